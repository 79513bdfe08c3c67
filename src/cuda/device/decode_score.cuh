// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Scores of the decode kernel: from a stage of keys to what a thread block keeps of a row. A block keeps every score of
// its units where they fit; where not, a list of those that its own best topk may still contain.
#pragma once
#include "cuda/device/decode_bins.cuh"
#include "cuda/device/decode_load.cuh"
#include "cuda/device/decode_meeting.cuh"

namespace topkey::cuda {

/// What a block keeps of one row of one tile, as keys of the order.
struct Kept {
  uint32_t* keys;
  int32_t* positions;  ///< null: entry i stands at first + i
  uint32_t capacity;   ///< of a list
  uint32_t count;
  uint32_t topk;
  uint32_t least;  ///< of a list: keys below cannot win any more
  int32_t first, last;
  uint32_t live, unreadable;
  uint32_t dropped;  ///< of a list: the best key that was there or not taken, if it may equal the last winner
  uint32_t nans;     ///< of a list; else they are counted behind the scoring
  BinRange range;
  int row, tile_row;  ///< of the launch, and of the tile
  int32_t request;
  int64_t start;  ///< of the row's window

  /// Keys of which the bins speak.
  __device__ uint32_t counted() const { return positions != nullptr ? count : live; }
  __device__ int32_t position(uint32_t i) const {
    return positions != nullptr ? positions[i] : first + static_cast<int32_t>(i);
  }
};

struct DecodeShared {
  DecodePlan plan;
  StageKeys keys[kDecodeGroups][kDecodeStages];
  Moments moments[kDecodeGroups][kDecodeTileRows][4];
  BinRange ranges[kDecodeTileRows];
  Kept kept[2][kDecodeTileRows];  ///< 0: of the first tile, which lower blocks share; 1: of the tile in work
  OpenRow open[2][kDecodeTileRows];
  uint32_t warps[32];
  uint32_t above, inside, number, tied;
  uint32_t fit;  ///< units that no list can overflow with
  Crossing crossing;
  uint32_t edges[2];
  uint64_t cut;
  uint64_t candidates[kDecodeCandidates];
};

/// The block's dynamic memory.
struct DecodeMemory {
  uint8_t* codes;    ///< [groups][stages][64, 128]
  uint8_t* q;        ///< [2][tile rows][heads, 128]
  float* weights;    ///< [2][tile rows][heads]
  uint32_t* bins;    ///< [tile rows][kDecodeBins]
  uint32_t* scores;  ///< [words]
};

/// One unit's or sample's dots with one query row; this lane's key of it (lanes c < 2 of four) and its score.
template <int kHeads, int kDim>
__device__ __forceinline__ float score_keys(const uint8_t* codes, const uint8_t* q, const float* weights, float scale) {
#ifdef TOPKEY_HAS_WGMMA
  float dots[kHeads / 2], sums[2];
  issue_dots<kHeads, kDim>(dots, operand_at(shared_address(codes)), operand_at(shared_address(q)));
  wgmma_wait<0>();
  add_heads<kHeads>(dots, weights, sums);
  sums[0] = join_groups(sums[0]), sums[1] = join_groups(sums[1]);
  return canonical(((threadIdx.x & 1) != 0 ? sums[1] : sums[0]) * scale);
#else
  return 0.0f;
#endif
}
/// Which of a unit's keys is this lane's.
__device__ __forceinline__ uint32_t own_key_of_unit() {
  const uint32_t thread = threadIdx.x % 128;
  return thread / 32 * 16 + thread % 32 / 4 + 8 * (thread & 1);
}
__device__ __forceinline__ bool owns_key_of_unit() { return (threadIdx.x & 2) == 0; }

__device__ inline float add_lanes(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

/// Bounds of a row's bins, from the sample's score of each lane; the same in every block that shares the row.
__device__ inline void add_sample(DecodeShared& s, int group, int r, bool live, float score) {
  const bool counts = live && fabsf(score) < 1e18f;  // so that no square is infinite
  const float x = counts ? score : 0.0f;
  const float sum = add_lanes(x), squares = add_lanes(x * x);
  const int count = __popc(__ballot_sync(~0u, counts));
  if ((threadIdx.x & 31) == 0) s.moments[group][r][threadIdx.x % 128 / 32] = {sum, squares, count};
}
__device__ inline void set_range(DecodeShared& s, int r, int row, uint32_t topk) {
  Moments all{0, 0, 0};
  for (int group = 0; group < kDecodeGroups; ++group) {
    for (const Moments& m : s.moments[group][r]) all.sum += m.sum, all.squares += m.squares, all.count += m.count;
  }
  s.ranges[r] = range_of(all, topk, int64_t{s.plan.high[row]} - s.plan.low[row]);
}

__device__ __forceinline__ void add_to_bin(uint32_t* bins, const BinRange& range, float score) {
  const int bin = range.bin(score);
  if (bin > 0) atomicAdd(bins + bin, 1u);
}

/// Keeps a lane's key of one row, one of those that all are live; entry: its place if all are kept.
__device__ __forceinline__ void keep_live(Kept& kept, uint32_t* bins, const BinRange& range, bool owner, float score,
                                          uint32_t entry) {
  if (!owner) return;
  add_to_bin(bins, range, score);
  kept.keys[entry] = key_of(score);
}
/// Lists the lanes' keys that may still win; kNotLive: none. The bins speak of what is listed, and of nothing else. By a
/// whole warp.
__device__ __forceinline__ void add_to_list(Kept& kept, uint32_t* bins, const BinRange& range, uint32_t key,
                                            int32_t position) {
  const uint32_t least = kept.least;
  const bool stays = key >= least;
  const uint32_t mask = __ballot_sync(~0u, stays), nans = __ballot_sync(~0u, key == kNanKey);
  const uint32_t lane = threadIdx.x & 31;
  if (lane == 0 && nans != 0) atomicAdd(&kept.nans, static_cast<uint32_t>(__popc(nans)));
  if (key != kNotLive && key + 1 == least) atomicMax(&kept.dropped, key);
  if (mask == 0) return;
  uint32_t at = 0;
  if (lane == 0) at = atomicAdd(&kept.count, static_cast<uint32_t>(__popc(mask)));
  at = __shfl_sync(~0u, at, 0) + __popc(mask & ((1u << lane) - 1));
  if (!stays) return;
  kept.keys[at] = key, kept.positions[at] = position;
  const int bin = range.bin_of_key(key);
  if (bin > 0) atomicAdd(bins + bin, 1u);
}
/// Keeps any lane's key of one row. By a whole warp.
__device__ __forceinline__ void keep_any(Kept& kept, uint32_t* bins, const BinRange& range, bool owner, bool live,
                                         bool unreadable, float score, uint32_t entry, int32_t position) {
  const uint32_t key = live ? key_of(score) : kNotLive, lane = threadIdx.x & 31;
  const uint32_t lives = __ballot_sync(~0u, live), unread = __ballot_sync(~0u, unreadable);
  if (lane == 0) atomicAdd(&kept.live, static_cast<uint32_t>(__popc(lives)));
  if (lane == 0 && unread != 0) atomicAdd(&kept.unreadable, static_cast<uint32_t>(__popc(unread)));
  if (kept.positions != nullptr) return add_to_list(kept, bins, range, key, position);
  if (live) add_to_bin(bins, range, score);
  if (owner) kept.keys[entry] = key;
}

}  // namespace topkey::cuda
