#include "search_pricer.h"

#include <algorithm>

namespace rvdcomm {
namespace {

// Source: ORACLES section 8, general RVD, item 3; see messages_an_element in primitives.py.
std::int64_t messages_an_element(std::int64_t src_r, std::int64_t src_v, std::int64_t dst_r,
                                 std::int64_t dst_v) {
  if (dst_v == 1) return src_v + dst_r - 2;
  return std::max<std::int64_t>({src_v - dst_v, src_v == 1 ? dst_r - src_r : 0, 0});
}

}  // namespace

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

Key RebindPricer::price(const Targets& src, const Targets& dst) const {
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
  Busiest busiest;
  for (int level = 0; level < problem_.num_levels(); ++level) {
    std::int64_t missing = 1;
    for (int a = 0; a < num_axes; ++a) {
      const Target s = src[a];
      if (!is_outer(a, level) || s == kReplica || s == dst[a]) continue;
      const int owner = axis_of[s];
      missing *= owner >= 0 && is_outer(owner, level) ? 0 : problem_.sizes[a];
    }
    const std::int64_t at_home = missing ? problem_.num_ranks / missing : 0;
    add_port(level, shard * problem_.blocks[level] * (problem_.num_ranks - at_home), &busiest);
  }
  if (busiest.farthest < 0) return {};
  const std::int64_t rounds = holders - (is_own ? 1 : 0);
  return {busiest.ticks + rounds * problem_.ticks_a_round[busiest.farthest], rounds, 0};
}

Ticks RebindPricer::bound_ticks(const Targets& src, const Targets& dst) const {
  const int num_axes = problem_.num_axes();
  const AxisOf axis_of(dst, num_axes);
  const std::int64_t square = problem_.num_ranks * problem_.num_ranks;
  Busiest busiest;
  for (int level = 0; level < problem_.num_levels(); ++level) {
    std::int64_t need = 1, groups = 1, missing = 1, src_r = 1, src_v = 1, dst_r = 1, dst_v = 1;
    for (int a = 0; a < num_axes; ++a) {
      if (!is_outer(a, level)) continue;
      const int k = problem_.sizes[a];
      const Target s = src[a], t = dst[a];
      groups *= k;
      (t >= 0 ? need : t == kReplica ? dst_r : dst_v) *= k;
      if (s == kReplica) {
        src_r *= k;
      } else if (s == kPart) {
        src_v *= k;
      } else if (s != t) {
        const int owner = axis_of[s];
        missing *= owner >= 0 && is_outer(owner, level) ? 0 : k;
      }
    }
    const Ticks units =
        src_v > 1 || dst_v > 1
            ? Ticks{square / groups} * messages_an_element(src_r, src_v, dst_r, dst_v)
            : Ticks{square / need - (missing ? square / (need * missing) : 0)};
    add_port(level, problem_.num_bytes * units, &busiest);
  }
  if (busiest.farthest < 0) return 0;
  return busiest.ticks + quickest_round(busiest.farthest);
}

Ticks RebindPricer::quickest_round(int level) const {
  return *std::min_element(problem_.ticks_a_round.begin() + level, problem_.ticks_a_round.end());
}

}  // namespace rvdcomm
