// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Twin of gpu_suite.cpp for builds without CUDA.
#include <stdexcept>

#include "bench/gpu_suite.h"

namespace topkey::bench {

bool run_gpu_suite(const GpuOptions&) {
  throw std::runtime_error("bench: this build has no CUDA (CMake: TOPKEY_CUDA)");
}

}  // namespace topkey::bench
