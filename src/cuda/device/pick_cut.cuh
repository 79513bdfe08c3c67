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
  uint16_t* bins;  ///< [count, kPickBins] in each block's shared memory: all blocks' bins; a slice has under 2^16 keys
  uint32_t parity = 0;  ///< of the rows before, of which bins were told
  /// All threads of all of them: behind it each sees what any has written.
  __device__ __forceinline__ void meet() const {
    __syncwarp();
    cluster_barrier();
  }
};

/// This block's part of a row.
struct PickPart {
  PickShared& s;
  uint4* vectors;
  Peers peers;
  Slice slice;
};

/// Sum of the first `count` words, 32 at most.
__device__ __forceinline__ uint32_t sum_of(const uint32_t* words, uint32_t count) {
  const uint32_t lane = threadIdx.x % 32;
  return __reduce_add_sync(~0u, lane < count ? words[lane] : 0);
}

/// By one thread, before the block comes to a barrier of the cluster, behind which peers may send.
__device__ __forceinline__ void init_told(PickShared& s) {
  init_barrier(&s.bins_told, 1), init_barrier(&s.row_told, 1);
}
/// Tells all blocks of the row what this block's bins hold, and waits for what they tell. A barrier of the block inside. In
/// the row's first round peers have long read what they were told before; in others (kMeet) the caller sees to that, and
/// the cluster meets.
template <bool kMeet>
__device__ __forceinline__ void share_bins(PickShared& s, const Peers& peers) {
  constexpr uint32_t kEach = 8, kPart = kPickBins / kEach;  // threads that tell one peer
  __syncthreads();
  const uint32_t first = threadIdx.x % kPart * kEach;
  const uint4 low = *reinterpret_cast<const uint4*>(s.bins + first);
  const uint4 high = *reinterpret_cast<const uint4*>(s.bins + first + 4);
  const uint4 packed{low.x | low.y << 16, low.z | low.w << 16, high.x | high.y << 16, high.z | high.w << 16};
#pragma unroll
  for (uint32_t e = threadIdx.x / kPart; e < kMaxCluster; e += kPickThreads / kPart) {
    // Each block begins with itself, lest all tell the same one.
    const uint32_t at = peers.rank + e, peer = at < peers.count ? at : at - peers.count;
    if (e >= peers.count) continue;
    const uint32_t to = peer_address(peers.bins + peers.rank * kPickBins + first, peer);
    if (kMeet) {
      store_peer(to, packed);
    } else {
      send_peer(to, packed, peer_address(&s.bins_told, peer));
    }
  }
  if (kMeet) return peers.meet();
  if (threadIdx.x == 0) arrive_expecting(&s.bins_told, peers.count * kPickBins * 2);
  wait_soon_at(&s.bins_told, peers.parity);
}
/// All blocks' keys in bin `bin`.
template <uint32_t kMost>
__device__ __forceinline__ uint32_t add_peers(const Peers& peers, uint32_t bin) {
  uint32_t sum = 0;
#pragma unroll
  for (uint32_t e = 0; e < kMost; ++e) sum += e < peers.count ? peers.bins[e * kPickBins + bin] : 0;
  return sum;
}
__device__ __forceinline__ uint32_t add_up(const Peers& peers, uint32_t bin) {
  return peers.count <= kMaxCluster / 2 ? add_peers<kMaxCluster / 2>(peers, bin) : add_peers<kMaxCluster>(peers, bin);
}

