// The search finds known paths, ends at its limit of successors, and computes costs above 64 bits.
#include <algorithm>
#include <initializer_list>

#include "check.h"
#include "rvdcomm/search.h"

using namespace rvdcomm;

namespace {

constexpr Target R = kReplica, V = kPart;

Targets targets(std::initializer_list<Target> values) {
  Targets out;
  out.fill(R);
  std::copy(values.begin(), values.end(), out.begin());
  return out;
}

/// 4 hosts of 4 ranks. Axis 0 numbers the hosts, axis 1 the ranks of a host. There are two digits
/// of size 4.
RebindProblem two_axes(Targets src, Targets dst) {
  RebindProblem problem;
  problem.src = problem.start = src;
  problem.dst = dst;
  problem.is_thorough = true;
  problem.units = {1, 2};
  problem.sizes = {4, 4};
  problem.levels = {1, 0};
  problem.digit_sizes = {4, 4};
  problem.blocks = {1, 4};
  problem.num_ranks = 16;
  problem.num_bytes = 1600;
  problem.ticks_a_unit = {1, 10};
  problem.ticks_a_round = {0, 0};
  problem.max_coarse_successors = problem.max_successors = 1000;
  return problem;
}

void gathers_over_hosts_first() {
  const RebindPath path = cheapest_rebinds(two_axes(targets({0, 1}), targets({R, R})));
  CHECK(path.states.size() == 3);
  CHECK(path.states[1] == targets({R, 1}));
  // Every host receives the 400 bytes of 3 other hosts. Then every rank receives 400 bytes from
  // each of 3 other ranks.
  CHECK(path.ticks == Ticks{256} * (10 * 3 * 400 + 3 * 400));
}

void sums_inside_hosts_first() {
  const RebindPath path = cheapest_rebinds(two_axes(targets({V, V}), targets({0, 1})));
  CHECK(path.states.size() == 3);
  CHECK(path.states[1] == targets({V, 1}));
}

void slices_for_nothing_in_one_step() {
  const RebindPath path = cheapest_rebinds(two_axes(targets({R, R}), targets({0, 1})));
  CHECK(path.ticks == 0);
  CHECK(path.states.size() == 2);
}

void takes_the_best_path_so_far_at_the_limit() {
  RebindProblem problem = two_axes(targets({0, 1}), targets({R, R}));
  const Ticks least = cheapest_rebinds(problem).ticks;
  problem.max_successors = 0;
  const RebindPath path = cheapest_rebinds(problem);
  CHECK(path.ticks >= least);
  CHECK(path.states.front() == problem.src);
  CHECK(path.states.back() == problem.dst);
}

void costs_above_64_bits_are_exact() {
  RebindProblem problem = two_axes(targets({0, 1}), targets({R, R}));
  const Ticks ticks = cheapest_rebinds(problem).ticks;
  for (Ticks& unit : problem.ticks_a_unit) unit <<= 70;
  CHECK(cheapest_rebinds(problem).ticks == ticks << 70);
}

}  // namespace

int main() {
  gathers_over_hosts_first();
  sums_inside_hosts_first();
  slices_for_nothing_in_one_step();
  takes_the_best_path_so_far_at_the_limit();
  costs_above_64_bits_are_exact();
}
