// Costs of rebinds in whole ticks: RebindPricer of rvdcomm/planning/primitives.py.
#pragma once

#include <algorithm>

#include "rvdcomm/search.h"

namespace rvdcomm {

/// For every target of `state`, the axis that is bound to it; -1 for none. R and V have no entry.
class AxisOf {
 public:
  AxisOf(const Targets& state, int num_axes) {
    axes_.fill(-1);
    for (int a = 0; a < num_axes; ++a) {
      if (state[a] >= 0) axes_[state[a]] = static_cast<std::int8_t>(a);
    }
  }
  int operator[](Target target) const { return target < 0 ? -1 : axes_[target]; }

 private:
  std::array<std::int8_t, kMaxTargets> axes_;
};

/// The formula of the port model: PortTicks of rvdcomm/cost/ticks.py, fed level by level.
class PortTicks {
 public:
  explicit PortTicks(const RebindProblem& problem) : problem_(problem) {}

  /// Bytes through the busiest port of the next level outwards, times the square of the rank count.
  void add(Ticks units) {
    if (units != 0) {
      busiest_ = std::max(busiest_, units * problem_.ticks_a_unit[num_levels_]);
      farthest_ = num_levels_;
    }
    ++num_levels_;
  }

  bool moves() const { return farthest_ >= 0; }

  /// The time of a step: that of its busiest port, and its rounds one after another.
  Ticks step(std::int64_t rounds) const {
    return moves() ? busiest_ + rounds * problem_.ticks_a_round[farthest_] : 0;
  }

  /// A lower bound on the time of all steps, of whose rounds `latency` is a lower bound.
  Ticks least(Ticks latency) const {
    return moves() ? busiest_ + std::max(latency, quickest_round(problem_, farthest_)) : latency;
  }

  /// The least latency of a round that crosses `level`, and maybe levels outside it.
  static Ticks quickest_round(const RebindProblem& problem, int level) {
    return *std::min_element(problem.ticks_a_round.begin() + level, problem.ticks_a_round.end());
  }

 private:
  const RebindProblem& problem_;
  Ticks busiest_ = 0;
  int num_levels_ = 0;
  int farthest_ = -1;
};

class RebindPricer {
 public:
  explicit RebindPricer(const RebindProblem& problem) : problem_(problem) {}

  /// Whether every digit is bound at most once.
  bool is_injective(const Targets& state) const;

  /// Whether the step has a price: V is entered by masks alone.
  /// @pre  is_injective(dst)
  bool is_priced(const Targets& src, const Targets& dst) const;

  /// Cost of one step.
  /// @pre  is_priced(src, dst)
  PathCost price(const Targets& src, const Targets& dst) const;

  /// One of how many pieces of its need a group of `level` has; 0 if it may have none. Axes in
  /// `ignored` tell no groups apart.
  std::int64_t missing(int level, const Targets& src, const Targets& dst, const AxisOf& axis_of_dst,
                       std::uint32_t ignored = 0) const;

  bool is_outer(int axis, int level) const { return problem_.levels[axis] >= level; }

 private:
  const RebindProblem& problem_;
};

}  // namespace rvdcomm
