// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What a warpgroup of the prefill kernel does with its rows between products: thresholds from the sample, room in lists
// that are nearly full, answers. Functions of their own, not inlined: the registers of the kernel's loop stay out of them.
#pragma once
#include "cuda/device/prefill_select.cuh"

namespace topkey::cuda {

/// Of a tile of tile_rows rows.
__device__ __forceinline__ uint2* list_of(const PrefillJob& job, int tile_rows, int row) {
  const int64_t entries = tile_rows * kListColumns * int64_t{job.length};  // of a thread block
  const int64_t block = static_cast<int64_t>(blockIdx.x) - job.turn;
  uint2* const lists = block >= 0 ? job.turned : job.lists + job.turn * entries;
  return lists + block * entries + static_cast<uint32_t>(row) * (job.length * kListColumns);
}
__device__ __forceinline__ bool is_in(uint32_t rows, int row) { return (rows >> row & 1u) != 0; }

/// Who looks at rows, and why; of lists none of the three: one is nearly full.
struct Look {
  int group, rows;  ///< the warpgroup and how many it has
  uint32_t slot;    ///< of the item
  uint32_t step;    ///< units done
  bool sample, halfway, all;
};

class GroupSettler {
 public:
  __device__ __forceinline__ GroupSettler(const PrefillJob& job, PrefillShared& s, const Look& look)
      : job_(job), s_(s), look_(look), item_(s.items[look.slot]), first_(look.group * look.rows) {}

  /// Behind a barrier, and before one.
  __device__ __forceinline__ void settle_lists() {
#pragma unroll 1
    for (int row = first_ + warp(); row < first_ + look_.rows; row += 4) {
      if (!is_in(item_.active, row)) continue;
      if (!s_.scored[row]) {
        if (look_.all) answer_unscored(job_, item_.first_row + row, fact_of(row));
      } else if (look_.sample) {
        take_sample(row);
      } else {
        settle(row);
      }
    }
  }

 private:
  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x & 31; }
  static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / 32 % 4); }
  __device__ __forceinline__ void sync() const { named_barrier(1 + look_.group, 128); }
  __device__ __forceinline__ uint2* list(int row) const { return list_of(job_, kPrefillGroups * look_.rows, row); }
  __device__ __forceinline__ const RowFact& fact_of(int row) const { return job_.facts[item_.first_row + row]; }

  /// By one warp.
  __device__ __forceinline__ void take_sample(int row) {
    if (item_.sample == kSampleUnits) {
      take_sample_of<kSampleUnits>(row);
    } else {
      take_sample_of<kSampleUnits / 2>(row);
    }
  }
  template <int kUnits>
  __device__ __forceinline__ void take_sample_of(int row) {
    const RowFact& f = fact_of(row);
    const float want = static_cast<float>(min(static_cast<uint32_t>(job_.emission.topk), f.live));
    const RowList entries(list(row), s_.counts[row]);
    float high = 0.0f;
    uint32_t nans = 0;
    const Sample<kUnits> first(entries);
    const float least = least_of(first, entries, want, static_cast<float>(f.live), &high);
    s_.counts[row][lane()] = static_cast<uint16_t>(first.keep(entries, least, &nans));
    nans = __reduce_add_sync(~0u, nans);
    if (lane() == 0 && !item_.exact) count(job_.stats, kNanScores, nans);
    if (lane() == 0) s_.least[row] = least, s_.high[row] = high;
  }
  /// A threshold that `want` of the `of` scores, of which the list begins with a sample, all but surely reach.
  template <int kUnits>
  __device__ __forceinline__ float least_of(const Sample<kUnits>& first, const RowList& entries, float want, float of,
                                            float* high) {
    const uint32_t seen = __reduce_add_sync(~0u, min(entries.count, static_cast<uint32_t>(first.kMost)));
    return first.least(s_.scratch[look_.group * 4 + warp()], rank_in_sample(want, static_cast<float>(seen), of), high);
  }

  /// By one warp: the answer, or room in the list.
  __device__ __forceinline__ void settle(int row) {
    SelectScratch& w = s_.scratch[look_.group * 4 + warp()];
    const RowFact& f = fact_of(row);
    const RowList entries(list(row), s_.counts[row]);
    const uint32_t full = nearly_full_of(job_);
    // A full list is thinned to its topk best halfway too: of equal scores none goes then, and there would be no room.
    const bool halfway = look_.halfway && entries.most <= full, all = look_.all;
    uint32_t nans = 0;
    if (!all && !halfway) {
      const bool roomy = job_.length >= kRoomyLength;
      // Short columns: where others have room, the list is only dealt out anew.
      if (!roomy && entries.total <= (full - full / 8) * kListColumns) {
        if (entries.most > full) thin(entries, 1, s_.counts[row], &nans);
        return;
      }
      // Long ones are thinned with a full one if it pays: the warpgroup waits for the slowest warp.
      if (roomy && entries.most <= full - full / 4) return;
    }
    uint32_t want = min(static_cast<uint32_t>(job_.emission.topk), f.live);
    if (halfway) {
      const float live = static_cast<float>(f.live),
                  part = static_cast<float>(look_.step) / static_cast<float>(item_.units);
      want = static_cast<uint32_t>(rank_in_sample(static_cast<float>(want), live * part, live));
    }
    float least = s_.least[row], from = least, to = s_.high[row];
    if (is_nan(least - least))
      from = least_of(Sample<kSampleUnits>(entries), entries, static_cast<float>(want),
                      static_cast<float>(entries.total), &to);
    LastWinner last{0, false};
    if (all || entries.total > want)
      last = select_row({job_, w, s_.marks[look_.group * 4 + warp()], entries, f, item_.first_row + row, want, from, to,
                         !all || !samples(item_), all},
                        &nans);
    if (all && last.number == 0) {
      if (lane() == 0 && !item_.exact) atomicOr(&s_.items[look_.slot].failed, 1u << row);
    } else if (all) {
      const bool tied = last.tied || s_.dropped[row] == key_of_number(last.number);
      if (lane() == 0) count(job_.stats, kTiedCuts, tied);
      if (lane() == 0) count(job_.stats, kRescans, item_.exact || s_.thinned[row]);
    } else {
      const uint64_t cut = halfway ? last.number & ~uint64_t{0xFFFFFFFFu} : last.number;
      const uint32_t dropped = thin(entries, cut, s_.counts[row], &nans);
      if (lane() == 0) {
        s_.dropped[row] = max(s_.dropped[row], dropped);
        if (!halfway && entries.total > want) s_.thinned[row] = true;
        const float score = score_of_key(key_of_number(last.number));
        if (entries.total > want && score >= least) {
          s_.least[row] = score;
          s_.tie[row] = !halfway && last.tied ? position_of_number(last.number) : INT32_MAX;
        }
      }
    }
    nans = __reduce_add_sync(~0u, nans);
    if (lane() == 0 && !item_.exact) count(job_.stats, kNanScores, nans);
    __syncwarp();
  }

  const PrefillJob& job_;
  PrefillShared& s_;
  const Look& look_;
  const Item& item_;
  const int first_;  ///< row
};

__device__ __noinline__ void settle_lists(const PrefillJob& job, PrefillShared& s, const Look& look) {
  GroupSettler(job, s, look).settle_lists();
}
}  // namespace topkey::cuda
