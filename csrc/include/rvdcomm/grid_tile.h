// What one thread of the grid does in one tile: the kernels are loops around run_tile, and the CPU
// tests call the same lines.
#pragma once

#include <cstdint>

#include "rvdcomm/element.h"
#include "rvdcomm/grid_plan.h"
#include "rvdcomm/macros.h"

namespace rvdcomm {

/// Bytes that are loaded and stored by one instruction.
struct alignas(16) Vector16 {
  uint32_t word[4];
};

/// What a launch hands to its threads.
struct GridView {
  const GridOp* ops;
  const GridSide* sides;
  char* const* buffers;
  int32_t num_ops;
};

/// Where a side's unit lies.
/// @pre  unit < op.num_units
/// @post the same as offset_from_flat of the box of units
RVD_HD int64_t offset_from_unit(const GridOp& op, const GridSide& side, uint32_t unit) {
  int64_t offset = side.offset;
  for (int d = op.num_dims - 1; d > 0; --d) {
    const uint32_t rest = quotient(unit, op.shape[d]);
    offset += static_cast<int64_t>(unit - rest * op.shape[d].divisor) * side.stride[d];
    unit = rest;
  }
  return op.num_dims > 0 ? offset + static_cast<int64_t>(unit) * side.stride[0] : offset;
}

/// The op that a tile belongs to.
/// @post op.first_tile <= tile, and no later op has that
RVD_HD const GridOp& op_from_tile(const GridView& grid, int64_t tile) {
  int low = 0, high = grid.num_ops;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (grid.ops[middle].first_tile <= tile ? low : high) = middle;
  }
  return grid.ops[low];
}

template <typename Unit>
RVD_HD void move_units(const GridView& grid, const GridOp& op, uint32_t first) {
  const GridSide* sides = grid.sides + op.first_side;
  const char* src = op.num_srcs == 0 ? nullptr : grid.buffers[sides[1].buffer];
  char* dst = grid.buffers[sides[0].buffer];
  // All loads stand before all stores, so that they are under way together.
  Unit units[kUnitsPerThread] = {};
  for (int i = 0; i < kUnitsPerThread; ++i) {
    const uint32_t unit = first + static_cast<uint32_t>(i * kTileThreads);
    if (src != nullptr && unit < op.num_units) {
      units[i] = *reinterpret_cast<const Unit*>(src + offset_from_unit(op, sides[1], unit));
    }
  }
  for (int i = 0; i < kUnitsPerThread; ++i) {
    const uint32_t unit = first + static_cast<uint32_t>(i * kTileThreads);
    if (unit < op.num_units) {
      *reinterpret_cast<Unit*>(dst + offset_from_unit(op, sides[0], unit)) = units[i];
    }
  }
}

/// This thread's units of a tile of a move.
RVD_HD void move_tile(const GridView& grid, const GridOp& op, uint32_t first) {
  switch (op.unit_bytes) {
    case 1: return move_units<uint8_t>(grid, op, first);
    case 2: return move_units<uint16_t>(grid, op, first);
    case 4: return move_units<uint32_t>(grid, op, first);
    case 8: return move_units<uint64_t>(grid, op, first);
    default: return move_units<Vector16>(grid, op, first);
  }
}

/// Store a value as an element of a dtype that is known only at run time.
template <typename Wide>
RVD_HD_CALL void store_as(DType dtype, char* dst, Wide value) {
  switch (dtype) {
#define RVD_STORE(name, bytes, summable)                       \
  case DType::k_##name: {                                      \
    const auto element = element_from<DType::k_##name>(value); \
    memcpy(dst, &element, sizeof(element));                    \
    return;                                                    \
  }
    RVD_DTYPES(RVD_STORE)
#undef RVD_STORE
  }
}

/// One unit of a sum: kCount elements of all sources, added in order.
template <DType kDType, bool kWide, int kCount>
RVD_HD void sum_unit(const GridView& grid, const GridOp& op, uint32_t unit) {
  using Element = ElementOf<kDType>;
  using Value = typename Element::Value;
  struct alignas(kCount == 1 ? alignof(typename Element::Bits) : kMaxUnitBytes) Unit {
    typename Element::Bits at[kCount];
  };
  const GridSide* sides = grid.sides + op.first_side;
  const auto read = [&](int i) {
    const GridSide& side = sides[1 + i];
    const char* src = grid.buffers[side.buffer] + offset_from_unit(op, side, unit);
    return *reinterpret_cast<const Unit*>(src);
  };
  Value sum[kCount];
  const Unit head = read(0);
  for (int e = 0; e < kCount; ++e) sum[e] = Element::load(head.at[e]);
  for (int i = 1; i < op.num_srcs; ++i) {
    const Unit next = read(i);
    for (int e = 0; e < kCount; ++e) sum[e] = accumulate<kDType, kWide>(sum[e], next.at[e]);
  }
  char* dst = grid.buffers[sides[0].buffer] + offset_from_unit(op, sides[0], unit);
  if (op.src_dtype == op.dst_dtype) {
    Unit out;
    for (int e = 0; e < kCount; ++e) out.at[e] = Element::store(sum[e]);
    *reinterpret_cast<Unit*>(dst) = out;
  } else if constexpr (kCount == 1) {
    using Wide = typename WideOf<Value>::type;
    store_as<Wide>(op.dst_dtype, dst, static_cast<Wide>(sum[0]));
  }
}

template <DType kDType, bool kWide>
RVD_HD_CALL void sum_units(const GridView& grid, const GridOp& op, uint32_t first) {
  constexpr int kItem = sizeof(typename ElementOf<kDType>::Bits);
  for (int i = 0; i < kUnitsPerThread; ++i) {
    const uint32_t unit = first + static_cast<uint32_t>(i * kTileThreads);
    if (unit >= op.num_units) return;
    if (op.unit_bytes == kItem) {
      sum_unit<kDType, kWide, 1>(grid, op, unit);
    } else {
      sum_unit<kDType, kWide, kMaxUnitBytes / kItem>(grid, op, unit);
    }
  }
}

/// This thread's units of a tile of a sum.
RVD_HD void sum_tile(const GridView& grid, const GridOp& op, uint32_t first) {
  switch (op.src_dtype) {
#define RVD_SUM(name, bytes, summable)                                                         \
  case DType::k_##name:                                                                        \
    if (ElementOf<DType::k_##name>::kIsHalf && op.wide) {                                      \
      return sum_units<DType::k_##name, ElementOf<DType::k_##name>::kIsHalf>(grid, op, first); \
    }                                                                                          \
    return sum_units<DType::k_##name, false>(grid, op, first);
    RVD_DTYPES(RVD_SUM)
#undef RVD_SUM
  }
}

/// All that thread `thread` of kTileThreads does for tile `tile` of a batch.
/// @pre kSums, or the batch has no sums
template <bool kSums>
RVD_HD void run_tile(const GridView& grid, int64_t tile, int thread) {
  const GridOp& op = op_from_tile(grid, tile);
  const auto first = static_cast<uint32_t>((tile - op.first_tile) * kTileUnits + thread);
  if constexpr (kSums) {
    if (!op.is_move) return sum_tile(grid, op, first);
  }
  move_tile(grid, op, first);
}

}  // namespace rvdcomm
