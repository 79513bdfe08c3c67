// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Where the decode kernel's cut lies: scores in 1,024 bins between bounds that a sample of the row's keys suggests, the
// first and the last bin open. Bounds that miss cost a further round, never a key. Whatever the bounds, a better key of
// the order never falls into a lower bin.
#pragma once
#include "cuda/device/decode_plan.cuh"
#include "cuda/device/quantile.cuh"

namespace topkey::cuda {

/// bin = (score - low) * scale, cut to whole numbers and to [0, kDecodeBins).
struct BinRange {
  float low, scale;

  __device__ __forceinline__ int bin(float score) const {
    const float x = (score - low) * scale;
    return x >= 1.0f ? static_cast<int>(fminf(x, static_cast<float>(kDecodeBins - 1))) : 0;  // NaN: 0
  }
  __device__ __forceinline__ int bin_of_key(uint32_t key) const { return bin(score_of_key(key)); }
};

/// No key of the order of a score is as large.
constexpr uint32_t kPastInfinity = 0xFF800001u;

/// What a sample of finite scores adds up to.
struct Moments {
  float sum, squares;
  int count;
};

/// Bounds from one standard deviation below where the k-th of n keys would be, were they normal, to far above. Rough
/// functions do: any bounds are right.
__device__ inline BinRange range_of(const Moments& m, uint32_t k, int64_t n) {
  if (m.count == 0) return {0.0f, 1.0f};
  const float each = __frcp_rn(static_cast<float>(m.count)), mean = m.sum * each;
  const float variance = m.squares * each - mean * mean;
  float deviation = variance > 0.0f ? variance * rsqrtf(variance) : 0.0f;
  deviation = fmaxf(deviation, fmaxf(fabsf(mean) * 1e-5f, 1e-30f));
  const float p = fminf(fmaxf(static_cast<float>(k) * __frcp_rn(static_cast<float>(n)), 1e-6f), 1.0f - 1e-6f);
  const float quantile = upper_quantile(p);
  const float low = fminf(fmaxf(mean + (quantile - 1.0f) * deviation, -1e37f), 1e37f);
  const float width = (fmaxf(quantile + 1.0f, 5.0f) - (quantile - 1.0f)) * deviation;
  return {low, fminf(fmaxf(__fdividef(static_cast<float>(kDecodeBins), width), 1e-30f), 1e30f)};
}

/// The smallest key of the order in bin `bin` or above; one past +inf's if none is. By one whole warp.
inline __device__ __noinline__ uint32_t first_key_of_bin(const BinRange& range, int bin) {
  const uint32_t lane = threadIdx.x & 31;
  constexpr uint64_t kEnd = kPastInfinity;
  uint64_t first = kNanKey, count = kEnd - kNanKey;
  if (bin <= 0) return kNanKey;
  while (true) {
    const uint64_t step = (count + 31) / 32, end = first + count;
    const uint64_t probe = first + (lane + 1) * step - 1;
    const bool reached = range.bin_of_key(static_cast<uint32_t>(probe < end ? probe : end - 1)) >= bin;
    const uint32_t which = __ballot_sync(~0u, reached);
    if (which == 0) return static_cast<uint32_t>(end);
    const uint64_t at = static_cast<uint64_t>(__ffs(static_cast<int>(which)) - 1) * step;
    if (step == 1) return static_cast<uint32_t>(first + (at < count ? at : count - 1));
    first += at < count ? at : count - 1;
    count = first + step < end ? step : end - first;
  }
}

struct Crossing {
  uint32_t bin, above, inside;
};
/// The bin that holds the k-th best of `total` keys, 1 <= k <= total, keys above it, and keys in it. What the bins from 1
/// on do not hold is bin 0's. bins: shared or global memory, which other blocks may have written. By all threads.
inline __device__ __noinline__ Crossing find_crossing(const uint32_t* bins, uint32_t total, uint32_t k, uint32_t* warps,
                                                      Crossing* room) {
  constexpr int kOwn = kDecodeBins / kDecodeThreads;
  const int first = kDecodeBins - kOwn * (static_cast<int>(threadIdx.x) + 1);  // thread 0: the highest
  uint32_t own[kOwn], sum = 0;
#pragma unroll
  for (int b = 0; b < kOwn; ++b) {
    own[b] = first + b == 0 ? 0 : __isShared(bins) ? bins[first + b] : __ldcg(bins + first + b);
    sum += own[b];
  }
  uint32_t counted = 0, above = scan_scorers(sum, warps, &counted);
  if (threadIdx.x == 0 && counted < k) *room = {0, counted, total - counted};
  if (above < k && k <= above + sum) {
#pragma unroll
    for (int b = kOwn - 1; b >= 0; --b) {
      if (above < k && k <= above + own[b]) *room = {static_cast<uint32_t>(first + b), above, own[b]};
      above += own[b];
    }
  }
  sync_scorers();
  const Crossing found = *room;
  sync_scorers();
  return found;
}

}  // namespace topkey::cuda
