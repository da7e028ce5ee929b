// Lower bounds on the rest of a path, as in rvdcomm/planning/search_bound.py.
#pragma once

#include <vector>

#include "pricer.h"
#include "rvdcomm/search.h"

namespace rvdcomm {

class SearchBound {
 public:
  SearchBound(const RebindProblem& problem, const RebindPricer& pricer);

  /// A lower bound on the ticks of any plan from `src` to the goal; 0 only if nothing must move.
  Ticks least_of_any(const Targets& src) const;

  /// A lower bound on the ticks and rounds of paths of LeanGraph. On such a path, the V axes of the
  /// goal are V from the start, or (`masked`) become V by a mask in the last step.
  PathCost least_of_kept(const Targets& state, std::uint32_t masked) const;

 private:
  Ticks entering(int level, const Targets& src, std::int64_t need, std::uint32_t ignored) const;
  PathCost least_rounds(const Targets& state, std::uint32_t masked) const;

  const RebindProblem& problem_;
  const RebindPricer& pricer_;
  AxisOf axis_of_;
  std::int64_t square_;
  std::vector<Ticks> nearest_;
};

}  // namespace rvdcomm
