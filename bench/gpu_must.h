// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What the files of the GPU's benchmark share: errors of the device as exceptions, the kernel that does nothing.
#pragma once
#include <cuda_runtime_api.h>

#include <stdexcept>

namespace topkey::bench {

inline void must(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

/// Launches a kernel of one thread that does nothing.
void empty_kernel(void* stream);

}  // namespace topkey::bench
