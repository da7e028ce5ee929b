// Which ops may run at the same time.
#include <algorithm>
#include <functional>
#include <utility>

#include "rvdcomm/copy_plan.h"

namespace rvdcomm {
namespace {

/// The range [first, second) of bytes of its buffer that a side spans.
std::pair<int64_t, int64_t> extent(const PlanOp& op, const PlanSide& side) {
  int64_t low = side.offset, high = side.offset + item_bytes(side.dtype);
  for (int d = 0; d < op.num_dims; ++d) {
    const int64_t reach = side.stride[d] * (op.shape[d] - 1);
    (reach < 0 ? low : high) += reach;
  }
  return {low, high};
}

/// Whether two sides are boxes of one row-major array, and are disjoint in some dim of that array.
/// @pre x and y are in one buffer
/// @post true only if no byte is in both
bool apart_in_a_dim(const PlanOp& a, const PlanSide& x, const PlanOp& b, const PlanSide& y) {
  std::vector<int64_t> strides{1};
  for (const auto& [op, side] : {std::pair(&a, &x), std::pair(&b, &y)}) {
    std::vector<int64_t> own(side->stride, side->stride + op->num_dims);
    std::sort(own.begin(), own.end());
    if (std::adjacent_find(own.begin(), own.end()) != own.end()) return false;
    strides.insert(strides.end(), own.begin(), own.end());
  }
  std::sort(strides.begin(), strides.end(), std::greater<>());
  strides.erase(std::unique(strides.begin(), strides.end()), strides.end());
  if (strides.back() <= 0) return false;
  int64_t rest_a = x.offset, rest_b = y.offset;
  // At each stride, a side covers [begin, end), in multiples of the stride. If an end exceeds the
  // next outer stride, the side is not a box of the array.
  const auto size_at = [](const PlanOp& op, const PlanSide& side, int64_t stride) {
    for (int d = 0; d < op.num_dims; ++d) {
      if (side.stride[d] == stride) return op.shape[d];
    }
    return stride == 1 ? item_bytes(side.dtype) : int64_t{1};
  };
  bool is_apart = false;
  int64_t outer = 0;
  for (const int64_t stride : strides) {
    if (outer % stride != 0) return false;
    const int64_t begin_a = rest_a / stride, begin_b = rest_b / stride;
    const int64_t end_a = begin_a + size_at(a, x, stride), end_b = begin_b + size_at(b, y, stride);
    if (outer != 0 && std::max(end_a, end_b) > outer / stride) return false;
    is_apart = is_apart || end_a <= begin_b || end_b <= begin_a;
    rest_a %= stride;
    rest_b %= stride;
    outer = stride;
  }
  return is_apart;
}

/// The number of bits of a positive number.
int num_bits(int64_t number) {
  int bits = 0;
  for (; number > 0; number >>= 1) ++bits;
  return bits;
}

bool overlap(const PlanOp& a, const PlanSide& x, const PlanOp& b, const PlanSide& y) {
  if (x.buffer != y.buffer) return false;
  const auto [low_a, high_a] = extent(a, x);
  const auto [low_b, high_b] = extent(b, y);
  return low_a < high_b && low_b < high_a && !apart_in_a_dim(a, x, b, y);
}

}  // namespace

bool independent(const PlanOp& earlier, const PlanOp& later) {
  if (overlap(earlier, earlier.dst, later, later.dst)) return false;
  for (const PlanSide& src : later.srcs) {
    if (overlap(earlier, earlier.dst, later, src)) return false;
  }
  for (const PlanSide& src : earlier.srcs) {
    if (overlap(earlier, src, later, later.dst)) return false;
  }
  return true;
}

void OpIndex::add(const PlanOp& op) {
  add(writes_, op, op.dst);
  for (const PlanSide& src : op.srcs) add(reads_, op, src);
}

void OpIndex::add(std::unordered_map<int32_t, Sides>& uses, const PlanOp& op,
                  const PlanSide& side) {
  const auto [low, high] = extent(op, side);
  uses[side.buffer][num_bits(high - low)].emplace(low, Use(&op, &side));
}

bool OpIndex::all_independent_of(const PlanOp& later) const {
  if (meets(writes_, later, later.dst) || meets(reads_, later, later.dst)) return false;
  return std::none_of(later.srcs.begin(), later.srcs.end(),
                      [&](const PlanSide& src) { return meets(writes_, later, src); });
}

bool OpIndex::meets(const std::unordered_map<int32_t, Sides>& uses, const PlanOp& op,
                    const PlanSide& side) {
  const auto found = uses.find(side.buffer);
  if (found == uses.end()) return false;
  const auto [low, high] = extent(op, side);
  for (const auto& [bits, sides] : found->second) {
    // Sides of this class are shorter than 2^bits bytes.
    for (auto i = sides.lower_bound(low - (int64_t{1} << bits) + 1);
         i != sides.end() && i->first < high; ++i) {
      if (overlap(*i->second.first, *i->second.second, op, side)) return true;
    }
  }
  return false;
}

}  // namespace rvdcomm
