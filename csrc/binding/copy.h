// The C++ object behind CopyProgram of Python.
#pragma once

#include <memory>
#include <mutex>

#include "rvdcomm/copy_program.h"
#if defined(RVDCOMM_HAS_CUDA)
#include "copy_cuda.h"
#endif

namespace rvdcomm {

/// A program with the engines of this build. The CUDA engine is made at the first run on a GPU.
struct Engines {
  CopyProgram cpu;
#if defined(RVDCOMM_HAS_CUDA)
  std::once_flag once;
  std::unique_ptr<CudaCopyProgram> cuda;
#endif
  explicit Engines(CopyProgram program) : cpu(std::move(program)) {}
};

}  // namespace rvdcomm
