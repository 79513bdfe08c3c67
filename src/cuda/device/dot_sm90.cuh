// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The score arithmetic `fp8mma`: tiles of codes in shared memory, the products, and the head sum, included by every
// kernel of the Hopper backend, so that all of them give the same bits.
// Dots: e4m3 products of the tensor core, d ascending by 32. Head sum: four groups, group c holds heads h with
// h % 8 / 2 == c; in a group one chain of FMA from +0, h ascending, of (w / 2) * (x + |x|): what w * max(0, x) is, with an
// addition in place of the slower maximum (NaN stays NaN; dots of e4m3 codes are finite else). Then (s0 + s1) + (s2 + s3).
// A head that only pads has codes 0 and weight 0 and changes no bit.
#pragma once
#include "cuda/device/ptx_sm90.cuh"
#include "cuda/device/view.cuh"

namespace topkey::cuda {

constexpr int kTileKeys = 64;         ///< keys of a product
constexpr int kCodePitch = 128;       ///< bytes of a row of codes in shared memory, whatever D is
constexpr int kCodeAlignment = 1024;  ///< of a tile of codes: the pattern of its 16-byte chunks repeats after 8 rows

/// Byte of chunk `chunk` (16 bytes) of row `row` in a tile of codes.
__device__ __forceinline__ uint32_t chunk_at(uint32_t row, uint32_t chunk) {
  return row * kCodePitch + ((chunk ^ (row & 7)) << 4);
}
/// A tile of codes as the tensor core's operand: rows of 128 bytes, chunks swizzled by row, groups of 8 rows 1,024 bytes
/// apart. Step s over d (32 codes) adds s * kDotStep.
__device__ __forceinline__ uint64_t operand_at(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}
constexpr uint64_t kDotStep = 32 >> 4;
/// The operand `steps` further; shared memory ends before its lower half could overflow.
__device__ __forceinline__ uint64_t operand_after(uint64_t operand, uint32_t steps) {
  const uint32_t low = static_cast<uint32_t>(operand) + steps;
  return (operand & 0xFFFFFFFF00000000u) | low;
}

/// An operand's lower half, which alone tells one from another. operand_of(low + steps) is that many steps further:
/// shared memory ends before it could overflow.
__device__ __forceinline__ uint32_t operand_low(uint32_t address) { return (address & 0x3FFFF) >> 4 | 1u << 16; }
__device__ __forceinline__ uint64_t operand_of(uint32_t low) { return uint64_t{1024 >> 4 | 1u << 30} << 32 | low; }

/// ReLU(x) * w added to s, with w already halved.
__device__ __forceinline__ float add_head(float dot, float half_weight, float sum) {
  return __fmaf_rn(half_weight, dot + fabsf(dot), sum);
}
/// The tree over the four groups, of which lane c of each four holds group c.
__device__ __forceinline__ float join_groups(float sum) {
  sum = sum + __shfl_xor_sync(~0u, sum, 1);
  return sum + __shfl_xor_sync(~0u, sum, 2);
}

#ifdef TOPKEY_HAS_WGMMA
/// Dots of 64 keys with kColumns heads, issued; wgmma_wait<0> behind it.
template <int kColumns, int kDim>
__device__ __forceinline__ void issue_dots(float (&dots)[kColumns / 2], uint64_t keys, uint64_t heads) {
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < kDim / 32; ++s)
    wgmma_e4m3<kColumns>(dots, operand_after(keys, s * kDotStep), operand_after(heads, s * kDotStep), s > 0);
  wgmma_commit();
}

template <int kColumns, int kDim>
__device__ __forceinline__ void issue_dots_low(float (&dots)[kColumns / 2], uint32_t keys, uint32_t heads) {
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < kDim / 32; ++s)
    wgmma_e4m3<kColumns>(dots, operand_of(keys + s * kDotStep), operand_of(heads + s * kDotStep), s > 0);
  wgmma_commit();
}

/// One query row: columns are heads. Adds this lane's group for its keys g and g + 8 (of the 16 of its warp).
/// half_weights: of all heads, in shared memory, 8-byte aligned.
template <int kColumns>
__device__ __forceinline__ void add_heads(const float (&dots)[kColumns / 2], const float* half_weights,
                                          float (&sums)[2]) {
  const float2* own = reinterpret_cast<const float2*>(half_weights) + (threadIdx.x & 3);
  sums[0] = 0.0f, sums[1] = 0.0f;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const float2 w = own[4 * j];
    sums[0] = add_head(dots[4 * j], w.x, sums[0]), sums[1] = add_head(dots[4 * j + 2], w.x, sums[1]);
    sums[0] = add_head(dots[4 * j + 1], w.y, sums[0]), sums[1] = add_head(dots[4 * j + 3], w.y, sums[1]);
  }
}
#endif

}  // namespace topkey::cuda
