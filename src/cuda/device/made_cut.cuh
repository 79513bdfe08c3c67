// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The cut of a row whose values the blocks of a cluster have made themselves and keep, kNotLiveScore where there is none
// (device/pick_cut.cuh says how a cut is found): bounds of the bins come from all values, not from a sample.
#pragma once
#include "cuda/device/pick_cut.cuh"

namespace topkey::cuda {

struct MadeShared {
  PickShared pick;
  alignas(16) uint16_t bins_of_peers[kMaxCluster * kPickBins];
  alignas(16) uint64_t made_told;  ///< a barrier for what peers send of their values' sums. A phase a row
  float4 of_warps[kPickWarps];
  uint4 of_peers[kMaxCluster];
  uint32_t lives_of_warps[kPickWarps], lives_of_peers[kMaxCluster];
};
static_assert(sizeof(MadeShared) % sizeof(uint4) == 0);

/// What a lane's values add up to: sum, squares and number of finite ones; all that are live.
struct MadeSums {
  float4 of{0.0f, 0.0f, 0.0f, 0.0f};
  __device__ __forceinline__ void add(float value, bool live) {
    const bool counts = live && fabsf(value) < 1e15f;
    const float x = counts ? value : 0.0f;
    of.x += x, of.y += x * x, of.z += counts ? 1.0f : 0.0f, of.w += live ? 1.0f : 0.0f;
  }
};

[[maybe_unused]] __device__ __forceinline__ float4 add_made_lanes(float4 m, int from) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    if (step > from) continue;
    m.x += __shfl_xor_sync(~0u, m.x, step), m.y += __shfl_xor_sync(~0u, m.y, step);
    m.z += __shfl_xor_sync(~0u, m.z, step), m.w += __shfl_xor_sync(~0u, m.w, step);
  }
  return m;
}
/// By one thread, before the block comes to a barrier of the cluster.
[[maybe_unused]] __device__ __forceinline__ void init_made(MadeShared& s) {
  init_told(s.pick), init_barrier(&s.made_told, 1), fence_new_barriers();
}
/// What all blocks' lanes add up to, the same in all: a barrier of the block, then what peers send. All threads have arrived
/// at the cluster's barrier before.
[[maybe_unused]] __device__ __forceinline__ float4 add_made(MadeShared& s, const Peers& peers, const MadeSums& sums) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float4 m = add_made_lanes(sums.of, 16);
  if (lane == 0) s.of_warps[warp] = m;
  cluster_wait();  // all blocks have begun
  __syncthreads();
  if (warp == 0) {
    m = add_made_lanes(s.of_warps[lane % kPickWarps], kPickWarps / 2);
    const uint4 own{__float_as_uint(m.x), __float_as_uint(m.y), __float_as_uint(m.z), __float_as_uint(m.w)};
    if (lane < peers.count)
      send_peer(peer_address(s.of_peers + peers.rank, lane), own, peer_address(&s.made_told, lane));
    if (lane == 0) arrive_expecting(&s.made_told, peers.count * static_cast<uint32_t>(sizeof own));
  }
  wait_soon_at(&s.made_told, peers.parity);
  const uint4 of_peer = lane < peers.count ? s.of_peers[lane] : uint4{0, 0, 0, 0};
  return add_made_lanes(
      {__uint_as_float(of_peer.x), __uint_as_float(of_peer.y), __uint_as_float(of_peer.z), __uint_as_float(of_peer.w)},
      16);
}

/// All live values win: the marks of a cut that has none inside.
[[maybe_unused]] static __device__ __noinline__ OwnCut all_made(PickPart p) {
  Marks marks{0, 0};
  for (uint32_t bit = 0; bit < 4 * p.slice.own(); ++bit)
    marks.above |= (p.slice.raw(p.vectors, bit) != kNotLiveScore ? 1u : 0u) << bit;
  return {{0, 0, 0}, marks, 0};
}

/// put(rank, bit) for this thread's winners, ascending.
template <class Put>
__device__ __forceinline__ void put_made(MadeShared& s, const PickPart& p, const OwnCut& own, const Put& put) {
  const Before before = tell_peers(p, own);
  if (own.cut.ranks()) rank_candidates(s.pick, own.cut);
  if ((own.marks.above | own.marks.inside) != 0) each_winner(s.pick, own, before, put);
}

/// The best k >= 1 of the row, handed to put. Returns how many there are in all. The bins are 0, and the block's
/// values are written, each by a thread of it. Behind it the parity of `peers` changes, for the next row.
template <class Put>
__device__ __forceinline__ uint32_t pick_made(MadeShared& s, const PickPart& p, const MadeSums& sums, uint32_t k,
                                              const Put& put) {
  const float4 all = add_made(s, p.peers, sums);
  const uint32_t live = static_cast<uint32_t>(all.w);
  // Bins are told even where all win: barriers of rows to come count a phase a row.
  const LinearBins bins = bins_of({all.x, all.y, all.z}, quantile_of(k, max(live, 1u)));
  count_linear(p.slice, p.vectors, bins, s.pick.bins);
  share_bins<false>(s.pick, p.peers);
  const OwnCut own = live <= k ? all_made(p) : find_cut(p, bins, k);
  put_made(s, p, own, put);
  return min(live, k);
}

/// The same where bins are known before: one meeting less. lives: of this lane's values.
template <class Put>
__device__ __forceinline__ uint32_t pick_guessed(MadeShared& s, const PickPart& p, uint32_t lives,
                                                 const LinearBins& bins, uint32_t k, const Put& put) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  lives = __reduce_add_sync(~0u, lives);
  if (lane == 0) s.lives_of_warps[warp] = lives;
  cluster_wait();  // all blocks have begun
  __syncthreads();
  if (warp == 0) {
    const uint32_t of_block = sum_of(s.lives_of_warps, kPickWarps);
    if (lane < p.peers.count)
      send_peer(peer_address(s.lives_of_peers + p.peers.rank, lane), of_block, peer_address(&s.made_told, lane));
    if (lane == 0) arrive_expecting(&s.made_told, p.peers.count * 4);
  }
  count_linear(p.slice, p.vectors, bins, s.pick.bins);
  share_bins<false>(s.pick, p.peers);
  wait_soon_at(&s.made_told, p.peers.parity);
  const uint32_t live = sum_of(s.lives_of_peers, p.peers.count);
  const OwnCut own = live <= k ? all_made(p) : find_cut(p, bins, k);
  put_made(s, p, own, put);
  return min(live, k);
}

}  // namespace topkey::cuda
