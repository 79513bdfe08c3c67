// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Every CUDA call and launch is checked, and its error carries the operation and the place in this source.
#pragma once
#include <cuda_runtime_api.h>

#include <string>

#include "topkey/error.h"

namespace topkey::cuda {

inline void check_cuda(cudaError_t error, const char* what, const char* file, int line) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // a launch's error is sticky until it is read
  throw Error(Status::device_error, std::string(what) + ": the device must succeed, got " + cudaGetErrorName(error) +
                                        " (" + cudaGetErrorString(error) + ") at " + file + ":" + std::to_string(line));
}

#define TOPKEY_CUDA_CHECK(call) ::topkey::cuda::check_cuda((call), #call, __FILE__, __LINE__)
/// Behind a launch.
#define TOPKEY_CUDA_LAUNCHED(op) ::topkey::cuda::check_cuda(cudaGetLastError(), op, __FILE__, __LINE__)

}  // namespace topkey::cuda
