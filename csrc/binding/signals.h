// The C++ object behind Signals of Python. Stages hold references to it.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "rvdcomm/signal.h"

namespace rvdcomm {

/// Signals with the buffers of their headers. The buffers keep the headers mapped while this object
/// exists, even if Python drops all its references to the memory.
class BoundSignals {
 public:
  BoundSignals(int self, const std::vector<pybind11::buffer>& headers, std::vector<int> lifelines);

 private:
  const std::vector<pybind11::buffer_info> memory_;

 public:
  Signals signals;
};

/// Hook for long waits: runs Python's signal handlers (Ctrl-C) and rethrows their exceptions.
/// @pre the GIL is not held
void raise_python_signals();

}  // namespace rvdcomm
