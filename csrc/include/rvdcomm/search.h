// The search for a cheap sequence of rebinds. rvdcomm/planning/search.py defines it. Graph, costs,
// bounds and order are the same here, so the path is the same.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace rvdcomm {

__extension__ using Ticks = __int128;

inline constexpr int kMaxAxes = 16;
inline constexpr int kMaxTargets = 64;

/// The target of an axis: kReplica, kPart, the index of a digit, or the scratch digit of the axis.
/// The indices of scratch digits follow those of the digits (RebindProblem::scratch).
using Target = std::int8_t;
inline constexpr Target kReplica = -1;
inline constexpr Target kPart = -2;

/// One target per axis; entries from `num_axes` on are kReplica.
using Targets = std::array<Target, kMaxAxes>;

/// Sets of axes that move together: bit a stands for axis a.
using Units = std::vector<std::uint32_t>;

/// Cost of a path or of a step. The fields are compared in this order.
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

/// The input of the search: two bindings, their common grid, the topology in ticks, and limits.
/// @pre  at most kMaxAxes axes, kMaxTargets targets, and no cost of a path above 2^126
struct RebindProblem {
  Targets src{}, start{}, dst{};
  bool is_thorough = false;
  Units units;         ///< a step moves any set of them; empty if there are too many to search
  Units coarse_units;  ///< fewer, larger units for a first search; empty if there is none
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

/// The states from src to dst, both included, and the total ticks of the steps between them.
struct RebindPath {
  Ticks ticks = 0;
  std::vector<Targets> states;
};

RebindPath cheapest_rebinds(const RebindProblem& problem);

}  // namespace rvdcomm
