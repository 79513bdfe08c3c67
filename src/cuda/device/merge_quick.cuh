// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A row's parts merged by one block whose threads hold all of its entries, where each part is ascending by position, as
// every selection of this library writes it: the cut by one histogram between bounds and a few candidates ranked against
// each other, then the winners, part after part, each to its place: its number in its own part and that of those of the
// other parts before it. Parts that are not ascending are told, and left to the general way.
#pragma once
#include "cuda/device/order.cuh"
#include "cuda/device/select.cuh"

namespace topkey::cuda {

/// Most parts of a row.
constexpr int64_t kMergeParts = 64;
/// Up to so many entries of a thread have their positions in registers.
constexpr int kMergeHeld = 8;
/// Words of a map of winners, of 32 positions each: contexts of up to 524,288 keys.
constexpr uint32_t kMergeMap = 16384;
/// Keys at the cut that are ranked against each other; more are counted again, in finer bins.
constexpr uint32_t kMergeCandidates = 128;

/// What of a merge this way takes: columns side by side.
struct QuickMerge {
  const int32_t* indices;
  const uint32_t* scores;
  int64_t index_part, index_row, score_part, score_row;  ///< elements
  uint32_t parts, width;
  uint32_t per_part;  ///< chunks of 32 entries of a part; of all parts at most 32 times what a thread holds
  uint32_t best;      ///< so many of each thread's best are topk or more of the row's entries (1 or 2); 0 = none are
  bool plain;  ///< nothing is forced, started or counted, and positions and perhaps scores are all that is wanted
  uint32_t map_words;       ///< plain: of a map of winners, for positions under 32 times as many; 0 = scores are wanted
  const int32_t* requests;  ///< plain: of each row, < 0 = padding; null = all are rows

  __device__ __forceinline__ const int32_t* index(int64_t row, uint32_t part, uint32_t column) const {
    return indices + row * index_row + part * index_part + column;
  }
  __device__ __forceinline__ const uint32_t* score(int64_t row, uint32_t part, uint32_t column) const {
    return scores + row * score_row + part * score_part + column;
  }
};

/// The number of +inf: all of finite scores are under it.
constexpr uint32_t kInfinityKey = 0xFF800000u;

struct QuickRoom {
  uint32_t bins[kSelectThreads];
  uint32_t groups[kSelectThreads / 32];  ///< sums of 32 bins
  uint32_t winners[kSelectThreads / 32];
  uint32_t starts[kMergeParts + 1];  ///< of each part's winners
  int64_t request, start, end;
  uint32_t high, low, floor, live, tie_high, tie_low, unsorted, candidates;
  uint32_t last;  ///< position
  uint32_t cut_key, next_key;
  uint64_t cut_at;
  uint64_t at[kMergeCandidates];
  uint32_t key[kMergeCandidates];

