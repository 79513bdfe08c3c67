// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What the prefill kernel keeps of a row that is too long to keep all scores: a list in memory of 32 columns, each written
// by one of the threads that score the row. An entry is the score's bits and the position. Entries are compared by score,
// then position, so no two are equal.
#pragma once
#include "cuda/device/prefill_job.cuh"

namespace topkey::cuda {

__device__ __forceinline__ uint64_t number_of(uint2 entry) {
  return uint64_t{key_of(canonical(__uint_as_float(entry.x)))} << 32 | ~entry.y;
}
__device__ __forceinline__ uint32_t key_of_number(uint64_t number) { return static_cast<uint32_t>(number >> 32); }
__device__ __forceinline__ int32_t position_of_number(uint64_t number) {
  return static_cast<int32_t>(~static_cast<uint32_t>(number));
}

/// The same value, of which the compiler then knows that the whole warp has it.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }
/// The same value, made where it stands and not before.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
/// The same values, which the compiler keeps in registers in place of making them again.
__device__ __forceinline__ uint32_t kept(uint32_t x) { return __shfl_sync(~0u, x, threadIdx.x & 31); }
template <class T>
__device__ __forceinline__ T* kept(T* p) {
  const uint64_t at = reinterpret_cast<uint64_t>(p);
  return reinterpret_cast<T*>(uint64_t{kept(static_cast<uint32_t>(at >> 32))} << 32 | kept(static_cast<uint32_t>(at)));
}

/// A row's list as a whole warp sees it: lane l reads column l.
struct RowList {
  uint2* column;   ///< this lane's
  uint32_t count;  ///< entries of it
  uint32_t most;   ///< of any column
  uint32_t total;

  __device__ __forceinline__ RowList(uint2* list, const uint16_t* counts) {
    const uint32_t lane = threadIdx.x & 31;
    column = kept(list + lane), count = counts[lane];
    most = __reduce_max_sync(~0u, count), total = __reduce_add_sync(~0u, count);
  }
  static constexpr uint32_t kBatch = 16;
  /// f(entries, first) for all entries, a batch of each column at a time: entries first .. first + kBatch - 1, in all lanes
  /// together. An absent one is -inf at position 0.
  template <class F>
  __device__ __forceinline__ void batches(const F& f) const {
    uint2 next[kBatch];  // a batch is under way while another is looked at
    load(0, next);
#pragma unroll 1
    for (uint32_t base = 0; base < most; base += kBatch) {
      uint2 entries[kBatch];
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) entries[i] = next[i];
      load(base + kBatch, next);
      f(entries, base);
    }
  }
  /// Entries base .. base + kBatch - 1 of this lane's column.
  __device__ __forceinline__ void load(uint32_t base, uint2 (&entries)[kBatch]) const {
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      entries[i] = uint2{0xFF800000u, 0};
      if (base + i < count) entries[i] = __ldcg(column + (base + i) * kListColumns);
    }
  }
  /// This lane's NaNs.
  __device__ uint32_t nans() const {
    uint32_t found = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) found += is_nan(__uint_as_float(__ldcg(&column[i * kListColumns].x)));
    return found;
  }
  /// f(entry, present) for each.
  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
    batches([&](const uint2(&entries)[kBatch], uint32_t first) {
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) f(entries[i], first + i < count);
    });
  }
};

/// Bins of equal width from `least` to about the best, both finite: what is less is in none (0 to 2; or, by rounding, in
/// the first), what is more in the last.
struct ListBins {
  static constexpr uint32_t kFirst = 3;
  float least, scale;

  __device__ __forceinline__ ListBins(float from, float to)
      : least(from), scale(static_cast<float>(kPrefillBins - kFirst - 1) / fmaxf(to - from, 1e-30f)) {}
  __device__ __forceinline__ static bool suit(float least, float best) {
    return least > -3e38f && best - least < 3e38f;
  }
  /// Ascends with x; 0 for NaN. The sum's last bits count quarters: no conversion, no branch. Times 4.
  __device__ __forceinline__ uint32_t bytes_of(float x) const {
    constexpr float kUnits = 2097152.0f;
    const float sum = __fmaf_rn(x - least, scale, kUnits + static_cast<float>(kFirst) + 0.5f);
    return __float_as_uint(fminf(fmaxf(sum, kUnits), kUnits + static_cast<float>(kPrefillBins - 1))) &
           (kPrefillBins - 1) * 4;
  }
  __device__ __forceinline__ uint32_t of(float x) const { return bytes_of(x) / 4; }
  /// Below all that is in the bin.
  __device__ __forceinline__ float edge(uint32_t bin) const {
    return least + (static_cast<float>(bin - kFirst) - 0.625f) / scale;
  }
};

