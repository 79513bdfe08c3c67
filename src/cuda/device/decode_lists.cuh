// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Where a block of the decode kernel cannot keep all scores of a row: a list of those that its own best topk may contain,
// thinned when it is nearly full, and its winners brought into order of position.
#pragma once
#include "cuda/device/decode_score.cuh"

namespace topkey::cuda {

__device__ __forceinline__ uint64_t ranked(uint32_t key, int32_t position) {
  return static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(position);
}

/// The k-th largest of a list's entries, key and position; k <= count. Digit by digit.
__device__ inline uint64_t kth_of_list(DecodeShared& s, const Kept& k, uint32_t wanted) {
  uint32_t* bins = reinterpret_cast<uint32_t*>(s.candidates);
  uint64_t prefix = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    sync_scorers();
    for (int b = threadIdx.x; b < 256; b += kDecodeThreads) bins[b] = 0;
    sync_scorers();
    for (uint32_t i = threadIdx.x; i < k.count; i += kDecodeThreads) {
      const uint64_t entry = ranked(k.keys[i], k.positions[i]);
      if (shift == 56 || entry >> (shift + 8) == prefix) atomicAdd(bins + (entry >> shift & 255), 1u);
    }
    sync_scorers();
    if (threadIdx.x < 32) {
      const int first = 255 - 8 * static_cast<int>(threadIdx.x);  // lane 0: the highest eight
      uint32_t sum = 0;
      for (int e = 0; e < 8; ++e) sum += bins[first - e];
      uint32_t above = sum;
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, above, step);
        if (static_cast<int>(threadIdx.x) >= step) above += other;
      }
      above -= sum;
      for (int e = 0; e < 8; ++e) {
        const uint32_t own = bins[first - e];
        if (above < wanted && wanted <= above + own) s.edges[0] = static_cast<uint32_t>(first - e), s.edges[1] = above;
        above += own;
      }
    }
    sync_scorers();
    prefix = prefix << 8 | s.edges[0];
    wanted -= s.edges[1];
  }
  sync_scorers();
  return prefix;
}

/// Drops entries below `least` from a list, in place, and from the bins.
__device__ inline void compact(DecodeShared& s, Kept& k, uint32_t* bins, uint64_t least) {
  constexpr int kEach = 4;
  const BinRange range = s.ranges[k.tile_row];
  uint32_t kept = 0, dropped = 0;
  const uint32_t count = k.count;
  for (uint32_t base = 0; base < count; base += kDecodeThreads * kEach) {
    uint32_t keys[kEach], stay = 0, total = 0;
    int32_t positions[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const uint32_t i = base + threadIdx.x * kEach + e;
      keys[e] = i < count ? k.keys[i] : kNotLive, positions[e] = i < count ? k.positions[i] : 0;
      if (keys[e] == kNotLive) continue;
      if (ranked(keys[e], positions[e]) >= least) {
        stay |= 1u << e;
      } else {
        const int bin = range.bin_of_key(keys[e]);
        if (bin > 0) atomicSub(bins + bin, 1u);
        dropped = max(dropped, keys[e]);
      }
    }
    uint32_t at = kept + scan_scorers(__popc(stay), s.warps, &total);  // all have read before any writes
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (stay >> e & 1u) k.keys[at] = keys[e], k.positions[at] = positions[e], ++at;
    }
    kept += total;
  }
  if (dropped != 0) atomicMax(&k.dropped, dropped);
  sync_scorers();
  if (threadIdx.x == 0) k.count = kept;
}

/// Drops what the block's own topk cannot contain: by the bins while they tell enough apart, else exactly. Keys of later
/// units stand behind those of the list, so of equals the list's win. By all threads, between barriers.
inline __device__ __noinline__ void thin_list(DecodeShared& s, Kept& k, uint32_t* bins) {
  const uint32_t topk = k.topk;
  if (k.count <= topk) return;
  const Crossing c = find_crossing(bins, k.count, topk, s.warps, &s.crossing);
  uint64_t least;
  uint32_t next;
  if (c.bin > 0 && c.above + c.inside <= topk + (k.capacity - topk) / 2) {
    if (threadIdx.x < 32) {
      const uint32_t edge = first_key_of_bin(s.ranges[k.tile_row], static_cast<int>(c.bin));
      if (threadIdx.x == 0) s.edges[0] = edge;
    }
    sync_scorers();
    next = s.edges[0];
    least = static_cast<uint64_t>(next) << 32;
  } else {
    least = kth_of_list(s, k, topk);
    next = static_cast<uint32_t>(least >> 32) + 1;
  }
  compact(s, k, bins, least);
  if (threadIdx.x == 0) k.least = max(k.least, next);
  sync_scorers();
}

