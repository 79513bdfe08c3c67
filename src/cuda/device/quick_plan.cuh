// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Which keys a block of the quick decode kernel scores. Rows that share a read are tiles, tiles are units of 64 keys. Where
// slices that end with their tile are not much longer than equal ones, each block has a slice of one tile: a second one
// costs a sample, a telling and a settling. Else all units are cut into equal slices. Every block works it out for itself.
#pragma once
#include "cuda/device/quick_job.cuh"

namespace topkey::cuda {

/// Sixteenths by which slices may be longer than equal ones, if blocks have keys of one tile each then. A row of 128K keys
/// among 63 of 1K to 4K took 28 us in place of 37, 64 rows of 1K to 128K 82 in place of 100.
constexpr int kLongerSlices = 8;
constexpr int kTilesOfLane = kQuickRows / 32;
struct TileEnds {
  int32_t of[kTilesOfLane];
};
/// Of a lane's tiles, side by side; by one warp.
template <int kShare>
__device__ __forceinline__ TileEnds read_ends(const QuickJob& job) {
  TileEnds ends;
#pragma unroll
  for (int e = 0; e < kTilesOfLane; ++e) {
    const int t = static_cast<int>(threadIdx.x & 31) * kTilesOfLane + e;
    const TileRows rows = t < job.tiles ? rows_of_tile<kShare>(job, t) : TileRows{0, 0};
    ends.of[e] = 0;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      if (i < static_cast<int>(rows.count)) ends.of[e] = max(ends.of[e], end_of_row(job, rows.first + i));
    }
  }
  return ends;
}

/// Blocks that a tile of so many units gets, if each has about 1 / inverse of them.
__device__ __forceinline__ uint32_t blocks_of(uint32_t units, float inverse) {
  return __float2uint_ru(static_cast<float>(units) * inverse);
}
/// The shortest slices, of some lengths, with which blocks have one tile each: 1 / length; 0: such slices were too long.
__device__ __forceinline__ float cut_at_ends(const uint32_t (&own)[kTilesOfLane], uint32_t total, uint32_t most) {
  const float equal = fmaxf(static_cast<float>(total) / static_cast<float>(gridDim.x), kQuickGroups);
  float found = 0.0f;
#pragma unroll
  for (int step = kLongerSlices; step >= 0; --step) {
    float length = equal * (1.0f + static_cast<float>(step) / 16.0f);
    if (equal <= static_cast<float>(most)) length = fminf(length, static_cast<float>(most));
    const float inverse = 1.0f / length;
    uint32_t blocks = 0;
#pragma unroll
    for (int e = 0; e < kTilesOfLane; ++e) blocks += blocks_of(own[e], inverse);
    if (__reduce_add_sync(~0u, blocks) <= gridDim.x) found = inverse;
  }
  return found;
}

/// A lane's tiles, and units before the first.
struct LaneTiles {
  uint32_t own[kTilesOfLane], before, total;
};
/// This block has a slice of one tile, of those that get `blocks`.
__device__ __forceinline__ void plan_one_tile(QuickShared& s, const LaneTiles& t,
                                              const uint32_t (&blocks)[kTilesOfLane]) {
  uint32_t sum = 0, before = t.before;
#pragma unroll
  for (int e = 0; e < kTilesOfLane; ++e) sum += blocks[e];
  uint32_t index = blockIdx.x - (sum_lanes_up(sum) - sum);  // among the tile's, if less than their number
#pragma unroll
  for (int e = 0; e < kTilesOfLane; ++e) {
    if (index < blocks[e]) {
      s.first_tile = s.last_tile = (threadIdx.x & 31) * kTilesOfLane + e;
      s.slots[1] = {index, blocks[e]};
      s.first = before + t.own[e] * index / blocks[e], s.last = before + t.own[e] * (index + 1) / blocks[e];
    }
    index -= blocks[e], before += t.own[e];
  }
}
/// This block has one of equal slices of all units.
__device__ __forceinline__ void plan_equal_slice(QuickShared& s, const LaneTiles& t) {
  const uint32_t b = blockIdx.x, working = min(max(t.total / kQuickGroups, 1u), gridDim.x);
  if (b >= working) return;
  const uint32_t first = t.total * b / working, last = t.total * (b + 1) / working;
  uint32_t before = t.before;
#pragma unroll
  for (int e = 0; e < kTilesOfLane; ++e) {
    const uint32_t own = t.own[e], tile = (threadIdx.x & 31) * kTilesOfLane + e;
    const bool begins = before <= first && first < before + own, closes = before < last && last <= before + own;
    if (begins || closes) {
      // Block of unit u: (u + 1) * working - 1, divided by total.
      const uint32_t low = ((before + 1) * working - 1) / t.total, high = ((before + own) * working - 1) / t.total;
      if (begins) s.first_tile = tile, s.slots[0] = {b - low, high - low + 1};
      if (closes) s.last_tile = tile, s.slots[1] = {b - low, high - low + 1};
    }
    before += own;
  }
  if ((threadIdx.x & 31) == 0) s.first = first, s.last = last;
}

