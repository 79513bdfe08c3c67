// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// How the blocks of a cluster settle a row's cut: bins are added up over the cluster, the keys of the bin that holds the
// k-th best are told to all blocks in the order of their positions, and each block ranks them for itself. A guess that
// misses, or a bin of too many keys, costs further rounds, by digits of the order; equal keys are shared out by position.
#pragma once
#include "cuda/device/pick_slice.cuh"

namespace topkey::cuda {

/// The blocks that share a row, of which this is number `rank`.
struct Peers {
  uint32_t count, rank;
  /// All threads of all of them: behind it each sees what any has written.
  __device__ __forceinline__ void meet() const {
    if (count == 1) {
      __syncthreads();
    } else {
      __syncwarp();
      cluster_barrier();
    }
  }
};

/// Inclusive sum over the lanes of a warp.
__device__ __forceinline__ uint32_t sum_lanes_up(uint32_t value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, value, step);
    if (threadIdx.x % 32 >= static_cast<uint32_t>(step)) value += other;
  }
  return value;
}
/// Sum of the first `count` words, 32 at most.
__device__ __forceinline__ uint32_t sum_of(const uint32_t* words, uint32_t count) {
  const uint32_t lane = threadIdx.x % 32;
  return __reduce_add_sync(~0u, lane < count ? words[lane] : 0);
}

/// All blocks' keys in bin `bin`. Each block begins with itself, lest all ask the same one.
__device__ __forceinline__ uint32_t add_up(const uint32_t* bin, const Peers& peers) {
  if (peers.count == 1) return *bin;
  uint32_t sum = 0;
  constexpr uint32_t kBatch = 8;
#pragma unroll 1
  for (uint32_t base = 0; base < peers.count; base += kBatch) {
    uint32_t each[kBatch];
#pragma unroll
    for (uint32_t e = 0; e < kBatch; ++e) {
      const uint32_t peer = (peers.rank + base + e) & (peers.count - 1);
      each[e] = base + e < peers.count ? load_peer(peer_address(bin, peer)) : 0;
    }
#pragma unroll
    for (uint32_t e = 0; e < kBatch; ++e) sum += each[e];
  }
  return sum;
}

/// The bin that holds the k-th best of what the bins hold, k >= 1. Ends with a barrier of the block.
__device__ __forceinline__ PickFound find_bin(PickShared& s, const uint32_t* bins, const Peers& peers, uint32_t k) {
  const uint32_t bin = kPickBins - 1 - threadIdx.x, warp = threadIdx.x / 32;  // thread 0: the highest
  const uint32_t inside = add_up(bins + bin, peers), sum = sum_lanes_up(inside);
  if (threadIdx.x % 32 == 31) s.warps[warp] = sum;
  if (threadIdx.x == 0) s.found = {0, 0, 0};
  __syncthreads();
  const uint32_t end = sum_of(s.warps, warp) + sum;
  if (end >= k && end - inside < k) s.found = {bin, end - inside, inside};
  __syncthreads();
  return s.found;
}

/// Where a row's cut lies: keys of which `need` win are inside.
struct PickCut {
  uint32_t inside, need, bin;
  /// Few keys, of which some win: they are ranked. Else all inside are equal, or all win: the first `need` do.
  __device__ bool ranks() const { return inside <= kPickCandidates && need < inside; }
  __device__ bool settled() const { return inside <= kPickCandidates || need == inside; }
};

/// A cut by digits of the order: the keys inside are those of the interval.
struct KeyCut {
  PickCut cut;
  KeyBins interval;
  int turn;  ///< of the bins that tell it
};
/// From all keys of the row on.
static __device__ __noinline__ KeyCut narrow_by_key(PickShared& s, Slice slice, const uint4* vectors, Peers peers,
                                                    uint32_t k, int turn) {
  constexpr uint32_t kInfinityKey = 0xFF800000u;
  KeyBins in{kNanKey, kInfinityKey, 23};
  PickCut cut{0, k, 0};
  static_assert((kInfinityKey - kNanKey) >> 23 < kPickBins);
  while (true) {
    turn ^= 1;
    uint32_t* bins = s.bins[turn];
    bins[threadIdx.x] = 0;
    __syncthreads();
    count_by_key(slice, vectors, in, bins);
    peers.meet();
    const PickFound found = find_bin(s, bins, peers, cut.need);
    cut = {found.inside, cut.need - found.above, found.bin};
    in.low += found.bin << in.shift;
    in.high = min(in.high, in.low + ((1u << in.shift) - 1));
    if (cut.settled() || in.shift == 0) break;
    in.shift = max(in.shift - 9, 0);
  }
  return {cut, in, turn};
}

