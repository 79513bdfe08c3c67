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
inline __device__ __noinline__ void ask_row(const DecodeJob& job, DecodeShared& s, int slot, int r, uint32_t* bins) {
  Kept& k = s.kept[slot][r];
  OpenRow& shared = s.open[slot][r];
  Meeting meeting = shared.meeting;
  const uint32_t index = shared.index;
  meeting.wait();
  Interval in = find_interval(s, k, meeting, bins, bins_of(job, k), k.topk);
  if (in.many()) narrow(s, k, meeting, bins, bins_of(job, k), index == 0, in);
  const uint2 own = share_of_interval(s, k, shared, meeting, in, candidates_of(job, k));
  if (threadIdx.x == 0 && !meeting.alone()) __stcg(shares_of(job, k) + index, own);
  meeting.arrive();
  if (threadIdx.x == 0) shared.meeting = meeting, shared.in = in, shared.own = own;
  sync_scorers();
}

/// Sums of the shares of the blocks before, and all candidates. Ends with a barrier.
__device__ __forceinline__ uint2 collect(const DecodeJob& job, DecodeShared& s, const Kept& k, const OpenRow& open) {
  const bool shared = !open.meeting.alone();
  if (threadIdx.x < 32) {
    uint2 sum{0, 0};
    for (uint32_t i = threadIdx.x; shared && i < open.index; i += 32) {
      const uint2 share = __ldcg(shares_of(job, k) + i);
      sum.x += share.x, sum.y += share.y;
    }
    sum = {__reduce_add_sync(~0u, sum.x), __reduce_add_sync(~0u, sum.y)};
    if (threadIdx.x == 0) s.above = sum.x, s.inside = sum.y, s.tied = 0;
  } else {
    const uint32_t i = threadIdx.x - 32;
    const auto* all = reinterpret_cast<const unsigned long long*>(candidates_of(job, k));
    if (shared && !open.in.many() && i < open.in.inside) s.candidates[i] = __ldcg(all + i);
  }
  sync_scorers();
  return {s.above, s.inside};
}

/// This block's winners of the row. room: for a list's places.
inline __device__ __noinline__ void answer_row(const DecodeJob& job, DecodeShared& s, int slot, int r, uint32_t* room,
                                               uint32_t room_words) {
  Kept& k = s.kept[slot][r];
  const OpenRow& open = s.open[slot][r];
  const Interval in = open.in;
  open.meeting.wait();
  const uint2 before = collect(job, s, k, open);
  Verdict v = judge(s, in, open.own, before);
  const AnswerWriter writer(job, k);
  if (k.positions == nullptr) {
    write_all(s, k, open, in, v, writer);
  } else {
    if (in.bin >= 0 && !in.many()) v.base += winners_before(s, in, v, k.first);
    write_list(s, k, v, writer, room, room_words);
  }
  sync_scorers();
  if (open.index == 0) {
    if (v.count < static_cast<uint32_t>(job.emission.topk) || job.emission.out.counts.data != nullptr)
      AnswerWriter::all(job, k).fill(v.count, kDecodeThreads);
    if (job.look.stats != nullptr && threadIdx.x == 0 && (in.bin >= 0 || job.look.needs_scores)) {
      count(job.look.stats, kScoredKeys, in.live);
      count(job.look.stats, kTiedCuts, s.tied);
    }
  }
  if (threadIdx.x == 0 && (in.bin >= 0 || job.look.needs_scores)) count(job.look.stats, kNanScores, k.nans);
  sync_scorers();
}

/// A tile that this block has alone is answered at once; of another, the block's share of the bins is told.
inline __device__ __noinline__ void settle_rows(const DecodeJob& job, DecodeShared& s, Segment g, int slot, int rows,
                                                uint32_t* bins) {
#pragma unroll 1
  for (int r = 0; r < rows; ++r) {
    Kept& k = s.kept[slot][r];
    Meeting meeting(job.exchange.rows + k.row, g.last_block - g.first_block + 1);
    if (g.shared()) {
      add_bins(bins + r * kDecodeBins, bins_of(job, k));
      RowExchange& row = job.exchange.rows[k.row];
      if (threadIdx.x == 0) atomicAdd(&row.counted, k.counted()), atomicAdd(&row.live, k.live);
      if (threadIdx.x == 0 && k.dropped != 0) atomicMax(&row.dropped, k.dropped);
      meeting.arrive();
    }
    if (threadIdx.x == 0) s.open[slot][r].meeting = meeting, s.open[slot][r].index = blockIdx.x - g.first_block;
    sync_scorers();
    if (g.shared()) continue;
    ask_row(job, s, slot, r, bins + r * kDecodeBins);
    answer_row(job, s, slot, r, bins + r * kDecodeBins, kDecodeBins);
  }
}

/// Rows of which all live keys win and nobody wants scores: the blocks take them in turns.
inline __device__ __noinline__ void answer_unscored(const DecodeJob& job, DecodeShared& s) {
  const DecodePlan& p = s.plan;
  for (int r = blockIdx.x; r < job.rows; r += gridDim.x) {
    if (p.scored[r]) continue;
    const RowWriter writer(job.emission, job.first_row + r, p.request[r], p.start[r]);
    uint32_t placed = 0, unreadable = 0;
    const int64_t low = p.low[r], high = p.high[r];
    for (int64_t base = low; base < high; base += kDecodeThreads) {
      const int64_t position = base + threadIdx.x;
      const bool inside = position < high;
      const bool live = inside && (!job.look.keys.paged || page_of(job.look.keys, p.table_row[r], position) >= 0);
      uint32_t total = 0;
      const uint32_t at = placed + scan_scorers(live, s.warps, &total);
      if (live) writer.put(at, position, 0.0f);
      unreadable += inside && !live;
      placed += total;
    }
    count(job.look.stats, kSkippedPages, unreadable);
    sync_scorers();
    writer.fill(placed, kDecodeThreads);
    sync_scorers();
  }
}

}  // namespace topkey::cuda
