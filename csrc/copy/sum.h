// Sums and conversions: ops that compute, tile by tile.
#pragma once

#include <vector>

#include "arithmetic.h"
#include "rvdcomm/copy_plan.h"

namespace rvdcomm {

/// One side of a sum: its tile is a plane of runs, in place where it is one run.
struct SumSide {
  int32_t buffer;
  int64_t offset;
  int64_t stride[kMaxDims + 2];
  /// Elements of the last dim follow each other.
  bool is_dense;
};

/// An op that adds or converts. Its last two dims are walked in tiles that stay in the first cache.
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