  /// All threads; a barrier must follow.
  __device__ void clear() {
    bins[threadIdx.x] = 0;
    if (threadIdx.x != 0) return;
    high = live = tie_high = unsorted = candidates = last = 0;
    low = floor = tie_low = ~0u;
  }
};

/// Winners: keys above `key`, and of those equal to it the entries before this position and part.
struct QuickCut {
  uint32_t key, position, part;
  bool tied;  ///< a key equal to the last winner was left out
};

/// As key_of and canonical of order.cuh and view.cuh, in fewer steps.
__device__ __forceinline__ uint32_t quick_key(float score) {
  const uint32_t u = __float_as_uint(score + 0.0f);  // -0 becomes +0
  const uint32_t flips = static_cast<uint32_t>(static_cast<int32_t>(u) >> 31) | 0x80000000u;
  return is_nan(score) ? kNanKey : u ^ flips;
}

/// The same number, of which the compiler does not know that: what follows from it is computed again where it is wanted,
/// else it fills the registers that the entries need.
__device__ __forceinline__ uint32_t afresh(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// Where a warp's chunks lie: `count` of them, each 32 columns of one part, the first the chunk `of_part` of `part`.
struct Chunks {
  uint32_t count, per_part, part, of_part;

  __device__ Chunks(uint32_t all, uint32_t each) : per_part(each) {
    const uint32_t warp = threadIdx.x >> 5, first = warp * all / (kSelectThreads / 32);
    count = (warp + 1) * all / (kSelectThreads / 32) - first;
    part = first / each, of_part = first % each;
  }
};
struct Chunk {
  uint32_t part, of_part;

  __device__ explicit Chunk(const Chunks& c) : part(afresh(c.part)), of_part(afresh(c.of_part)) {}
  __device__ void next(const Chunks& c) {
    if (++of_part == c.per_part) of_part = 0, ++part;
  }
  __device__ uint32_t column() const { return of_part * 32 + (threadIdx.x & 31); }
};

/// A thread's entries: one of each of its warp's chunks. Registers hold their keys, and the positions of a few; of many,
/// positions lie in shared memory.
template <int kEach>
struct Entries {
  static constexpr bool kShares = kEach > kMergeHeld;
  uint32_t keys[kEach];               ///< kNotLive: none there; before rank(), bits of scores
  int32_t held[kShares ? 1 : kEach];  ///< positions; < 0: none
  int32_t* shared;                    ///< the same of this thread, each kSelectThreads after the last

  __device__ __forceinline__ int32_t position(int e) const {
    return kShares ? shared[e * kSelectThreads] : held[kShares ? 0 : e];
  }
  /// Reads all before anything is done with the first of them. Returns whether a valid entry's predecessor in its part is
  /// not a valid one before it. `meanwhile` is done until they come.
  template <class Meanwhile>
  __device__ __forceinline__ bool load(const QuickMerge& m, int64_t row, const Chunks& chunks,
                                       const Meanwhile& meanwhile) {
    const uint32_t lane = threadIdx.x & 31, width = m.width;
    int32_t positions[kEach];
    Chunk chunk(chunks);
    const int32_t* index = m.index(row, chunk.part, chunk.column());
    const uint32_t* score = m.score(row, chunk.part, chunk.column());
    const int64_t back = int64_t{chunks.per_part} * 32;
    // What comes before this warp's first entry; of a part's first entry it is not looked at.
    uint32_t carried = lane == 0 && chunks.count > 0 && chunk.of_part > 0 ? static_cast<uint32_t>(index[-1]) : ~0u;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const bool inside = e < chunks.count && chunk.column() < width;
      positions[e] = inside ? *index : -1;
      keys[e] = inside ? *score : 0;
      chunk.next(chunks);
      index += 32, score += 32;
      if (chunk.of_part == 0) index += m.index_part - back, score += m.score_part - back;
    }
    meanwhile();
    bool bad = false;
    each(chunks, [&](int e, const Chunk& at) {
      // Lane 0 gets the last lane's: the predecessor of the next chunk's first.
      const uint32_t turned = __shfl_sync(~0u, static_cast<uint32_t>(positions[e]), (lane + 31) & 31);
      const bool first = lane == 0 && at.of_part == 0;
      bad |= positions[e] >= 0 && !first && (lane == 0 ? carried : turned) >= static_cast<uint32_t>(positions[e]);
      carried = turned;
      if (kShares) {
        shared[e * kSelectThreads] = positions[e];
      } else {
        held[kShares ? 0 : e] = positions[e];
      }
    });
    return bad;
  }
  /// Bits of scores become keys, forced(position) tells which are forced. Returns how many scores are NaN.
  template <class Forced>
  __device__ __forceinline__ uint32_t rank(const Forced& forced) {
    uint32_t nans = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int32_t at = position(e);
      const uint32_t key = quick_key(__uint_as_float(keys[e]));
      nans += at >= 0 && key == kNanKey;
      keys[e] = at < 0 ? kNotLive : forced(at) ? kForcedKey : key;
    }
    return nans;
  }
  /// Tells room this thread's part of high, low, floor and live.
  __device__ void bound(uint32_t best, QuickRoom& room) const {
    uint32_t first = 0, second = 0, low = ~0u, live = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const uint32_t key = keys[e], lesser = key < first ? key : first;
      second = lesser > second ? lesser : second;
      first = key > first ? key : first;
      low = key - 1 < low ? key - 1 : low;  // those that are not live stay out of it
      live += key != kNotLive;
    }
    // What is no number of a finite score would only spread the bins; the last one is open to it.
    const uint32_t number = first < kInfinityKey ? first : second < kInfinityKey ? second : 0;
    const uint32_t high = __reduce_max_sync(~0u, number), least = __reduce_min_sync(~0u, low);
    const uint32_t floor = __reduce_min_sync(~0u, best == 1 ? first : best == 2 ? second : 0);
    live = __reduce_add_sync(~0u, live);
    if ((threadIdx.x & 31) != 0) return;
    atomicMax(&room.high, high);
    atomicMin(&room.low, least);
    atomicMin(&room.floor, floor);
    atomicAdd(&room.live, live);
  }
  /// Tells room the last position, at least this thread's part of it.
  __device__ __forceinline__ void bound_positions(QuickRoom& room) const {
    int32_t last = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) last = max(last, position(e));
    const uint32_t most = __reduce_max_sync(~0u, static_cast<uint32_t>(last));
    if ((threadIdx.x & 31) == 0) atomicMax(&room.last, most);
  }
  /// Calls body(e, chunk) for each of the entries.
  template <class Body>
  __device__ __forceinline__ void each(const Chunks& chunks, const Body& body) const {
    Chunk chunk(chunks);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      body(e, chunk);
      chunk.next(chunks);
    }
  }
};

