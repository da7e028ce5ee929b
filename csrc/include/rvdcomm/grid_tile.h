// The work of one GPU thread in one tile. The kernels call run_tile once per thread; the C++ tests
// call it in a loop on the CPU.
#pragma once

#include <cstdint>

#include "rvdcomm/element.h"
#include "rvdcomm/grid_plan.h"
#include "rvdcomm/macros.h"

namespace rvdcomm {

/// 16 bytes that a GPU thread loads or stores with one instruction.
struct alignas(16) Vector16 {
  uint32_t word[4];
};

/// The arguments of a launch, equal for all of its threads.
struct GridView {
  const GridOp* ops;
  const GridSide* sides;
  char* const* buffers;
  int32_t num_ops;
};

/// The byte offset of a unit of a side.
/// @pre  unit < 2^31
/// @post for units of the op, the same as offset_from_flat of the box of units; the offset of a
///       later unit must not be accessed
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
/// @post the last op with op.first_tile <= tile
RVD_HD const GridOp& op_from_tile(const GridView& grid, int64_t tile) {
  int low = 0, high = grid.num_ops;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (grid.ops[middle].first_tile <= tile ? low : high) = middle;
  }
  return grid.ops[low];
}

/// The units of one thread in a tile: first, first + kTileThreads, and so on, below `end`.
struct ThreadUnits {
  uint32_t first, end;

  RVD_HD uint32_t at(int i) const { return first + static_cast<uint32_t>(i * kTileThreads); }
  RVD_HD bool has(int i) const { return at(i) < end; }
};

template <typename Unit>
RVD_HD void move_units(const GridView& grid, const GridOp& op, ThreadUnits mine) {
  const GridSide* sides = grid.sides + op.first_side;
  const char* src = op.num_srcs == 0 ? nullptr : grid.buffers[sides[1].buffer];
  char* dst = grid.buffers[sides[0].buffer];
  // All loads are issued before all stores, so that the loads overlap in time. The offsets of the
  // stores are computed before the stores too: the compiler must assume that a store changes `op`,
  // and would load the op again after every store.
  Unit units[kUnitsPerThread] = {};
  char* to[kUnitsPerThread];
  RVD_UNROLL for (int i = 0; i < kUnitsPerThread; ++i) {
    if (src != nullptr && mine.has(i)) {
      units[i] = *reinterpret_cast<const Unit*>(src + offset_from_unit(op, sides[1], mine.at(i)));
    }
  }
  RVD_UNROLL for (int i = 0; i < kUnitsPerThread; ++i) {
    to[i] = dst + offset_from_unit(op, sides[0], mine.at(i));
  }
  RVD_UNROLL for (int i = 0; i < kUnitsPerThread; ++i) {
    if (mine.has(i)) *reinterpret_cast<Unit*>(to[i]) = units[i];
  }
}

