#include "rvdcomm/copy_program.h"

#include <algorithm>
#include <utility>

#include "cpu.h"
#include "rvdcomm/copy_plan.h"

namespace rvdcomm {

CopyProgram::CopyProgram(std::vector<CopyOp> ops, bool wide) : wide_(wide) {
  std::vector<PlanOp> plan;
  for (size_t i = 0; i < ops.size(); ++i) {
    // The caller passes every buffer that an op names, even if the op is empty.
    num_buffers_ = std::max(num_buffers_, ops[i].dst.buffer + 1);
    for (const Side& src : ops[i].srcs) num_buffers_ = std::max(num_buffers_, src.buffer + 1);
    PlanOp op = normalize(ops[i], i);
    if (op.num_elements() == 0) continue;
    num_bytes_ += op.num_elements() * item_bytes(op.dst.dtype);
    plan.push_back(std::move(op));
  }
  plan = join_progressions(std::move(plan));
  cpu_ = std::make_shared<const CpuProgram>(cpu_program(plan, wide));
  plan_ = std::make_shared<const std::vector<PlanOp>>(std::move(plan));
}

void CopyProgram::run(void* const* buffers, int num_threads) const {
  run_cpu(*cpu_, buffers, num_threads);
}

}  // namespace rvdcomm
