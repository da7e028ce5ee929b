// The canonical form of a copy program's ops, from which the CPU and CUDA engines are built.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "rvdcomm/copy_program.h"

namespace rvdcomm {

/// A side whose offset and strides count bytes.
struct PlanSide {
  int32_t buffer;
  DType dtype;
  int64_t offset;
  int64_t stride[kMaxDims];
};

/// An op in canonical form: no dim of size 1, mergeable dims merged, dst strides positive and
/// descending.
struct PlanOp {
  int32_t num_dims;
  int64_t shape[kMaxDims];
  PlanSide dst;
  std::vector<PlanSide> srcs;
  bool read_soon = false;

  /// Whether the op has no arithmetic: it has no source, or one source of dst's dtype.
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

/// Bring an op into canonical form.
/// @post no dim of size 1; dst strides positive and descending; no two adjacent dims can be merged
void canonicalize(PlanOp& op);

/// @throws std::invalid_argument as refuse()
PlanOp normalize(const CopyOp& op, size_t index);

/// Join successive ops that differ by equal steps in their offsets: they become one op with one
/// more dim. For example, a pack for k peers becomes one op.
std::vector<PlanOp> join_progressions(std::vector<PlanOp> ops);

/// Whether `later` may run at the same time as `earlier`.
/// @post true only if neither writes what the other reads or writes
bool independent(const PlanOp& earlier, const PlanOp& later);

/// Ops by the memory that they use: finds those that a later op depends on without a scan.
class OpIndex {
 public:
  /// @pre `op` outlives the index
  void add(const PlanOp& op);

  /// @post equals `independent(earlier, later)` for all ops that were added
  bool all_independent_of(const PlanOp& later) const;

 private:
  using Use = std::pair<const PlanOp*, const PlanSide*>;

  /// The sides that write to one buffer, or those that read it. By the number of bits of the bytes
  /// that a side spans, then by the first of these bytes: with a bound on their length, the sides
  /// that reach a byte are next to each other.
  using Sides = std::map<int, std::multimap<int64_t, Use>>;

  void add(std::unordered_map<int32_t, Sides>& uses, const PlanOp& op, const PlanSide& side);
  static bool meets(const std::unordered_map<int32_t, Sides>& uses, const PlanOp& op,
                    const PlanSide& side);

  std::unordered_map<int32_t, Sides> reads_, writes_;
};

}  // namespace rvdcomm
