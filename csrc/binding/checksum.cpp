#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bind.h"
#include "rvdcomm/crc32c.h"
#include "rvdcomm/digest.h"

namespace py = pybind11;

namespace rvdcomm {

void bind_checksum(py::module_& m) {
  m.def(
      "crc32c",
      [](const py::buffer& data, uint32_t value) {
        const py::buffer_info info = data.request();
        const auto num_bytes = static_cast<size_t>(info.size * info.itemsize);
        const py::gil_scoped_release release;
        return crc32c(value, info.ptr, num_bytes);
      },
      py::arg("data"), py::arg("value") = 0);
  m.def(
      "digest",
      [](uintptr_t address, size_t word_bytes, const std::vector<int64_t>& sizes,
         const std::vector<int64_t>& strides, const std::vector<int64_t>& lo) {
        if (word_bytes != 1 && word_bytes != 2 && word_bytes != 4) {
          throw py::value_error("words have 1, 2 or 4 bytes, not " + std::to_string(word_bytes));
        }
        if (strides.size() != sizes.size() || lo.size() != sizes.size()) {
          throw py::value_error("a box has as many strides and first indices as dims");
        }
        std::vector<DigestDim> dims;
        for (size_t d = 0; d < sizes.size(); ++d) dims.push_back({sizes[d], strides[d], lo[d]});
        const py::gil_scoped_release release;
        return digest(reinterpret_cast<const void*>(address), word_bytes, dims.data(), dims.size());
      },
      py::arg("address"), py::arg("word_bytes"), py::arg("sizes"), py::arg("strides"),
      py::arg("lo"));
}

}  // namespace rvdcomm
