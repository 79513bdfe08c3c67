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

/// kRows query rows (1, 2, 4) on the same keys, columns as column_of has them: adds this lane's groups s of its row, for
/// its keys g and g + 8. half_weights: of all columns, as weight_of_column has them, 16-byte aligned.
template <int kRows, int kColumns>
__device__ __forceinline__ void add_rows(const float (&dots)[kColumns / 2], const float* half_weights,
                                         float (&sums)[2][kRows]) {
  const float4* own = reinterpret_cast<const float4*>(half_weights) + (threadIdx.x & 3);
#pragma unroll
  for (int s = 0; s < kRows; ++s) sums[0][s] = sums[1][s] = 0.0f;
#pragma unroll
  for (int jj = 0; jj < kColumns / 16; ++jj) {
    const float4 w = own[4 * jj];
#pragma unroll
    for (int j = 2 * jj; j < 2 * jj + 2; ++j) {
      float &a = sums[0][j % kRows], &b = sums[1][j % kRows];
      const float x = j % 2 == 0 ? w.x : w.z, y = j % 2 == 0 ? w.y : w.w;
      a = add_head(dots[4 * j], x, a), b = add_head(dots[4 * j + 2], x, b);
      a = add_head(dots[4 * j + 1], y, a), b = add_head(dots[4 * j + 3], y, b);
    }
  }
}
#endif

/// Where a head of one of kRows query rows stands among the columns of a product, so that lane c of four has all columns
/// of row c % kRows, and of it groups c / kRows * kRows + {0 to kRows - 1}, heads ascending.
template <int kRows>
__device__ __forceinline__ uint32_t column_of(uint32_t row, uint32_t head) {
  const uint32_t group = head % 8 / 2, lane = group / kRows * kRows + row;
  return 8 * (kRows * (head / 8) + group % kRows) + 2 * lane + head % 2;
}
/// Of a column's weight: a lane reads those of two times two columns at once.
__device__ __forceinline__ uint32_t weight_of_column(uint32_t column) {
  const uint32_t j = column / 8, lane = column % 8 / 2;
  return (j / 2 * 4 + lane) * 4 + j % 2 * 2 + column % 2;
}
/// Sums of add_rows to those of the tree, of kRows = 1: both keys, in each lane of four; 2: key g in lanes 0 and 1, g + 8 in
/// the others; 4: both keys.
__device__ __forceinline__ void join_rows(const float (&sums)[2][1], float (&scores)[2]) {
  scores[0] = join_groups(sums[0][0]), scores[1] = join_groups(sums[1][0]);
}
__device__ __forceinline__ void join_rows(const float (&sums)[2][2], float (&scores)[1]) {
  const float first = sums[0][0] + sums[0][1], second = sums[1][0] + sums[1][1];
  const bool upper = (threadIdx.x & 2) != 0;
  scores[0] = (upper ? second : first) + __shfl_xor_sync(~0u, upper ? first : second, 2);
}
__device__ __forceinline__ void join_rows(const float (&sums)[2][4], float (&scores)[2]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) scores[e] = (sums[e][0] + sums[e][1]) + (sums[e][2] + sums[e][3]);
}

}  // namespace topkey::cuda
