#include "rvdcomm/search.h"

#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "bind.h"

namespace rvdcomm {
namespace {

namespace py = pybind11;

Targets targets_from(const std::vector<int>& values) {
  if (values.size() > kMaxAxes) throw py::value_error("too many axes for the native search");
  Targets targets;
  targets.fill(kReplica);
  for (std::size_t a = 0; a < values.size(); ++a) targets[a] = static_cast<Target>(values[a]);
  return targets;
}

Units units_from(const std::vector<std::vector<int>>& axes_of_units) {
  Units units;
  for (const std::vector<int>& axes : axes_of_units) {
    units.push_back(0);
    for (const int axis : axes) units.back() |= std::uint32_t{1} << axis;
  }
  return units;
}

std::vector<Ticks> ticks_from(const py::sequence& values) {
  std::vector<Ticks> ticks;
  for (const py::handle value : values) {
    const py::int_ number = py::reinterpret_borrow<py::int_>(value);
    const auto low = py::cast<std::uint64_t>(number & py::int_(~std::uint64_t{0}));
    ticks.push_back((Ticks{py::cast<std::int64_t>(number >> py::int_(64))} << 64) | low);
  }
  return ticks;
}

py::object int_from(Ticks ticks) {
  const py::int_ high(static_cast<std::int64_t>(ticks >> 64));
  const py::int_ low(static_cast<std::uint64_t>(ticks));
  return (high << py::int_(64)) | low;
}

py::tuple cheapest(const std::vector<int>& src, const std::vector<int>& start,
                   const std::vector<int>& dst, const std::vector<std::vector<int>>& units,
                   const std::vector<std::vector<int>>& coarse_units, bool is_thorough,
                   std::vector<int> sizes, std::vector<int> levels, std::vector<int> digit_sizes,
                   std::vector<std::int64_t> blocks, std::int64_t num_ranks, std::int64_t num_bytes,
                   const py::sequence& ticks_a_unit, const py::sequence& ticks_a_round,
                   std::int64_t max_coarse_successors, std::int64_t max_successors) {
  RebindProblem problem;
  problem.src = targets_from(src);
  problem.start = targets_from(start);
  problem.dst = targets_from(dst);
  problem.is_thorough = is_thorough;
  problem.units = units_from(units);
  problem.coarse_units = units_from(coarse_units);
  problem.sizes = std::move(sizes);
  problem.levels = std::move(levels);
  problem.digit_sizes = std::move(digit_sizes);
  problem.blocks = std::move(blocks);
  problem.num_ranks = num_ranks;
  problem.num_bytes = num_bytes;
  problem.ticks_a_unit = ticks_from(ticks_a_unit);
  problem.ticks_a_round = ticks_from(ticks_a_round);
  problem.max_coarse_successors = max_coarse_successors;
  problem.max_successors = max_successors;
  const RebindPath path = cheapest_rebinds(problem);
  py::list states;
  for (const Targets& state : path.states) {
    py::tuple targets(src.size());
    for (std::size_t a = 0; a < src.size(); ++a) targets[a] = static_cast<int>(state[a]);
    states.append(targets);
  }
  return py::make_tuple(int_from(path.ticks), states);
}

}  // namespace

void bind_search(py::module_& m) {
  m.def("cheapest_rebinds", &cheapest, py::arg("src"), py::arg("start"), py::arg("dst"),
        py::arg("units"), py::arg("coarse_units"), py::arg("is_thorough"), py::arg("sizes"),
        py::arg("levels"), py::arg("digit_sizes"), py::arg("blocks"), py::arg("num_ranks"),
        py::arg("num_bytes"), py::arg("ticks_a_unit"), py::arg("ticks_a_round"),
        py::arg("max_coarse_successors"), py::arg("max_successors"));
}

}  // namespace rvdcomm
