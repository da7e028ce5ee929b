// The kernels: one for batches of moves, which needs few registers, and one that also adds.
#include "copy_kernel.h"
#include "rvdcomm/grid_tile.h"

namespace rvdcomm {
namespace {

template <bool kSums>
__global__ void __launch_bounds__(kTileThreads)
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
