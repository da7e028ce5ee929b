// Joins successive ops whose offsets differ by equal steps into one op with one more dim.
#include <algorithm>
#include <utility>

#include "rvdcomm/copy_plan.h"

namespace rvdcomm {
namespace {

/// Whether the stride of every dim of dst is at least the extent of all dims inside it. Then no two
/// coordinates share bytes of dst.
bool dst_is_nested(const PlanOp& op) {
  int64_t inner = item_bytes(op.dst.dtype);
  for (int d = op.num_dims - 1; d >= 0; --d) {
    if (op.dst.stride[d] < inner) return false;
    inner += op.dst.stride[d] * (op.shape[d] - 1);
  }
  return true;
}

bool same_side(const PlanOp& op, const PlanSide& a, const PlanSide& b) {
  return a.buffer == b.buffer && a.dtype == b.dtype &&
         std::equal(a.stride, a.stride + op.num_dims, b.stride);
}

/// Whether two ops differ in nothing but their offsets.
bool same_form(const PlanOp& a, const PlanOp& b) {
  if (a.num_dims != b.num_dims || !std::equal(a.shape, a.shape + a.num_dims, b.shape)) return false;
  if (a.srcs.size() != b.srcs.size() || !same_side(a, a.dst, b.dst)) return false;
  for (size_t i = 0; i < a.srcs.size(); ++i) {
    if (!same_side(a, a.srcs[i], b.srcs[i])) return false;
  }
  return true;
}

/// Whether b is a, moved by one step along the last dim of `step`, which is the dim to be added.
bool is_next(const PlanOp& a, const PlanOp& b, const PlanOp& step) {
  const int d = step.num_dims - 1;
  if (!same_form(a, b) || b.dst.offset - a.dst.offset != step.dst.stride[d]) return false;
  for (size_t i = 0; i < a.srcs.size(); ++i) {
    if (b.srcs[i].offset - a.srcs[i].offset != step.srcs[i].stride[d]) return false;
  }
  return true;
}

/// Whether every source is in another buffer than dst, or is exactly dst (an accumulator). Ops of a
/// progression for which this holds do not read what another of them writes.
bool reads_only_others(const PlanOp& op) {
  return std::all_of(op.srcs.begin(), op.srcs.end(), [&](const PlanSide& src) {
    return src.buffer != op.dst.buffer ||
           (same_side(op, src, op.dst) && src.offset == op.dst.offset);
  });
}

/// One pass of join_progressions.
std::vector<PlanOp> join_once(const std::vector<PlanOp>& ops) {
  std::vector<PlanOp> joined;
  for (size_t i = 0, count = 1; i < ops.size(); i += count) {
    const PlanOp& first = ops[i];
    count = 1;
    joined.push_back(first);
    if (i + 1 == ops.size() || first.num_dims == kMaxDims || !same_form(first, ops[i + 1]) ||
        !reads_only_others(first)) {
      continue;
    }
    PlanOp step = first;
    const int d = step.num_dims++;
    step.dst.stride[d] = ops[i + 1].dst.offset - first.dst.offset;
    for (size_t k = 0; k < step.srcs.size(); ++k) {
      step.srcs[k].stride[d] = ops[i + 1].srcs[k].offset - first.srcs[k].offset;
    }
    while (i + count < ops.size() && is_next(ops[i + count - 1], ops[i + count], step) &&
           reads_only_others(ops[i + count])) {
      ++count;
    }
    step.shape[d] = static_cast<int64_t>(count);
    canonicalize(step);
    if (count > 1 && step.dst.offset >= 0 && dst_is_nested(step)) {
      joined.back() = std::move(step);
    } else {
      count = 1;
    }
  }
  return joined;
}

}  // namespace

std::vector<PlanOp> join_progressions(std::vector<PlanOp> ops) {
  for (;;) {
    std::vector<PlanOp> joined = join_once(ops);
    if (joined.size() == ops.size()) return ops;
    ops = std::move(joined);
  }
}

}  // namespace rvdcomm
