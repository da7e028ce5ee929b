// RVD_CUDA turns errors of CUDA calls into exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace rvdcomm {

inline void check_cuda(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + call + ": " +
                           cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")");
}

}  // namespace rvdcomm

/// Throw a std::runtime_error if a CUDA call fails. Its message has the file and line, the text of
/// the call, and CUDA's message.
#define RVD_CUDA(call) ::rvdcomm::check_cuda((call), #call, __FILE__, __LINE__)
