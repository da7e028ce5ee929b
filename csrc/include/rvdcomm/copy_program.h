// Copy programs: batches of strided boxes that are copied, converted, summed or zeroed.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "rvdcomm/dtype.h"
#include "rvdcomm/strided_box.h"

namespace rvdcomm {

/// One side of an op: elements `offset + dot(coord, stride)` of a buffer, counted in its dtype.
struct Side {
  int32_t buffer;
  DType dtype;
  int64_t offset;
  int64_t stride[kMaxDims];
};

/// `dst[box] = convert(sum of srcs in order)`. An op without sources writes zeros; an op with one
/// source copies it.
struct CopyOp {
  int32_t num_dims;
  int64_t shape[kMaxDims];
  Side dst;
  std::vector<Side> srcs;
  /// Whether dst is read soon. If so, its stores do not bypass the caches, however large the op is.
  bool read_soon = false;
};

/// A side of an op with any number of dims.
struct DimsSide {
  int32_t buffer;
  DType dtype;
  int64_t offset;
  std::vector<int64_t> stride;
};

/// Append an op with any number of dims. If it has more than kMaxDims, its dims are coalesced. If
/// more than kMaxDims are left, outer dims are peeled: one op is appended per coordinate in them.
/// @throws std::invalid_argument if a stride list is not as long as the shape
void append_ops(std::vector<CopyOp>& ops, std::vector<int64_t> shape, DimsSide dst,
                std::vector<DimsSide> srcs);

struct PlanOp;
struct CpuProgram;

/// Ops that run in order; a later op may read what an earlier one wrote.
///
/// Sums round every partial sum to the dtype, as adding one source after another does; with `wide`,
/// half types (float8, float16, bfloat16, complex32) are summed in float32 and rounded once.
/// Immutable after construction; several threads may run one program at the same time.
class CopyProgram {
 public:
  /// @throws std::invalid_argument if an op is invalid; the message names the op and gives the rule
  CopyProgram(std::vector<CopyOp> ops, bool wide);

  /// Run all ops; returns when they are done.
  /// @pre buffers[i] is the address of buffer i, aligned to its dtype; a source of an op is its dst
  ///      exactly or does not overlap it; buffers with different numbers do not overlap, unless
  ///      the program only reads both
  void run(void* const* buffers, int num_threads) const;

  int num_buffers() const { return num_buffers_; }
  /// Bytes that one run writes.
  int64_t num_bytes() const { return num_bytes_; }
  bool wide() const { return wide_; }
  /// The ops in canonical form.
  const std::vector<PlanOp>& plan() const { return *plan_; }

 private:
  std::shared_ptr<const std::vector<PlanOp>> plan_;
  std::shared_ptr<const CpuProgram> cpu_;
  int num_buffers_ = 0;
  int64_t num_bytes_ = 0;
  bool wide_;
};

}  // namespace rvdcomm