/// Values among which one is looked for, the need-th largest of those in [low, high]; most are at most `guess`.
struct Span {
  uint32_t low, high, guess, need;
  uint32_t equal;  ///< values in [low, high], once known
};

/// Reads room.bins and room.groups: the bin of the value looked for becomes the span. Every warp comes to the same.
__device__ inline void narrow(Span& span, int shift, const QuickRoom& room) {
  const uint32_t lane = threadIdx.x & 31;
  const auto from_top = [&](uint32_t own) {
    uint32_t sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_down_sync(~0u, sum, step);
      sum += lane + step < 32 ? other : 0;
    }
    return sum;
  };
  const uint32_t group = room.groups[lane], groups = from_top(group);
  const int g = 31 - __clz(static_cast<int>(__ballot_sync(~0u, groups >= span.need)));
  const uint32_t above_group = __shfl_sync(~0u, groups - group, g);
  const uint32_t bin = room.bins[g * 32 + lane], bins = from_top(bin) + above_group;
  const int b = 31 - __clz(static_cast<int>(__ballot_sync(~0u, bins >= span.need)));
  span.equal = __shfl_sync(~0u, bin, b);
  span.need -= __shfl_sync(~0u, bins - bin, b);
  const uint32_t number = static_cast<uint32_t>(g) * 32 + static_cast<uint32_t>(b);
  span.low += number << shift;
  // The last bin is open.
  const uint32_t rest = span.high - span.low, width = (1u << shift) - 1;
  span.high = span.low + (number == kSelectThreads - 1 || rest < width ? rest : width);
  span.guess = span.high;
}

/// The cut among the candidates that room holds, `equal` of them, of which `need` win. A barrier is inside.
__device__ inline QuickCut rank_candidates(const Span& span, QuickRoom& room) {
  const uint32_t lane = threadIdx.x & 31;
  for (uint32_t i = threadIdx.x >> 5; i < span.equal; i += kSelectThreads / 32) {
    const uint32_t key = room.key[i];
    const uint64_t at = room.at[i];
    uint32_t rank = 0;
    for (uint32_t base = 0; base < span.equal; base += 32) {
      const uint32_t j = base + lane < span.equal ? base + lane : i;  // none is better than itself
      const uint32_t other = room.key[j];
      rank += __popc(__ballot_sync(~0u, (other > key) | ((other == key) & (room.at[j] < at))));
    }
    if (lane == 0 && rank + 1 == span.need) room.cut_key = key, room.cut_at = at;
    if (lane == 0 && rank == span.need) room.next_key = key;
  }
  __syncthreads();
  return {room.cut_key, static_cast<uint32_t>(room.cut_at >> 32), static_cast<uint32_t>(room.cut_at) + 1,
          room.next_key == room.cut_key};
}

/// Narrows the span until all of it wins, or few candidates are left, or it is one value. value(e) of an entry: 0 = none.
/// room.bins are clear; they are not at the end.
template <int kEach, class Value>
__device__ __forceinline__ void settle(const Value& value, Span& span, QuickRoom& room) {
#pragma unroll 1
  for (;;) {
    const uint32_t range = span.guess > span.low ? span.guess - span.low : 0;
    const int bits = 32 - __clz(static_cast<int>(range)), shift = bits > 10 ? bits - 10 : 0;  // 1024 bins
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const uint32_t v = value(e), bin = (v - span.low) >> shift;
      if (v >= span.low && v <= span.high) atomicAdd(&room.bins[bin < kSelectThreads ? bin : kSelectThreads - 1], 1u);
    }
    __syncthreads();
    const uint32_t sum = __reduce_add_sync(~0u, room.bins[threadIdx.x]);
    if ((threadIdx.x & 31) == 0) room.groups[threadIdx.x >> 5] = sum;
    __syncthreads();
    narrow(span, shift, room);
    if (span.equal == span.need || span.equal <= kMergeCandidates || span.low == span.high) return;
    __syncthreads();
    room.bins[threadIdx.x] = 0;
    __syncthreads();
  }
}

