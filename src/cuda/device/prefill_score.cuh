// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The prefill kernel's products: a warpgroup's 256 columns in two halves, the first of which is reduced while the second
// runs. Nothing else hides under the products (the tensor core and the additions share the registers' ports), so a score
// costs no instruction more than its heads' additions, one comparison and a store where it may win.
#pragma once
#include "cuda/device/prefill_job.cuh"

namespace topkey::cuda {

/// Of a thread, one of its rows: where its next entry goes, and what may go there.
struct Column {
  uint2* next;
  float least;
  bool active;
};

/// Adds 128 columns of a thread's two keys (g and g + 8 of its warp's 16): chain i holds the heads of group i.
template <int kChains>
__device__ __forceinline__ void add_columns(const float (&dots)[64], const float4* weights, float (&first)[kChains],
                                            float (&second)[kChains]) {
#pragma unroll
  for (int jj = 0; jj < 8; ++jj) {
    const float4 w = weights[jj];
    float &a = first[2 * jj % kChains], &b = second[2 * jj % kChains];
    a = add_head(dots[8 * jj], w.x, a), b = add_head(dots[8 * jj + 2], w.x, b);
    a = add_head(dots[8 * jj + 1], w.y, a), b = add_head(dots[8 * jj + 3], w.y, b);
    float &c = first[(2 * jj + 1) % kChains], &d = second[(2 * jj + 1) % kChains];
    c = add_head(dots[8 * jj + 4], w.z, c), d = add_head(dots[8 * jj + 6], w.z, d);
    c = add_head(dots[8 * jj + 5], w.w, c), d = add_head(dots[8 * jj + 7], w.w, d);
  }
}

__device__ __forceinline__ float join_chains(const float (&s)[4]) { return (s[0] + s[1]) + (s[2] + s[3]); }
/// Half the heads: the other half is with the neighbour.
__device__ __forceinline__ float join_chains(const float (&s)[2]) {
  const float own = s[0] + s[1];
  return own + __shfl_xor_sync(~0u, own, 1);
}

/// A key's score to the list, if it may win. Without a branch.
__device__ __forceinline__ void offer(Column& column, bool live, float score, int32_t position, uint32_t& nans) {
  const bool takes = live && column.active && !(score < column.least);
  store_if(takes, column.next, __float_as_uint(score), static_cast<uint32_t>(position));
  column.next += takes ? kListColumns : 0;
  nans += takes && score != score;
}

#ifdef TOPKEY_HAS_WGMMA
/// A unit's products of one warpgroup, and its scores: sums[k][i] of key k (g, g + 8) and the thread's row i.
template <int kHeads>
struct UnitSums {
  static constexpr int kOwn = kHeads == 32 ? 2 : 1;
  static constexpr int kChains = kHeads == 128 ? 2 : 4;
  float sums[2][kOwn];

  /// weights: of this thread's columns, halved. done(): the keys' codes are read.
  template <class Done>
  __device__ __forceinline__ void score(uint64_t keys, uint64_t queries, const float4 (&weights)[16],
                                        const Done& done) {
    constexpr uint32_t kHalf = kPrefillColumns / 2 * kCodePitch >> 4;
    float halves[2][64];
    issue_dots<128, 128>(halves[0], keys, queries);
    issue_dots<128, 128>(halves[1], keys, operand_after(queries, kHalf));
    float first[kChains], second[kChains];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 0) {
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
        done();
      }
      if (half == 0 || kOwn == 2) {
#pragma unroll
        for (int i = 0; i < kChains; ++i) first[i] = second[i] = 0.0f;
      }
      add_columns(halves[half], weights + half * 8, first, second);
      if (half == 1 || kOwn == 2)
        sums[0][kOwn == 2 ? half : 0] = join_chains(first), sums[1][kOwn == 2 ? half : 0] = join_chains(second);
    }
  }
};
#endif

}  // namespace topkey::cuda
