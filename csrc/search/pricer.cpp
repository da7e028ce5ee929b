#include "pricer.h"

namespace rvdcomm {

bool RebindPricer::is_injective(const Targets& state) const {
  std::uint64_t bound = 0;
  for (int a = 0; a < problem_.num_axes(); ++a) {
    if (state[a] < 0) continue;
    const std::uint64_t bit = std::uint64_t{1} << state[a];
    if (bound & bit) return false;
    bound |= bit;
  }
  return true;
}

bool RebindPricer::is_priced(const Targets& src, const Targets& dst) const {
  bool enters_v = false, is_mask = true;
  for (int a = 0; a < problem_.num_axes(); ++a) {
    if (src[a] == dst[a]) continue;
    enters_v |= dst[a] == kPart;
    is_mask &= dst[a] == kPart;
  }
  return !enters_v || is_mask;
}

PathCost RebindPricer::price(const Targets& src, const Targets& dst) const {
  const int num_axes = problem_.num_axes();
  const AxisOf axis_of(dst, num_axes);
  std::int64_t held = 1, parts = 1, holders = 1;
  bool is_own = true, is_mask = true;
  for (int a = 0; a < num_axes; ++a) {
    const int k = problem_.sizes[a];
    const Target s = src[a], t = dst[a];
    is_mask &= s == t || t == kPart;
    if (t >= 0) held *= k;
    if (s == kPart && t != kPart) parts *= k;
    if ((s == kPart && t != kPart) || (s >= 0 && axis_of[s] < 0)) {
      holders *= k;
    } else if (s >= 0 && axis_of[s] != a) {
      is_own = false;
    }
  }
  if (is_mask) return {};
  const Ticks shard = Ticks{problem_.num_bytes} * parts * (problem_.num_ranks / held);
  PortTicks ports(problem_);
  for (int level = 0; level < problem_.num_levels(); ++level) {
    const std::int64_t lacks = missing(level, src, dst, axis_of);
    const std::int64_t at_home = lacks ? problem_.num_ranks / lacks : 0;
    ports.add(shard * problem_.blocks[level] * (problem_.num_ranks - at_home));
  }
  const std::int64_t rounds = ports.moves() ? holders - (is_own ? 1 : 0) : 0;
  return {ports.step(rounds), rounds, 0};
}

std::int64_t RebindPricer::missing(int level, const Targets& src, const Targets& dst,
                                   const AxisOf& axis_of_dst, std::uint32_t ignored) const {
  std::int64_t missing = 1;
  for (int a = 0; a < problem_.num_axes(); ++a) {
    const Target s = src[a];
    if (!is_outer(a, level) || (ignored >> a & 1) || s == kReplica || s == dst[a]) continue;
    const int owner = axis_of_dst[s];
    missing *= owner >= 0 && is_outer(owner, level) ? 0 : problem_.sizes[a];
  }
  return missing;
}

}  // namespace rvdcomm