/// By one warp. Blocks have at least a unit for each of their warpgroups. What a block without units has must be there
/// before.
template <int kShare>
__device__ __forceinline__ void make_plan(const QuickJob& job, QuickShared& s, TileEnds ends) {
  const uint32_t lane = threadIdx.x & 31;
  LaneTiles t;
  uint32_t units = 0, longest = 0, tiles = 0;
#pragma unroll
  for (int e = 0; e < kTilesOfLane; ++e) {
    const int32_t end = max(0, min(ends.of[e], job.max_len));
    s.ends[lane * kTilesOfLane + e] = end, s.before[lane * kTilesOfLane + e] = units;
    t.own[e] = end <= job.whole ? 0 : static_cast<uint32_t>(end + kTileKeys - 1) / kTileKeys;
    units += t.own[e], longest = max(longest, t.own[e]), tiles += t.own[e] != 0;
  }
  longest = __reduce_max_sync(~0u, longest), tiles = __reduce_add_sync(~0u, tiles);
  const uint32_t up = sum_lanes_up(units);
  t.total = __shfl_sync(~0u, up, 31), t.before = up - units;
#pragma unroll
  for (int e = 0; e < kTilesOfLane; ++e) s.before[lane * kTilesOfLane + e] += t.before;
  if (lane == 31) s.before[kQuickRows] = t.total;
  if (t.total == 0) return;
  uint32_t blocks[kTilesOfLane];
  if (t.total == tiles * longest && tiles <= gridDim.x) {
    const uint32_t each = min(gridDim.x / tiles, max(longest / kQuickGroups, 1u));
#pragma unroll
    for (int e = 0; e < kTilesOfLane; ++e) blocks[e] = t.own[e] != 0 ? each : 0;
    return plan_one_tile(s, t, blocks);
  }
  const float inverse =
      cut_at_ends(t.own, t.total, min(job.words / kShare, static_cast<uint32_t>(kMostEntries)) / kTileKeys);
  if (inverse == 0.0f) return plan_equal_slice(s, t);
#pragma unroll
  for (int e = 0; e < kTilesOfLane; ++e) blocks[e] = blocks_of(t.own[e], inverse);
  plan_one_tile(s, t, blocks);
}

/// A block's units of one tile.
struct QuickSegment {
  uint32_t first, last;  ///< of the whole launch
};
__device__ __forceinline__ QuickSegment segment_of(const QuickShared& s, uint32_t tile) {
  return {max(s.before[tile], s.first), min(s.before[tile + 1], s.last)};
}
/// Of a tile's sample: a unit a warpgroup, spread over the tile, the same for all blocks.
__device__ __forceinline__ uint32_t sample_unit(const QuickShared& s, uint32_t tile, uint32_t group) {
  const uint32_t first = s.before[tile], units = s.before[tile + 1] - first;
  return first + units * (2 * group + 1) / (2 * kQuickGroups);
}

}  // namespace topkey::cuda
