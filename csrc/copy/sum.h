// Sums and conversions: ops with arithmetic. They run tile by tile.
#pragma once

#include <vector>

#include "arithmetic.h"
#include "rvdcomm/copy_plan.h"

namespace rvdcomm {

/// One side of a sum. A tile that is one contiguous run is accessed in place; all other tiles are
/// gathered or scattered through a scratch row.
struct SumSide {
  int32_t buffer;
  int64_t offset;
  int64_t stride[kMaxDims + 2];
  /// Whether the elements along the last dim are contiguous.
  bool is_dense;
};

/// An op that adds or converts. Tiles of its last two dims fit in the first-level cache.
struct Sum {
  int32_t num_dims;  // at least 2
  int64_t shape[kMaxDims + 2];
  int64_t tile_rows, tile_cols;
  DType src_dtype, dst_dtype;
  bool wide;
  const Arithmetic* arithmetic;
  SumSide dst;
  std::vector<SumSide> srcs;
};

/// @pre !op.is_move()
Sum sum_from_op(const PlanOp& op, bool wide);

/// Run the part of a sum whose coordinates are in [start, end).
void run_sum(const Sum& sum, const int64_t* start, const int64_t* end, void* const* buffers);

}  // namespace rvdcomm
