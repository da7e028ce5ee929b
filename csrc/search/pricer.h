// Costs of rebinds in whole ticks, as RebindPricer of rvdcomm/planning/primitives.py.
#pragma once

#include <algorithm>

#include "rvdcomm/search.h"

namespace rvdcomm {

/// For every digit, the axis of `state` that is bound to it; -1 if there is none, and for R and V.
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

/// The formulas of the port model, as PortTicks of rvdcomm/cost/ticks.py. `add` is called once per
/// level, from the lowest level outwards.
class PortTicks {
 public:
  explicit PortTicks(const RebindProblem& problem) : problem_(problem) {}

  /// Add the next level. `units` are the bytes through its busiest port, in units of 1 / n^2 byte
  /// for n ranks.
  void add(Ticks units) {
    if (units != 0) {
      busiest_ = std::max(busiest_, units * problem_.ticks_a_unit[num_levels_]);
      farthest_ = num_levels_;
    }
    ++num_levels_;
  }

  bool moves() const { return farthest_ >= 0; }

  /// The time of a step: the time of its slowest port plus the latency of all its rounds.
  Ticks step(std::int64_t rounds) const {
    return moves() ? busiest_ + rounds * problem_.ticks_a_round[farthest_] : 0;
  }

  /// A lower bound on the time of a path. `latency` is a lower bound on the latency of its rounds.
  Ticks least(Ticks latency) const {
    return moves() ? busiest_ + std::max(latency, quickest_round(problem_, farthest_)) : latency;
  }

  /// The least latency of a round whose farthest level is `level` or a level outside it.
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

  /// Whether the step has a price: only masks may bind axes to V.
  /// @pre  is_injective(dst)
  bool is_priced(const Targets& src, const Targets& dst) const;

  /// Cost of one step.
  /// @pre  is_priced(src, dst)
  PathCost price(const Targets& src, const Targets& dst) const;

  /// The n such that a group of `level` has one n-th of its need; 0 if some group has none of its
  /// need. Groups that differ only in axes of `ignored` count as one group.
  std::int64_t missing(int level, const Targets& src, const Targets& dst, const AxisOf& axis_of_dst,
                       std::uint32_t ignored = 0) const;

  bool is_outer(int axis, int level) const { return problem_.levels[axis] >= level; }

 private:
  const RebindProblem& problem_;
};

}  // namespace rvdcomm
