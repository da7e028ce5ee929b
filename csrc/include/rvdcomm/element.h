// Elements of every dtype: the stored bits, the value type in which sums are computed, conversions.
#pragma once

#include <cstdint>
#include <type_traits>

#include "rvdcomm/dtype.h"
#include "rvdcomm/float_bits.h"
#include "rvdcomm/macros.h"

namespace rvdcomm {

template <typename T>
struct Complex {
  T re, im;
};

/// A dtype whose stored bits are the values that are summed.
template <typename T>
struct PlainElement {
  using Bits = T;
  using Value = T;
  static constexpr bool kIsHalf = false;
  static RVD_HD Value load(Bits bits) { return bits; }
  static RVD_HD Bits store(Value value) { return value; }
  static RVD_HD Value add(Value a, Value b) { return a + b; }
};

/// Sums wrap modulo 2^bits. The addition is unsigned, because signed overflow is undefined.
template <typename T>
struct IntElement : PlainElement<T> {
  static RVD_HD T add(T a, T b) {
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
};

/// A byte: zero is false, all other values are true. The sum of two is the logical or.
struct BoolElement {
  using Bits = uint8_t;
  using Value = uint8_t;
  static constexpr bool kIsHalf = false;
  static RVD_HD Value load(Bits bits) { return bits != 0; }
  static RVD_HD Bits store(Value value) { return value; }
  static RVD_HD Value add(Value a, Value b) { return a | b; }
};

/// A float of 8 or 16 bits; sums are computed in float32.
template <typename Format, typename B>
struct HalfElement {
  using Bits = B;
  using Value = float;
  static constexpr bool kIsHalf = true;
  static RVD_HD Value load(Bits bits) { return Format::float_from_bits(bits); }
  static RVD_HD Bits store(Value value) { return static_cast<B>(Format::bits_from_float(value)); }
  static RVD_HD Value add(Value a, Value b) { return a + b; }
};

template <typename T>
struct ComplexElement : PlainElement<Complex<T>> {
  static RVD_HD Complex<T> add(Complex<T> a, Complex<T> b) { return {a.re + b.re, a.im + b.im}; }
};

/// A complex number of two float16; sums are computed in two float32.
struct HalfComplexElement {
  using Bits = Complex<uint16_t>;
  using Value = Complex<float>;
  static constexpr bool kIsHalf = true;
  static RVD_HD Value load(Bits bits) {
    return {Float16::float_from_bits(bits.re), Float16::float_from_bits(bits.im)};
  }
  static RVD_HD Bits store(Value value) {
    return {static_cast<uint16_t>(Float16::bits_from_float(value.re)),
            static_cast<uint16_t>(Float16::bits_from_float(value.im))};
  }
  static RVD_HD Value add(Value a, Value b) { return {a.re + b.re, a.im + b.im}; }
};

// clang-format off
template <DType kDType> struct ElementOf;
template <> struct ElementOf<DType::k_bool> : BoolElement {};
template <> struct ElementOf<DType::k_uint8> : IntElement<uint8_t> {};
template <> struct ElementOf<DType::k_uint16> : IntElement<uint16_t> {};
template <> struct ElementOf<DType::k_uint32> : IntElement<uint32_t> {};
template <> struct ElementOf<DType::k_uint64> : IntElement<uint64_t> {};
template <> struct ElementOf<DType::k_int8> : IntElement<int8_t> {};
template <> struct ElementOf<DType::k_int16> : IntElement<int16_t> {};
template <> struct ElementOf<DType::k_int32> : IntElement<int32_t> {};
template <> struct ElementOf<DType::k_int64> : IntElement<int64_t> {};
template <> struct ElementOf<DType::k_float8_e4m3fn> : HalfElement<Float8E4M3, uint8_t> {};
template <> struct ElementOf<DType::k_float8_e4m3fnuz> : HalfElement<Float8E4M3Fnuz, uint8_t> {};
template <> struct ElementOf<DType::k_float8_e5m2> : HalfElement<Float8E5M2, uint8_t> {};
template <> struct ElementOf<DType::k_float8_e5m2fnuz> : HalfElement<Float8E5M2Fnuz, uint8_t> {};
template <> struct ElementOf<DType::k_float8_e8m0fnu> : HalfElement<Float8E8M0, uint8_t> {};
template <> struct ElementOf<DType::k_float16> : HalfElement<Float16, uint16_t> {};
template <> struct ElementOf<DType::k_bfloat16> : HalfElement<BFloat16, uint16_t> {};
template <> struct ElementOf<DType::k_float32> : PlainElement<float> {};
template <> struct ElementOf<DType::k_float64> : PlainElement<double> {};
template <> struct ElementOf<DType::k_complex32> : HalfComplexElement {};
template <> struct ElementOf<DType::k_complex64> : ComplexElement<float> {};
template <> struct ElementOf<DType::k_complex128> : ComplexElement<double> {};
// clang-format on

template <typename T>
struct IsComplex : std::false_type {};
template <typename T>
struct IsComplex<Complex<T>> : std::true_type {};

/// Convert a float to an integer: round towards zero, then keep the low bits. A C cast gives the
/// same wherever it is defined.
/// @post NaN and values outside the range of int64 (for uint64, of int64 and uint64) give the low
///       bits of 2^63, on every machine
template <typename Int, typename Float>
RVD_HD Int int_from_float(Float value) {
  constexpr Float kTwo63 = static_cast<Float>(9223372036854775808.0);
  if (value >= -kTwo63 && value < kTwo63) return static_cast<Int>(static_cast<int64_t>(value));
  if (std::is_same<Int, uint64_t>::value && value >= kTwo63 && value < 2 * kTwo63) {
    return static_cast<Int>(static_cast<uint64_t>(value));
  }
  return static_cast<Int>(1ull << 63);
}

/// Convert a value to the number type `To`. A conversion from complex to real drops the imaginary
/// part; integers wrap.
template <typename To, typename From>
RVD_HD To number_from(From value) {
  if constexpr (IsComplex<From>::value) {
    if constexpr (IsComplex<To>::value) {
      return {number_from<decltype(To::re)>(value.re), number_from<decltype(To::im)>(value.im)};
    } else {
      return number_from<To>(value.re);
    }
  } else if constexpr (IsComplex<To>::value) {
    return {number_from<decltype(To::re)>(value), 0};
  } else if constexpr (std::is_integral<To>::value && std::is_floating_point<From>::value) {
    return int_from_float<To>(value);
  } else {
    return static_cast<To>(value);
  }
}

/// Convert a value to an element of `kDst`. Values for half types are converted to float32 first,
/// as in torch.
template <DType kDst, typename From>
RVD_HD typename ElementOf<kDst>::Bits element_from(From value) {
  using Element = ElementOf<kDst>;
  if constexpr (kDst == DType::k_bool) {
    if constexpr (IsComplex<From>::value) {
      return value.re != 0 || value.im != 0;
    } else {
      return value != 0;
    }
  } else {
    return Element::store(number_from<typename Element::Value>(value));
  }
}

/// The widest type of the same kind: int64, uint64, or a floating or complex type itself. Every
/// value converts to it without loss, so run-time conversions need code for these types only.
template <typename Value>
struct WideOf {
  using type = typename std::conditional<
      std::is_integral<Value>::value,
      typename std::conditional<std::is_signed<Value>::value, int64_t, uint64_t>::type,
      Value>::type;
};

/// The next partial sum. It is rounded to the dtype unless `kWide`.
/// @post with kWide = false, k - 1 calls give the bits of k - 1 separate additions in the dtype
template <DType kDType, bool kWide>
RVD_HD typename ElementOf<kDType>::Value accumulate(typename ElementOf<kDType>::Value sum,
                                                    typename ElementOf<kDType>::Bits next) {
  using Element = ElementOf<kDType>;
  const typename Element::Value value = Element::add(sum, Element::load(next));
  if constexpr (Element::kIsHalf && !kWide) {
    return Element::load(Element::store(value));
  } else {
    return value;
  }
}

}  // namespace rvdcomm
