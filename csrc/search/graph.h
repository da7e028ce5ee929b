// Graphs of the search, as in rvdcomm/planning/graph.py: the successors of a state, and a lower
// bound on the rest of a path.
#pragma once

#include <memory>
#include <vector>

#include "bound.h"
#include "pricer.h"
#include "rvdcomm/search.h"

namespace rvdcomm {

inline std::uint32_t bit(int axis) { return std::uint32_t{1} << axis; }

class Graph {
 public:
  virtual ~Graph() = default;
  virtual bool is_goal(const Targets& state) const = 0;
  /// A lower bound on the ticks and rounds of every path from `state` to a goal.
  virtual PathCost bound(const Targets& state) const = 0;
  /// Append the states one step away, if whole units move, in the order of the Python graph.
  virtual void append_successors(const Targets& state, const Units& units,
                                 std::vector<Targets>* out) const = 0;

 protected:
  Graph(const RebindProblem& problem, const RebindPricer& pricer)
      : problem_(problem), pricer_(pricer), bound_(problem, pricer) {}

  /// Size of a digit; 0 for a scratch digit, which only its own axis can be bound to.
  int size(Target target) const {
    return target < problem_.num_digits() ? problem_.digit_sizes[target] : 0;
  }

  /// Call `function` with the axes of every set of units that may move, in the order of binary
  /// numbers. A unit may move if all its axes may.
  template <typename Function>
  static void for_subsets(const Units& units, std::uint32_t may_move, const Function& function) {
    std::array<std::uint32_t, kMaxAxes> movable{};
    int num_movable = 0;
    for (std::uint32_t unit : units) {
      if ((unit & ~may_move) == 0) movable[num_movable++] = unit;
    }
    for (std::uint32_t chosen = 1; chosen < bit(num_movable); ++chosen) {
      std::uint32_t axes = 0;
      for (std::uint32_t rest = chosen; rest; rest &= rest - 1)
        axes |= movable[__builtin_ctz(rest)];
      function(axes);
    }
  }

  /// In `successor`, move `holders` away from the digits to which it binds `moved` axes. They move
  /// to digits of equal size that the moved axes leave free.
  /// @return  the holders for which there is no such digit
  std::uint32_t displace(const Targets& state, std::uint32_t moved, std::uint32_t holders,
                         Targets* successor) const;

  const RebindProblem& problem_;
  const RebindPricer& pricer_;
  const SearchBound bound_;
};

std::unique_ptr<Graph> make_graph(const RebindProblem& problem, const RebindPricer& pricer);

}  // namespace rvdcomm
