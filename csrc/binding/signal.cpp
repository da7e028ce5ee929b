#include "rvdcomm/signal.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"
#include "signals.h"

namespace py = pybind11;

namespace rvdcomm {
namespace {

SignalHeader* header_in(const py::buffer_info& memory) {
  const auto address = reinterpret_cast<uintptr_t>(memory.ptr);
  const py::ssize_t num_bytes = memory.size * memory.itemsize;
  if (num_bytes < static_cast<py::ssize_t>(sizeof(SignalHeader)) ||
      address % alignof(SignalHeader) != 0) {
    throw py::value_error("a header needs " + std::to_string(sizeof(SignalHeader)) +
                          " bytes at a multiple of " + std::to_string(alignof(SignalHeader)) +
                          "; this memory has " + std::to_string(num_bytes) + " at " +
                          std::to_string(address) + ".");
  }
  return static_cast<SignalHeader*>(memory.ptr);
}

std::vector<py::buffer_info> request_all(const std::vector<py::buffer>& buffers) {
  std::vector<py::buffer_info> memory;
  for (const py::buffer& buffer : buffers) memory.push_back(buffer.request(/*writable=*/true));
  return memory;
}

std::vector<SignalHeader*> headers_in(const std::vector<py::buffer_info>& memory) {
  std::vector<SignalHeader*> headers;
  for (const py::buffer_info& each : memory) headers.push_back(header_in(each));
  return headers;
}

void begin(BoundSignals& bound, uint64_t identity, uint64_t location, double timeout_secs) {
  const py::gil_scoped_release release;
  bound.signals.begin(identity, location, timeout_secs, raise_python_signals);
}

uint64_t location(BoundSignals& bound, int peer, double timeout_secs) {
  const py::gil_scoped_release release;
  return bound.signals.location(peer, timeout_secs, raise_python_signals);
}

void wait(BoundSignals& bound, int peer, uint32_t num_events, double timeout_secs) {
  const py::gil_scoped_release release;
  bound.signals.wait(peer, num_events, timeout_secs, raise_python_signals);
}

// --- PeerError ----------------------------------------------------------------------------------

const char* kind_of(Fault fault) {
  switch (fault) {
    case Fault::kDead: return "dead";
    case Fault::kTimeout: return "timeout";
    case Fault::kElsewhere: return "elsewhere";
    default: return "failed";
  }
}

Fault fault_of(const std::string& kind) {
  for (const Fault fault : {Fault::kDead, Fault::kTimeout, Fault::kFailed, Fault::kElsewhere}) {
    if (kind == kind_of(fault)) return fault;
  }
  throw py::value_error("a rank is 'dead', 'timeout', 'failed' or 'elsewhere', not '" + kind +
                        "'.");
}

/// Never freed: `translate` may run while the interpreter exits. Modules are never freed either.
PyObject* peer_error_class = nullptr;

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const PeerError& error) {
    const py::object made = py::handle(peer_error_class)(error.what());
    made.attr("kind") = kind_of(error.fault);
    made.attr("rank") = error.rank;
    PyErr_SetObject(peer_error_class, made.ptr());
  }
}

}  // namespace

BoundSignals::BoundSignals(int self, const std::vector<py::buffer>& headers,
                           std::vector<int> lifelines)
    : memory_(request_all(headers)), signals(self, headers_in(memory_), std::move(lifelines)) {}

void raise_python_signals() {
  const py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void bind_signal(py::module_& m) {
  peer_error_class = PyErr_NewException("rvdcomm._C.PeerError", PyExc_RuntimeError, nullptr);
  m.attr("PeerError") = py::reinterpret_borrow<py::object>(peer_error_class);
  py::register_local_exception_translator(&translate);

  m.attr("HEADER_BYTES") = sizeof(SignalHeader);
  m.def(
      "format_header",
      [](const py::buffer& memory) { Signals::format(header_in(memory.request(true))); },
      py::arg("memory"));
  py::class_<BoundSignals, std::shared_ptr<BoundSignals>>(m, "Signals")
      .def(py::init<int, const std::vector<py::buffer>&, std::vector<int>>(), py::arg("index"),
           py::arg("headers"), py::arg("lifelines"))
      .def("advance", [](BoundSignals& bound) { bound.signals.advance(); })
      .def("count", [](const BoundSignals& bound) { return bound.signals.count(); })
      .def("begin", &begin, py::arg("identity"), py::arg("location"), py::arg("timeout_secs"))
      .def("location", &location, py::arg("peer"), py::arg("timeout_secs"))
      .def(
          "end",
          [](BoundSignals& bound, const std::vector<uint32_t>& num_events) {
            bound.signals.end(num_events);
          },
          py::arg("num_events"))
      .def("wait", &wait, py::arg("peer"), py::arg("num_events"), py::arg("timeout_secs"))
      .def("fail", [](BoundSignals& bound) { bound.signals.fail(); })
      .def("check", [](BoundSignals& bound) { bound.signals.check(); })
      .def(
          "blame",
          [](BoundSignals& bound, const std::string& kind, int peer) {
            bound.signals.blame(fault_of(kind), peer);
          },
          py::arg("kind"), py::arg("peer"))
      .def("close", [](BoundSignals& bound) { bound.signals.close(); });
}

}  // namespace rvdcomm
