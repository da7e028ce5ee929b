// The search for the cheapest sequence of rebinds, as rvdcomm/planning/search.py defines it: the
// same graph, costs, bounds and order, so the same path.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace rvdcomm {

__extension__ using Ticks = __int128;

inline constexpr int kMaxAxes = 16;
inline constexpr int kMaxTargets = 64;

/// What an axis is bound to: kReplica, kPart, a digit, or the axis's scratch digit, which follows
/// the digits.
using Target = std::int8_t;
inline constexpr Target kReplica = -1;
inline constexpr Target kPart = -2;

/// One target an axis; entries from `num_axes` on are kReplica.
using Targets = std::array<Target, kMaxAxes>;

/// Sets of axes that move together: bit a stands for axis a.
using Units = std::vector<std::uint32_t>;

/// What a path or a step takes; compared in this order.
struct PathCost {
  Ticks ticks = 0;
  std::int64_t rounds = 0;
  std::int64_t steps = 0;
};

inline bool operator<(const PathCost& a, const PathCost& b) {
  if (a.ticks != b.ticks) return a.ticks < b.ticks;
  if (a.rounds != b.rounds) return a.rounds < b.rounds;
  return a.steps < b.steps;
}

inline bool operator==(const PathCost& a, const PathCost& b) {
  return a.ticks == b.ticks && a.rounds == b.rounds && a.steps == b.steps;
}

/// A pair of bindings, the grid that they share, and the units of cost.
/// @pre  at most kMaxAxes axes, kMaxTargets targets, and no cost of a path above 2^126
struct RebindProblem {
  Targets src{}, start{}, dst{};
  bool is_thorough = false;
  Units units;         ///< any set of these moves; none if they are too many
  Units coarse_units;  ///< as units, but fewer; none if units are few
  std::vector<int> sizes;
  std::vector<int> levels;
  std::vector<int> digit_sizes;
  std::vector<std::int64_t> blocks;
  std::int64_t num_ranks = 1;
  std::int64_t num_bytes = 0;
  std::vector<Ticks> ticks_a_unit;
  std::vector<Ticks> ticks_a_round;
  std::int64_t max_coarse_successors = 0;
  std::int64_t max_successors = 0;

  int num_axes() const { return static_cast<int>(sizes.size()); }
  int num_digits() const { return static_cast<int>(digit_sizes.size()); }
  int num_levels() const { return static_cast<int>(blocks.size()); }
  Target scratch(int axis) const { return static_cast<Target>(num_digits() + axis); }
};

/// States from src to dst, both included, and what the steps between them take.
struct RebindPath {
  Ticks ticks = 0;
  std::vector<Targets> states;
};

RebindPath cheapest_rebinds(const RebindProblem& problem);

}  // namespace rvdcomm
