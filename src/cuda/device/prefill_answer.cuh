// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A row's answer in the prefill kernel, by one warp: the last winner of its list, the winners as bits of a map of
// positions, and from the map, in order, the indices.
#pragma once
#include "cuda/device/prefill_lists.cuh"

namespace topkey::cuda {

/// One row's outputs. What most callers want, positions and nothing else, takes few instructions.
struct WarpWriter {
  const PrefillJob& job;
  const RowWriter all;
  int32_t* indices;  ///< null: not plain
  int32_t add;

  __device__ WarpWriter(const PrefillJob& j, int32_t row, const RowFact& f)
      : job(j), all(j.emission, j.first_row + row, f.request, f.start), indices(nullptr) {
    const Selection& out = j.emission.out;
    if (out.slots.data == nullptr && j.emission.shard.world_size <= 1 && out.indices.data != nullptr &&
        out.index_base.data == nullptr && out.indices.stride[1] == 1)
      indices = element<int32_t>(out.indices, j.first_row + row, 0);
    add = static_cast<int32_t>(-f.start);
  }
  __device__ __forceinline__ void put(uint32_t j, int32_t position) const {
    if (indices != nullptr) {
      indices[j] = position + add;
    } else {
      all.put(j, position, 0.0f);
    }
  }
  /// By the whole warp, behind all puts.
  __device__ void fill(uint32_t used) const {
    __syncwarp();
    all.fill_by(used, threadIdx.x & 31, 32);
  }
};

/// A row all of whose live keys are wanted.
__device__ __forceinline__ void answer_unscored(const PrefillJob& job, int32_t row, const RowFact& f) {
  const WarpWriter writer(job, row, f);
  const uint32_t lane = threadIdx.x & 31;
  uint32_t used = 0;
  for (int32_t base = f.low; f.live > 0 && base < f.high; base += 32) {
    const int32_t position = base + static_cast<int32_t>(lane);
    const bool live = position < f.high && (!job.keys.paged || page_of(job.keys, f.table_row, position) >= 0);
    const uint32_t lives = __ballot_sync(~0u, live);
    if (live) writer.put(used + __popc(lives & ((1u << lane) - 1)), position);
    used += __popc(lives);
  }
  writer.fill(used);
}

/// put(rank, position) for the marked positions from `base` on, of which `used` come before. Leaves the map empty. A lane
/// a word finds the marks; what it found is dealt out anew, so that all lanes put, side by side.
template <class Put>
__device__ __forceinline__ uint32_t each_mark(SelectScratch& w, int32_t base, uint32_t words, uint32_t used,
                                              const Put& put) {
  const uint32_t lane = threadIdx.x & 31;
  uint16_t* const found = reinterpret_cast<uint16_t*>(w.bins);
  static_assert(sizeof w.bins >= 32 * 32 * sizeof(uint16_t));
#pragma unroll 1
  for (uint32_t first = 0; first < words; first += 32) {
    uint32_t bits = w.marks[first + lane];
    w.marks[first + lane] = 0;
    const uint32_t own = __popc(bits);
    uint32_t before = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, before, step);
      if (lane >= static_cast<uint32_t>(step)) before += other;
    }
    const uint32_t total = __shfl_sync(~0u, before, 31);
    uint16_t* to = found + (before - own);
    for (; bits != 0; bits &= bits - 1) *to++ = static_cast<uint16_t>(lane * 32 + __ffs(static_cast<int>(bits)) - 1);
    __syncwarp();
    const int32_t origin = base + static_cast<int32_t>(first * 32);
#pragma unroll 4
    for (uint32_t i = lane; i < total; i += 32) put(used + i, origin + found[i]);
    used += total;
    __syncwarp();
  }
  return used;
}
__device__ __forceinline__ uint32_t hand_out_marks(SelectScratch& w, int32_t base, uint32_t words, uint32_t used,
                                                   const WarpWriter& writer) {
  if (writer.indices == nullptr)
    return each_mark(w, base, words, used, [&](uint32_t j, int32_t p) { writer.all.put(j, p, 0.0f); });
  int32_t* const indices = writer.indices;
  const int32_t add = writer.add;
  return each_mark(w, base, words, used, [&](uint32_t j, int32_t p) { indices[j] = p + add; });
}

/// What one warp does with one row's list.
struct ListTask {
  const PrefillJob& job;
  SelectScratch& w;
  const RowList& list;
  const RowFact& f;
  int32_t row;
  uint32_t want;
  float least, best;  ///< bounds of bins: at least `want` entries should reach the first, few exceed the second
  bool complete;      ///< every key is in the list, or was dropped for better ones
  bool answers;       ///< else the last winner is looked for, to thin the list
};

/// The row's last winner; number 0 if the sample's threshold was too high. Writes the answer, if it is wanted, before any
/// of the next position. w.marks is empty before and behind. nans: more by the list's, where it is the answer.
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
  if (lane == 0) w.number = 0;
  __syncwarp();
  const uint32_t marked_above = t.answers ? c.bin : kPrefillBins;
  const WarpWriter writer(t.job, t.row, t.f);
  const int32_t low = t.f.low & ~31, high = t.f.high;
  uint32_t used = 0;
  for (int64_t base = low; base < high; base += kWindow) {
    const int32_t from = static_cast<int32_t>(base);
    const bool first = from == low;
    if (binned) {
      const uint32_t marks = shared_address(w.marks);
      t.list.batches([&](const uint2(&entries)[RowList::kBatch], uint32_t begin) {
        uint32_t inside = 0;
#pragma unroll
        for (uint32_t i = 0; i < RowList::kBatch; ++i) {
          const uint32_t bin = bins.of(__uint_as_float(entries[i].x));
          const uint32_t at = entries[i].y - static_cast<uint32_t>(from);
          set_bits_if((bin > marked_above) & (at < kWindow), marks + at / 32 * 4, 1u << (at % 32));
          inside |= (bin == c.bin ? 1u : 0u) << i;
        }
        // Few: read again, so that no register is indexed.
        for (; first && inside != 0; inside &= inside - 1) {
          const uint32_t i = begin + static_cast<uint32_t>(__ffs(static_cast<int>(inside))) - 1;
          w.candidates[atomicAdd(&w.number, 1u)] = number_of(__ldcg(t.list.column + i * kListColumns));
        }
      });
      __syncwarp();
    }
    if (first && binned) last = last_of_candidates(w, t.want - c.above);
    // By rounding the bins may have counted scores below the threshold, behind which others were never kept.
    if (first && !t.complete && key_of_number(last.number) < key_of(canonical(t.least))) {
      for (uint32_t i = lane; i < kMarkWords; i += 32) w.marks[i] = 0;
      __syncwarp();
      return {0, false};
    }
    if (!t.answers) return last;
    const auto mark = [&](uint64_t number) {
      const uint32_t at = ~static_cast<uint32_t>(number) - static_cast<uint32_t>(from);
      if (number >= last.number && at < kWindow) atomicOr(&w.marks[at / 32], 1u << (at % 32));
    };
    if (binned) {
      for (uint32_t i = lane; i < w.number; i += 32) mark(w.candidates[i]);
    } else {
      t.list.each([&](uint2 entry, bool present) {
        if (present) mark(number_of(entry));
      });
    }
    __syncwarp();
    used = hand_out_marks(w, from, static_cast<uint32_t>(min(int64_t{kWindow}, high - base) + 31) / 32, used, writer);
  }
  writer.fill(used);
  return last;
}

}  // namespace topkey::cuda
