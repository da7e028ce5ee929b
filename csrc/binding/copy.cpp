#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.h"
#include "copy.h"
#include "rvdcomm/copy_program.h"

namespace py = pybind11;

namespace rvdcomm {
namespace {

using PySide = std::tuple<int32_t, std::string, int64_t, std::vector<int64_t>>;
using PyOp = std::tuple<std::vector<int64_t>, PySide, std::vector<PySide>>;

#if defined(RVDCOMM_HAS_CUDA)
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

DimsSide side_from_py(const PySide& side) {
  const auto& [buffer, dtype, offset, strides] = side;
  return {buffer, dtype_from_name(dtype), offset, strides};
}

std::unique_ptr<Engines> make(const std::vector<PyOp>& py_ops, bool wide,
                              const std::vector<int32_t>& read_soon) {
  std::vector<CopyOp> ops;
  for (const auto& [shape, dst, srcs] : py_ops) {
    std::vector<DimsSide> sides;
    for (const PySide& src : srcs) sides.push_back(side_from_py(src));
    append_ops(ops, shape, side_from_py(dst), std::move(sides));
  }
  for (CopyOp& op : ops) {
    op.read_soon = std::find(read_soon.begin(), read_soon.end(), op.dst.buffer) != read_soon.end();
  }
  return std::make_unique<Engines>(CopyProgram(std::move(ops), wide));
}

/// The addresses of a program's buffers. Up to kFew addresses need no allocation.
class Addresses {
 public:
  Addresses(const CopyProgram& program, const py::sequence& addresses) {
    const size_t count = addresses.size(), wanted = static_cast<size_t>(program.num_buffers());
    if (count < wanted) {
      throw std::invalid_argument("the program uses buffers 0 to " + std::to_string(wanted - 1) +
                                  ", but " + std::to_string(count) + " addresses were given.");
    }
    if (count > kFew) many_.resize(count);
    void** to = count > kFew ? many_.data() : few_;
    for (size_t i = 0; i < count; ++i) {
      to[i] = reinterpret_cast<void*>(addresses[i].cast<uintptr_t>());
    }
  }

  void* const* data() const { return many_.empty() ? few_ : many_.data(); }

 private:
  static constexpr size_t kFew = 32;
  void* few_[kFew] = {};
  std::vector<void*> many_;
};

void run(const Engines& engines, const py::sequence& addresses, int num_threads) {
  if (num_threads < 1) {
    throw std::invalid_argument("num_threads is " + std::to_string(num_threads) +
                                "; give 1 or more.");
  }
  const Addresses buffers(engines.cpu, addresses);
  py::gil_scoped_release released;
  engines.cpu.run(buffers.data(), num_threads);
}

void run_cuda(Engines& engines, const py::sequence& addresses, intptr_t stream) {
#if defined(RVDCOMM_HAS_CUDA)
  const Addresses buffers(engines.cpu, addresses);
  py::gil_scoped_release released;
  std::call_once(engines.once,
                 [&] { engines.cuda = std::make_unique<CudaCopyProgram>(engines.cpu); });
  engines.cuda->run(buffers.data(), reinterpret_cast<void*>(stream));
#else
  (void)engines, (void)addresses, (void)stream;
  throw std::runtime_error(
      "rvdcomm._C was built without CUDA; build it where nvcc is found, with RVDCOMM_CUDA=1.");
#endif
}

}  // namespace

void bind_copy(py::module_& m) {
  m.attr("has_cuda") = kHasCuda;
  py::class_<Engines>(m, "CopyProgram")
      .def(py::init(&make), py::arg("ops"), py::arg("wide") = false,
           py::arg("read_soon") = std::vector<int32_t>())
      .def("run", &run, py::arg("addresses"), py::arg("num_threads") = 1)
      .def("run_cuda", &run_cuda, py::arg("addresses"), py::arg("stream"))
      .def_property_readonly("num_buffers", [](const Engines& e) { return e.cpu.num_buffers(); })
      .def_property_readonly("num_bytes", [](const Engines& e) { return e.cpu.num_bytes(); });
}

}  // namespace rvdcomm
