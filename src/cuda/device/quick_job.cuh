// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The quick decode kernel's data: what it is told, what a block has of its rows, and how blocks tell each other of them.
#pragma once
#include "cuda/device/block_maxima.cuh"
#include "cuda/device/decode_bins.cuh"
#include "cuda/device/order.cuh"
#include "cuda/device/plain_decode.cuh"
#include "cuda/device/tiles_sm90.cuh"
#include "cuda/device/warp.cuh"

namespace topkey::cuda {

constexpr int kQuickThreads = 512, kQuickGroups = kQuickThreads / 128;  ///< of them a warpgroup each
constexpr int kQuickAll = kQuickThreads + 128;                          ///< and four warps that bring keys
constexpr int kQuickStages = 3;                                         ///< units under way in a warpgroup
constexpr int kQuickRows = 128, kQuickBins = kDecodeBins, kQuickCandidates = 256;
constexpr int kMostEntries = 32768;  ///< that a block has of a row
/// Most rows of a request that share a read of its keys: a tile.
constexpr int kMostShare = 4;
/// Of each row's bins those in use, from 0 on: four rows' would not leave room for all scores.
template <int kShare>
constexpr int kBinsOf = kShare == kMostShare ? kQuickBins / 2 : kQuickBins;

struct QuickJob : PlainDecode {
  int32_t tiles, parts;  ///< of all rows, of a request
  uint32_t words;        ///< 4 bytes each, for what a block keeps, and bins of a second tile
  int32_t window;        ///< keys of which the bins must hold the best topk
  uint32_t* bins;        ///< [rows, kQuickBins]
  uint4* headers;        ///< [rows] blocks that have arrived, once per step; keys that are not live
  uint2* shares;         ///< [rows, blocks] keys above the interval in question, and inside
  uint64_t* candidates;  ///< [rows, kQuickCandidates] key of the order << 32 | ~position
  BlockMaxima maxima;
};

/// A tile's rows.
struct TileRows {
  uint32_t first, count;
};
template <int kShare>
__device__ __forceinline__ TileRows rows_of_tile(const QuickJob& job, uint32_t tile) {
  if (kShare == 1) return {tile, 1};
  const uint32_t next_n = static_cast<uint32_t>(job.table_n), parts = static_cast<uint32_t>(job.parts);
  const uint32_t request = tile / parts, done = (tile - request * parts) * kShare;
  return {request * next_n + done, min(static_cast<uint32_t>(kShare), next_n - done)};
}

/// Threads that settle a row: half a block where rows share a read, so that two are settled side by side.
template <int kShare>
constexpr int kTeamOf = kShare == 1 ? kQuickThreads : kQuickThreads / 2;

/// What a block has of a row: all scores, or a list of those that may win, with their positions, which ascend.
struct QuickRow {
  uint32_t* scores;                    ///< see quick_place
  int32_t* positions;                  ///< of a list; null: entry i stands at first + i
  uint32_t row, count, index, blocks;  ///< entries; this block among those that share the row
  int32_t first, end;                  ///< position of entry 0; end of the row
  BinRange range;
};
struct QuickShare {
  uint32_t index, blocks;
};
struct QuickRoom {
  uint32_t warps[kQuickThreads / 32];
  uint32_t above, inside, number;
  uint32_t bin, bin_above, bin_inside;
  uint32_t before_above, before_inside;
  uint32_t edges[2];
  uint64_t cut;
  union {
    uint64_t candidates[kQuickCandidates];
    float4 moments[kQuickThreads / 32 * kMostShare];  ///< of a sample's scores, while a tile is scored
  };
};
struct QuickShared {
  alignas(16) float scale[kQuickGroups][kQuickStages][kTileKeys];
  uint64_t full[kQuickGroups][kQuickStages], empty[kQuickGroups][kQuickStages];
  uint32_t absent[kQuickGroups][kQuickStages];  ///< the unit's page does not exist
  QuickRoom rooms[2];
  QuickRow rows[2][kMostShare];  ///< of the first tile and the last
  uint32_t warps[kQuickThreads / 32];
  uint32_t dead[2][kMostShare];                 ///< their keys in pages that do not exist
  int32_t row_ends[kMostShare];                 ///< of the tile in work
  uint32_t first, last, first_tile, last_tile;  ///< units and tiles of this block
  QuickShare slots[2];                          ///< of its first and its last tile
  uint32_t before[kQuickRows + 1];              ///< units before a tile
  int32_t ends[kQuickRows];                     ///< of a tile's longest row
};

/// Where entry i of the scores lies: threads side by side, of which each has 4 to 128 entries side by side, read vectors of
/// 4 with few conflicts of banks.
__device__ __forceinline__ uint32_t quick_place(uint32_t i) { return i ^ ((i >> 5 ^ i >> 7) & 7) << 2; }
/// The same of a key of the unit-th unit, whose place in unit 0 is `own`.
__device__ __forceinline__ uint32_t quick_place_of(uint32_t unit, uint32_t own) {
  return unit * kTileKeys + (own ^ ((unit << 1 ^ unit >> 1) & 7) << 2);
}
__device__ __forceinline__ uint32_t key_of_kept(uint32_t bits) {
  return bits == kNotLiveScore ? kNotLive : key_of(__uint_as_float(bits));
}

/// A lane's row among kShare that share a read: lane c of four has row c % kShare, and of it the keys that its scores are of.
template <int kShare>
struct OwnScores {
  static constexpr int kKeys = kShare == 4 ? 2 : 1;
  float of[kKeys];
  bool live[kKeys];  ///< and this lane's to keep
  __device__ __forceinline__ static uint32_t row() { return threadIdx.x % kShare; }
  /// Which of a unit's keys is this lane's first; the second is 8 further. One row alone has each key in two lanes.
  __device__ __forceinline__ static uint32_t key() {
    const uint32_t thread = threadIdx.x % 128, upper = kShare == 1 ? thread & 1 : kShare == 2 ? thread / 2 & 1 : 0;
    return thread / 32 * 16 + thread % 32 / 4 + 8 * upper;
  }
  __device__ __forceinline__ static bool owner() { return kShare != 1 || (threadIdx.x & 2) == 0; }
};

/// Bounds of the bins of a lane's row by some scores of each lane, the same in every block: each warp works them out for
/// itself. One barrier of all that score.
template <int kShare>
__device__ __forceinline__ BinRange range_of_sample(QuickShared& s, const OwnScores<kShare>& scores, int32_t topk,
                                                    int32_t keys) {
  constexpr uint32_t kLanes = kShare == 1 ? ~0u : kShare == 2 ? 0x55555555u : 0x11111111u;
  const uint32_t lane = threadIdx.x & 31, row = OwnScores<kShare>::row();
  float sum = 0.0f, squares = 0.0f;
  int number = 0;
#pragma unroll
  for (int e = 0; e < OwnScores<kShare>::kKeys; ++e) {
    const bool counts = scores.live[e] && fabsf(scores.of[e]) < 1e18f;  // so that no square is infinite
    const float x = counts ? scores.of[e] : 0.0f;
    sum += x, squares += x * x, number += __popc(__ballot_sync(~0u, counts) & kLanes << row);
  }
#pragma unroll
  for (int step = 16; step >= kShare; step /= 2) {
    sum += __shfl_xor_sync(~0u, sum, step), squares += __shfl_xor_sync(~0u, squares, step);
  }
  float same = __uint_as_float(kCanonicalNan);
  if (kShare == 1) {
    const uint32_t counting = __ballot_sync(~0u, scores.live[0] && fabsf(scores.of[0]) < 1e18f);
    const float one = __shfl_sync(~0u, scores.of[0], counting == 0 ? 0 : __ffs(static_cast<int>(counting)) - 1);
    if (counting != 0 && __all_sync(~0u, (counting >> lane & 1u) == 0 || scores.of[0] == one)) same = one;
  }
  float4* moments = s.rooms[1].moments;
  if (lane < kShare) moments[threadIdx.x / 32 * kShare + lane] = {sum, squares, static_cast<float>(number), same};
  named_barrier(7, kQuickThreads);
  constexpr int kAll = kQuickThreads / 32 * kShare;
  float4 m = moments[lane % kAll];
  if (kShare == 1) {
    const float first = __shfl_sync(~0u, m.w, 0);
    if (__all_sync(~0u,
                   m.w == first)) {  // about the only number of the sample, in steps that tell it from the next one
      const float around = fmaxf(fabsf(first) * 1e-5f, 1e-30f);
      return {first - around, fminf(__fdividef(kQuickBins / 2.0f, around), 1e30f)};
    }
  }
  if (kAll > 32) {
    const float4 more = moments[lane + 32];
    m.x += more.x, m.y += more.y, m.z += more.z;
  }
#pragma unroll
  for (int step = kAll < 32 ? kAll / 2 : 16; step >= kShare; step /= 2) {
    m.x += __shfl_xor_sync(~0u, m.x, step), m.y += __shfl_xor_sync(~0u, m.y, step);
    m.z += __shfl_xor_sync(~0u, m.z, step);
  }
  BinRange range = range_of({m.x, m.y, static_cast<int>(m.z)}, static_cast<uint32_t>(topk), keys);
  range.scale *= static_cast<float>(kBinsOf<kShare>) / kQuickBins;
  return range;
}

/// By one thread of a block: the block has written what it tells. Behind a barrier of those that wrote.
__device__ __forceinline__ void arrive_at_row(const QuickJob& job, uint32_t row) {
  add_one_released(&job.headers[row].x);
}
__device__ __forceinline__ void wait_for_row(const QuickJob& job, uint32_t row, uint32_t arrivals) {
  while (load_acquired(&job.headers[row].x) < arrivals) {
  }
}

/// Adds the block's bins of a row to the row's. Behind the next barrier each of its own holds what was in the row's before:
/// how many such keys other blocks have told.
__device__ __forceinline__ void add_bin(uint32_t* own, uint32_t* of_row) {
  const uint32_t keys = *own;
  if (keys != 0) *own = atomicAdd(of_row, keys);
}
/// Of a tile's rows, from `first` on. By all that score.
template <int kShare>
__device__ __forceinline__ void tell_bins(const QuickJob& job, QuickShared& s, TileRows rows, uint32_t slot,
                                          uint32_t* bins) {
  constexpr int kBins = kBinsOf<kShare>;
  uint32_t* of_rows = job.bins + rows.first * kQuickBins;
#pragma unroll
  for (int turn = 0; turn < kShare * kBins / kQuickThreads; ++turn) {
    const uint32_t own = threadIdx.x + turn * kQuickThreads;
    add_bin(bins + own, of_rows + own / kBins * kQuickBins + own % kBins);
  }
  const uint32_t row = rows.first + threadIdx.x;
  const bool speaks = threadIdx.x < rows.count;
  if (speaks && s.dead[slot][threadIdx.x] != 0) atomicAdd(&job.headers[row].y, s.dead[slot][threadIdx.x]);
  named_barrier(7, kQuickThreads);
  if (speaks) arrive_at_row(job, row);
}

__device__ __forceinline__ void put_fill(const PlainDecode& job, uint32_t row, int32_t j) {
  job.out[row * job.out_row + j] = job.fill;
  if (job.scores != nullptr) job.scores[row * job.scores_row + j] = __uint_as_float(0xFF800000u);  // -inf
}
__device__ __forceinline__ void fill_row(const PlainDecode& job, uint32_t row, uint32_t used, uint32_t thread,
                                         uint32_t threads) {
  for (int32_t j = static_cast<int32_t>(used + thread); j < job.columns; j += static_cast<int32_t>(threads))
    put_fill(job, row, j);
}
/// Some of a block's threads, and their barrier.
template <int kThreads>
struct Team {
  QuickRoom& room;
  int barrier;
  __device__ __forceinline__ uint32_t thread() const { return threadIdx.x % kThreads; }
  __device__ __forceinline__ uint32_t lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ uint32_t warp() const { return thread() / 32; }
  __device__ __forceinline__ void sync() const { named_barrier(barrier, kThreads); }
  /// How many of them say so. A barrier, too.
  __device__ __forceinline__ uint32_t count(bool flag) const { return named_barrier_count(barrier, kThreads, flag); }
  /// Exclusive sum over the threads, and of all. One barrier; the room's `warps` must be free.
  __device__ __forceinline__ uint32_t scan(uint32_t value, uint32_t* total) const {
    const uint32_t up = sum_lanes_up(value);
    if (lane() == 31) room.warps[warp()] = up;
    sync();
    const uint32_t of_warp = lane() < kThreads / 32 ? room.warps[lane()] : 0;
    *total = __reduce_add_sync(~0u, of_warp);
    return __reduce_add_sync(~0u, lane() < warp() ? of_warp : 0) + up - value;
  }
};

}  // namespace topkey::cuda