/// Which of a block's kept keys win, and where its winners go.
struct Verdict {
  uint64_t least;              ///< key << 32 | ~position: wins from here on
  uint32_t tie_key, tie_take;  ///< and of this key's entries the first so many, by position; 0 = no such key
  uint32_t base;               ///< winners of the blocks before
  uint32_t count;              ///< of the row
  __device__ bool wins(uint32_t key, int32_t position) const {
    return (static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(position)) >= least;
  }
};

/// Winners of a list, whose entries lie in any order: a bitmap of their positions, some of them at a time, gives each its
/// place.
template <class Wins, class Put>
__device__ void place_by_position(DecodeShared& s, const Kept& kept, uint32_t* room, uint32_t room_words,
                                  const Wins& wins, const Put& put) {
  const uint32_t words = room_words / 2;
  uint32_t* before = room + words;
  uint32_t placed = 0;
  for (int64_t base = kept.first; base < kept.last; base += int64_t{words} * 32) {
    const uint32_t reach =
        static_cast<uint32_t>(min(static_cast<long long>(words) * 32, static_cast<long long>(kept.last - base)));
    const uint32_t used = (reach + 31) / 32, own = (used + kDecodeThreads - 1) / kDecodeThreads;
    for (uint32_t w = threadIdx.x; w < used; w += kDecodeThreads) room[w] = 0;
    sync_scorers();
    for (uint32_t i = threadIdx.x; i < kept.count; i += kDecodeThreads) {
      const int64_t at = kept.positions[i] - base;
      if (at >= 0 && at < reach && wins(i)) atomicOr(room + at / 32, 1u << (at % 32));
    }
    sync_scorers();
    uint32_t sum = 0, total = 0;
    for (uint32_t e = 0; e < own; ++e) {
      const uint32_t w = threadIdx.x * own + e;
      if (w < used) sum += __popc(room[w]);
    }
    uint32_t at_word = scan_scorers(sum, s.warps, &total);
    for (uint32_t e = 0; e < own; ++e) {
      const uint32_t w = threadIdx.x * own + e;
      if (w < used) before[w] = at_word, at_word += __popc(room[w]);
    }
    sync_scorers();
    for (uint32_t i = threadIdx.x; i < kept.count; i += kDecodeThreads) {
      const int64_t at = kept.positions[i] - base;
      if (at < 0 || at >= reach || !(room[at / 32] >> (at % 32) & 1u)) continue;
      put(placed + before[at / 32] + __popc(room[at / 32] & ((1u << (at % 32)) - 1)), i);
    }
    placed += total;
    sync_scorers();
  }
}

template <class Writer>
inline __device__ __noinline__ void write_list(DecodeShared& s, Kept& kept, const Verdict& v, const Writer& writer,
                                               uint32_t* room, uint32_t room_words) {
  if (v.tie_take > 0) {  // the equals that win, by position, are marked
    place_by_position(
        s, kept, room, room_words, [&](uint32_t i) { return kept.keys[i] == v.tie_key; },
        [&](uint32_t number, uint32_t i) {
          if (number < v.tie_take) kept.positions[i] |= INT32_MIN;
        });
    for (uint32_t i = threadIdx.x; i < kept.count; i += kDecodeThreads) {
      if (kept.positions[i] < 0) kept.positions[i] &= INT32_MAX, kept.keys[i] = kForcedKey;
    }
    sync_scorers();
  }
  place_by_position(
      s, kept, room, room_words, [&](uint32_t i) { return v.wins(kept.keys[i], kept.positions[i]); },
      [&](uint32_t number, uint32_t i) {
        const uint32_t key = kept.keys[i] == kForcedKey ? v.tie_key : kept.keys[i];
        writer.put(v.base + number, kept.positions[i], key);
      });
}

}  // namespace topkey::cuda
