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

/// A warp's part of the entries: a multiple of 128, four a lane at a time, but for the last.
struct Part {
  uint32_t first, last;
  __device__ explicit Part(uint32_t count) {
    constexpr uint32_t kWarps = kDecodeThreads / 32;
    const uint32_t each = (count + kWarps * 128 - 1) / (kWarps * 128) * 128;
    first = min(count, threadIdx.x / 32 * each), last = min(count, first + each);
  }
};
/// Entries i .. i + 3 of those before `last`; past it none.
__device__ __forceinline__ uint4 four_keys(const uint32_t* keys, uint32_t i, uint32_t last) {
  if (i + 4 <= last) return *reinterpret_cast<const uint4*>(keys + i);
  return {i < last ? keys[i] : kNotLive, i + 1 < last ? keys[i + 1] : kNotLive, i + 2 < last ? keys[i + 2] : kNotLive,
          kNotLive};
}

/// Answers of one row. What most callers want, positions and nothing else, takes few instructions.
struct AnswerWriter {
  const DecodeJob& job;
  const Kept& kept;
  bool plain;
  int32_t* indices;
  int32_t add;

  __device__ AnswerWriter(const DecodeJob& j, const Kept& k) : job(j), kept(k) {
    const Selection& out = j.emission.out;
    plain = out.slots.data == nullptr && out.scores.data == nullptr && j.emission.shard.world_size <= 1 &&
            out.indices.data != nullptr && out.index_base.data == nullptr && out.indices.stride[1] == 1;
    indices = plain ? element<int32_t>(out.indices, j.first_row + k.row, 0) : nullptr;
    add = static_cast<int32_t>(-k.start);
  }
  __device__ __forceinline__ void put(uint32_t j, int32_t position, uint32_t key) const {
    if (plain) {
      indices[j] = position + add;
    } else {
      put_all(job, kept, j, position, key);
    }
  }
  __device__ static RowWriter all(const DecodeJob& job, const Kept& k) {
    return RowWriter(job.emission, job.first_row + k.row, k.request, k.start);
  }
  __device__ __noinline__ static void put_all(const DecodeJob& job, const Kept& k, uint32_t j, int32_t position,
                                              uint32_t key) {
    all(job, k).put(j, position, score_of_key(key));
  }
};

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

