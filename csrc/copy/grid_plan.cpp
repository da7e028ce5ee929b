#include "rvdcomm/grid_plan.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace rvdcomm {
namespace {

// FastDiv divides numbers below 2^31. The limit leaves room for the numbers of units past the end
// of an op, for which threads compute offsets.
constexpr int64_t kMaxUnits = int64_t{1} << 30;
constexpr int64_t kMaxParts = 64;

/// The largest power of two, at most `most`, that divides `number`.
int64_t common_power(int64_t most, int64_t number) {
  while (most > 1 && number % most != 0) most /= 2;
  return most;
}

/// Elements of a unit: the longest vector of at most kMaxUnitBytes that divides the length of the
/// run, the offsets, and the outer strides of all sides. 1 if a side is not contiguous or is
/// converted.
int64_t unit_elements(const PlanOp& op, int64_t alignment) {
  const int64_t item = item_bytes(op.dst.dtype);
  const int last = op.num_dims - 1;
  int64_t unit = std::min<int64_t>(kMaxUnitBytes, alignment);
  if (last < 0) return 1;
  const auto narrow = [&](const PlanSide& side) {
    if (side.dtype != op.dst.dtype || side.stride[last] != item) unit = item;
    unit = common_power(unit, side.offset);
    for (int d = 0; d < last; ++d) unit = common_power(unit, side.stride[d]);
  };
  narrow(op.dst);
  for (const PlanSide& src : op.srcs) narrow(src);
  unit = common_power(unit, item * op.shape[last]);
  // Sums have loops for one element and for a full vector only.
  if (!op.is_move() && unit < kMaxUnitBytes) return 1;
  return std::max<int64_t>(unit / item, 1);
}

/// The index of a buffer of the program in a batch; a new one is added.
int32_t index_in(GridBatch& batch, int32_t buffer) {
  const auto found = std::find(batch.buffers.begin(), batch.buffers.end(), buffer);
  const auto index = static_cast<int32_t>(found - batch.buffers.begin());
  if (found == batch.buffers.end()) batch.buffers.push_back(buffer);
  return index;
}

/// Whether the batch surely uses at most kMaxBuffers buffers if the op is added.
bool has_room(const GridBatch& batch, const PlanOp& op) {
  const auto num_new = [&](const PlanSide& side) {
    return std::count(batch.buffers.begin(), batch.buffers.end(), side.buffer) == 0 ? 1 : 0;
  };
  int64_t count = static_cast<int64_t>(batch.buffers.size()) + num_new(op.dst);
  for (const PlanSide& src : op.srcs) count += num_new(src);
  return count <= kMaxBuffers;
}

GridSide grid_side(GridBatch& batch, const PlanOp& op, const PlanSide& side, int64_t unit) {
  GridSide result{side.offset, {}, index_in(batch, side.buffer)};
  for (int d = 0; d < op.num_dims; ++d) {
    result.stride[d] = side.stride[d] * (d == op.num_dims - 1 ? unit : 1);
  }
  return result;
}

/// The number of parts of an op. Successive tiles belong to different parts, in turn.
///
/// A pack for k peers writes the piece of one peer after the piece of another. In this order, it
/// reads every k-th run of its source first, and the runs between them much later. If a run is
/// shorter than a memory line, every line is then loaded up to k times. With one part per peer,
/// tiles of all peers run at the same time, so all runs of a line are read while the line is in the
/// cache.
int64_t num_parts(const PlanOp& op, int64_t num_units) {
  if (op.num_dims < 2 || op.srcs.empty() || op.shape[0] > kMaxParts) return 1;
  const int64_t* stride = op.srcs[0].stride;
  const bool is_inside = std::abs(stride[0]) < std::abs(stride[1]);
  return is_inside && num_units / op.shape[0] >= kTileUnits ? op.shape[0] : 1;
}

/// Append an op. An op with more than kMaxUnits units is appended as two halves.
void append(GridBatch& batch, const PlanOp& op, bool wide, int64_t alignment) {
  const int64_t unit = unit_elements(op, alignment);
  // Elements of a unit along dim d, and units along it.
  const auto step = [&](int d) { return d == op.num_dims - 1 ? unit : 1; };
  const auto num_steps = [&](int d) { return op.shape[d] / step(d); };
  if (op.num_elements() / unit > kMaxUnits) {
    int d = 0;
    for (int other = 1; other < op.num_dims; ++other) {
      if (num_steps(other) > num_steps(d)) d = other;
    }
    PlanOp low = op, high = op;
    // The cut is between two units, so both halves keep the alignment of the op.
    low.shape[d] = num_steps(d) / 2 * step(d);
    high.shape[d] = op.shape[d] - low.shape[d];
    high.dst.offset += low.shape[d] * op.dst.stride[d];
    for (PlanSide& src : high.srcs) src.offset += low.shape[d] * src.stride[d];
    append(batch, low, wide, alignment);
    append(batch, high, wide, alignment);
    return;
  }
  GridOp grid{};
  grid.num_dims = op.num_dims;
  for (int d = 0; d < op.num_dims; ++d) {
    grid.shape[d] = fast_div(static_cast<uint32_t>(num_steps(d)));
  }
  grid.first_tile = batch.num_tiles;
  const int64_t num_units = op.num_elements() / unit, parts = num_parts(op, num_units);
  grid.parts = fast_div(static_cast<uint32_t>(parts));
  grid.part_units = static_cast<uint32_t>(num_units / parts);
  grid.dst_dtype = op.dst.dtype;
  grid.src_dtype = op.srcs.empty() ? op.dst.dtype : op.srcs[0].dtype;
  grid.unit_bytes = static_cast<int32_t>(unit * item_bytes(grid.src_dtype));
  grid.first_side = static_cast<int32_t>(batch.sides.size());
  grid.num_srcs = static_cast<int32_t>(op.srcs.size());
  grid.is_move = op.is_move();
  grid.wide = wide;
  batch.sides.push_back(grid_side(batch, op, op.dst, unit));
  for (const PlanSide& src : op.srcs) batch.sides.push_back(grid_side(batch, op, src, unit));
  if (batch.buffers.size() > static_cast<size_t>(kMaxBuffers)) {
    throw std::invalid_argument("an op uses " + std::to_string(batch.buffers.size()) +
                                " buffers, and a launch takes " + std::to_string(kMaxBuffers) +
                                "; add its sources up in several ops.");
  }
  batch.num_tiles += parts * ((grid.part_units + kTileUnits - 1) / kTileUnits);
  batch.has_sums = batch.has_sums || !grid.is_move;
  batch.ops.push_back(grid);
}

}  // namespace

std::vector<GridBatch> grid_batches(const CopyProgram& program, int64_t alignment) {
  const std::vector<PlanOp>& ops = program.plan();
  std::vector<GridBatch> batches;
  for (size_t i = 0, first = 0; i < ops.size(); ++i) {
    const auto is_free = [&](const PlanOp& op) { return independent(op, ops[i]); };
    const auto begin = ops.begin() + static_cast<ptrdiff_t>(first);
    if (i == 0 || !has_room(batches.back(), ops[i]) ||
        !std::all_of(begin, ops.begin() + static_cast<ptrdiff_t>(i), is_free)) {
      batches.emplace_back();
      first = i;
    }
    append(batches.back(), ops[i], program.wide(), alignment);
  }
  return batches;
}

}  // namespace rvdcomm
