#include "move.h"

#include <algorithm>
#include <cstdlib>

namespace rvdcomm {
namespace {

// Half of a first-level cache of 32 KiB: a block of src and its block of dst fit together.
constexpr int64_t kBlockBytes = 16 << 10;
constexpr int64_t kLineBytes = 64;

// Moves of so many bytes do not stay in the caches for their next reader, and a streamed store
// spares the read of the line that it overwrites: x1.6 to x1.9 at 16 MiB with runs of 16 and 256
// bytes, and nothing at 4 MiB (AMD EPYC, 32 MiB of third-level cache).
constexpr int64_t kStreamBytes = 8 << 20;
// Runs shorter than a line are streamed where so many bytes follow each other.
constexpr int64_t kStreamRowBytes = 1 << 10;

void swap_dims(Move& move, int a, int b) {
  std::swap(move.shape[a], move.shape[b]);
  std::swap(move.dst_stride[a], move.dst_stride[b]);
  std::swap(move.src_stride[a], move.src_stride[b]);
}

/// The dim in which src steps least.
int least_src_dim(const Move& move) {
  int least = move.num_dims - 1;
  for (int d = 0; d < move.num_dims - 1; ++d) {
    if (move.shape[d] > 1 && std::abs(move.src_stride[d]) < std::abs(move.src_stride[least])) {
      least = d;
    }
  }
  return least;
}

/// Choose the loop order where src and dst want different ones.
///
/// Runs of whole lines are read front to back, which the processor foresees; where they are written
/// matters less. Shorter ones are walked in square blocks, so that the lines of both sides are used
/// up while they are in the first cache.
void choose_plane(Move& move) {
  const int last = move.num_dims - 1, least = least_src_dim(move);
  int64_t& rows = move.shape[last - 1];
  int64_t& cols = move.shape[last];
  const bool is_line = move.run_bytes >= kLineBytes;
  if (least != last) {
    for (int d = least; d < (is_line ? last : last - 1); ++d) swap_dims(move, d, d + 1);
  }
  move.block_rows = rows;
  move.block_cols = cols;
  if (least == last || is_line) return;
  const int64_t runs = kBlockBytes / move.run_bytes;
  int64_t side = 1;
  while (side * side < runs) side *= 2;
  move.block_rows = std::min(rows, std::max(side, runs / cols));
  move.block_cols = std::min(cols, std::max<int64_t>(runs / move.block_rows, 1));
}

/// Stream if the dst is large and its lines are written whole.
void choose_stream(Move& move, int64_t num_bytes) {
  const int col = move.num_dims - 1;
  const bool is_dense = move.shape[col] == 1 || move.dst_stride[col] == move.run_bytes;
  const int64_t row_bytes = move.run_bytes * (is_dense ? move.block_cols : 1);
  const bool is_whole = move.run_bytes % kLineBytes == 0 || row_bytes >= kStreamRowBytes;
  bool is_aligned = move.run_bytes % kStreamAlign == 0;
  for (int d = 0; d < move.num_dims; ++d) {
    is_aligned = is_aligned && move.dst_stride[d] % kStreamAlign == 0;
  }
  // One long run is left to memcpy, which streams by itself.
  const bool is_short = move.run_bytes < kStreamBytes;
  if (is_aligned && is_short && num_bytes >= kStreamBytes && is_whole) {
    move.stream = stream_plane(move.run_bytes);
  }
}

void run_plane(const Move& move, PlaneFn copy, char* dst, const char* src) {
  const int row = move.num_dims - 2, col = row + 1;
  Plane plane{0,
              0,
              move.run_bytes,
              move.dst_stride[row],
              move.dst_stride[col],
              move.src_stride[row],
              move.src_stride[col]};
  for (int64_t r = 0; r < move.shape[row]; r += move.block_rows) {
    plane.rows = std::min(move.block_rows, move.shape[row] - r);
    for (int64_t c = 0; c < move.shape[col]; c += move.block_cols) {
      plane.cols = std::min(move.block_cols, move.shape[col] - c);
      copy(dst + r * plane.dst_row + c * plane.dst_col, src + r * plane.src_row + c * plane.src_col,
           plane);
    }
  }
}

}  // namespace

Move move_from_op(const PlanOp& op) {
  Move move{};
  const bool is_zero = op.srcs.empty();
  const PlanSide& src = is_zero ? op.dst : op.srcs[0];
  move.dst_buffer = op.dst.buffer;
  move.dst_offset = op.dst.offset;
  move.src_buffer = src.buffer;
  move.src_offset = src.offset;
  const int64_t item = item_bytes(op.dst.dtype);
  const int last = op.num_dims - 1;
  const bool has_run = last >= 0 && op.dst.stride[last] == item && src.stride[last] == item;
  move.run_bytes = has_run ? item * op.shape[last] : item;
  const int outer = has_run ? last : op.num_dims;
  move.num_dims = std::max(outer, 2);
  for (int d = 0, to = move.num_dims - outer; d < outer; ++d, ++to) {
    move.shape[to] = op.shape[d];
    move.dst_stride[to] = op.dst.stride[d];
    move.src_stride[to] = src.stride[d];
  }
  for (int d = 0; d < move.num_dims - outer; ++d) move.shape[d] = 1;
  if (move.run_bytes == 0) move.shape[0] = 0;
  move.plane = is_zero ? zero_plane : copy_plane(move.run_bytes);
  choose_plane(move);
  if (!is_zero && !op.read_soon) choose_stream(move, op.num_elements() * item);
  return move;
}

void run_move(const Move& move, char* dst, const char* src) {
  const int outer = move.num_dims - 2;
  int64_t coord[kMaxDims] = {};
  for (int d = 0; d < move.num_dims; ++d) {
    if (move.shape[d] == 0) return;
  }
  const bool streams =
      move.stream != nullptr && reinterpret_cast<uintptr_t>(dst) % kStreamAlign == 0;
  const PlaneFn copy = streams ? move.stream : move.plane;
  for (;;) {
    run_plane(move, copy, dst, src);
    int d = outer - 1;
    for (; d >= 0; --d) {
      dst += move.dst_stride[d];
      src += move.src_stride[d];
      if (++coord[d] < move.shape[d]) break;
      dst -= move.dst_stride[d] * move.shape[d];
      src -= move.src_stride[d] * move.shape[d];
      coord[d] = 0;
    }
    if (d < 0) break;
  }
  if (streams) stream_fence();
}

}  // namespace rvdcomm