/// The interval of a bin that holds too many keys, narrowed until they fit, all win, or are equal. bins: room.
inline __device__ __noinline__ void narrow(DecodeShared& s, const Kept& kept, Meeting& meeting, uint32_t* bins,
                                           uint32_t* of_row, bool first_block, Interval& in) {
  const int warp = threadIdx.x / 32;
  if (warp < 2) {
    const bool open = warp == 1 && in.bin == kDecodeBins - 1;
    const uint32_t edge = open ? kPastInfinity : first_key_of_bin(kept.range, in.bin + warp);
    if (threadIdx.x % 32 == 0) s.edges[warp] = edge;
  }
  sync_scorers();
  in.low = s.edges[0], in.high = s.edges[1] - 1, in.by_keys = true;
  // Where all inside win, the last winner is looked for if a dropped key may equal it.
  while (in.many() && in.low < in.high && (in.ties() || in.dropped >= in.low)) {
    const int shift = max(0, 22 - __clz(static_cast<int>(in.high - in.low)));  // width >> shift < 1024
    if (!meeting.alone()) {
      meeting.meet();  // nobody reads the bins of the round before any more
      for (int b = threadIdx.x; first_block && b < kDecodeBins; b += kDecodeThreads) __stcg(of_row + b, 0u);
      meeting.meet();
    }
    sync_scorers();
    for (int b = threadIdx.x; b < kDecodeBins; b += kDecodeThreads) bins[b] = 0;
    sync_scorers();
    each_kept(kept, [&](uint32_t key, uint32_t) {
      if (key >= in.low && key <= in.high) atomicAdd(bins + ((key - in.low) >> shift), 1u);
    });
    sync_scorers();
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

/// Behind the first meeting: the bin of the k-th best.
__device__ __forceinline__ Interval find_interval(DecodeShared& s, const Kept& kept, const Meeting& meeting,
                                                  const uint32_t* bins, const uint32_t* of_row, uint32_t topk) {
  Interval in{};
  const RowExchange* row = meeting.row();
  in.live = meeting.alone() ? kept.live : __ldcg(&row->live);
  in.dropped = meeting.alone() ? kept.dropped : __ldcg(&row->dropped);
  const uint32_t counted = meeting.alone() ? kept.counted() : __ldcg(&row->counted);
  in.wanted = min(topk, in.live), in.bin = -1;
  if (in.live <= topk) return in;  // else topk are counted too: a list that has dropped keys still has so many
  const Crossing c = find_crossing(meeting.alone() ? bins : of_row, counted, topk, s.warps, &s.crossing);
  in.bin = static_cast<int32_t>(c.bin);
  in.above = c.above, in.inside = c.inside, in.need = topk - c.above;
  return in;
}

/// How many keys this block has above the interval and inside; and which inside, if they are to be ranked. Each warp
/// walks over its part of the entries.
__device__ __forceinline__ uint2 share_of_interval(DecodeShared& s, Kept& kept, OpenRow& of_row, const Meeting& meeting,
                                                   const Interval& in, uint64_t* candidates) {
  if (threadIdx.x == 0) s.inside = s.number = 0;
  sync_scorers();
  const Part part(kept.count);
  const BinRange range = kept.range;
  uint32_t above = 0, inside = 0, nans = 0;
  const uint32_t* keys = kept.keys;
  const bool lists = !in.many();
#pragma unroll 1
  for (uint32_t i = part.first + (threadIdx.x & 31) * 4; i < part.last; i += 128) {
    const uint4 four = four_keys(keys, i, part.last);
    const uint32_t each[4] = {four.x, four.y, four.z, four.w};
    uint32_t hits = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t key = each[e];
      const int bin = range.bin_of_key(key);
      const bool live = key != kNotLive;
      const bool over = in.by_keys ? key > in.high : live && bin > in.bin;
      const bool within = in.by_keys ? key >= in.low && !over : live && bin == in.bin;
      nans += key == kNanKey, above += over, inside += within;
      hits |= (within && lists ? 1u : 0u) << e;
    }
    for (; hits != 0; hits &= hits - 1) {
      const int e = __ffs(static_cast<int>(hits)) - 1;
      const uint32_t key = e == 0 ? each[0] : e == 1 ? each[1] : e == 2 ? each[2] : each[3];
      s.candidates[atomicAdd(&s.number, 1u)] = ranked(key, kept.position(i + e));
    }
  }
  above = __reduce_add_sync(~0u, above), inside = __reduce_add_sync(~0u, inside);
  if ((threadIdx.x & 31) == 0) of_row.above_of_warp[threadIdx.x / 32] = above;
  if ((threadIdx.x & 31) == 0 && inside != 0) atomicAdd(&s.inside, inside);
  if (kept.positions == nullptr && nans != 0) atomicAdd(&kept.nans, nans);
  sync_scorers();
  if (!meeting.alone() && !in.many() && threadIdx.x < 32 && s.number > 0) {  // one place for all of them
    uint32_t at = 0;
    if (threadIdx.x == 0) at = atomicAdd(&meeting.row()->candidates, s.number);
    at = __shfl_sync(~0u, at, 0);
    for (uint32_t i = threadIdx.x; i < s.number; i += 32)
      __stcg(reinterpret_cast<unsigned long long*>(candidates) + at + i, s.candidates[i]);
  }
  uint32_t sum = 0;
#pragma unroll
  for (int w = 0; w < kDecodeThreads / 32; ++w) sum += of_row.above_of_warp[w];
  return {sum, s.inside};
}

/// Behind the second meeting. before: of the blocks before this one, sums of their shares. s.candidates holds them all
/// behind the last barrier.
__device__ __forceinline__ Verdict judge(DecodeShared& s, const Interval& in, uint2 own, uint2 before) {
  Verdict v{uint64_t{kNanKey} << 32, 0, 0, before.x, in.wanted};
  if (in.bin < 0) return v;
  if (in.many()) {
    v.base += min(before.y, in.need);
    v.least = static_cast<uint64_t>(in.low) << 32;
    if (threadIdx.x == 0) s.tied = in.ties() || (in.low == in.high && in.dropped == in.low);
    if (!in.ties()) return v;
    const uint32_t left = in.need > before.y ? in.need - before.y : 0;
    v.least = (static_cast<uint64_t>(in.low) + 1) << 32;
    v.tie_key = in.low, v.tie_take = min(left, own.y);
    return v;
  }
  const uint32_t t = threadIdx.x;
  if (t < in.inside) {
    const uint64_t mine = s.candidates[t];
    uint32_t better = 0;
#pragma unroll 4
    for (uint32_t i = 0; i < in.inside; ++i) better += s.candidates[i] > mine;
    if (better == in.need - 1) s.cut = mine;
    if (better == in.need) s.edges[0] = static_cast<uint32_t>(mine >> 32);
  }
  sync_scorers();
  v.least = s.cut;
  const uint32_t last = static_cast<uint32_t>(s.cut >> 32);
  if (t == 0) s.tied = in.dropped == last || (in.need < in.inside && s.edges[0] == last);
  return v;
}

/// Keys inside an interval of too many, in the parts of the warps before.
inline __device__ __noinline__ uint32_t count_inside(DecodeShared& s, const Kept& kept, const Interval& in, Part part) {
  uint32_t inside = 0;
  for (uint32_t i = part.first + (threadIdx.x & 31); i < part.last; i += 32)
    inside += kept.keys[i] >= in.low && kept.keys[i] <= in.high;
  inside = __reduce_add_sync(~0u, inside);
  if ((threadIdx.x & 31) == 0) s.warps[threadIdx.x / 32] = inside;
  sync_scorers();
  uint32_t before = 0;
  for (uint32_t w = 0; w < threadIdx.x / 32; ++w) before += s.warps[w];
  return before;
}

/// How many of the candidates win and stand before a position; the same in all lanes of a warp.
__device__ __forceinline__ uint32_t winners_before(const DecodeShared& s, const Interval& in, const Verdict& v,
                                                   int32_t position) {
  uint32_t count = 0;
  for (uint32_t i = threadIdx.x & 31; i < in.inside; i += 32) {
    const uint64_t entry = s.candidates[i];
    count += entry >= v.least && static_cast<int32_t>(~static_cast<uint32_t>(entry)) < position;
  }
  return __reduce_add_sync(~0u, count);
}

/// Which of the lanes' four entries win where equals are shared out by number: tied counts those before.
__device__ __forceinline__ void mark_ties(const Verdict& v, const uint32_t (&each)[4], uint32_t below, uint32_t& tied,
                                          uint32_t (&wins)[4], uint32_t& rank) {
  const uint32_t lane = threadIdx.x & 31;
  uint32_t ties[4], number = tied;
  for (int e = 0; e < 4; ++e) {
    ties[e] = __ballot_sync(~0u, each[e] == v.tie_key);
    number += __popc(ties[e] & below);
  }
  for (int e = 0; e < 4; ++e) {
    const bool tie = (ties[e] >> lane & 1u) != 0;
    wins[e] = __ballot_sync(~0u, each[e] > v.tie_key || (tie && number < v.tie_take));
    rank += __popc(wins[e] & below);
    number += tie, tied += __popc(ties[e]);
  }
}

/// Winners among all kept scores, in order; each warp those of its part.
__device__ __forceinline__ void write_all(DecodeShared& s, const Kept& kept, const OpenRow& of_row, const Interval& in,
                                          const Verdict& v, const AnswerWriter& writer) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31, below = (1u << lane) - 1;
  const Part part(kept.count);
  uint32_t at = v.base;
  for (uint32_t w = 0; w < warp; ++w) at += of_row.above_of_warp[w];
  const bool ranks = in.bin >= 0 && !in.many();
  uint32_t tied = 0;
  if (ranks) {
    at += winners_before(s, in, v, kept.first + static_cast<int32_t>(part.first));
  } else if (in.many()) {  // keys inside, of the parts before
    const uint32_t inside = count_inside(s, kept, in, part);
    at += in.ties() ? min(inside, v.tie_take) : inside;
    tied = inside;
  }
  const uint32_t* keys = kept.keys;
  const int32_t origin = kept.first;
#pragma unroll 1
  for (uint32_t base = part.first; base < part.last; base += 128) {
    const uint32_t i = base + lane * 4;
    const uint4 four = four_keys(keys, i, part.last);
    const uint32_t each[4] = {four.x, four.y, four.z, four.w};
    uint32_t wins[4], rank = at;
    if (v.tie_key == kNotLive) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        wins[e] = __ballot_sync(~0u, ranked(each[e], origin + static_cast<int32_t>(i) + e) >= v.least);
        rank += __popc(wins[e] & below);
      }
    } else {
      mark_ties(v, each, below, tied, wins, rank);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (wins[e] >> lane & 1u) writer.put(rank++, origin + static_cast<int32_t>(i) + e, each[e]);
      at += __popc(wins[e]);
    }
  }
}

}  // namespace topkey::cuda
