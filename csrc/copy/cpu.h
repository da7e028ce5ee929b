// The CPU engine: runs the ops of a program as moves and sums, divided among threads.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "move.h"
#include "sum.h"

namespace rvdcomm {

/// A move or a sum, and the dim along which it is divided among threads.
struct CpuStep {
  std::variant<Move, Sum> work;
  int64_t num_bytes;
  /// Bytes of all earlier steps of the phase.
  int64_t first_byte;
  /// The dim that is divided. For a move, num_dims means the bytes of a run.
  int split_dim;
  int64_t split_size;
};

/// Steps that are independent of each other. Threads may run them and parts of them in any order.
struct Phase {
  std::vector<CpuStep> steps;
  int64_t num_bytes;
};

struct CpuProgram {
  std::vector<Phase> phases;
};

CpuProgram cpu_program(const std::vector<PlanOp>& ops, bool wide);

/// @pre as CopyProgram::run
void run_cpu(const CpuProgram& program, void* const* buffers, int num_threads);

}  // namespace rvdcomm