/// Of the cut's bin, which of the candidates win; all of them are there. Ends with a barrier of the block.
__device__ __forceinline__ void rank_candidates(PickShared& s, const PickCut& cut) {
  const uint32_t t = threadIdx.x;
  if (t < kPickCandidates) {
    const uint64_t mine = t < cut.inside ? s.candidates[t] : 0;
    uint32_t better = cut.inside;
    if (t / 32 * 32 < cut.inside) {
      better = 0;
#pragma unroll 4
      for (uint32_t i = 0; i < cut.inside; ++i) better += s.candidates[i] > mine;
    }
    const bool inside = t < cut.inside;
    const uint32_t wins = __ballot_sync(~0u, inside & (better < cut.need));
    if (t % 32 == 0) s.wins[t / 32] = wins;
    if (inside & (better == cut.need - 1)) s.last_key = static_cast<uint32_t>(mine >> 32);
    if (inside & (better == cut.need)) s.lost_key = static_cast<uint32_t>(mine >> 32);
  }
  __syncthreads();
}
/// Winners among the keys inside that come before number `number` by position.
__device__ __forceinline__ uint32_t winners_inside(const PickShared& s, const PickCut& cut, uint32_t number) {
  if (!cut.ranks()) return min(number, cut.need);
  uint32_t count = 0, word = 0;
#pragma unroll 1
  for (; (word + 1) * 32 <= number; ++word) count += __popc(s.wins[word]);
  return number % 32 == 0 ? count : count + __popc(s.wins[word] & ((1u << number % 32) - 1));
}
__device__ __forceinline__ bool wins_inside(const PickShared& s, const PickCut& cut, uint32_t number) {
  return cut.ranks() ? (s.wins[number / 32] >> number % 32 & 1u) != 0 : number < cut.need;
}

/// How many winners come before this thread's, and how many keys inside.
struct Before {
  uint32_t above, inside;
};
/// Tells the peers what is above and inside of this block. Two barriers inside, the second of the cluster.
__device__ __forceinline__ Before tell_peers(PickShared& s, const Slice& slice, const uint4* vectors,
                                             const Peers& peers, const PickCut& cut, const Marks& marks,
                                             uint32_t of_peer) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t own = __popc(marks.above) | static_cast<uint32_t>(__popc(marks.inside)) << 16;
  const uint32_t sum = sum_lanes_up(own);
  if (lane == 31) s.warps[warp] = sum;
  if (warp == 0) {
    const uint32_t before = __reduce_add_sync(~0u, lane < peers.rank ? of_peer : 0);
    if (lane == 0) s.inside_before = before;
  }
  __syncthreads();
  const uint32_t before = sum_of(s.warps, warp) + sum - own, all = sum_of(s.warps, kPickWarps);
  Before at{before & 0xFFFFu, s.inside_before + (before >> 16)};
  if (threadIdx.x < peers.count) store_peer(peer_address(s.above + peers.rank, threadIdx.x), all & 0xFFFFu);
  uint32_t number = at.inside;
  for (uint32_t rest = cut.ranks() ? marks.inside : 0; rest != 0; rest &= rest - 1, ++number) {
    const uint32_t bit = __ffs(static_cast<int>(rest)) - 1, word = slice.first_word() + bit;
    const uint64_t key = KeyBins::key(slice, slice.raw(vectors, bit), word);
    const uint64_t entry = key << 32 | ~static_cast<uint32_t>(slice.origin + static_cast<int32_t>(word));
    for (uint32_t peer = 0; peer < peers.count; ++peer) store_peer(peer_address(s.candidates + number, peer), entry);
  }
  peers.meet();
  at.above += sum_of(s.above, peers.rank);
  return at;
}

}  // namespace topkey::cuda
