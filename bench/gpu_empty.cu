// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The least that a launch costs: what small calls are held against.
#include "bench/gpu_must.h"

namespace topkey::bench {
namespace {

__global__ void nothing() {}

}  // namespace

void empty_kernel(void* stream) {
  nothing<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>();
  must(cudaGetLastError());
}

}  // namespace topkey::bench
