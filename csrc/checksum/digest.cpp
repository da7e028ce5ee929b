#include "rvdcomm/digest.h"

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

// The loops below are compiled once for each of these processors; the compiler vectorizes them.
#if defined(__x86_64__) && defined(__GNUC__)
#define RVD_AVX2 __attribute__((target("avx2")))
#define RVD_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq")))
#endif
#define RVD_INLINE inline __attribute__((always_inline))

namespace rvdcomm {
namespace {

constexpr uint64_t kGolden = 0x9E37'79B9'7F4A'7C15;

/// Words of a run whose weights are in a table. The table of 32 KiB stays in the caches, and each
/// row reads it again.
constexpr int64_t kRunWords = 4096;

/// Runs shorter than this are joined with their neighbours, since each row costs some nanoseconds.
constexpr int64_t kShortRunWords = 256;

/// The finalizer of splitmix64. Source: G. Steele et al., Fast Splittable Pseudorandom Number
/// Generators, 2014, with the constants of D. Stafford's mix 13.
RVD_INLINE uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58'476D'1CE4'E5B9;
  z = (z ^ (z >> 27)) * 0x94D0'49BB'1331'11EB;
  return z ^ (z >> 31);
}

RVD_INLINE uint64_t factor_at(uint64_t start, int64_t i) {
  return mixed(start + kGolden * static_cast<uint64_t>(i)) | 1;
}

struct Dim {
  DigestDim box;
  uint64_t start;  ///< Where the sequence of the factors begins.

  uint64_t factor(int64_t i) const { return factor_at(start, box.lo + i); }
};

uint64_t start_of(uint64_t d) { return mixed(kGolden * (d + 1)); }

/// Weights of the words of a run, as low and high halves: products of 32 bits are what processors
/// multiply side by side.
struct Weights {
  std::vector<uint32_t> low;
  std::vector<uint32_t> high;
  uint64_t sum = 0;
};

// --- loops --------------------------------------------------------------------------------------

RVD_INLINE void factors_loop(uint64_t start, int64_t lo, size_t size, uint64_t* out) {
  for (size_t i = 0; i < size; ++i) out[i] = factor_at(start, lo + static_cast<int64_t>(i));
}

RVD_INLINE void multiply_loop(const uint64_t* weights, size_t size, uint64_t factor,
                              uint64_t* out) {
  for (size_t i = 0; i < size; ++i) out[i] = factor * weights[i];
}

RVD_INLINE uint64_t halves_loop(const uint64_t* weights, size_t size, uint32_t* low,
                                uint32_t* high) {
  uint64_t sum = 0;
  for (size_t i = 0; i < size; ++i) {
    low[i] = static_cast<uint32_t>(weights[i]);
    high[i] = static_cast<uint32_t>(weights[i] >> 32);
    sum += weights[i];
  }
  return sum;
}

template <typename Word>
RVD_INLINE uint64_t row_loop(const Word* words, int64_t stride, const Weights& weights) {
  const size_t size = weights.low.size();
  const uint32_t* low = weights.low.data();
  const uint32_t* high = weights.high.data();
  uint64_t sum = 0;
  uint32_t high_sum = 0;  // Its carries are beyond 2**64.
  if (stride == 1) {
    for (size_t i = 0; i < size; ++i) {
      sum += uint64_t{words[i]} * low[i];
      high_sum += uint32_t{words[i]} * high[i];
    }
  } else {
    for (size_t i = 0; i < size; ++i, words += stride) {
      sum += uint64_t{*words} * low[i];
      high_sum += uint32_t{*words} * high[i];
    }
  }
  return sum + (uint64_t{high_sum} << 32);
}

/// The loops for one kind of processor.
template <typename Word>
struct Loops {
  void (*factors)(uint64_t start, int64_t lo, size_t size, uint64_t* out);
  void (*multiply)(const uint64_t* weights, size_t size, uint64_t factor, uint64_t* out);
  uint64_t (*halves)(const uint64_t* weights, size_t size, uint32_t* low, uint32_t* high);
  uint64_t (*row)(const Word* words, int64_t stride, const Weights& weights);
};

#define RVD_LOOPS(name, target)                                                             \
  template <typename Word>                                                                  \
  struct name {                                                                             \
    target static void factors(uint64_t start, int64_t lo, size_t size, uint64_t* out) {    \
      factors_loop(start, lo, size, out);                                                   \
    }                                                                                       \
    target static void multiply(const uint64_t* weights, size_t size, uint64_t factor,      \
                                uint64_t* out) {                                            \
      multiply_loop(weights, size, factor, out);                                            \
    }                                                                                       \
    target static uint64_t halves(const uint64_t* weights, size_t size, uint32_t* low,      \
                                  uint32_t* high) {                                         \
      return halves_loop(weights, size, low, high);                                         \
    }                                                                                       \
    target static uint64_t row(const Word* words, int64_t stride, const Weights& weights) { \
      return row_loop(words, stride, weights);                                              \
    }                                                                                       \
    static constexpr Loops<Word> kLoops = {factors, multiply, halves, row};                 \
  };

RVD_LOOPS(Baseline, )
#if defined(RVD_AVX2)
RVD_LOOPS(Avx2, RVD_AVX2)
RVD_LOOPS(Avx512, RVD_AVX512)
#endif
#undef RVD_LOOPS

template <typename Word>
const Loops<Word>& fastest_loops() {
#if defined(RVD_AVX2)
  if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw")) {
    return Avx512<Word>::kLoops;
  }
  if (__builtin_cpu_supports("avx2")) return Avx2<Word>::kLoops;
#endif
  return Baseline<Word>::kLoops;
}

