// Moves: ops whose bytes go to dst as they are.
#pragma once

#include "plane.h"
#include "rvdcomm/copy_plan.h"

namespace rvdcomm {

/// A move as runs of bytes, with its dims in the order in which they are looped over.
///
/// The last two dims are the plane, which is walked in blocks.
struct Move {
  int32_t num_dims;  // at least 2
  int64_t shape[kMaxDims + 2];
  int64_t dst_stride[kMaxDims + 2], src_stride[kMaxDims + 2];
  int32_t dst_buffer, src_buffer;
  int64_t dst_offset, src_offset;
  int64_t run_bytes;
  int64_t block_rows, block_cols;
  PlaneFn plane;
  /// For a dst whose address is a multiple of kStreamAlign, or null.
  PlaneFn stream;
};

/// @pre op.is_move()
Move move_from_op(const PlanOp& op);

/// Run a move at these addresses, which are those of its first runs.
void run_move(const Move& move, char* dst, const char* src);

}  // namespace rvdcomm
