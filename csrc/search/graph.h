// Which bindings are one step away, and how far the goal is at least: rvdcomm/planning/graph.py.
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
  /// Ticks and rounds that every path from `state` to a goal takes at least.
  virtual PathCost bound(const Targets& state) const = 0;
  /// Appends the states one step away that move whole units, in the order of the Python graph.
  virtual void append_successors(const Targets& state, const Units& units,
                                 std::vector<Targets>* out) const = 0;

 protected:
  Graph(const RebindProblem& problem, const RebindPricer& pricer)
      : problem_(problem), pricer_(pricer), bound_(problem, pricer) {}

  /// Size of a digit; of a scratch digit, 0: it belongs to one axis alone.
  int size(Target target) const {
    return target < problem_.num_digits() ? problem_.digit_sizes[target] : 0;
  }

  /// Calls `function` with the axes of every set of units all of whose axes may move, in the order
  /// of binary numbers.
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

  /// Gives holders of a digit that the moved axes want one that they leave, of the same size.
  /// @return  the holders that found none
  std::uint32_t displace(const Targets& state, std::uint32_t moved, std::uint32_t holders,
                         Targets* successor) const;

  const RebindProblem& problem_;
  const RebindPricer& pricer_;
  const SearchBound bound_;
};

std::unique_ptr<Graph> make_graph(const RebindProblem& problem, const RebindPricer& pricer);

}  // namespace rvdcomm
