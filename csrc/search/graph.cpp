#include "graph.h"

#include <algorithm>

namespace rvdcomm {
namespace {

bool has(std::uint32_t axes, int axis) { return axes >> axis & 1; }

template <typename Function>
void for_axes(std::uint32_t axes, const Function& function) {
  for (; axes; axes &= axes - 1) function(__builtin_ctz(axes));
}

class ThoroughGraph final : public Graph {
 public:
  ThoroughGraph(const RebindProblem& problem, const RebindPricer& pricer)
      : Graph(problem, pricer) {}

  bool is_goal(const Targets& state) const override { return state == problem_.dst; }

  PathCost bound(const Targets& state) const override { return {bound_.least_of_any(state), 0, 0}; }

  void append_successors(const Targets& state, const Units& units,
                         std::vector<Targets>* out) const override {
    const int num_axes = problem_.num_axes();
    const std::uint32_t everyone = bit(num_axes) - 1;
    std::uint32_t digits = 0;
    for (int a = 0; a < num_axes; ++a) digits |= state[a] >= 0 ? bit(a) : 0;
    for_subsets(units, everyone, [&](std::uint32_t axes) {
      Targets to_goal = state, to_replicas = state, to_scratch = state;
      for_axes(axes, [&](int a) {
        to_goal[a] = problem_.dst[a];
        to_replicas[a] = kReplica;
        to_scratch[a] = problem_.scratch(a);
      });
      Targets displacing = to_goal;
      if (displace(state, axes, everyone, &displacing) == 0) append(state, displacing, out);
      append(state, to_goal, out);
      if ((axes & ~digits) == 0) append(state, to_replicas, out);
      if ((axes & digits) == 0) append(state, to_scratch, out);
    });
    Targets masked_last = problem_.dst;
    for (int a = 0; a < num_axes; ++a) {
      if (problem_.dst[a] == kPart && state[a] != kPart) masked_last[a] = kReplica;
    }
    append(state, masked_last, out);
    append(state, problem_.dst, out);
    for (std::uint32_t unit : units) {
      const int axis = __builtin_ctz(unit);
      for (int digit = 0; digit < problem_.num_digits(); ++digit) {
        const Target target = static_cast<Target>(digit);
        if (size(target) != problem_.sizes[axis]) continue;
        Targets successor = state;
        successor[axis] = target;
        append(state, successor, out);
      }
    }
  }

 private:
  void append(const Targets& state, const Targets& successor, std::vector<Targets>* out) const {
    if (successor != state && pricer_.is_injective(successor) &&
        pricer_.is_priced(state, successor)) {
      out->push_back(successor);
    }
  }
};

class LeanGraph final : public Graph {
 public:
  LeanGraph(const RebindProblem& problem, const RebindPricer& pricer) : Graph(problem, pricer) {
    for (int a = 0; a < problem.num_axes(); ++a) {
      if (problem.dst[a] == kPart && problem.src[a] != kPart) masked_ |= bit(a);
    }
  }

  bool is_goal(const Targets& state) const override {
    for (int a = 0; a < problem_.num_axes(); ++a) {
      if (!has(masked_, a) && state[a] != problem_.dst[a]) return false;
    }
    return true;
  }

  PathCost bound(const Targets& state) const override {
    return bound_.least_of_kept(state, masked_);
  }

  void append_successors(const Targets& state, const Units& units,
                         std::vector<Targets>* out) const override {
    std::uint32_t away = 0, digits = 0, unmasked = 0, to_replicas = 0;
    for (int a = 0; a < problem_.num_axes(); ++a) {
      if (state[a] != problem_.dst[a]) away |= bit(a);
      if (state[a] >= 0) digits |= bit(a);
      if (state[a] != kPart) unmasked |= bit(a);
      if (problem_.dst[a] == kReplica) to_replicas |= bit(a);
    }
    for_subsets(units, away & ~masked_, [&](std::uint32_t axes) {
      Targets successor = state;
      for_axes(axes, [&](int a) { successor[a] = problem_.dst[a]; });
      for_axes(displace(state, axes, masked_, &successor),
               [&](int a) { successor[a] = problem_.scratch(a); });
      append(successor, out);
    });
    for_subsets(units, away & digits & ~masked_, [&](std::uint32_t axes) {
      // If all goals are R, the rule above gives the same state.
      if ((axes & ~to_replicas) == 0) return;
      Targets successor = state;
      for_axes(axes, [&](int a) { successor[a] = kReplica; });
      append(successor, out);
    });
    for_subsets(units, ~digits & ~masked_, [&](std::uint32_t axes) {
      Targets successor = state;
      for_axes(axes, [&](int a) { successor[a] = problem_.scratch(a); });
      append(successor, out);
    });
    for_subsets(units, unmasked & masked_, [&](std::uint32_t axes) {
      Targets successor = state;
      for_axes(axes, [&](int a) { successor[a] = kPart; });
      out->push_back(successor);
    });
  }

 private:
  /// Append the state after free slices: R axes take their goal's digit if no axis is bound to it.
  void append(Targets successor, std::vector<Targets>* out) const {
    const AxisOf bound(successor, problem_.num_axes());
    for (int a = 0; a < problem_.num_axes(); ++a) {
      const Target t = problem_.dst[a];
      if (successor[a] == kReplica && t >= 0 && bound[t] < 0) successor[a] = t;
    }
    if (pricer_.is_injective(successor)) out->push_back(successor);
  }

  std::uint32_t masked_ = 0;
};

}  // namespace

std::uint32_t Graph::displace(const Targets& state, std::uint32_t moved, std::uint32_t holders,
                              Targets* successor) const {
  std::uint64_t wanted = 0;
  for_axes(moved, [&](int a) {
    if ((*successor)[a] >= 0) wanted |= std::uint64_t{1} << (*successor)[a];
  });
  const auto is_wanted = [wanted](Target t) { return t >= 0 && (wanted >> t & 1); };
  std::uint32_t homeless = 0, taken = 0;
  for_axes(holders & ~moved, [&](int a) {
    if (!is_wanted(state[a])) return;
    homeless |= bit(a);
    for (int b = 0; b < problem_.num_axes(); ++b) {
      const bool is_left = has(moved & ~taken, b) && state[b] >= 0 && !is_wanted(state[b]);
      if (!is_left || size(state[b]) != problem_.sizes[a]) continue;
      (*successor)[a] = state[b];
      taken |= bit(b);
      homeless &= ~bit(a);
      break;
    }
  });
  return homeless;
}

std::unique_ptr<Graph> make_graph(const RebindProblem& problem, const RebindPricer& pricer) {
  if (problem.is_thorough) return std::make_unique<ThoroughGraph>(problem, pricer);
  return std::make_unique<LeanGraph>(problem, pricer);
}

}  // namespace rvdcomm
