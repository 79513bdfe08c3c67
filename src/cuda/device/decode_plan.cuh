// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Who scores what in the decode kernel: rows to tiles of rows that share keys, tiles to units of 64 keys, all units in
// equal contiguous slices to thread blocks. Every thread block works it out for itself from the lengths that it finds.
#pragma once
#include "cuda/device/emit.cuh"
#include "cuda/device/key_boxes.cuh"
#include "cuda/device/look.cuh"
#include "cuda/device/select.cuh"
#include "cuda/device/tiles_sm90.cuh"

namespace topkey::cuda {

constexpr int kDecodeThreads = 512, kDecodeGroups = kDecodeThreads / 128;  ///< of them a warpgroup each
constexpr int kDecodeAll = kDecodeThreads + 128;  ///< and four warps that bring keys, one for each
constexpr int kDecodeRows = 256;                  ///< rows of a launch
constexpr int kDecodeTileRows = 4;                ///< most rows that share keys
constexpr int kDecodeStages = 3;                  ///< units under way in a warpgroup
constexpr int kDecodeBins = 1024;
constexpr int kDecodeCandidates = 256;  ///< keys of the bin in question that blocks tell each other
/// Rows share keys where their windows end (and begin) no farther apart.
constexpr int kDecodeApart = 1024;

/// Barrier of all threads but those that bring keys.
__device__ __forceinline__ void sync_scorers() { named_barrier(7, kDecodeThreads); }
/// Exclusive sum over them in thread order, and of all. room: 32 words, free again behind it.
inline __device__ __noinline__ uint2 scan_sums(uint32_t value, uint32_t* room) {
  constexpr uint32_t kWarps = kDecodeThreads / 32;
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  uint32_t sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, step);
    if (lane >= static_cast<uint32_t>(step)) sum += other;
  }
  if (lane == 31) room[warp] = sum;
  sync_scorers();
  uint32_t of_warp = lane < kWarps ? room[lane] : 0;
#pragma unroll
  for (int step = 1; step < 16; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, of_warp, step);
    if (lane >= static_cast<uint32_t>(step)) of_warp += other;
  }
  const uint32_t total = __shfl_sync(~0u, of_warp, kWarps - 1);
  const uint32_t before = __shfl_sync(~0u, of_warp, warp == 0 ? 0 : warp - 1);
  sync_scorers();
  return {(warp == 0 ? 0 : before) + sum - value, total};
}
__device__ __forceinline__ uint32_t scan_scorers(uint32_t value, uint32_t* room, uint32_t* total) {
  const uint2 sums = scan_sums(value, room);
  *total = sums.y;
  return sums.x;
}

/// What thread blocks tell each other of a row; all in the workspace.
struct RowExchange {
  uint32_t arrived;     ///< blocks, once per step
  uint32_t counted;     ///< keys of which the bins speak
  uint32_t candidates;  ///< in its list
  uint32_t live;        ///< keys
  uint32_t dropped;     ///< the best key that a list has dropped or not taken
  uint32_t unused[3];   ///< 16 bytes are cleared at a time
};
struct Exchange {
  RowExchange* rows;     ///< [rows]
  uint32_t* bins;        ///< [rows, kDecodeBins]
  uint2* shares;         ///< [rows, blocks] keys above the interval in question, and inside
  uint64_t* candidates;  ///< [rows, kDecodeCandidates] key of the order << 32 | ~position
};

struct DecodeJob {
  KeyBoxes boxes;  ///< first: it wants the alignment
  LookParams look;
  Query q;
  Emission emission;
  Exchange exchange;
  int64_t first_row;
  int rows, heads, tile_rows;
  int query_alignment;
  int page_shift;  ///< log2 of the page size; -1: not a power of two
  uint32_t words;  ///< 4 bytes each, for the scores that a block keeps
};

struct DecodePlan {
  int32_t low[kDecodeRows], high[kDecodeRows];  ///< positions that a row looks at
  int32_t table_row[kDecodeRows], request[kDecodeRows];
  int64_t start[kDecodeRows];
  bool scored[kDecodeRows];
  uint32_t before[kDecodeRows + 1];                         ///< units before a tile
  int32_t tile_low[kDecodeRows];                            ///< position of a tile's first unit, a multiple of 64
  int32_t tile_high[kDecodeRows];                           ///< end of what any of its rows sees
  int32_t inner_low[kDecodeRows], inner_high[kDecodeRows];  ///< what all of them see
  int16_t tile_row[kDecodeRows + 1];
  uint8_t tile_rows[kDecodeRows];
  uint32_t starts[8], leaders[8], warps[32];
  uint32_t tiles, units, working;  ///< working: blocks that have units
  uint32_t first, last;            ///< units of this block
  uint32_t first_tile, last_tile;  ///< of this block, inclusive; none where first == last
};

/// So many units times blocks that products fit 32 bits.
constexpr uint32_t kFewUnits = 1u << 24;

/// The block that scores unit u.
__device__ __forceinline__ uint32_t block_of(const DecodePlan& p, uint32_t u) {
  if (p.units < kFewUnits) return ((u + 1) * p.working - 1) / p.units;
  return static_cast<uint32_t>(((u + 1ull) * p.working - 1) / p.units);
}
__device__ __forceinline__ uint32_t first_unit_of(const DecodePlan& p, uint32_t block) {
  if (p.units < kFewUnits) return p.units * block / p.working;
  return static_cast<uint32_t>(static_cast<uint64_t>(p.units) * block / p.working);
}

