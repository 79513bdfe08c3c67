// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A row's list before one warp in the prefill kernel: the last winner by bins and the few scores of its bin, the winners
// marked in a map of positions and handed out from it, in order. Loops are short on purpose: before whole warpgroups, with
// all entries in registers and every pass over them unrolled, a row took longer.
#pragma once
#include "cuda/device/prefill_answer.cuh"

namespace topkey::cuda {

constexpr uint32_t kSparseWords = 512;  ///< from so many on each lane finds the marks of four

/// The marks of `words` words of positions from `base` on, of which `used` come before; with them.
__device__ __forceinline__ uint32_t hand_out_marks(SelectScratch& w, uint32_t* marks, uint32_t words, int32_t base,
                                                   uint32_t used, const WarpWriter& writer) {
  if (writer.indices == nullptr)
    return each_mark<1>(w, marks, words, base, used, [&](uint32_t j, int32_t p) { writer.all.put(j, p, 0.0f); });
  int32_t* const indices = writer.indices;
  const int32_t add = writer.add;
  const auto put = [&](uint32_t j, int32_t p) { indices[j] = p + add; };
  if (words >= kSparseWords) return each_mark<4>(w, marks, (words + 127) / 128 * 128, base, used, put);
  return each_mark<1>(w, marks, words, base, used, put);
}

/// What one warp does with one row's list.
struct ListTask {
  const PrefillJob& job;
  SelectScratch& w;
  uint32_t* marks;  ///< the warp's
  const RowList& list;
  const RowFact& f;
  int32_t row;
  uint32_t want;
  float least, best;  ///< bounds of bins: at least `want` entries should reach the first, few exceed the second
  bool complete;      ///< every key is in the list, or was dropped for better ones
  bool answers;       ///< else the last winner is looked for, to thin the list
};

/// The row's last winner; number 0 if the sample's threshold was too high. Writes the answer, if it is wanted, before any
/// of the next position. The marks are empty before and behind. nans: more by the list's, where it is the answer.
__device__ __forceinline__ LastWinner select_row(const ListTask& t, uint32_t* nans) {
  constexpr int32_t kWindow = kMarkWords * 32;
  SelectScratch& w = t.w;
  const uint32_t lane = threadIdx.x & 31;
  const bool suit = ListBins::suit(t.least, t.best);
  const ListBins bins(suit ? t.least : 0.0f, suit ? t.best : 1.0f);
  WarpCrossing c{0, 0, 0};
  if (suit) {
    clear_bins(w);
    bool nan = false;
    const uint32_t to = shared_address(w.bins);
    t.list.each([&](uint2 entry, bool) {
      const float score = __uint_as_float(entry.x);
      add_one(bins.bytes_of(score) | to);
      nan = nan | (score != score);
    });
    if (__any_sync(~0u, nan) && t.answers) *nans += t.list.nans();
    c = cross_bins(w, t.want, ListBins::kFirst);
  } else if (t.answers) {
    *nans += t.list.nans();
  }
  LastWinner last{0, false};
  if (c.inside == 0 && !t.complete) return last;
  const bool binned = c.inside > 0 && c.inside <= kPrefillCandidates;
  if (!binned) last = last_by_digits(w, t.list, t.want);
  uint32_t candidates = 0;
  const uint32_t marked_above = t.answers ? c.bin : kPrefillBins;
  const WarpWriter writer(t.job, t.row, t.f);
  const int32_t low = t.f.low & ~31, high = t.f.high;
  uint32_t used = 0;
  for (int64_t base = low; base < high; base += kWindow) {
    const int32_t from = static_cast<int32_t>(base);
    const bool first = from == low;
    if (binned) {
      const uint32_t marks = shared_address(t.marks);
      t.list.batches([&](const uint2(&entries)[RowList::kBatch], uint32_t begin) {
        uint32_t inside = 0;
#pragma unroll
        for (uint32_t i = 0; i < RowList::kBatch; ++i) {
          const uint32_t bin = bins.of(__uint_as_float(entries[i].x));
          const uint32_t at = entries[i].y - static_cast<uint32_t>(from);
          set_bits_if((bin > marked_above) & (at < kWindow), marks + at / 32 * 4, 1u << (at % 32));
          inside |= (bin == c.bin ? 1u : 0u) << i;
        }
        // Few: where they lie, so that no register is indexed; read again together.
        for (uint32_t some; first && (some = __ballot_sync(~0u, inside != 0)) != 0; inside &= inside - 1) {
          const uint32_t at = candidates + __popc(some & ((1u << lane) - 1));
          if (inside != 0)
            w.candidates[at] =
                (begin + static_cast<uint32_t>(__ffs(static_cast<int>(inside))) - 1) * kListColumns + lane;
          candidates += __popc(some);
        }
      });
      __syncwarp();
      for (uint32_t i = lane; first && i < candidates; i += 32)
        w.candidates[i] = number_of(__ldcg(t.list.column - lane + w.candidates[i]));
      __syncwarp();
    }
    if (first && binned) last = last_of_candidates(w, candidates, t.want - c.above);
    // By rounding the bins may have counted scores below the threshold, behind which others were never kept.
    if (first && !t.complete && key_of_number(last.number) < key_of(canonical(t.least))) {
      for (uint32_t i = lane; i < kMarkWords; i += 32) t.marks[i] = 0;
      __syncwarp();
      return {0, false};
    }
    if (!t.answers) return last;
    const auto mark = [&](uint64_t number) {
      const uint32_t at = ~static_cast<uint32_t>(number) - static_cast<uint32_t>(from);
      if (number >= last.number && at < kWindow) atomicOr(&t.marks[at / 32], 1u << (at % 32));
    };
    if (binned) {
      for (uint32_t i = lane; i < candidates; i += 32) mark(w.candidates[i]);
    } else {
      t.list.each([&](uint2 entry, bool present) {
        if (present) mark(number_of(entry));
      });
    }
    __syncwarp();
    const uint32_t words = (static_cast<uint32_t>(min(int64_t{kWindow}, high - base)) + 1023) / 1024 * 32;
    used = hand_out_marks(w, t.marks, words, from, used, writer);
  }
  writer.fill(used);
  return last;
}

}  // namespace topkey::cuda
