#include "cpu.h"

#include <algorithm>

#include "threads.h"

namespace rvdcomm {
namespace {

// A thread takes tens of microseconds to wake, which is longer than to copy fewer bytes than this.
constexpr int64_t kMinBytesPerThread = 256 << 10;
// A dim with at least this many steps can be divided evenly enough among threads. Then no inner dim
// is tried, because dividing an inner dim makes runs shorter.
constexpr int64_t kManySteps = 64;
// Runs are cut at multiples of this many bytes from their start. If a run starts at a cache line,
// no two threads write the same line.
constexpr int64_t kRunGrain = 4096;

void choose_split(CpuStep& step, const int64_t* shape, int num_dims, int64_t run_bytes) {
  step.split_dim = 0;
  step.split_size = shape[0];
  for (int d = 1; d < num_dims && step.split_size < kManySteps; ++d) {
    if (shape[d] > step.split_size) {
      step.split_dim = d;
      step.split_size = shape[d];
    }
  }
  if (step.split_size < kManySteps && run_bytes / kRunGrain > step.split_size) {
    step.split_dim = num_dims;
    step.split_size = run_bytes;
  }
}

CpuStep step_from_op(const PlanOp& op, bool wide) {
  const int64_t num_bytes = op.num_elements() * item_bytes(op.dst.dtype);
  if (op.is_move()) {
    CpuStep step{move_from_op(op), num_bytes, 0, 0, 0};
    const Move& move = std::get<Move>(step.work);
    choose_split(step, move.shape, move.num_dims, move.run_bytes);
    return step;
  }
  CpuStep step{sum_from_op(op, wide), num_bytes, 0, 0, 0};
  const Sum& sum = std::get<Sum>(step.work);
  choose_split(step, sum.shape, sum.num_dims, 0);
  return step;
}

/// The index in a step's split dim at which to cut it, so that about `byte` bytes are before the
/// cut.
/// @post ascending in byte; 0 at 0 and split_size at num_bytes
int64_t cut_from_byte(const CpuStep& step, int64_t byte) {
  if (byte <= 0) return 0;
  if (byte >= step.num_bytes) return step.split_size;
  const double share = static_cast<double>(byte) / static_cast<double>(step.num_bytes);
  const auto cut = static_cast<int64_t>(share * static_cast<double>(step.split_size));
  const Move* move = std::get_if<Move>(&step.work);
  return move != nullptr && step.split_dim == move->num_dims ? cut / kRunGrain * kRunGrain : cut;
}

/// Run [begin, end) of a step's split dim.
void run_part(const CpuStep& step, int64_t begin, int64_t end, void* const* buffers) {
  if (begin >= end) return;
  if (const Sum* sum = std::get_if<Sum>(&step.work)) {
    int64_t first[kMaxDims + 2] = {}, last[kMaxDims + 2];
    std::copy(sum->shape, sum->shape + sum->num_dims, last);
    first[step.split_dim] = begin;
    last[step.split_dim] = end;
    run_sum(*sum, first, last, buffers);
    return;
  }
  const Move& move = std::get<Move>(step.work);
  char* dst = static_cast<char*>(buffers[move.dst_buffer]) + move.dst_offset;
  const char* src = static_cast<const char*>(buffers[move.src_buffer]) + move.src_offset;
  if (end - begin == step.split_size) return run_move(move, dst, src);
  Move part = move;
  if (step.split_dim == move.num_dims) {
    part.run_bytes = end - begin;
    part.stream = nullptr;
    run_move(part, dst + begin, src + begin);
  } else {
    part.shape[step.split_dim] = end - begin;
    run_move(part, dst + begin * move.dst_stride[step.split_dim],
             src + begin * move.src_stride[step.split_dim]);
  }
}

/// The arguments of run_share, equal for all threads of a phase.
struct Shares {
  const Phase& phase;
  void* const* buffers;
  int num_threads;
};

/// Run share i of a phase. All shares have about the same number of bytes.
void run_share(const void* context, int i) {
  const Shares& shares = *static_cast<const Shares*>(context);
  const Phase& phase = shares.phase;
  const auto byte_at = [&](int k) {
    return k == shares.num_threads ? phase.num_bytes : phase.num_bytes / shares.num_threads * k;
  };
  const int64_t begin = byte_at(i), end = byte_at(i + 1);
  for (const CpuStep& step : phase.steps) {
    if (step.first_byte >= end || step.first_byte + step.num_bytes <= begin) continue;
    run_part(step, cut_from_byte(step, begin - step.first_byte),
             cut_from_byte(step, end - step.first_byte), shares.buffers);
  }
}

}  // namespace

CpuProgram cpu_program(const std::vector<PlanOp>& ops, bool wide) {
  CpuProgram program;
  OpIndex in_phase;
  for (const PlanOp& op : ops) {
    if (program.phases.empty() || !in_phase.all_independent_of(op)) {
      program.phases.push_back({{}, 0});
      in_phase = {};
    }
    in_phase.add(op);
    Phase& phase = program.phases.back();
    CpuStep step = step_from_op(op, wide);
    step.first_byte = phase.num_bytes;
    phase.num_bytes += step.num_bytes;
    phase.steps.push_back(std::move(step));
  }
  return program;
}

void run_cpu(const CpuProgram& program, void* const* buffers, int num_threads) {
  for (const Phase& phase : program.phases) {
    const int64_t most = std::max<int64_t>(phase.num_bytes / kMinBytesPerThread, 1);
    const int threads = static_cast<int>(std::min<int64_t>(num_threads, most));
    if (threads > 1) {
      const Shares shares{phase, buffers, threads};
      parallel_for(threads, run_share, &shares);
    } else {
      for (const CpuStep& step : phase.steps) run_part(step, 0, step.split_size, buffers);
    }
  }
}

}  // namespace rvdcomm
