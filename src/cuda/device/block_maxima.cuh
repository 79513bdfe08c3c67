// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The best score of each candidate block of 1, 2, 4, 8 or 16 keys, which the kernels that score leave for those that pick
// blocks: of lanes that have scores as the products of 64 keys leave them (device/dot_sm90.cuh).
#pragma once
#include "cuda/device/order.cuh"

namespace topkey::cuda {

/// Row r's at values + r * step, kNotLiveScore where a block has no live key.
struct BlockMaxima {
  float* values;  ///< null: they are not wanted
  int64_t step;
  int32_t shift;  ///< 1 << shift keys a block
};
constexpr int kMostMaximaShift = 4;  ///< a warp has all keys of such a block

/// Of lanes with a mask, whose keys are all of this lane's block: what stands for no number.
__device__ __forceinline__ uint32_t best_or_none(float best, uint32_t lives, uint32_t lanes) {
  if (!is_nan(best)) return __float_as_uint(best);
  return (lives & lanes) != 0 ? kCanonicalNan : kNotLiveScore;
}

/// The best of this lane's block, where lane l has the score of key l / 4 + 8 * (l & 1) of its warp's 16. By whole warps.
[[maybe_unused]] __device__ __forceinline__ uint32_t best_of_block(bool live, float score, int shift) {
  float best = live ? score : __uint_as_float(kCanonicalNan);
#pragma unroll
  for (int s = 0; s < 3; ++s) {
    if (s < shift) best = fmaxf(best, __shfl_xor_sync(~0u, best, 4 << s));
  }
  if (shift > 3) best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
  const uint32_t lives = __ballot_sync(~0u, live);
  // Every fourth lane has the block's next key; of 16 keys the odd ones have the second half.
  const uint32_t lane = threadIdx.x & 31, first = shift > 3 ? 0 : (lane >> 2 >> shift << shift << 2) + (lane & 1);
  return best_or_none(best, lives, shift > 3 ? 0x33333333u : 0x11111111u >> (32 - (4u << shift)) << first);
}

/// The same for two blocks of 8 keys, or one of 16: lane l has the scores of keys l / 4 and l / 4 + 8 for one of four rows,
/// l % 4. The lower half of the warp gets the first block's best. kInside: all keys are live.
template <bool kInside>
__device__ __forceinline__ uint32_t best_of_blocks(const bool (&live)[2], const float (&score)[2], int shift) {
  const float none = __uint_as_float(kCanonicalNan), first = kInside || live[0] ? score[0] : none,
              second = kInside || live[1] ? score[1] : none;
  const bool upper = (threadIdx.x & 16) != 0;
  float best = upper ? second : first;
  best = fmaxf(best, __shfl_xor_sync(~0u, upper ? first : second, 16));
  best = fmaxf(best, __shfl_xor_sync(~0u, best, 8));
  best = fmaxf(best, __shfl_xor_sync(~0u, best, 4));
  if (shift > 3) best = fmaxf(best, __shfl_xor_sync(~0u, best, 16));
  if (kInside) return __float_as_uint(best + 0.0f);  // -0 is +0; of NaNs a maximum makes one without a sign
  if (__all_sync(~0u, !is_nan(best))) return __float_as_uint(canonical(best));
  const uint32_t of_first = __ballot_sync(~0u, live[0]), of_second = __ballot_sync(~0u, live[1]);
  const uint32_t lives = shift > 3 ? of_first | of_second : upper ? of_second : of_first;
  return best_or_none(canonical(best), lives, 0x11111111u << (threadIdx.x & 3));
}

}  // namespace topkey::cuda
