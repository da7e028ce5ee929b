// The CUDA engine of copy programs.
#pragma once

#include <memory>

#include "rvdcomm/copy_program.h"

namespace rvdcomm {

/// A copy program on GPUs. Copies of an object share its tables in device memory.
class CudaCopyProgram {
 public:
  explicit CudaCopyProgram(const CopyProgram& program);

  /// Run on the current device, on this stream (a cudaStream_t); returns once the work is queued.
  ///
  /// There is one launch per batch: ops that are independent of each other and use at most
  /// kMaxBuffers buffers. Most programs are one batch. The first run on a device with buffers of a
  /// given alignment makes the batches, and uploads those with many ops. Later runs with the same
  /// device and alignment neither allocate device memory nor synchronize.
  /// @pre as CopyProgram::run, with addresses that the device can reach
  /// @throws std::runtime_error with the failing call and CUDA's message
  /// @throws std::invalid_argument if one op uses more than kMaxBuffers buffers
  void run(void* const* buffers, void* stream) const;

 private:
  class Plans;
  std::shared_ptr<Plans> plans_;
};

}  // namespace rvdcomm
