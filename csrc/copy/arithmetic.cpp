#include "arithmetic.h"

#include <cstring>
#include <type_traits>

#include "rvdcomm/element.h"

// Marks the AVX2 variant of a loop, which is used if the processor has AVX2. The element functors
// are inlined into both variants.
#if defined(__x86_64__) && defined(__GNUC__)
#define RVD_AVX2 __attribute__((target("avx2")))
#endif
// dst may be one of the sources, but then iteration i accesses only element i of it. So no
// iteration depends on another, and the compiler may vectorise the loop.
#if defined(__clang__)
#define RVD_IVDEP _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define RVD_IVDEP _Pragma("GCC ivdep")
#else
#define RVD_IVDEP
#endif

namespace rvdcomm {
namespace {

template <typename T>
RVD_HD T get(const char* from, int64_t i) {
  T value;
  memcpy(&value, from + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

template <typename T>
RVD_HD void put(char* to, int64_t i, T value) {
  memcpy(to + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

/// Sums treat a complex number as two real numbers, so that the compiler can vectorise the loops.
template <DType kDType>
struct PartOf {
  static constexpr DType kPart = kDType == DType::k_complex32    ? DType::k_float16
                                 : kDType == DType::k_complex64  ? DType::k_float32
                                 : kDType == DType::k_complex128 ? DType::k_float64
                                                                 : kDType;
  static constexpr int64_t kCount = kPart == kDType ? 1 : 2;
};

template <DType kDType>
RVD_HD void load_loop(char* sum, const char* src, int64_t count) {
  using Element = ElementOf<PartOf<kDType>::kPart>;
  RVD_IVDEP
  for (int64_t i = 0; i < count * PartOf<kDType>::kCount; ++i) {
    put(sum, i, Element::load(get<typename Element::Bits>(src, i)));
  }
}

template <DType kDType, bool kWide>
RVD_HD void add_loop(char* sum, const char* src, int64_t count) {
  constexpr DType kPart = PartOf<kDType>::kPart;
  using Element = ElementOf<kPart>;
  RVD_IVDEP
  for (int64_t i = 0; i < count * PartOf<kDType>::kCount; ++i) {
    put(sum, i,
        accumulate<kPart, kWide>(get<typename Element::Value>(sum, i),
                                 get<typename Element::Bits>(src, i)));
  }
}

template <DType kDType>
RVD_HD void add_store_loop(char* dst, const char* sum, const char* src, int64_t count) {
  using Element = ElementOf<PartOf<kDType>::kPart>;
  RVD_IVDEP
  for (int64_t i = 0; i < count * PartOf<kDType>::kCount; ++i) {
    const auto value = Element::add(get<typename Element::Value>(sum, i),
                                    Element::load(get<typename Element::Bits>(src, i)));
    put(dst, i, Element::store(value));
  }
}

template <DType kDType, bool kWide, int kNumSrcs>
RVD_HD void fold_loop(char* dst, const char* const* srcs, int64_t count) {
  constexpr DType kPart = PartOf<kDType>::kPart;
  using Element = ElementOf<kPart>;
  using Bits = typename Element::Bits;
  const char *first = srcs[0], *last = srcs[kNumSrcs - 1];
  [[maybe_unused]] const char* second = srcs[1];
  [[maybe_unused]] const char* third = srcs[kNumSrcs - 2];
  RVD_IVDEP
  for (int64_t i = 0; i < count * PartOf<kDType>::kCount; ++i) {
    auto sum = Element::load(get<Bits>(first, i));
    if constexpr (kNumSrcs > 2) sum = accumulate<kPart, kWide>(sum, get<Bits>(second, i));
    if constexpr (kNumSrcs > 3) sum = accumulate<kPart, kWide>(sum, get<Bits>(third, i));
    put(dst, i, Element::store(Element::add(sum, Element::load(get<Bits>(last, i)))));
  }
}

template <DType kDst, typename Value>
RVD_HD void convert_loop(char* dst, const char* sum, int64_t count) {
  RVD_IVDEP
  for (int64_t i = 0; i < count; ++i) put(dst, i, element_from<kDst>(get<Value>(sum, i)));
}

template <DType kDType>
struct Baseline {
  static void load(char* sum, const char* src, int64_t n) { load_loop<kDType>(sum, src, n); }
  template <bool kWide>
  static void add(char* sum, const char* src, int64_t n) {
    add_loop<kDType, kWide>(sum, src, n);
  }
  static void add_store(char* dst, const char* sum, const char* src, int64_t n) {
    add_store_loop<kDType>(dst, sum, src, n);
  }
  template <bool kWide, int kNumSrcs>
  static void fold(char* dst, const char* const* srcs, int64_t n) {
    fold_loop<kDType, kWide, kNumSrcs>(dst, srcs, n);
  }
  template <typename Value>
  static void convert(char* dst, const char* sum, int64_t n) {
    convert_loop<kDType, Value>(dst, sum, n);
  }
};

#if defined(RVD_AVX2)
template <DType kDType>
struct Avx2 {
  RVD_AVX2 static void load(char* sum, const char* src, int64_t n) {
    load_loop<kDType>(sum, src, n);
  }
  template <bool kWide>
  RVD_AVX2 static void add(char* sum, const char* src, int64_t n) {
    add_loop<kDType, kWide>(sum, src, n);
  }
  RVD_AVX2 static void add_store(char* dst, const char* sum, const char* src, int64_t n) {
    add_store_loop<kDType>(dst, sum, src, n);
  }
  template <bool kWide, int kNumSrcs>
  RVD_AVX2 static void fold(char* dst, const char* const* srcs, int64_t n) {
    fold_loop<kDType, kWide, kNumSrcs>(dst, srcs, n);
  }
  template <typename Value>
  RVD_AVX2 static void convert(char* dst, const char* sum, int64_t n) {
    convert_loop<kDType, Value>(dst, sum, n);
  }
};
#endif

/// The loops of one dtype from a family of loops: Baseline or Avx2.
template <template <DType> class Loops, DType kDType>
constexpr Arithmetic make() {
  using Element = ElementOf<kDType>;
  using Value = typename Element::Value;
  using L = Loops<kDType>;
  // Only half types have different loops for `wide`; other types use the same loops for both.
  constexpr bool kWide = Element::kIsHalf;
  return {sizeof(Value),
          std::is_same<Value, typename Element::Bits>::value && kDType != DType::k_bool,
          L::load,
          {L::template add<false>, L::template add<kWide>},
          L::add_store,
          {{nullptr, nullptr, L::template fold<false, 2>, L::template fold<false, 3>,
            L::template fold<false, 4>},
           {nullptr, nullptr, L::template fold<kWide, 2>, L::template fold<kWide, 3>,
            L::template fold<kWide, 4>}},
          {
#define RVD_CONVERT(name, bytes, summable) Loops<DType::k_##name>::template convert<Value>,
              RVD_DTYPES(RVD_CONVERT)
#undef RVD_CONVERT
          }};
}

template <template <DType> class Loops>
struct Table {
  static constexpr Arithmetic kOf[] = {
#define RVD_MAKE(name, bytes, summable) make<Loops, DType::k_##name>(),
      RVD_DTYPES(RVD_MAKE)
#undef RVD_MAKE
  };
};

const Arithmetic* table() {
#if defined(RVD_AVX2)
  if (__builtin_cpu_supports("avx2")) return Table<Avx2>::kOf;
#endif
  return Table<Baseline>::kOf;
}

}  // namespace

const Arithmetic& arithmetic(DType dtype) {
  static const Arithmetic* const found = table();
  return found[static_cast<int>(dtype)];
}

}  // namespace rvdcomm
