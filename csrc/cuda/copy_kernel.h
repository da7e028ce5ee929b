// Launches the copy kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "rvdcomm/grid_plan.h"

namespace rvdcomm {

inline constexpr int kInlineOps = 16;
inline constexpr int kInlineSides = 64;

/// The arguments of a kernel, passed by value. A batch of few ops has its ops and sides inline.
struct KernelArguments {
  char* buffers[kMaxBuffers];
  GridOp inline_ops[kInlineOps];
  GridSide inline_sides[kInlineSides];
  /// Tables in device memory; null if ops and sides are inline.
  const GridOp* ops;
  const GridSide* sides;
  int32_t num_ops;
};

/// Queue one batch on the stream, without synchronizing.
cudaError_t launch_copy(const KernelArguments& arguments, int64_t num_tiles, bool has_sums,
                        cudaStream_t stream);

}  // namespace rvdcomm