template <int kEach, class Value>
__device__ __forceinline__ QuickCut cut_among(const Entries<kEach>& entries, const Chunks& chunks, const Value& value,
                                              const Span& span, QuickRoom& room) {
  entries.each(chunks, [&](int e, const Chunk& chunk) {
    const uint32_t v = value(e);
    if (v < span.low || v > span.high) return;
    const uint32_t slot = atomicAdd(&room.candidates, 1u);
    room.key[slot] = entries.keys[e];
    room.at[slot] = static_cast<uint64_t>(static_cast<uint32_t>(entries.position(e))) << 32 | chunk.part;
  });
  __syncthreads();
  return rank_candidates(span, room);
}

/// Too many entries of one key: their positions decide, the lower the better.
template <int kEach>
__device__ __forceinline__ QuickCut cut_of_ties(const Entries<kEach>& entries, const Chunks& chunks, uint32_t key,
                                                uint32_t need, QuickRoom& room) {
  const auto value = [&](int e) {
    // Above 0: positions have 31 bits.
    return entries.keys[e] == afresh(key) ? ~static_cast<uint32_t>(entries.position(e)) : 0u;
  };
  uint32_t high = 0, low = ~0u;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const uint32_t v = value(e);
    high = v > high ? v : high;
    low = v != 0 && v < low ? v : low;
  }
  high = __reduce_max_sync(~0u, high), low = __reduce_min_sync(~0u, low);
  if ((threadIdx.x & 31) == 0) atomicMax(&room.tie_high, high), atomicMin(&room.tie_low, low);
  __syncthreads();
  room.bins[threadIdx.x] = 0;
  __syncthreads();
  Span span{room.tie_low, room.tie_high, room.tie_high, need, 0};
  settle<kEach>(value, span, room);
  if (span.equal == span.need) return {key, ~span.low + 1, 0, true};
  return cut_among(entries, chunks, value, span, room);
}

/// span: of the keys. All barriers inside; room.bins are clear.
template <int kEach>
__device__ __forceinline__ QuickCut quick_cut(const Entries<kEach>& entries, const Chunks& chunks, Span span,
                                              QuickRoom& room) {
  const auto value = [&](int e) { return entries.keys[e]; };
  settle<kEach>(value, span, room);
  if (span.equal == span.need) return {span.low - 1, 0, 0, false};
  if (span.equal <= kMergeCandidates) return cut_among(entries, chunks, value, span, room);
  return cut_of_ties(entries, chunks, span.low, span.need, room);
}

/// Winners, part after part: positions and scores.
struct WinnerLists {
  uint32_t *positions, *scores;
};

/// How many of positions [begin, end) are under `limit`. The one before `begin` may be read.
__device__ __forceinline__ uint32_t count_under(const uint32_t* positions, uint32_t begin, uint32_t end,
                                                uint32_t limit) {
  uint32_t low = begin;
  // Four steps at a time: steps of 0 change nothing.
  for (uint32_t step = 1u << (31 - __clz(static_cast<int>(end - begin | 1u))); step > 0; step >>= 4) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const uint32_t probe = low + (step >> s) < end ? low + (step >> s) : end;
      low = positions[static_cast<int32_t>(probe) - 1] < limit ? probe : low;
    }
  }
  return low - begin;
}

/// Lists of `step` parts each become lists of twice as many. emit(place, position, score) for all `count` winners.
template <class Emit>
__device__ __forceinline__ void merge_pairs(const WinnerLists& lists, uint32_t count, uint32_t step, uint32_t parts,
                                            const uint32_t* starts, const Emit& emit) {
  const auto start = [&](uint32_t part) { return starts[part < parts ? part : parts]; };
  for (uint32_t i = threadIdx.x; i < count; i += kSelectThreads) {
    uint32_t own = 0;
    for (uint32_t part = step; part < parts; part += step) own = starts[part] <= i ? part : own;
    const bool left = (own & step) == 0;
    const uint32_t other = left ? own + step : own - step, begin = start(other), end = start(other + step);
    const uint32_t position = lists.positions[i], score = lists.scores[i];
    uint32_t at = begin + count_under(lists.positions, begin, end, position);
    // A position that two parts brought stands twice, the lower score first, as sorted numbers would.
    for (; at < end && lists.positions[at] == position; ++at) {
      const uint32_t mine = quick_key(__uint_as_float(score)), its = quick_key(__uint_as_float(lists.scores[at]));
      if (its > mine || (left && its == mine)) break;
    }
    emit(left ? i + at - begin : i - start(own) + at, position, score);
  }
}

