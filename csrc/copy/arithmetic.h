// Loops over contiguous elements: sums of every dtype, and conversions between all dtypes.
#pragma once

#include <cstdint>

#include "rvdcomm/dtype.h"

namespace rvdcomm {

/// The largest number of sources of a `fold` loop.
inline constexpr int kMaxFold = 4;

/// The loops of one dtype. A running sum is an array of ElementOf<dtype>::Value.
struct Arithmetic {
  int64_t value_bytes;
  /// Whether stored elements are already values. If so, a sum can start from the source in place.
  bool is_plain;
  void (*load)(char* sum, const char* src, int64_t count);
  /// sum += src. [0] rounds every partial sum to the dtype; [1] does not round.
  void (*add[2])(char* sum, const char* src, int64_t count);
  /// dst = sum + src, rounded to the dtype: the last addition.
  void (*add_store)(char* dst, const char* sum, const char* src, int64_t count);
  /// dst = srcs[0] + ... + srcs[n - 1] in one pass. Indices are [wide][n]; null for n < 2.
  void (*fold[2][kMaxFold + 1])(char* dst, const char* const* srcs, int64_t count);
  /// dst = sum converted to a dtype. The index is the dtype.
  void (*convert[kNumDTypes])(char* dst, const char* sum, int64_t count);
};

/// The loops of a dtype for this processor.
const Arithmetic& arithmetic(DType dtype);

}  // namespace rvdcomm
