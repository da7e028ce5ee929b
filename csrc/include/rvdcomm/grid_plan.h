// A batch of ops as a grid of threads runs it. Built by grid_plan.cpp, run by grid_tile.h.
#pragma once

#include <cstdint>
#include <vector>

#include "rvdcomm/copy_plan.h"
#include "rvdcomm/fast_div.h"

namespace rvdcomm {

inline constexpr int kTileThreads = 256;
/// Units a thread has in flight at once: enough loads to cover the memory's latency.
inline constexpr int kUnitsPerThread = 4;
inline constexpr int kTileUnits = kTileThreads * kUnitsPerThread;
/// The widest access of a GPU thread.
inline constexpr int kMaxUnitBytes = 16;

/// A side in bytes; strides are those of a unit in the last dim.
struct GridSide {
  int64_t offset;
  int64_t stride[kMaxDims];
  int32_t buffer;
};

/// An op over a box of units: vectors that one thread moves, or adds, at once.
struct GridOp {
  FastDiv shape[kMaxDims];
  int64_t first_tile;
  FastDiv parts;        // equal parts of the units, one after another
  uint32_t part_units;  // below 2^31
  int32_t num_dims;
  int32_t unit_bytes;  // of the src side
  int32_t first_side;  // dst; the sources follow
  int32_t num_srcs;
  DType src_dtype, dst_dtype;
  bool is_move, wide;
};

/// Ops that are independent of each other, and so one launch.
struct GridBatch {
  std::vector<GridOp> ops;
  std::vector<GridSide> sides;
  int64_t num_tiles = 0;
  bool has_sums = false;
};

/// The batches of a program, in order, for buffers that all start at multiples of `alignment`.
/// @pre alignment is a power of two
std::vector<GridBatch> grid_batches(const CopyProgram& program, int64_t alignment);

}  // namespace rvdcomm
