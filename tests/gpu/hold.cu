// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See hold.h.
#include "tests/gpu/hold.h"

#include <cstdint>

namespace topkey::testing {
namespace {

__device__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__global__ void spin(const volatile int* release, uint64_t limit) {
  const uint64_t begin = nanoseconds();
  while (*release == 0 && nanoseconds() - begin < limit) __nanosleep(1000);
}

}  // namespace

cudaError_t hold_sms(int blocks, const volatile int* release, double seconds, cudaStream_t stream) {
  int device = 0, most = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  // All the shared memory of an SM: one block on each, and no other kernel's beside it that needs some.
  if (error == cudaSuccess) error = cudaFuncSetAttribute(spin, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  if (error != cudaSuccess) return error;
  spin<<<blocks, 1024, static_cast<size_t>(most), stream>>>(release, static_cast<uint64_t>(seconds * 1e9));
  return cudaGetLastError();
}

}  // namespace topkey::testing
