#include "rvdcomm/stage.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.h"
#include "copy.h"
#include "signals.h"

namespace py = pybind11;

namespace rvdcomm {
namespace {

void* address_of(uintptr_t number) { return reinterpret_cast<void*>(number); }

/// A stage that holds a reference to the signals to which it is bound.
class BoundStage {
 public:
  BoundStage(const std::vector<Engines*>& programs,
             const std::vector<std::tuple<int32_t, int32_t, uint32_t>>& actions, int num_shards)
      : stage_(copied(programs), converted(actions), num_shards) {}

  void bind(const std::vector<uintptr_t>& memory, std::shared_ptr<BoundSignals> signals,
            double timeout_secs) {
    std::vector<void*> buffers;
    for (const uintptr_t number : memory) buffers.push_back(address_of(number));
    signals_ = std::move(signals);
    stage_.bind(std::move(buffers), signals_ ? &signals_->signals : nullptr, timeout_secs);
  }

  void run(const py::tuple& shards, int num_threads) {
    set_shards(shards);
    const py::gil_scoped_release release;
    stage_.run(num_threads, raise_python_signals);
  }

  /// Run the stage as one whole call of the domain.
  void call(const py::tuple& shards, int num_threads, uint64_t identity,
            const std::vector<uint32_t>& num_events) {
    set_shards(shards);
    const py::gil_scoped_release release;
    stage_.call(num_threads, identity, num_events, raise_python_signals);
  }

 private:
  void set_shards(const py::tuple& shards) {
    if (shards.size() != static_cast<size_t>(stage_.num_shards())) {
      throw std::invalid_argument("a stage of " + std::to_string(stage_.num_shards()) +
                                  " shards was given " + std::to_string(shards.size()) + ".");
    }
    for (int i = 0; i < stage_.num_shards(); ++i) {
      stage_.set_shard(i, PyLong_AsVoidPtr(PyTuple_GET_ITEM(shards.ptr(), i)));
    }
    if (PyErr_Occurred()) throw py::error_already_set();
  }

  static std::vector<CopyProgram> copied(const std::vector<Engines*>& programs) {
    std::vector<CopyProgram> out;
    for (const Engines* engines : programs) out.push_back(engines->cpu);
    return out;
  }

  static std::vector<Action> converted(
      const std::vector<std::tuple<int32_t, int32_t, uint32_t>>& actions) {
    std::vector<Action> out;
    for (const auto& [kind, index, count] : actions) {
      out.push_back({static_cast<Action::Kind>(kind), index, count});
    }
    return out;
  }

  Stage stage_;
  std::shared_ptr<BoundSignals> signals_;
};

}  // namespace

void bind_stage(py::module_& m) {
  py::class_<BoundStage>(m, "Stage")
      .def(py::init<const std::vector<Engines*>&,
                    const std::vector<std::tuple<int32_t, int32_t, uint32_t>>&, int>(),
           py::arg("programs"), py::arg("actions"), py::arg("num_shards"))
      .def("bind", &BoundStage::bind, py::arg("memory"), py::arg("signals").none(true),
           py::arg("timeout_secs"))
      .def("run", &BoundStage::run, py::arg("shards"), py::arg("num_threads"))
      .def("call", &BoundStage::call, py::arg("shards"), py::arg("num_threads"),
           py::arg("identity"), py::arg("num_events"));
}

}  // namespace rvdcomm
