#include "rvdcomm/search.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <queue>
#include <unordered_map>
#include <utility>

#include "graph.h"
#include "pricer.h"

namespace rvdcomm {
namespace {

struct TargetsHash {
  std::size_t operator()(const Targets& state) const {
    std::uint64_t halves[2];
    static_assert(sizeof(halves) == sizeof(Targets));
    std::memcpy(halves, state.data(), sizeof(halves));
    const std::uint64_t mixed =
        (halves[0] ^ (halves[1] * 0x9E3779B97F4A7C15u)) * 0xBF58476D1CE4E5B9u;
    return static_cast<std::size_t>(mixed ^ (mixed >> 32));
  }
};

struct Node {
  Targets state;
  PathCost key;
  std::size_t parent;
};

/// An entry of the heap: `full` is a lower bound on paths through the node. The entry is out of
/// date if `key` is no longer the key of the node.
struct Entry {
  PathCost full;
  std::int64_t order;
  PathCost key;
  std::size_t node;
};

/// Cheapest first, then deepest, then oldest.
struct IsLater {
  bool operator()(const Entry& a, const Entry& b) const {
    if (!(a.full == b.full)) return b.full < a.full;
    if (a.key.steps != b.key.steps) return a.key.steps < b.key.steps;
    return a.order > b.order;
  }
};

PathCost sum(const PathCost& a, const PathCost& b) {
  return {a.ticks + b.ticks, a.rounds + b.rounds, a.steps + b.steps};
}

/// The cost of a path.
PathCost key_of(const RebindPricer& pricer, const std::vector<Targets>& states) {
  PathCost key;
  for (std::size_t i = 1; i < states.size(); ++i) {
    key = sum(key, pricer.price(states[i - 1], states[i]));
    ++key.steps;
  }
  return key;
}

/// States of the cheapest path found from problem.start to a goal; empty if none is below `known`.
std::vector<Targets> found(const RebindProblem& problem, const RebindPricer& pricer,
                           const Graph& graph, const Units& units, std::optional<PathCost> known,
                           std::int64_t max_successors) {
  constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  std::vector<Node> nodes{{problem.start, PathCost{}, kNone}};
  std::unordered_map<Targets, std::size_t, TargetsHash> index{{problem.start, 0}};
  std::priority_queue<Entry, std::vector<Entry>, IsLater> heap;
  heap.push({graph.bound(problem.start), 0, PathCost{}, 0});
  std::vector<Targets> successors;
  std::size_t goal = graph.is_goal(problem.start) ? 0 : kNone;
  std::int64_t num_successors = 0, order = 0;
  while (!heap.empty() && num_successors <= max_successors) {
    const Entry entry = heap.top();
    heap.pop();
    // A copy, because `nodes` may be reallocated below.
    const Node node = nodes[entry.node];
    if (!(entry.key == node.key)) continue;
    if (graph.is_goal(node.state)) break;
    successors.clear();
    graph.append_successors(node.state, units, &successors);
    num_successors += static_cast<std::int64_t>(successors.size());
    for (const Targets& successor : successors) {
      PathCost key = sum(node.key, pricer.price(node.state, successor));
      ++key.steps;
      const auto seen = index.find(successor);
      if (seen != index.end() && !(key < nodes[seen->second].key)) {
        Node& same = nodes[seen->second];
        if (key == same.key && node.state < nodes[same.parent].state) same.parent = entry.node;
        continue;
      }
      const bool is_goal = graph.is_goal(successor);
      PathCost full = sum(key, graph.bound(successor));
      full.steps += is_goal ? 0 : 1;
      if (known && !(full < *known)) continue;
      std::size_t place = nodes.size();
      if (seen != index.end()) {
        place = seen->second;
        nodes[place] = {successor, key, entry.node};
      } else {
        nodes.push_back({successor, key, entry.node});
        index.emplace(successor, place);
      }
      if (is_goal) {
        goal = place;
        known = key;
      }
      heap.push({full, ++order, key, place});
    }
  }
  std::vector<Targets> states;
  for (std::size_t i = goal; i != kNone; i = nodes[i].parent) states.push_back(nodes[i].state);
  std::reverse(states.begin(), states.end());
  return states;
}

/// Join two steps where one step costs no more: a slice and the step after it, for example.
void join_steps(const RebindPricer& pricer, std::vector<Targets>* states) {
  std::size_t i = 1;
  while (i + 1 < states->size()) {
    const Targets &before = (*states)[i - 1], &state = (*states)[i], &after = (*states)[i + 1];
    if (pricer.is_priced(before, after)) {
      const PathCost apart = sum(pricer.price(before, state), pricer.price(state, after));
      if (!(apart < pricer.price(before, after))) {
        states->erase(states->begin() + static_cast<std::ptrdiff_t>(i));
        i = std::max<std::size_t>(i - 1, 1);
        continue;
      }
    }
    ++i;
  }
}

/// Move one axis of a step before or after the other axes, where that is cheaper.
void split_steps(const RebindProblem& problem, const RebindPricer& pricer,
                 std::vector<Targets>* states) {
  const auto is_step = [&pricer](const Targets& src, const Targets& dst) {
    return pricer.is_injective(dst) && pricer.is_priced(src, dst);
  };
  std::size_t i = 0;
  while (i + 1 < states->size()) {
    const Targets before = (*states)[i], after = (*states)[i + 1];
    PathCost cheapest = pricer.price(before, after);
    std::optional<Targets> best;
    for (int a = 0; a < problem.num_axes(); ++a) {
      if (before[a] == after[a]) continue;
      Targets first = before, last = after;
      first[a] = after[a];
      last[a] = before[a];
      for (const Targets& middle : {first, last}) {
        if (!is_step(before, middle) || !is_step(middle, after)) continue;
        const PathCost total = sum(pricer.price(before, middle), pricer.price(middle, after));
        if (!(total < cheapest)) continue;
        cheapest = total;
        best = middle;
      }
    }
    if (best) {
      states->insert(states->begin() + static_cast<std::ptrdiff_t>(i) + 1, *best);
    } else {
      ++i;
    }
  }
}

}  // namespace

RebindPath cheapest_rebinds(const RebindProblem& problem) {
  const RebindPricer pricer(problem);
  const std::unique_ptr<Graph> graph = make_graph(problem, pricer);
  std::vector<Targets> states;
  std::optional<PathCost> known;
  if (!problem.coarse_units.empty()) {
    states =
        found(problem, pricer, *graph, problem.coarse_units, known, problem.max_coarse_successors);
    split_steps(problem, pricer, &states);
    known = key_of(pricer, states);
  }
  if (!problem.units.empty()) {
    std::vector<Targets> better =
        found(problem, pricer, *graph, problem.units, known, problem.max_successors);
    if (!better.empty()) states = std::move(better);
  }
  states.insert(states.begin(), problem.src);
  states.push_back(problem.dst);
  states.erase(std::unique(states.begin(), states.end()), states.end());
  join_steps(pricer, &states);
  split_steps(problem, pricer, &states);
  return {key_of(pricer, states).ticks, std::move(states)};
}

}  // namespace rvdcomm
