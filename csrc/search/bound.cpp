#include "bound.h"

#include <algorithm>

namespace rvdcomm {
namespace {

// Source: docs/bound.md, "Messages in all", and messages_an_element in
// rvdcomm/planning/search_bound.py.
std::int64_t messages_an_element(std::int64_t src_r, std::int64_t src_v, std::int64_t dst_r,
                                 std::int64_t dst_v) {
  if (dst_v == 1) return src_v + dst_r - 2;
  return std::max<std::int64_t>({src_v - dst_v, src_v == 1 ? dst_r - src_r : 0, 0});
}

}  // namespace

SearchBound::SearchBound(const RebindProblem& problem, const RebindPricer& pricer)
    : problem_(problem),
      pricer_(pricer),
      axis_of_(problem.dst, problem.num_axes()),
      square_(problem.num_ranks * problem.num_ranks) {
  for (int level = 0; level < problem.num_levels(); ++level) {
    nearest_.push_back(PortTicks::quickest_round(problem, level));
  }
}

Ticks SearchBound::least_of_any(const Targets& src) const {
  PortTicks ports(problem_);
  for (int level = 0; level < problem_.num_levels(); ++level) {
    std::int64_t groups = 1, need = 1, src_r = 1, src_v = 1, dst_r = 1, dst_v = 1;
    for (int a = 0; a < problem_.num_axes(); ++a) {
      if (!pricer_.is_outer(a, level)) continue;
      const int k = problem_.sizes[a];
      const Target s = src[a], t = problem_.dst[a];
      groups *= k;
      (t >= 0 ? need : t == kReplica ? dst_r : dst_v) *= k;
      if (s == kReplica) src_r *= k;
      if (s == kPart) src_v *= k;
    }
    const Ticks units = src_v > 1 || dst_v > 1 ? Ticks{square_ / groups} *
                                                     messages_an_element(src_r, src_v, dst_r, dst_v)
                                               : entering(level, src, need, 0);
    ports.add(problem_.num_bytes * units);
  }
  return ports.least(0);
}

PathCost SearchBound::least_of_kept(const Targets& state, std::uint32_t masked) const {
  PortTicks ports(problem_);
  for (int level = 0; level < problem_.num_levels(); ++level) {
    std::int64_t groups = 1, need = 1, sharing = 1, summed = 1, kept = 1, dst_r = 1;
    for (int a = 0; a < problem_.num_axes(); ++a) {
      if (!pricer_.is_outer(a, level)) continue;
      const int k = problem_.sizes[a];
      if (masked >> a & 1) {
        sharing *= k;
        continue;
      }
      const Target t = problem_.dst[a];
      groups *= k;
      if (t == kReplica) dst_r *= k;
      if (t >= 0) need *= k;
      if (state[a] == kPart) (t == kPart ? kept : summed) *= k;
    }
    Ticks units = 0;
    if (summed == 1) {
      units = entering(level, state, need, masked);
    } else {
      // No group has all parts, so each group also receives everything that it wants.
      const Ticks messages =
          Ticks{square_ / groups} * kept * messages_an_element(1, summed, dst_r, 1);
      units = std::max(Ticks{square_ / need}, messages);
    }
    ports.add(problem_.num_bytes * (units / sharing));
  }
  PathCost least = least_rounds(state, masked);
  least.ticks = ports.least(least.ticks);
  least.rounds = std::max<std::int64_t>(least.rounds, ports.moves() ? 1 : 0);
  return least;
}

Ticks SearchBound::entering(int level, const Targets& src, std::int64_t need,
                            std::uint32_t ignored) const {
  const std::int64_t missing = pricer_.missing(level, src, problem_.dst, axis_of_, ignored);
  return square_ / need - (missing ? square_ / (need * missing) : 0);
}

PathCost SearchBound::least_rounds(const Targets& state, std::uint32_t masked) const {
  Ticks ticks = 0, in_place = 0, farthest = 0;
  std::int64_t rounds = 0, lost = 0;
  for (int a = 0; a < problem_.num_axes(); ++a) {
    const Target s = state[a];
    if ((masked >> a & 1) || s == problem_.dst[a]) continue;
    const std::int64_t partners = problem_.sizes[a] - 1;
    const Ticks once = nearest_[problem_.levels[a]];
    if (s == kPart) {
      ticks += partners * once;
      rounds += partners;
    } else if (s >= 0 && axis_of_[s] < 0) {
      in_place += partners * once;
      lost += partners;
      farthest = std::max(farthest, once);
    }
  }
  return {ticks + std::min(in_place, lost * nearest_[0] + farthest), rounds + lost, 0};
}

}  // namespace rvdcomm