/// Move the units of one thread in a tile.
RVD_HD void move_tile(const GridView& grid, const GridOp& op, ThreadUnits mine) {
  switch (op.unit_bytes) {
    case 1: return move_units<uint8_t>(grid, op, mine);
    case 2: return move_units<uint16_t>(grid, op, mine);
    case 4: return move_units<uint32_t>(grid, op, mine);
    case 8: return move_units<uint64_t>(grid, op, mine);
    default: return move_units<Vector16>(grid, op, mine);
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

/// Sum kUnits units of kCount elements each. Sources are added in order.
template <DType kDType, bool kWide, int kCount, int kUnits>
RVD_HD void sum_some(const GridView& grid, const GridOp& op, ThreadUnits mine) {
  using Element = ElementOf<kDType>;
  using Value = typename Element::Value;
  struct alignas(kCount == 1 ? alignof(typename Element::Bits) : kMaxUnitBytes) Unit {
    typename Element::Bits at[kCount];
  };
  const GridSide* sides = grid.sides + op.first_side;
  Unit next[kUnits] = {};
  // Loads all units of one source before any of them is used, so that the loads overlap in time.
  const auto read = [&](int src) {
    const GridSide& side = sides[1 + src];
    const char* from = grid.buffers[side.buffer];
    RVD_UNROLL for (int i = 0; i < kUnits; ++i) {
      if (mine.has(i)) {
        next[i] = *reinterpret_cast<const Unit*>(from + offset_from_unit(op, side, mine.at(i)));
      }
    }
  };
  Value sum[kUnits][kCount];
  read(0);
  RVD_UNROLL for (int i = 0; i < kUnits; ++i) {
    RVD_UNROLL for (int e = 0; e < kCount; ++e) sum[i][e] = Element::load(next[i].at[e]);
  }
  for (int src = 1; src < op.num_srcs; ++src) {
    read(src);
    RVD_UNROLL for (int i = 0; i < kUnits; ++i) {
      RVD_UNROLL for (int e = 0; e < kCount; ++e) {
        sum[i][e] = accumulate<kDType, kWide>(sum[i][e], next[i].at[e]);
      }
    }
  }
  const bool is_same = op.src_dtype == op.dst_dtype;
  const DType dst_dtype = op.dst_dtype;
  char* dst = grid.buffers[sides[0].buffer];
  char* to[kUnits];
  RVD_UNROLL for (int i = 0; i < kUnits; ++i) {
    to[i] = dst + offset_from_unit(op, sides[0], mine.at(i));
  }
  RVD_UNROLL for (int i = 0; i < kUnits; ++i) {
    if (!mine.has(i)) return;
    if (is_same) {
      Unit out;
      RVD_UNROLL for (int e = 0; e < kCount; ++e) out.at[e] = Element::store(sum[i][e]);
      *reinterpret_cast<Unit*>(to[i]) = out;
    } else if constexpr (kCount == 1) {
      using Wide = typename WideOf<Value>::type;
      store_as<Wide>(dst_dtype, to[i], static_cast<Wide>(sum[i][0]));
    }
  }
}

template <DType kDType, bool kWide, int kCount>
RVD_HD void sum_all(const GridView& grid, const GridOp& op, ThreadUnits mine) {
  // Units per step: the sums of all of them fit in 16 registers of 32 bits. At least one.
  constexpr int kWords = static_cast<int>(sizeof(typename ElementOf<kDType>::Value) + 3) / 4;
  constexpr int kFit = kCount * kWords >= 16 ? 1 : 16 / (kCount * kWords);
  constexpr int kUnits = kFit < kUnitsPerThread ? kFit : kUnitsPerThread;
  static_assert(kUnitsPerThread % kUnits == 0, "a tile is a whole number of steps");
  for (int i = 0; i < kUnitsPerThread && mine.has(i); i += kUnits) {
    sum_some<kDType, kWide, kCount, kUnits>(grid, op, ThreadUnits{mine.at(i), mine.end});
  }
}

template <DType kDType, bool kWide>
RVD_HD_CALL void sum_units(const GridView& grid, const GridOp& op, ThreadUnits mine) {
  constexpr int kItem = sizeof(typename ElementOf<kDType>::Bits);
  if (op.unit_bytes == kItem) {
    sum_all<kDType, kWide, 1>(grid, op, mine);
  } else {
    sum_all<kDType, kWide, kMaxUnitBytes / kItem>(grid, op, mine);
  }
}

/// Sum the units of one thread in a tile.
RVD_HD void sum_tile(const GridView& grid, const GridOp& op, ThreadUnits mine) {
  switch (op.src_dtype) {
#define RVD_SUM(name, bytes, summable)                                                        \
  case DType::k_##name:                                                                       \
    if (ElementOf<DType::k_##name>::kIsHalf && op.wide) {                                     \
      return sum_units<DType::k_##name, ElementOf<DType::k_##name>::kIsHalf>(grid, op, mine); \
    }                                                                                         \
    return sum_units<DType::k_##name, false>(grid, op, mine);
    RVD_DTYPES(RVD_SUM)
#undef RVD_SUM
  }
}

/// The work of thread `thread` of kTileThreads for tile `tile` of a batch.
/// @pre kSums is true if the batch has sums
template <bool kSums>
RVD_HD void run_tile(const GridView& grid, int64_t tile, int thread) {
  const GridOp& op = op_from_tile(grid, tile);
  // Successive tiles belong to different parts, in turn. Tiles at the same position in their parts
  // are close to each other in the source, so it is best to read them at the same time (num_parts
  // in grid_plan.cpp).
  const auto number = static_cast<uint32_t>(tile - op.first_tile);
  const uint32_t round = quotient(number, op.parts);
  const uint32_t part = (number - round * op.parts.divisor) * op.part_units;
  const uint32_t first = part + round * kTileUnits + static_cast<uint32_t>(thread);
  const ThreadUnits mine{first, part + op.part_units};
  if constexpr (kSums) {
    if (!op.is_move) return sum_tile(grid, op, mine);
  }
  move_tile(grid, op, mine);
}

}  // namespace rvdcomm
