// The CPU engine: a program's ops as moves and sums, shared out over threads.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "move.h"
#include "sum.h"

namespace rvdcomm {

/// A move or a sum, and the dim along which threads share it.
struct CpuStep {
  std::variant<Move, Sum> work;
  int64_t num_bytes;
  /// Bytes of all steps before it in its phase.
  int64_t first_byte;
  /// Dim num_dims of a move is its run.
  int split_dim;
  int64_t split_size;
};

/// Steps that are independent of each other: threads may run them, and parts of them, in any order.
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
