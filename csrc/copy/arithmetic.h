// Loops over contiguous elements: sums of every dtype, and conversions between all of them.
#pragma once

#include <cstdint>

#include "rvdcomm/dtype.h"

namespace rvdcomm {

/// Sources that one loop adds at once, at most.
inline constexpr int kMaxFold = 4;

/// The loops of one dtype. A running sum is an array of ElementOf<dtype>::Value.
struct Arithmetic {
  int64_t value_bytes;
  /// The stored elements are values already, so that a sum may start from them in place.
  bool is_plain;
  void (*load)(char* sum, const char* src, int64_t count);
  /// sum += src, rounded to the dtype at once in [0], not at all in [1].
  void (*add[2])(char* sum, const char* src, int64_t count);
  /// The last addition, which rounds once in either case.
  void (*add_store)(char* dst, const char* sum, const char* src, int64_t count);
  /// dst = srcs[0] + ... + srcs[n - 1] in one pass; [wide][n], and null for n < 2.
  void (*fold[2][kMaxFold + 1])(char* dst, const char* const* srcs, int64_t count);
  /// dst = sum converted to [dst dtype].
  void (*convert[kNumDTypes])(char* dst, const char* sum, int64_t count);
};

/// The loops of a dtype for this processor.
const Arithmetic& arithmetic(DType dtype);

}  // namespace rvdcomm