__device__ __forceinline__ void clear_bins(SelectScratch& w) {
  uint4* bins = reinterpret_cast<uint4*>(w.bins);
#pragma unroll
  for (int i = 0; i < kPrefillBins / 128; ++i) bins[i * 32 + static_cast<int>(threadIdx.x & 31)] = uint4{0, 0, 0, 0};
  __syncwarp();
}

/// The bin of the want-th, counted from the top, what is above it and in it; inside 0: there are not so many.
struct WarpCrossing {
  uint32_t bin, above, inside;
};
/// first: bins before it do not count.
__device__ __forceinline__ WarpCrossing cross_bins(SelectScratch& w, uint32_t want, uint32_t first) {
  constexpr int kOwn = kPrefillBins / 32;
  const int lane = static_cast<int>(threadIdx.x & 31), own = kPrefillBins - kOwn * (lane + 1);
  __syncwarp();
  if (static_cast<uint32_t>(lane) < first) w.bins[lane] = 0;
  __syncwarp();
  uint32_t bins[kOwn], sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn / 4; ++i) {
    const uint4 four = *reinterpret_cast<const uint4*>(w.bins + own + 4 * i);
    bins[4 * i] = four.x, bins[4 * i + 1] = four.y, bins[4 * i + 2] = four.z, bins[4 * i + 3] = four.w;
    sum += four.x + four.y + four.z + four.w;
  }
  uint32_t above = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, above, step);
    if (lane >= step) above += other;
  }
  above -= sum;
  const uint32_t found = __ballot_sync(~0u, above < want && want <= above + sum);
  WarpCrossing c{0, 0, 0};
#pragma unroll
  for (int b = kOwn - 1; b >= 0; --b) {
    if (above < want && want <= above + bins[b]) c = {static_cast<uint32_t>(own + b), above, bins[b]};
    above += bins[b];
  }
  const int owner = found == 0 ? 0 : __ffs(static_cast<int>(found)) - 1;
  return {__shfl_sync(~0u, c.bin, owner), __shfl_sync(~0u, c.above, owner), __shfl_sync(~0u, c.inside, owner)};
}

/// The first entries of each column, of which a threshold is taken.
template <int kUnits>
struct Sample {
  static constexpr int kMost = 2 * kUnits;
  float x[kMost];

  __device__ __forceinline__ explicit Sample(const RowList& list) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      x[i] = __uint_as_float(kCanonicalNan);
      if (static_cast<uint32_t>(i) < list.count) x[i] = __uint_as_float(__ldcg(&list.column[i * kListColumns].x));
    }
  }
  /// A score that at least `rank` of them reach, and few more; -inf if there are not so many. best: of them.
  __device__ __forceinline__ float least(SelectScratch& w, float rank, float* best) const {
    float low = 3e38f, high = -3e38f;
#pragma unroll
    for (int i = 0; i < kMost; ++i) low = fminf(low, x[i]), high = fmaxf(high, x[i]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      low = fminf(low, __shfl_xor_sync(~0u, low, step));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, step));
    }
    *best = high;
    if (!ListBins::suit(low, high)) return __uint_as_float(0xFF800000u);
    const ListBins bins(low, high);
    clear_bins(w);
