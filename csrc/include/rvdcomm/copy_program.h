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

/// `dst[box] = convert(sum of srcs in order)`: no source fills zeros, one copies.
struct CopyOp {
  int32_t num_dims;
  int64_t shape[kMaxDims];
  Side dst;
  std::vector<Side> srcs;
  /// Whether dst is read soon, so that it should stay in the caches however large it is.
  bool read_soon = false;
};

/// A side of an op with any number of dims.
struct DimsSide {
  int32_t buffer;
  DType dtype;
  int64_t offset;
  std::vector<int64_t> stride;
};

/// Append the op of these dims: coalesced, and its outer dims peeled if more than kMaxDims are
/// left.
/// @throws std::invalid_argument if a stride list is not as long as the shape
void append_ops(std::vector<CopyOp>& ops, std::vector<int64_t> shape, DimsSide dst,
                std::vector<DimsSide> srcs);

struct PlanOp;
struct CpuProgram;

/// Ops that run in order; a later op may read what an earlier one wrote.
///
/// Sums round every partial sum to the dtype, as adding one source after another does; with `wide`,
/// half types (float8, float16, bfloat16, complex32) are summed in float32 and rounded once.
/// Immutable once made; several threads may run one program at the same time.
class CopyProgram {
 public:
  /// @throws std::invalid_argument if an op means nothing: it says which, and what would be right.
  CopyProgram(std::vector<CopyOp> ops, bool wide);

  /// Run all ops; returns when they are done.
  /// @pre buffers[i] is the address of buffer i, aligned to its dtype; a source of an op is its dst
  ///      exactly or does not overlap it; buffers of different number do not overlap, unless both
  ///      are only read
  void run(void* const* buffers, int num_threads) const;

  int num_buffers() const { return num_buffers_; }
  /// Bytes that one run writes.
  int64_t num_bytes() const { return num_bytes_; }
  bool wide() const { return wide_; }
  /// The ops as the engines start from them.
  const std::vector<PlanOp>& plan() const { return *plan_; }

 private:
  std::shared_ptr<const std::vector<PlanOp>> plan_;
  std::shared_ptr<const CpuProgram> cpu_;
  int num_buffers_ = 0;
  int64_t num_bytes_ = 0;
  bool wide_;
};

}  // namespace rvdcomm
