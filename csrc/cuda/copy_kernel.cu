// The kernels: one for batches of moves, which needs few registers, and one that also adds.
#include "copy_kernel.h"
#include "rvdcomm/grid_tile.h"

namespace rvdcomm {
#ifndef RVD_MIN
#define RVD_MIN 1
#endif
namespace {

template <bool kSums>
__global__ void __launch_bounds__(kTileThreads, RVD_MIN)
    copy_kernel(const __grid_constant__ KernelArguments arguments) {
  const bool is_inline = arguments.ops == nullptr;
  const GridView grid{is_inline ? arguments.inline_ops : arguments.ops,
                      is_inline ? arguments.inline_sides : arguments.sides, arguments.buffers,
                      arguments.num_ops};
#ifdef RVD_LOOP
  for (int64_t tile = blockIdx.x; tile < arguments.num_tiles; tile += gridDim.x)
    run_tile<kSums>(grid, tile, static_cast<int>(threadIdx.x));
#else
  run_tile<kSums>(grid, blockIdx.x, static_cast<int>(threadIdx.x));
#endif
}

}  // namespace

cudaError_t launch_copy(const KernelArguments& arguments, int64_t num_tiles, bool has_sums,
                        cudaStream_t stream) {
  const auto kernel = has_sums ? copy_kernel<true> : copy_kernel<false>;
#ifdef RVD_LOOP
  num_tiles = num_tiles < 132 * RVD_LOOP ? num_tiles : 132 * RVD_LOOP;
#endif
  kernel<<<static_cast<unsigned>(num_tiles), kTileThreads, 0, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace rvdcomm