// --- boxes --------------------------------------------------------------------------------------

/// How a box is read: the first `num_inner` dims and pieces of the next one are a run of words that
/// lie at one stride; its weights are in a table. All other dims are rows, which use that table.
struct Run {
  size_t num_inner = 0;
  int64_t inner_words = 1;
  int64_t piece = 1;  ///< Indices of dim `num_inner` in one run.
  int64_t stride = 1;
};

/// @pre dims are sorted by stride, the smallest first, and have more than one index each.
Run run_of(const std::vector<Dim>& dims) {
  Run run;
  if (dims.empty()) return run;
  run.stride = dims[0].box.stride;
  const auto continues = [&] {
    return run.num_inner < dims.size() &&
           dims[run.num_inner].box.stride == run.stride * run.inner_words;
  };
  while (continues() && run.inner_words * dims[run.num_inner].box.size <= kRunWords) {
    run.inner_words *= dims[run.num_inner++].box.size;
  }
  if (continues() && run.inner_words < kShortRunWords) run.piece = kRunWords / run.inner_words;
  return run;
}

/// The digest of one box of words.
template <typename Word>
class Summed {
 public:
  explicit Summed(const std::vector<Dim>& dims) : dims_(dims), run_(run_of(dims)) {}

  uint64_t operator()(const Word* words) {
    std::vector<uint64_t> inner = {1};
    for (size_t k = 0; k < run_.num_inner; ++k) inner = times(inner, k, 0, dims_[k].box.size);
    if (run_.piece == 1) {
      tabulate(inner);
      return rows(words, dims_.size(), run_.num_inner);
    }
    // Every piece has a table of its own, which serves all rows.
    const DigestDim& outer = dims_[run_.num_inner].box;
    uint64_t sum = 0;
    for (int64_t at = 0; at < outer.size; at += run_.piece) {
      tabulate(times(inner, run_.num_inner, at, std::min(run_.piece, outer.size - at)));
      sum += rows(words + at * outer.stride, dims_.size(), run_.num_inner + 1);
    }
    return sum;
  }

 private:
  /// The factors of `size` indices of dim `k`, each times all `weights`.
  std::vector<uint64_t> times(const std::vector<uint64_t>& weights, size_t k, int64_t at,
                              int64_t size) const {
    std::vector<uint64_t> factors(static_cast<size_t>(size));
    loops_.factors(dims_[k].start, dims_[k].box.lo + at, factors.size(), factors.data());
    if (weights.size() == 1) return factors;
    std::vector<uint64_t> products(factors.size() * weights.size());
    uint64_t* out = products.data();
    for (const uint64_t factor : factors) {
      loops_.multiply(weights.data(), weights.size(), factor, out);
      out += weights.size();
    }
    return products;
  }

  void tabulate(const std::vector<uint64_t>& weights) {
    table_.low.resize(weights.size());
    table_.high.resize(weights.size());
    table_.sum =
        loops_.halves(weights.data(), weights.size(), table_.low.data(), table_.high.data());
  }

  /// The sum of all rows of the table: of all indices of dims `first` to `end`, `end` excluded.
  uint64_t rows(const Word* words, size_t end, size_t first) const {
    // The 1 that every word gets adds the sum of the weights.
    if (end == first) return loops_.row(words, run_.stride, table_) + table_.sum;
    const Dim& dim = dims_[end - 1];
    uint64_t sum = 0;
    for (int64_t i = 0; i < dim.box.size; ++i, words += dim.box.stride) {
      sum += dim.factor(i) * rows(words, end - 1, first);
    }
    return sum;
  }

  const std::vector<Dim>& dims_;
  const Run run_;
  const Loops<Word>& loops_ = fastest_loops<Word>();
  Weights table_;
};

template <typename Word>
uint64_t digest_of(const void* data, const std::vector<Dim>& dims) {
  return Summed<Word>(dims)(static_cast<const Word*>(data));
}

}  // namespace

uint64_t digest_factor(uint64_t d, uint64_t i) {
  return factor_at(start_of(d), static_cast<int64_t>(i));
}

uint64_t digest(const void* data, size_t word_bytes, const DigestDim* dims, size_t num_dims) {
  std::vector<Dim> sorted;
  uint64_t scale = 1;  // The factors of dims with one index, whose strides say nothing.
  for (size_t d = 0; d < num_dims; ++d) {
    const Dim dim = {dims[d], start_of(d)};
    if (dim.box.size == 0) return 0;
    if (dim.box.size == 1) {
      scale *= dim.factor(0);
    } else {
      sorted.push_back(dim);
    }
  }
  // A product does not depend on the order of its factors, so the order is that of the memory.
  std::stable_sort(sorted.begin(), sorted.end(), [](const Dim& a, const Dim& b) {
    return std::abs(a.box.stride) < std::abs(b.box.stride);
  });
  if (word_bytes == 1) return scale * digest_of<uint8_t>(data, sorted);
  if (word_bytes == 2) return scale * digest_of<uint16_t>(data, sorted);
  return scale * digest_of<uint32_t>(data, sorted);
}

}  // namespace rvdcomm