/// The bin that holds the k-th best of what the blocks' bins hold, k >= 1, behind share_bins. Ends with a barrier of the
/// block.
__device__ __forceinline__ PickFound find_bin(PickShared& s, const Peers& peers, uint32_t k) {
  const uint32_t bin = kPickBins - 1 - threadIdx.x, warp = threadIdx.x / 32;  // thread 0: the highest
  const uint32_t inside = add_up(peers, bin), sum = sum_lanes_up(inside);
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

/// A cut, and what of it is this thread's: of the first warp's, how many keys a peer has inside.
struct OwnCut {
  PickCut cut;
  Marks marks;
  uint32_t of_peer;
};
__device__ __forceinline__ uint32_t of_peer(const Peers& peers, uint32_t bin) {
  return threadIdx.x < peers.count ? peers.bins[threadIdx.x * kPickBins + bin] : 0;
}

/// By digits of the order, from all keys of the row on, behind a round with the first bins.
static __device__ __noinline__ OwnCut cut_by_key(PickPart p, uint32_t k) {
  constexpr uint32_t kInfinityKey = 0xFF800000u;
  KeyBins in{kNanKey, kInfinityKey, 23};
  static_assert((kInfinityKey - kNanKey) >> 23 < kPickBins);
  PickCut cut{0, k, 0};
  while (true) {
    p.s.bins[threadIdx.x] = 0;
    p.peers.meet();
    count_by_key(p.slice, p.vectors, in, p.s.bins);
    share_bins<true>(p.s, p.peers);
    const PickFound found = find_bin(p.s, p.peers, cut.need);
    cut = {found.inside, cut.need - found.above, found.bin};
    in.low += found.bin << in.shift;
    in.high = min(in.high, in.low + ((1u << in.shift) - 1));
    if (cut.settled() || in.shift == 0) break;
    in.shift = max(in.shift - 9, 0);
  }
  return {cut, mark_by_key(p.slice, p.vectors, in), of_peer(p.peers, cut.bin)};
}
/// By bins that were guessed, counted and shared, if the cut is in one of few keys.
__device__ __forceinline__ OwnCut find_cut(const PickPart& p, const LinearBins& bins, uint32_t k) {
  const PickFound found = find_bin(p.s, p.peers, k);
  const PickCut cut{found.inside, k - found.above, found.bin};
  if (found.inside == 0 || !cut.settled()) return cut_by_key(p, k);
  return {cut, mark_linear(p.slice, p.vectors, bins, cut.bin), of_peer(p.peers, cut.bin)};
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
/// Tells the peers what is above and inside of this block, and waits for what they tell. A barrier of the block inside.
__device__ __forceinline__ Before tell_peers(const PickPart& p, const OwnCut& own) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t mine = __popc(own.marks.above) | static_cast<uint32_t>(__popc(own.marks.inside)) << 16;
  const uint32_t sum = sum_lanes_up(mine);
  if (lane == 31) p.s.warps[warp] = sum;
  if (warp == 0) {
    const uint32_t before = __reduce_add_sync(~0u, lane < p.peers.rank ? own.of_peer : 0);
    if (lane == 0) p.s.inside_before = before;
  }
  __syncthreads();
  const uint32_t before = sum_of(p.s.warps, warp) + sum - mine, all = sum_of(p.s.warps, kPickWarps);
  Before at{before & 0xFFFFu, p.s.inside_before + (before >> 16)};
  if (threadIdx.x < p.peers.count)
    send_peer(peer_address(p.s.above + p.peers.rank, threadIdx.x), all & 0xFFFFu,
              peer_address(&p.s.row_told, threadIdx.x));
  uint32_t number = at.inside;
  for (uint32_t rest = own.cut.ranks() ? own.marks.inside : 0; rest != 0; rest &= rest - 1, ++number) {
    const uint32_t bit = __ffs(static_cast<int>(rest)) - 1, word = p.slice.first_word() + bit;
    const uint64_t key = KeyBins::key(p.slice, p.slice.raw(p.vectors, bit), word);
    const uint64_t entry = key << 32 | ~static_cast<uint32_t>(p.slice.origin + static_cast<int32_t>(word));
#pragma unroll 1
    for (uint32_t peer = 0; peer < p.peers.count; ++peer)
      send_peer(peer_address(p.s.candidates + number, peer), entry, peer_address(&p.s.row_told, peer));
  }
  if (threadIdx.x == 0) arrive_expecting(&p.s.row_told, p.peers.count * 4 + (own.cut.ranks() ? own.cut.inside * 8 : 0));
  wait_soon_at(&p.s.row_told, p.peers.parity);
  at.above += sum_of(p.s.above, p.peers.rank);
  return at;
}

/// put(rank, bit) for this thread's winners, ascending.
template <class Put>
__device__ __forceinline__ void each_winner(const PickShared& s, const OwnCut& own, const Before& before,
                                            const Put& put) {
  uint32_t rank = before.above + winners_inside(s, own.cut, before.inside), number = before.inside;
  for (uint32_t rest = own.marks.above | own.marks.inside; rest != 0; rest &= rest - 1) {
    const uint32_t bit = __ffs(static_cast<int>(rest)) - 1;
    const bool inside = (own.marks.inside >> bit & 1u) != 0;
    if (!inside || wins_inside(s, own.cut, number)) put(rank++, bit);
    number += inside;
  }
}

}  // namespace topkey::cuda
