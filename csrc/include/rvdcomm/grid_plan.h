// The form of a batch of ops for a GPU grid. grid_plan.cpp builds it; grid_tile.h runs it.
#pragma once

#include <cstdint>
#include <vector>

#include "rvdcomm/copy_plan.h"
#include "rvdcomm/fast_div.h"

namespace rvdcomm {

inline constexpr int kTileThreads = 256;
/// Units that a thread loads before it stores: enough loads in flight to hide the memory latency.
inline constexpr int kUnitsPerThread = 4;
inline constexpr int kTileUnits = kTileThreads * kUnitsPerThread;
/// The widest access of a GPU thread.
inline constexpr int kMaxUnitBytes = 16;
/// Most buffers of a batch, whose addresses are passed to the kernel by value.
inline constexpr int kMaxBuffers = 256;

/// A side in bytes. The stride of the last dim is the distance between units, not elements.
/// `buffer` is an index in the buffers of the batch.
struct GridSide {
  int64_t offset;
  int64_t stride[kMaxDims];
  int32_t buffer;
};

/// An op over a box of units. A unit is a vector of elements that one thread moves or adds at once.
struct GridOp {
  FastDiv shape[kMaxDims];
  int64_t first_tile;
  FastDiv parts;        // number of equal, contiguous parts of the units
  uint32_t part_units;  // below 2^31
  int32_t num_dims;
  int32_t unit_bytes;  // of a unit of a source
  int32_t first_side;  // index of dst in the sides; the sources follow
  int32_t num_srcs;
  DType src_dtype, dst_dtype;
  bool is_move, wide;
};

/// Ops that are independent of each other, so one launch runs them all.
struct GridBatch {
  std::vector<GridOp> ops;
  std::vector<GridSide> sides;
  std::vector<int32_t> buffers;  // numbers of the program's buffers that the batch uses
  int64_t num_tiles = 0;
  bool has_sums = false;
};

/// The batches of a program, in order. All buffers must start at multiples of `alignment`.
/// @pre alignment is a power of two
/// @throws std::invalid_argument if one op uses more than kMaxBuffers buffers
std::vector<GridBatch> grid_batches(const CopyProgram& program, int64_t alignment);

}  // namespace rvdcomm
