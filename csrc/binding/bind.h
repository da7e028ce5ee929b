// Every other .cpp file of this folder defines one of these functions. module.cpp calls them all.
#pragma once

#include <pybind11/pybind11.h>

namespace rvdcomm {

void bind_checksum(pybind11::module_& m);
void bind_copy(pybind11::module_& m);
void bind_signal(pybind11::module_& m);
void bind_search(pybind11::module_& m);
void bind_stage(pybind11::module_& m);

}  // namespace rvdcomm
