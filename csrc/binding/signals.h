// Signals as Python holds them; stages keep them alive.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "rvdcomm/signal.h"

namespace rvdcomm {

/// Signals that keep their headers' memory alive: whatever Python drops, no word is unmapped here.
class BoundSignals {
 public:
  BoundSignals(int self, const std::vector<pybind11::buffer>& headers, std::vector<int> lifelines);

 private:
  const std::vector<pybind11::buffer_info> memory_;

 public:
  Signals signals;
};

/// For long waits: lets Python's signal handlers (Ctrl-C) run, and throws what they raise.
/// @pre the GIL is not held
void raise_python_signals();

}  // namespace rvdcomm
