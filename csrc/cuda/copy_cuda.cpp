#include "copy_cuda.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "check.h"
#include "copy_kernel.h"

namespace rvdcomm {
namespace {

/// A stream that waits for no other.
class OwnStream {
 public:
  OwnStream() { RVD_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  ~OwnStream() { (void)cudaStreamDestroy(stream_); }
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Copy to device memory. Once this returns, the data are there for kernels of every stream.
///
/// A cudaMemcpy from pageable memory may return earlier. Then only streams that wait for the legacy
/// stream may read the data, and the streams that torch makes do not.
void upload(void* to, const void* from, size_t num_bytes) {
  const OwnStream stream;
  RVD_CUDA(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyHostToDevice, stream));
  RVD_CUDA(cudaStreamSynchronize(stream));
}

/// An array in device memory that is written once, when it is constructed.
class DeviceTable {
 public:
  template <typename T>
  explicit DeviceTable(const std::vector<T>& items) {
    const size_t num_bytes = items.size() * sizeof(T);
    RVD_CUDA(cudaMalloc(&data_, num_bytes));
    upload(data_, items.data(), num_bytes);
  }
  DeviceTable(const DeviceTable&) = delete;
  DeviceTable& operator=(const DeviceTable&) = delete;
  // Errors are ignored: cudaFree fails if the process exits or its CUDA context is lost, and the
  // driver then frees the memory.
  ~DeviceTable() { (void)cudaFree(data_); }

  template <typename T>
  const T* as() const {
    return static_cast<const T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

/// A batch. If it has too many ops or sides for the kernel arguments, they are in device memory.
struct DeviceBatch {
  explicit DeviceBatch(GridBatch made) : batch(std::move(made)) {
    if (batch.ops.size() <= kInlineOps && batch.sides.size() <= kInlineSides) return;
    ops = std::make_unique<DeviceTable>(batch.ops);
    sides = std::make_unique<DeviceTable>(batch.sides);
  }
  GridBatch batch;
  std::unique_ptr<DeviceTable> ops, sides;
};

}  // namespace

/// The batches of a program. They are made once for every pair of a device and an alignment.
class CudaCopyProgram::Plans {
 public:
  explicit Plans(CopyProgram program) : program_(std::move(program)) {}

  int num_buffers() const { return program_.num_buffers(); }

  const std::vector<DeviceBatch>& of(int device, int64_t alignment) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto key = std::make_pair(device, alignment);
    const auto found = batches_.find(key);
    if (found != batches_.end()) return found->second;
    std::vector<DeviceBatch> made;
    for (GridBatch& batch : grid_batches(program_, alignment)) made.emplace_back(std::move(batch));
    return batches_.emplace(key, std::move(made)).first->second;
  }

 private:
  CopyProgram program_;
  std::mutex mutex_;
  std::map<std::pair<int, int64_t>, std::vector<DeviceBatch>> batches_;
};

CudaCopyProgram::CudaCopyProgram(const CopyProgram& program)
    : plans_(std::make_shared<Plans>(program)) {}

void CudaCopyProgram::run(void* const* buffers, void* stream) const {
  uintptr_t low_bits = kMaxUnitBytes;
  for (int i = 0; i < plans_->num_buffers(); ++i) {
    low_bits |= reinterpret_cast<uintptr_t>(buffers[i]);
  }
  const auto alignment = static_cast<int64_t>(low_bits & (~low_bits + 1));
  int device = 0;
  RVD_CUDA(cudaGetDevice(&device));
  KernelArguments arguments{};
  for (const DeviceBatch& each : plans_->of(device, alignment)) {
    const GridBatch& batch = each.batch;
    for (size_t i = 0; i < batch.buffers.size(); ++i) {
      arguments.buffers[i] = static_cast<char*>(buffers[batch.buffers[i]]);
    }
    arguments.ops = each.ops ? each.ops->as<GridOp>() : nullptr;
    arguments.sides = each.ops ? each.sides->as<GridSide>() : nullptr;
    arguments.num_ops = static_cast<int32_t>(batch.ops.size());
    if (!each.ops) {
      std::copy(batch.ops.begin(), batch.ops.end(), arguments.inline_ops);
      std::copy(batch.sides.begin(), batch.sides.end(), arguments.inline_sides);
    }
    RVD_CUDA(
        launch_copy(arguments, batch.num_tiles, batch.has_sums, static_cast<cudaStream_t>(stream)));
  }
}

}  // namespace rvdcomm
