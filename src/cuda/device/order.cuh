// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The order of the selection as one unsigned number a key: larger is better, equal numbers go by position. A key that is
// not live is 0, NaN is 1, then all scores by value, and forced keys above everything.
#pragma once
#include "cuda/device/view.cuh"

namespace topkey::cuda {

constexpr uint32_t kNotLive = 0, kNanKey = 1, kForcedKey = 0xFFFFFFFFu;
/// Stands in a buffer of scores for a key that is not live: a NaN that no canonical score is.
constexpr uint32_t kNotLiveScore = 0xFFFFFFFFu;

/// Of a canonical score. -inf gives 0x007FFFFF, so nothing meets kNanKey; +inf 0xFF800000, so nothing meets kForcedKey.
__device__ __forceinline__ uint32_t key_of(float canonical_score) {
  const uint32_t u = __float_as_uint(canonical_score);
  if (is_nan(canonical_score)) return kNanKey;
  return (u & 0x80000000u) ? ~u : u | 0x80000000u;
}
/// The score back; of an unforced live key.
__device__ __forceinline__ float score_of_key(uint32_t key) {
  if (key == kNanKey) return __uint_as_float(kCanonicalNan);
  return __uint_as_float((key & 0x80000000u) ? key & 0x7FFFFFFFu : ~key);
}

}  // namespace topkey::cuda