/// Facts of the launch's rows; by all threads, ends with a barrier.
__device__ inline void look_at_decode_rows(const DecodeJob& job, DecodePlan& p) {
  const int r = threadIdx.x;
  if (r < job.rows) {
    int64_t skipped = 0;
    const RowFact f = window_fact(job.look, job.first_row + r, &skipped);
    p.low[r] = f.low, p.high[r] = f.high, p.table_row[r] = f.table_row;
    p.start[r] = f.start, p.request[r] = f.request;
    p.scored[r] = f.n > 0 && (f.n > f.topk || job.look.needs_scores);
    if (blockIdx.x == 0) count(job.look.stats, kSkippedPages, static_cast<uint64_t>(skipped));
  }
  if (blockIdx.x == 0 && r == 0) count(job.look.stats, kRows, static_cast<uint64_t>(job.rows));
  __syncthreads();
}

__device__ __forceinline__ bool near(int32_t a, int32_t b) {
  return a - b < kDecodeApart && b - a < kDecodeApart;  // both are positions, so nothing overflows
}

/// Rows to tiles: runs of rows of one table row, in pieces of job.tile_rows.
__device__ inline void make_tiles(const DecodeJob& job, DecodePlan& p) {
  const int r = threadIdx.x, warp = r / 32, lane = r % 32;
  const bool scored = r < job.rows && p.scored[r];
  bool with_last = scored && r > 0 && p.scored[r - 1] && p.table_row[r] == p.table_row[r - 1];
  if (with_last) with_last = near(p.low[r], p.low[r - 1]) && near(p.high[r], p.high[r - 1]);
  const uint32_t starts = __ballot_sync(~0u, !with_last);
  if (lane == 0 && warp < 8) p.starts[warp] = starts;
  __syncthreads();
  bool leads = false;
  if (scored) {
    int w = warp;
    uint32_t bits = p.starts[w] & (~0u >> (31 - lane));
    while (bits == 0) bits = p.starts[--w];  // row 0 is a start
    leads = (r - (w * 32 + 31 - __clz(static_cast<int>(bits)))) % job.tile_rows == 0;
  }
  const uint32_t leaders = __ballot_sync(~0u, leads);
  if (lane == 0 && warp < 8) p.leaders[warp] = leaders;
  __syncthreads();
  if (r == 0) {
    uint32_t tiles = 0;
    for (const uint32_t each : p.leaders) tiles += __popc(each);
    p.tiles = tiles;
  }
  if (leads) {
    int tile = __popc(p.leaders[warp] & ((1u << lane) - 1));
    for (int w = 0; w < warp; ++w) tile += __popc(p.leaders[w]);
    int32_t low = p.low[r], high = p.high[r], inner_low = low, inner_high = high;
    int rows = 1;
    const auto starts_at = [&](int i) { return (p.starts[i / 32] >> (i % 32) & 1u) != 0; };
    for (; rows < job.tile_rows && r + rows < job.rows && !starts_at(r + rows); ++rows) {
      low = min(low, p.low[r + rows]), high = max(high, p.high[r + rows]);
      inner_low = max(inner_low, p.low[r + rows]), inner_high = min(inner_high, p.high[r + rows]);
    }
    p.tile_high[tile] = high, p.inner_low[tile] = inner_low, p.inner_high[tile] = inner_high;
    p.tile_row[tile] = static_cast<int16_t>(r), p.tile_rows[tile] = static_cast<uint8_t>(rows);
    p.tile_low[tile] = low & ~(kTileKeys - 1);
    p.before[tile] = static_cast<uint32_t>((int64_t{high} - p.tile_low[tile] + kTileKeys - 1) / kTileKeys);
  }
  __syncthreads();
}

/// Units before each tile, and this block's slice.
__device__ inline void cut_units(DecodePlan& p) {
  const uint32_t t = threadIdx.x, own = t < p.tiles ? p.before[t] : 0;
  uint32_t total = 0;
  const uint32_t before = block_scan(own, p.warps, &total);
  if (t < p.tiles) p.before[t] = before;
  if (t == 0) {
    p.before[p.tiles] = total;
    p.units = total, p.working = total < gridDim.x ? total : gridDim.x;
    p.first = p.last = 0, p.first_tile = 1, p.last_tile = 0;
  }
  __syncthreads();
  if (blockIdx.x >= p.working) return;  // for all threads alike
  const uint32_t first = first_unit_of(p, blockIdx.x), last = first_unit_of(p, blockIdx.x + 1);
  if (t == 0) p.first = first, p.last = last;
  if (t < p.tiles && before <= first && first < before + own) p.first_tile = t;
  if (t < p.tiles && before <= last - 1 && last - 1 < before + own) p.last_tile = t;
  __syncthreads();
}

/// A block's units of one tile.
struct Segment {
  uint32_t tile, first, last;        ///< units of the whole launch
  uint32_t first_block, last_block;  ///< that share the tile
  __device__ bool shared() const { return first_block != last_block; }
};
__device__ inline Segment segment_of(const DecodePlan& p, uint32_t tile) {
  const uint32_t a = p.before[tile], b = p.before[tile + 1];
  return {tile, max(a, p.first), min(b, p.last), block_of(p, a), block_of(p, b - 1)};
}

}  // namespace topkey::cuda
