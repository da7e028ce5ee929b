#include "bind.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "The native core of rvdcomm; _C.pyi says what is in it.";
  rvdcomm::bind_checksum(m);
  rvdcomm::bind_copy(m);
  rvdcomm::bind_signal(m);
  rvdcomm::bind_search(m);
  rvdcomm::bind_stage(m);
}
