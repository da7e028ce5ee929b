#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

#include "bind.h"
#include "rvdcomm/crc32c.h"

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
}

}  // namespace rvdcomm
