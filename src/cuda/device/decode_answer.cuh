// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The decode kernel's steps behind the scoring, row by row: tell, ask, answer. None is inlined: each is code that a launch
// must first fetch.
#pragma once
#include "cuda/device/decode_finish.cuh"

namespace topkey::cuda {

__device__ inline uint32_t* bins_of(const DecodeJob& job, const Kept& k) {
  return job.exchange.bins + int64_t{k.row} * kDecodeBins;
}
__device__ inline uint64_t* candidates_of(const DecodeJob& job, const Kept& k) {
  return job.exchange.candidates + int64_t{k.row} * kDecodeCandidates;
}
__device__ inline uint2* shares_of(const DecodeJob& job, const Kept& k) {
  return job.exchange.shares + int64_t{k.row} * gridDim.x;
}

/// The row's interval, and this block's share of it told. bins: of this row, or room for them.
__device__ __noinline__ void ask_row(const DecodeJob& job, DecodeShared& s, int slot, int r, uint32_t* bins) {
  Kept& k = s.kept[slot][r];
  OpenRow open = s.open[slot][r];
  open.meeting.wait();
  open.in = find_interval(s, k, open.meeting, bins, bins_of(job, k), static_cast<uint32_t>(job.look.topk));
  if (open.in.by_number()) refine(s, k, open.meeting, bins, bins_of(job, k), open.index == 0, open.in);
  open.own = share_of_interval(s, k, open.meeting, open.in, candidates_of(job, k));
  if (threadIdx.x == 0 && !open.meeting.alone()) __stcg(shares_of(job, k) + open.index, open.own);
  open.meeting.arrive();
  if (threadIdx.x == 0) s.open[slot][r] = open;
  __syncthreads();
}

/// Sums of the shares of the blocks before.
__device__ inline uint2 shares_before(const DecodeJob& job, DecodeShared& s, const Kept& k, uint32_t index) {
  if (threadIdx.x == 0) s.above = s.inside = 0;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < index; i += kDecodeThreads) {
    const uint2 share = __ldcg(shares_of(job, k) + i);
    atomicAdd(&s.above, share.x), atomicAdd(&s.inside, share.y);
  }
  __syncthreads();
  return {s.above, s.inside};
}

/// This block's winners of the row. room: for a list's places.
__device__ __noinline__ void answer_row(const DecodeJob& job, DecodeShared& s, int slot, int r, uint32_t* room,
                                        uint32_t room_words) {
  Kept& k = s.kept[slot][r];
  const OpenRow open = s.open[slot][r];
  open.meeting.wait();
  const uint2 before = open.meeting.alone() ? uint2{0, 0} : shares_before(job, s, k, open.index);
  const uint64_t* candidates = open.meeting.alone() ? s.candidates : candidates_of(job, k);
  const Verdict v = judge(s, k, open.in, open.own, before, candidates);
  const int64_t row = job.first_row + k.row;
  const Window w = window_of(job.look.rows, row, job.look.keys.count);
  const RowWriter writer(job.emission, row, static_cast<int32_t>(w.request), w.start);
  if (k.positions == nullptr) {
    write_all(s, k, v, writer);
  } else {
    write_list(s, k, v, writer, room, room_words);
  }
  if (open.index == 0) writer.fill(v.count);
  const bool scored = open.in.live > static_cast<uint32_t>(job.look.topk) || job.look.needs_scores;
  if (threadIdx.x == 0 && scored) {
    count(job.look.stats, kNanScores, k.nans);
    if (open.index == 0) count(job.look.stats, kScoredKeys, open.in.live);
    if (open.index == 0) count(job.look.stats, kTiedCuts, s.tied);
  }
  __syncthreads();
}

/// A tile that this block has alone is answered at once; of another, the block's share of the bins is told.
__device__ __noinline__ void settle_rows(const DecodeJob& job, DecodeShared& s, Segment g, int slot, int rows,
                                         uint32_t* bins) {
#pragma unroll 1
  for (int r = 0; r < rows; ++r) {
    Kept& k = s.kept[slot][r];
    OpenRow open{
        Meeting(job.exchange.rows + k.row, g.last_block - g.first_block + 1), {}, {}, blockIdx.x - g.first_block};
    if (g.shared()) {
      add_bins(bins + r * kDecodeBins, bins_of(job, k));
      if (threadIdx.x == 0) atomicAdd(&job.exchange.rows[k.row].live, k.live);
      open.meeting.arrive();
    }
    if (threadIdx.x == 0) s.open[slot][r] = open;
    __syncthreads();
    if (g.shared()) continue;
    ask_row(job, s, slot, r, bins + r * kDecodeBins);
    answer_row(job, s, slot, r, bins + r * kDecodeBins, kDecodeBins);
  }
}

/// Rows of which all live keys win and nobody wants scores: the blocks take them in turns.
__device__ __noinline__ void answer_unscored(const DecodeJob& job, DecodeShared& s) {
  const DecodePlan& p = s.plan;
  for (int r = blockIdx.x; r < job.rows; r += gridDim.x) {
    if (p.scored[r]) continue;
    const int64_t row = job.first_row + r;
    const Window w = window_of(job.look.rows, row, job.look.keys.count);
    const RowWriter writer(job.emission, row, static_cast<int32_t>(w.request), w.start);
    uint32_t placed = 0, unreadable = 0;
    const int64_t low = p.low[r], high = p.high[r];
    for (int64_t base = low; base < high; base += kDecodeThreads) {
      const int64_t position = base + threadIdx.x;
      const bool inside = position < high;
      const bool live = inside && (!job.look.keys.paged || page_of(job.look.keys, p.table_row[r], position) >= 0);
      uint32_t total = 0;
      const uint32_t at = placed + block_scan(live, s.warps, &total);
      if (live) writer.put(at, position, 0.0f);
      unreadable += inside && !live;
      placed += total;
    }
    count(job.look.stats, kSkippedPages, unreadable);
    __syncthreads();
    writer.fill(placed);
    __syncthreads();
  }
}

}  // namespace topkey::cuda
