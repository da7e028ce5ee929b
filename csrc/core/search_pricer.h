// Costs of rebinds in whole ticks: RebindPricer of rvdcomm/planning/primitives.py.
#pragma once

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

/// Ticks of the busiest port, and the farthest level that is crossed; -1 for none.
struct Busiest {
  Ticks ticks = 0;
  int farthest = -1;
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
  Key price(const Targets& src, const Targets& dst) const;

  /// A lower bound on all paths from `src` to `dst`, in ticks.
  Ticks bound_ticks(const Targets& src, const Targets& dst) const;

  /// Adds bytes into a group of `level`, times the square of the rank count.
  void add_port(int level, Ticks units, Busiest* busiest) const {
    if (units == 0) return;
    const Ticks ticks = units * problem_.ticks_a_unit[level];
    busiest->ticks = ticks > busiest->ticks ? ticks : busiest->ticks;
    busiest->farthest = level;
  }

  /// Ticks of the quickest round at `level` or farther.
  Ticks quickest_round(int level) const;

  bool is_outer(int axis, int level) const { return problem_.levels[axis] >= level; }

 private:
  const RebindProblem& problem_;
};

}  // namespace rvdcomm