/// Whether an entry is among the winners.
template <int kEach>
__device__ __forceinline__ bool wins(const Entries<kEach>& entries, int e, const Chunk& chunk, const QuickCut& cut) {
  if (entries.keys[e] != cut.key) return entries.keys[e] > cut.key;
  const uint32_t position = static_cast<uint32_t>(entries.position(e));  // few
  return position < cut.position || (position == cut.position && chunk.part < cut.part);
}

/// Winners of a row to lists, part after part, and where each part's begin to room.starts. A barrier is inside, another
/// must follow.
template <bool kForces, int kEach>
__device__ __forceinline__ void keep_winners(const QuickMerge& m, int64_t row, const Entries<kEach>& entries,
                                             const Chunks& chunks, const QuickCut& cut, const WinnerLists& lists,
                                             QuickRoom& room) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint32_t all = 0, winning = 0;  // of the warp; a bit for each of this thread's entries
  entries.each(chunks, [&](int e, const Chunk& chunk) {
    const bool win = wins(entries, e, chunk, cut);
    winning |= (win ? 1u : 0u) << e;
    all += __popc(__ballot_sync(~0u, win));
  });
  if (lane == 0) room.winners[warp] = all;
  __syncthreads();
  const uint32_t other = room.winners[lane];
  uint32_t used = __reduce_add_sync(~0u, lane < warp ? other : 0);
  entries.each(chunks, [&](int e, const Chunk& chunk) {
    if (lane == 0 && e < chunks.count && chunk.of_part == 0) room.starts[chunk.part] = used;
    const bool win = (winning >> e & 1) != 0;
    const uint32_t ballot = __ballot_sync(~0u, win), i = used + __popc(ballot & ((1u << lane) - 1));
    used += __popc(ballot);
    if (!win) return;
    const uint32_t key = entries.keys[e];
    lists.positions[i] = static_cast<uint32_t>(entries.position(e));
    lists.scores[i] = __float_as_uint(kForces && key == kForcedKey
                                          ? canonical(__uint_as_float(*m.score(row, chunk.part, chunk.column())))
                                          : score_of_key(key));
  });
}

/// Winners by a map of the row's positions, a bit each, which has them in order: put(place, position) for all. False: a
/// position came twice. All barriers inside.
template <int kEach, class Put>
__device__ __forceinline__ bool write_by_map(const Entries<kEach>& entries, const Chunks& chunks, const QuickCut& cut,
                                             uint32_t* map, QuickRoom& room, const Put& put) {
  const uint32_t each = (room.last / 32 + kSelectThreads) / kSelectThreads, lane = threadIdx.x & 31;
  for (uint32_t i = 0; i < each; ++i) map[i * kSelectThreads + threadIdx.x] = 0;
  __syncthreads();
  bool twice = false;
  entries.each(chunks, [&](int e, const Chunk& chunk) {
    if (!wins(entries, e, chunk, cut)) return;
    const uint32_t position = static_cast<uint32_t>(entries.position(e)), bit = 1u << (position & 31);
    twice |= (atomicOr(&map[position / 32], bit) & bit) != 0;
  });
  if (__syncthreads_or(twice)) return false;
  uint32_t own = 0;
  for (uint32_t i = 0; i < each; ++i) own += __popc(map[threadIdx.x * each + i]);
  uint32_t sum = own;
#pragma unroll
  for (uint32_t step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, step);
    sum += lane >= step ? other : 0;
  }
  if (lane == 31) room.winners[threadIdx.x >> 5] = sum;
  __syncthreads();
  const uint32_t of_warp = room.winners[lane];
  uint32_t place = __reduce_add_sync(~0u, lane < threadIdx.x >> 5 ? of_warp : 0) + sum - own;
  for (uint32_t i = 0; i < each; ++i) {
    const uint32_t first = (threadIdx.x * each + i) * 32;
    for (uint32_t rest = map[threadIdx.x * each + i]; rest != 0; rest &= rest - 1)
      put(place++, first + __ffs(static_cast<int>(rest)) - 1);
  }
  return true;
}

/// Where in shared memory a merge's lists lie, in words. The word before either of them may be read and holds nothing.
/// Positions of entries that are held there are not wanted any more when the second lists are written: both begin at
/// `entries`.
struct MergeRoom {
  int64_t lists, entries, words;

  __host__ __device__ MergeRoom(int64_t winners, int64_t parts, int each) : lists(4), entries(lists + 2 * winners + 1) {
    const int64_t second = parts > 2 ? 2 * winners : 0, held = each > kMergeHeld ? int64_t{each} * kSelectThreads : 0;
    words = entries + (second > held ? second : held);
  }
};

}  // namespace topkey::cuda
