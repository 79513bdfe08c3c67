// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See claims.h.
#include "cuda/claims.h"

#include "cuda/check.h"
#include "cuda/device/view.cuh"
#include "cuda/stages.h"

namespace topkey::cuda {
namespace {

__global__ __launch_bounds__(256) void claim(const __grid_constant__ Tensor slots, int64_t rows, int64_t count,
                                             Claims claims) {
  const auto slots_of = [&](int64_t i) { return integer(slots, i); };
  for (int64_t row = int64_t{blockIdx.x} * 256 + threadIdx.x; row < rows; row += int64_t{gridDim.x} * 256) {
    const int64_t slot = slots_of(row);
    if (slot >= 0 && slot < count) claims.claim(slots_of, static_cast<uint32_t>(row), slot);
  }
}

const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&claim), 0}};

}  // namespace

KernelList claim_kernels() { return {kEntries, 1}; }

Claims claim_slots(const Tensor& slots, int64_t count, int64_t rows, int which, void* workspace, const Launch& launch) {
  if (rows <= kSearchedRows || rows > kClaimedRows) return {nullptr, 0};
  const size_t bytes = claim_bytes(rows);
  const Claims claims{
      reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(workspace) + static_cast<size_t>(which) * bytes),
      static_cast<uint32_t>(claim_places(rows) - 1)};
  TOPKEY_CUDA_CHECK(cudaMemsetAsync(claims.rows, 0, bytes, launch.stream()));
  claim<<<launch.blocks((rows + 255) / 256, 8), 256, 0, launch.stream()>>>(slots, rows, count, claims);
  TOPKEY_CUDA_LAUNCHED("claim_slots");
  return claims;
}

}  // namespace topkey::cuda
