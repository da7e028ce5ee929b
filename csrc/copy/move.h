// Moves: ops that copy bytes or write zeros, without arithmetic.
#pragma once

#include "plane.h"
#include "rvdcomm/copy_plan.h"

namespace rvdcomm {

/// A move as runs of bytes. The order of the dims is the order of the loops.
///
/// The last two dims are the plane, which is copied block by block.
struct Move {
  int32_t num_dims;  // at least 2
  int64_t shape[kMaxDims + 2];
  int64_t dst_stride[kMaxDims + 2], src_stride[kMaxDims + 2];
  int32_t dst_buffer, src_buffer;
  int64_t dst_offset, src_offset;
  int64_t run_bytes;
  int64_t block_rows, block_cols;
  PlaneFn plane;
  /// `plane` with streamed stores, for dst addresses that are multiples of kStreamAlign; or null.
  PlaneFn stream;
};

/// @pre op.is_move()
Move move_from_op(const PlanOp& op);

/// Run a move. `dst` and `src` are the addresses of its first run.
void run_move(const Move& move, char* dst, const char* src);

}  // namespace rvdcomm
