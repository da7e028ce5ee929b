// Division by a divisor that is known in advance, by a multiplication and a shift.
#pragma once

#include <cstdint>

#include "rvdcomm/macros.h"

namespace rvdcomm {

/// A divisor and its reciprocal: magic = floor(2^(32 + shift) / divisor) + 1 - 2^32.
///
/// Source: Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994.
struct FastDiv {
  uint32_t divisor, magic;
  int32_t shift;
};

/// @pre 1 <= divisor < 2^31
inline FastDiv fast_div(uint32_t divisor) {
  int32_t shift = 0;
  while ((uint64_t{1} << shift) < divisor) ++shift;
  const uint64_t excess = (uint64_t{1} << shift) - divisor;
  return {divisor, static_cast<uint32_t>((excess << 32) / divisor + 1), shift};
}

/// @pre  number < 2^31
/// @post quotient(number, fast_div(d)) == number / d
RVD_HD uint32_t quotient(uint32_t number, const FastDiv& by) {
  const auto high = static_cast<uint32_t>(static_cast<uint64_t>(number) * by.magic >> 32);
  return (high + number) >> by.shift;
}

}  // namespace rvdcomm