#pragma unroll
    for (int i = 0; i < kMost; ++i) add_one(bins.bytes_of(x[i]) | shared_address(w.bins));
    const WarpCrossing c = cross_bins(w, static_cast<uint32_t>(rank), ListBins::kFirst);
    return c.inside == 0 ? __uint_as_float(0xFF800000u) : bins.edge(c.bin);
  }
  /// Keeps of each column what reaches `least`; how many. nans: more, by those that do not stay.
  __device__ __forceinline__ uint32_t keep(const RowList& list, float least, uint32_t* nans) const {
    const uint64_t begin = reinterpret_cast<uint64_t>(list.column);
    uint32_t next = static_cast<uint32_t>(begin);
#pragma unroll
    for (int i = 0; i < kMost; ++i) *nans += x[i] != x[i];
    *nans -= kMost - min(list.count, static_cast<uint32_t>(kMost));  // absent ones
    constexpr int kBatch = 16;
#pragma unroll
    for (int base = 0; base < kMost; base += kBatch) {
      uint32_t positions[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        positions[i] = 0;
        if (x[base + i] >= least) positions[i] = __ldcg(&list.column[(base + i) * kListColumns].y);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        store_next_if<kListColumns * sizeof(uint2)>(x[base + i] >= least, next, static_cast<uint32_t>(begin >> 32),
                                                    __float_as_uint(x[base + i]), positions[i]);
      }
    }
    return (next - static_cast<uint32_t>(begin)) / (kListColumns * sizeof(uint2));
  }
};

/// The last of a list's `want` best.
struct LastWinner {
  uint64_t number;
  bool tied;  ///< the next entry has the same score
};

/// By eight digits of eight bits, for any list of at least `want` entries: slow, and never wrong.
__device__ __forceinline__ LastWinner last_by_digits(SelectScratch& w, const RowList& list, uint32_t want) {
  uint64_t prefix = 0;
  uint32_t need = want;
#pragma unroll 1
  for (int shift = 56; shift >= 0; shift -= 8) {
    clear_bins(w);
    list.each([&](uint2 entry, bool present) {
      const uint64_t digits = number_of(entry) >> shift;
      if (present && digits >> 8 == prefix) atomicAdd(&w.bins[digits & 255], 1u);
    });
    const WarpCrossing c = cross_bins(w, need, 0);
    need -= c.above, prefix = prefix << 8 | c.bin;
    __syncwarp();
  }
  bool tied = false;
  list.each([&](uint2 entry, bool present) {
    const uint64_t number = number_of(entry);
    tied = tied || (present && number < prefix && key_of_number(number) == key_of_number(prefix));
  });
  return {prefix, __any_sync(~0u, tied) != 0};
}

/// Of the candidates [0, number) the need-th best.
__device__ __forceinline__ LastWinner last_of_candidates(const SelectScratch& w, uint32_t number, uint32_t need) {
  uint64_t last = 0;
  uint32_t next = kNotLive;
  for (uint32_t i = threadIdx.x & 31; i < number; i += 32) {
    const uint64_t mine = w.candidates[i];
    uint32_t better = 0;
#pragma unroll 4
    for (uint32_t j = 0; j < number; ++j) better += w.candidates[j] > mine;
    if (better == need - 1) last = mine;
    if (better == need) next = key_of_number(mine);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) last |= __shfl_xor_sync(~0u, last, step);  // one lane has it
  next = __reduce_max_sync(~0u, next);
  return {last, next != kNotLive && next == key_of_number(last)};
}

/// Keeps the list's entries from `last` on, dealt out evenly to its columns; returns the best key that went. counts: of
/// the columns, rewritten. nans: more, if NaNs went.
__device__ __forceinline__ uint32_t thin(const RowList& list, uint64_t last, uint16_t* counts, uint32_t* nans) {
  const uint32_t lane = threadIdx.x & 31, below = (1u << lane) - 1;
  uint2* base = list.column - lane;
  uint32_t kept = 0, dropped = kNotLive;
  // What is written never overtakes what is read: entries are read in the order in which they are dealt out.
  list.each([&](uint2 entry, bool present) {
    const uint64_t number = number_of(entry);
    const bool stays = present & (number >= last);
    const bool goes = present & !stays;
    dropped = max(dropped, goes ? key_of_number(number) : kNotLive);
    *nans += goes & (key_of_number(number) == kNanKey);
    const uint32_t stayed = __ballot_sync(~0u, stays);
    if (stays) __stcg(base + kept + __popc(stayed & below), entry);
    kept += __popc(stayed);
  });
  counts[lane] = static_cast<uint16_t>(kept / kListColumns + (lane < kept % kListColumns));
  __syncwarp();
  return __reduce_max_sync(~0u, dropped);
}

}  // namespace topkey::cuda
