// A copy program's ops in the one form that the engines start from.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "rvdcomm/copy_program.h"

namespace rvdcomm {

/// A side in bytes.
struct PlanSide {
  int32_t buffer;
  DType dtype;
  int64_t offset;
  int64_t stride[kMaxDims];
};

/// An op without dims of size 1, with neighbours merged, and dst strides positive and descending.
struct PlanOp {
  int32_t num_dims;
  int64_t shape[kMaxDims];
  PlanSide dst;
  std::vector<PlanSide> srcs;
  bool read_soon = false;

  /// Bytes are moved as they are: at most one source, and of dst's dtype.
  bool is_move() const { return srcs.empty() || (srcs.size() == 1 && srcs[0].dtype == dst.dtype); }
  int64_t num_elements() const {
    int64_t count = 1;
    for (int d = 0; d < num_dims; ++d) count *= shape[d];
    return count;
  }
};

/// Call `what` on dst and on every source.
template <typename Op, typename Do>
void for_sides(Op& op, Do what) {
  what(op.dst);
  for (auto& src : op.srcs) what(src);
}

/// @throws std::invalid_argument that names op `index` of its program
[[noreturn]] void refuse(size_t index, const std::string& what);

/// Bring an op into its one form.
/// @post no dim of size 1; dst strides positive and descending; no two neighbours are one dim
void canonicalize(PlanOp& op);

/// @throws std::invalid_argument as refuse()
PlanOp normalize(const CopyOp& op, size_t index);

/// Join ops that are the steps of one more dim: a pack for k peers becomes one op.
std::vector<PlanOp> join_progressions(std::vector<PlanOp> ops);

/// Whether `later` may run at the same time as `earlier`.
/// @post true only if neither writes what the other reads or writes
bool independent(const PlanOp& earlier, const PlanOp& later);

}  // namespace rvdcomm
