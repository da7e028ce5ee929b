// What every path to the goal takes at least: rvdcomm/planning/search_bound.py.
#pragma once

#include <vector>

#include "pricer.h"
#include "rvdcomm/search.h"

namespace rvdcomm {

class SearchBound {
 public:
  SearchBound(const RebindProblem& problem, const RebindPricer& pricer);

  /// Ticks that any plan takes from `src` to the goal; 0 only where nothing must move.
  Ticks least_of_any(const Targets& src) const;

  /// Ticks and rounds of paths that keep the V axes of the goal as they are, but for a last mask,
  /// which makes the `masked` axes V.
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
