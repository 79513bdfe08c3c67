// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The prefill kernel's products: a warpgroup's 256 columns in two halves; while one is reduced the next half's products
// are under way, of the same keys or the next. Nothing else hides under the products (the tensor core and the additions
// share the registers' ports), so a score costs no instruction more than its heads' additions, one comparison and a store
// where it may win.
#pragma once
#include "cuda/device/prefill_job.cuh"
#include "cuda/device/ptx.cuh"

namespace topkey::cuda {

/// Of a thread, one of its rows: where its next entry goes, and what may go there.
struct Column {
  uint32_t next, high;  ///< of the address
  float least;
};

/// Of a thread's weights, in fours: which are for dots whose ReLU is a maximum, so that not all additions go one way. They
/// are twice as large: w * max(x, 0) is w / 2 * (x + |x|) to the bit.
__device__ __forceinline__ constexpr bool by_maximum(int four) { return four % 8 < kMaximumFours; }
/// ReLU(x) * w added to s. A NaN stays one.
template <bool kByMaximum>
__device__ __forceinline__ float add_head_by(float dot, float weight, float sum) {
  if (kByMaximum) return __fmaf_rn(weight, relu(dot), sum);
  return add_head(dot, weight, sum);
}
/// Adds 128 columns of a thread's two keys (g and g + 8 of its warp's 16): chain i holds the heads of group i.
template <int kChains>
__device__ __forceinline__ void add_columns(const float (&dots)[64], const float4* weights, float (&first)[kChains],
                                            float (&second)[kChains]) {
#pragma unroll
  for (int jj = 0; jj < 8; ++jj) {
    const auto add = [&](float dot, float w, float sum) {
      return by_maximum(jj) ? add_head_by<true>(dot, w, sum) : add_head_by<false>(dot, w, sum);
    };
    const float4 w = weights[jj];
    float &a = first[2 * jj % kChains], &b = second[2 * jj % kChains];
    a = add(dots[8 * jj], w.x, a), b = add(dots[8 * jj + 2], w.x, b);
    a = add(dots[8 * jj + 1], w.y, a), b = add(dots[8 * jj + 3], w.y, b);
    float &c = first[(2 * jj + 1) % kChains], &d = second[(2 * jj + 1) % kChains];
    c = add(dots[8 * jj + 4], w.z, c), d = add(dots[8 * jj + 6], w.z, d);
    c = add(dots[8 * jj + 5], w.w, c), d = add(dots[8 * jj + 7], w.w, d);
  }
}

__device__ __forceinline__ float join_chains(const float (&s)[4]) { return (s[0] + s[1]) + (s[2] + s[3]); }
/// Half the heads: the other half is with the neighbour.
__device__ __forceinline__ float join_chains(const float (&s)[2]) {
  const float own = s[0] + s[1];
  return own + __shfl_xor_sync(~0u, own, 1);
}

/// A key's score to the list, if it may win or is NaN. Without a branch.
__device__ __forceinline__ void offer(Column& column, bool live, float score, int32_t position) {
  store_next_if<kListColumns * sizeof(uint2)>(live && !(score < column.least), column.next, column.high,
                                              __float_as_uint(score), static_cast<uint32_t>(position));
}

#ifdef TOPKEY_HAS_WGMMA
/// A unit's scores, from the products of one half of the columns after the other: sums[k][i] of key k (g, g + 8) and the
/// thread's row i.
template <int kHeads>
struct UnitSums {
  static constexpr int kOwn = kHeads == 32 ? 2 : 1;
  static constexpr int kChains = kHeads == 128 ? 2 : 4;
  float sums[2][kOwn];
  float first[kChains], second[kChains];

  /// weights: of this thread's columns, halved.
  template <int kHalf>
  __device__ __forceinline__ void add(const float (&dots)[64], const float4 (&weights)[16]) {
    if (kHalf == 0 || kOwn == 2) {
#pragma unroll
      for (int i = 0; i < kChains; ++i) first[i] = second[i] = 0.0f;
    }
    add_columns(dots, weights + kHalf * 8, first, second);
    if (kHalf == 1 || kOwn == 2)
      sums[0][kOwn == 2 ? kHalf : 0] = join_chains(first), sums[1][kOwn == 2 ? kHalf : 0] = join_chains(second);
  }
};
#endif

}  // namespace topkey::cuda
