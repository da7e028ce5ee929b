// The CUDA engine of copy programs.
#pragma once

#include <memory>

#include "rvdcomm/copy_program.h"

namespace rvdcomm {

/// A copy program on GPUs. Copies share what they keep on the devices.
class CudaCopyProgram {
 public:
  explicit CudaCopyProgram(const CopyProgram& program);

  /// Run on the current device, on this stream (a cudaStream_t); returns once the work is queued.
  ///
  /// One launch for each batch of independent ops, which is normally one launch in all. A program
  /// of many ops is uploaded when it first runs on a device (or first with so little alignment);
  /// no later run allocates or synchronizes.
  /// @pre as CopyProgram::run, with addresses that the device can reach
  /// @throws std::runtime_error with the failing call and CUDA's message
  void run(void* const* buffers, void* stream) const;

 private:
  class Plans;
  std::shared_ptr<Plans> plans_;
};

}  // namespace rvdcomm
