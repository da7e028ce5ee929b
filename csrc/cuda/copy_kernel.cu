// Two kernels: one for batches with sums, and one for all others, which needs fewer registers.
#include "copy_kernel.h"
#include "rvdcomm/grid_tile.h"

namespace rvdcomm {
namespace {

/// The least number of resident blocks per multiprocessor, which limits the registers per thread.
/// Measured on an H200: a move of 1 GiB takes 0.61 ms with 4 blocks and 0.69 ms without a limit. A
/// sum of 4 x 1 GiB of bfloat16 takes 1.76 ms with 3 blocks, and 2.2 ms with 4 or without a limit.
constexpr int min_blocks(bool sums) { return sums ? 3 : 4; }

template <bool kSums>
__global__ void __launch_bounds__(kTileThreads, min_blocks(kSums))
    copy_kernel(const __grid_constant__ KernelArguments arguments) {
  const bool is_inline = arguments.ops == nullptr;
  const GridView grid{is_inline ? arguments.inline_ops : arguments.ops,
                      is_inline ? arguments.inline_sides : arguments.sides, arguments.buffers,
                      arguments.num_ops};
  run_tile<kSums>(grid, blockIdx.x, static_cast<int>(threadIdx.x));
}

}  // namespace

cudaError_t launch_copy(const KernelArguments& arguments, int64_t num_tiles, bool has_sums,
                        cudaStream_t stream) {
  const auto kernel = has_sums ? copy_kernel<true> : copy_kernel<false>;
  kernel<<<static_cast<unsigned>(num_tiles), kTileThreads, 0, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace rvdcomm
