// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What warps and their lanes do in more than one kernel.
#pragma once
#include <cstdint>

namespace topkey::cuda {

/// Inclusive sum over the lanes of a warp.
__device__ __forceinline__ uint32_t sum_lanes_up(uint32_t value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, value, step);
    if (threadIdx.x % 32 >= static_cast<uint32_t>(step)) value += other;
  }
  return value;
}

/// A bit for each of up to 32 numbers, in their order: whether it is over an edge. Two instructions each: the sign of a
/// difference is shifted in. A NaN is not over it: the NaN that this device's arithmetic makes has no sign.
class OverEdge {
 public:
  __device__ explicit OverEdge(float edge) : edge_(edge) {}
  __device__ __forceinline__ void add(float at) { bits_ = __funnelshift_l(__float_as_uint(edge_ - at), bits_, 1); }
  /// Of `count` numbers, that many were added.
  __device__ __forceinline__ uint32_t of(uint32_t count) const {
    return count == 0 ? 0 : __brev(bits_) >> (32 - count);
  }
  /// Next below a positive number: what is over it is no less than the number.
  __device__ static float below(float x) { return __uint_as_float(__float_as_uint(x) - 1); }

 private:
  float edge_;
  uint32_t bits_ = 0;
};

}  // namespace topkey::cuda
