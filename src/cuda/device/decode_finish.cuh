// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The decode kernel's selection: of what each block keeps of a row, only bin counts, sums and under 257 keys travel. Two
// meetings of the blocks that share a row: (1) all have added their bins, so all know the bin of the k-th key; (2) all
// have told how many keys they have above it and which inside. Then each ranks the keys inside for itself and writes its
// own winners, ascending, behind those of the blocks before it. A bin of too many keys takes further rounds of finer
// bins; one key of the order with too many equals is shared out in position order. Nothing can overflow.
#pragma once
#include "cuda/device/decode_lists.cuh"

namespace topkey::cuda {

/// f(key, entry) for all kept keys of a row.
template <class F>
__device__ void each_kept(const Kept& k, const F& f) {
  if (k.positions == nullptr) {  // a multiple of 64, and 16-byte aligned
    for (uint32_t i = threadIdx.x * 4; i < k.count; i += kDecodeThreads * 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(k.keys + i);
      f(four.x, i), f(four.y, i + 1), f(four.z, i + 2), f(four.w, i + 3);
    }
  } else {
    for (uint32_t i = threadIdx.x; i < k.count; i += kDecodeThreads) f(k.keys[i], i);
  }
}

/// Adds a block's bins of a row to the row's.
__device__ inline void add_bins(const uint32_t* own, uint32_t* of_row) {
  for (int b = threadIdx.x; b < kDecodeBins; b += kDecodeThreads) {
    if (own[b] != 0) atomicAdd(of_row + b, own[b]);
  }
}

/// Narrows an interval of too many keys until they fit, or are equal.
__device__ __noinline__ void refine(DecodeShared& s, const Kept& kept, Meeting& meeting, uint32_t* bins,
                                    uint32_t* of_row, bool first_block, Interval& in) {
  while (in.by_number() && in.low < in.high) {
    const uint32_t width = in.high - in.low;
    const int shift = max(0, 22 - __clz(static_cast<int>(width)));  // width >> shift < 1024
    if (!meeting.alone()) {
      meeting.meet();  // nobody reads the bins of the round before any more
      for (int b = threadIdx.x; first_block && b < kDecodeBins; b += kDecodeThreads) __stcg(of_row + b, 0u);
      meeting.meet();
    }
    __syncthreads();
    for (int b = threadIdx.x; b < kDecodeBins; b += kDecodeThreads) bins[b] = 0;
    __syncthreads();
    each_kept(kept, [&](uint32_t key, uint32_t) {
      if (key >= in.low && key <= in.high) atomicAdd(bins + ((key - in.low) >> shift), 1u);
    });
    __syncthreads();
    if (!meeting.alone()) {
      add_bins(bins, of_row);
      meeting.meet();
    }
    const Crossing c = find_crossing(meeting.alone() ? bins : of_row, in.inside, in.need, s.warps, &s.crossing);
    in.low += c.bin << shift;
    in.high = min(in.high, in.low + ((1u << shift) - 1));
    in.above += c.above, in.inside = c.inside, in.need -= c.above;
  }
}

/// Behind the first meeting: the interval of the k-th best.
__device__ inline Interval find_interval(DecodeShared& s, const Kept& kept, const Meeting& meeting,
                                         const uint32_t* bins, const uint32_t* of_row, uint32_t topk) {
  Interval in{};
  in.live = meeting.alone() ? kept.live : __ldcg(&meeting.row()->live);
  in.wanted = min(topk, in.live);
  if (in.live <= topk) {
    in.low = kNanKey, in.high = kForcedKey, in.inside = in.need = in.live;
    return in;
  }
  const Crossing c = find_crossing(meeting.alone() ? bins : of_row, in.live, topk, s.warps, &s.crossing);
  const int warp = threadIdx.x / 32;
  if (warp < 2) {
    const bool open = warp == 1 && c.bin == kDecodeBins - 1;
    const uint32_t edge = open ? 0xFF800001u : first_key_of_bin(kept.range, static_cast<int>(c.bin) + warp);
    if (threadIdx.x % 32 == 0) s.edges[warp] = edge;
  }
  __syncthreads();
  in.low = s.edges[0], in.high = s.edges[1] - 1;
  in.above = c.above, in.inside = c.inside, in.need = topk - c.above;
  return in;
}

/// How many keys this block has above the interval and inside; and which inside, if they are to be ranked.
__device__ inline uint2 share_of_interval(DecodeShared& s, Kept& kept, const Meeting& meeting, const Interval& in,
                                          uint64_t* candidates) {
  if (threadIdx.x == 0) s.above = s.inside = s.number = 0;
  __syncthreads();
  const bool lists = !in.whole() && !in.by_number();
  uint32_t above = 0, inside = 0, nans = 0;
  each_kept(kept, [&](uint32_t key, uint32_t i) {
    nans += key == kNanKey, above += key > in.high;
    if (key < in.low || key > in.high) return;
    ++inside;
    if (!lists) return;
    const uint64_t entry = static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(kept.position(i));
    if (meeting.alone()) {
      s.candidates[atomicAdd(&s.number, 1u)] = entry;
    } else {
      __stcg(reinterpret_cast<unsigned long long*>(candidates) + atomicAdd(&meeting.row()->candidates, 1u), entry);
    }
  });
  above = __reduce_add_sync(~0u, above), inside = __reduce_add_sync(~0u, inside);
  if ((threadIdx.x & 31) == 0 && (above | inside) != 0) atomicAdd(&s.above, above), atomicAdd(&s.inside, inside);
  if (kept.positions == nullptr && nans != 0) atomicAdd(&kept.nans, nans);
  __syncthreads();
  return {s.above, s.inside};
}

/// Behind the second meeting. before: of the blocks before this one, sums of their shares.
__device__ inline Verdict judge(DecodeShared& s, const Kept& kept, const Interval& in, uint2 own, uint2 before,
                                const uint64_t* candidates) {
  Verdict v{static_cast<uint64_t>(in.low) << 32, 0, 0, before.x + before.y, in.wanted};
  if (threadIdx.x == 0) s.tied = 0;
  if (in.whole()) {
    __syncthreads();
    return v;
  }
  if (in.by_number()) {
    const uint32_t left = in.need > before.y ? in.need - before.y : 0;
    v.least = (static_cast<uint64_t>(in.low) + 1) << 32;
    v.tie_key = in.low, v.tie_take = min(left, own.y);
    v.base = before.x + min(before.y, in.need);
    __syncthreads();
    if (threadIdx.x == 0) s.tied = 1;
    __syncthreads();
    return v;
  }
  const uint32_t t = threadIdx.x;
  if (candidates != s.candidates && t < in.inside)
    s.candidates[t] = __ldcg(reinterpret_cast<const unsigned long long*>(candidates) + t);
  if (t == 0) s.number = 0;
  __syncthreads();
  if (t < in.inside) {
    const uint64_t mine = s.candidates[t];
    uint32_t better = 0;
    for (uint32_t i = 0; i < in.inside; ++i) better += s.candidates[i] > mine;
    if (better == in.need - 1) s.cut = mine;
    if (better == in.need) s.edges[0] = static_cast<uint32_t>(mine >> 32);
    const int32_t position = static_cast<int32_t>(~static_cast<uint32_t>(mine));
    if (better < in.need && position < kept.first) atomicAdd(&s.number, 1u);
  }
  __syncthreads();
  v.least = s.cut, v.base = before.x + s.number;
  if (t == 0) s.tied = s.edges[0] == static_cast<uint32_t>(s.cut >> 32);
  __syncthreads();
  return v;
}

/// Winners among all kept scores, in order. Each warp walks over its part twice: to count, and to write.
__device__ inline void write_all(DecodeShared& s, const Kept& kept, const Verdict& v, const RowWriter& writer) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31, warps = kDecodeThreads / 32;
  const uint32_t part = (kept.count / 32 + warps - 1) / warps * 32;
  const uint32_t first = warp * part, last = min(kept.count, first + part);
  uint32_t wins = 0, ties = 0;
  for (uint32_t i = first + lane; i < last; i += 32) {
    const uint32_t key = kept.keys[i];
    wins += v.wins(key, kept.first + static_cast<int32_t>(i)), ties += key == v.tie_key;
  }
  wins = __reduce_add_sync(~0u, wins), ties = __reduce_add_sync(~0u, ties);
  if (lane == 0) s.warps[warp] = wins, s.warps[16 + warp] = v.tie_key != kNotLive ? ties : 0;
  __syncthreads();
  uint32_t won = 0, tied = 0;
  for (uint32_t w = 0; w < warp; ++w) won += s.warps[w], tied += s.warps[16 + w];
  for (uint32_t i = first; i < last; i += 32) {
    const uint32_t key = i + lane < last ? kept.keys[i + lane] : kNotLive;
    const int32_t position = kept.first + static_cast<int32_t>(i + lane);
    const bool win = key != kNotLive && v.wins(key, position), tie = key != kNotLive && key == v.tie_key;
    const uint32_t win_mask = __ballot_sync(~0u, win), tie_mask = __ballot_sync(~0u, tie), below = (1u << lane) - 1;
    const uint32_t number = tied + __popc(tie_mask & below);
    if (win || (tie && number < v.tie_take))
      writer.put(v.base + won + __popc(win_mask & below) + min(number, v.tie_take), position, score_of_key(key));
    won += __popc(win_mask), tied += __popc(tie_mask);
  }
  __syncthreads();
}

}  // namespace topkey::cuda
