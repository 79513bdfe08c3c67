// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// How the blocks of the quick decode kernel settle a row. Each keeps all its scores; of these only bin counts, sums and
// under 257 keys travel. Two meetings of the blocks that share the row: (1) all have added their bins, so all know the bin
// of the k-th key; (2) all have told how many keys they have above it and which inside. Then each ranks the keys inside for
// itself and writes its own winners, ascending, behind those of the blocks before it. A bin of too many keys takes further
// rounds of finer bins; one key of the order with too many equals is shared out in position order. Half a block settles a
// row where rows share a read of the keys, two side by side; else all of it.
#pragma once
#include <type_traits>

#include "cuda/device/quick_job.cuh"

namespace topkey::cuda {

/// global_of of positions, in 32 bits: a thread may write several winners one after the other, and a division of 64 bits
/// for each of them can be seen.
class GlobalPositions {
 public:
  __device__ explicit GlobalPositions(const Shard& s) {
    if (s.world_size <= 1) return;
    run_ = static_cast<uint32_t>(run_of(s)), step_ = run_ * static_cast<uint32_t>(s.world_size - 1);
    first_ = static_cast<uint32_t>(s.rank) * run_;
    shift_ = (run_ & (run_ - 1)) == 0 ? __ffs(static_cast<int>(run_)) - 1 : -1;
  }
  __device__ __forceinline__ int32_t operator()(int32_t local) const {
    const uint32_t at = static_cast<uint32_t>(local);
    return static_cast<int32_t>(at + (shift_ >= 0 ? at >> shift_ : at / run_) * step_ + first_);
  }

 private:
  uint32_t run_ = 1, step_ = 0, first_ = 0;
  int shift_ = 0;
};

/// Where the k-th best of a row lies.
struct QuickCut {
  float bin;                      ///< of the bins, unless by_keys
  uint32_t low, high;             ///< keys of the order, if by_keys
  bool by_keys, ranks, ties;      ///< keys inside are ranked; or all are equal, and the first `need` win
  uint32_t inside, need, wanted;  ///< keys inside; of them that win; of the row
  uint32_t place;                 ///< of this block's first candidate
};

/// The bin that holds the k-th best of what the bins hold: room.bin, bin_above, bin_inside, behind a barrier. Returns what
/// all bins hold, but for bin 0 if `linear`.
template <bool kShared, int kBins, int kThreads>
__device__ __forceinline__ uint32_t find_bin(const Team<kThreads>& h, const uint32_t* own, const uint32_t* of_row,
                                             uint32_t k) {
  constexpr int kOwn = kBins / kThreads;
  using Vector = std::conditional_t<kOwn == 4, uint4, uint2>;
  static_assert(sizeof(Vector) == kOwn * 4);
  const uint32_t first = kBins - kOwn * (h.thread() + 1);  // thread 0: the highest
  union {
    Vector vector;
    uint32_t each[kOwn];
  };
  vector =
      kShared ? __ldcg(reinterpret_cast<const Vector*>(of_row + first)) : *reinterpret_cast<const Vector*>(own + first);
  uint32_t total, sum = 0;
#pragma unroll
  for (int b = 0; b < kOwn; ++b) sum += each[b];
  uint32_t above = h.scan(sum, &total);
#pragma unroll
  for (int b = kOwn - 1; b >= 0; --b) {
    if (above < k && k <= above + each[b])
      h.room.bin = first + b, h.room.bin_above = above, h.room.bin_inside = each[b];
    above += each[b];
  }
  h.sync();
  return total;
}

/// Rounds of bins of keys of the order, finer and finer, from a bin on that has too many keys, or is the open one below.
struct QuickBin {
  uint32_t bin, above, inside;
};
template <bool kShared, int kBins, int kThreads>
__device__ __noinline__ QuickCut narrow(const QuickJob& job, QuickRoom& room, QuickRow r, uint32_t* bins, int barrier,
                                        QuickBin from) {
  const Team<kThreads> h{room, barrier};
  uint32_t* of_row = job.bins + r.row * kQuickBins;
  uint32_t steps = 1;
  const auto meet = [&] {
    h.sync();
    ++steps;
    if (kShared && h.thread() == 0) arrive_at_row(job, r.row), wait_for_row(job, r.row, steps * r.blocks);
    h.sync();
  };
  const uint32_t k = static_cast<uint32_t>(job.topk);
  QuickCut cut{0.0f, 0, 0, true, false, false, from.inside, k - from.above, k, 0};
  if (h.warp() < 2) {
    const uint32_t edge = first_key_of_bin(r.range, static_cast<int>(from.bin + h.warp()));
    if (h.lane() == 0) room.edges[h.warp()] = h.warp() == 1 && from.bin == kBins - 1 ? kPastInfinity : edge;
  }
  h.sync();
  cut.low = room.edges[0], cut.high = room.edges[1] - 1;
  // Where all scores are equal, bins are so narrow that one holds a single number: a round would say no more.
  bool open = cut.inside <= kQuickCandidates || cut.low < cut.high;
  while (open) {
    // Width >> shift < kBins.
    const int shift = max(0, (kBins == 1024 ? 22 : 23) - __clz(static_cast<int>(cut.high - cut.low)));
    static_assert(kBins == 1024 || kBins == 512);
    meet();  // nobody reads the bins of the round before any more
    for (uint32_t b = h.thread(); b < kBins; b += kThreads) {
      bins[b] = 0;
      if (kShared && r.index == 0) __stcg(of_row + b, 0u);
    }
    meet();
    for (uint32_t i = h.thread(); i < r.count; i += kThreads) {
      const uint32_t key = key_of_kept(r.scores[quick_place(i)]);
      if (key >= cut.low && key <= cut.high) atomicAdd(bins + ((key - cut.low) >> shift), 1u);
    }
    h.sync();
    for (uint32_t b = h.thread(); kShared && b < kBins; b += kThreads) add_bin(bins + b, of_row + b);
    meet();
    find_bin<kShared, kBins>(h, bins, of_row, cut.need);
    cut.low += room.bin << shift, cut.high = min(cut.high, cut.low + ((1u << shift) - 1));
    cut.inside = room.bin_inside, cut.need -= room.bin_above, cut.place = kShared ? bins[room.bin] : 0;
    open = cut.inside > kQuickCandidates && cut.need < cut.inside && cut.low < cut.high;
    h.sync();
  }
  cut.ranks = cut.inside <= kQuickCandidates, cut.ties = !cut.ranks && cut.need < cut.inside;
  if (h.thread() == 0) room.number = steps;  // the caller goes on from there
  h.sync();
  return cut;
}

/// Which of a thread's scores are above the cut's interval, and which inside; bit e is entry first + e of `own`.
struct QuickMarks {
  uint32_t above, inside;
};
inline __device__ __noinline__ QuickMarks mark_by_keys(const uint32_t* scores, uint32_t low, uint32_t high,
                                                       uint32_t first, uint32_t own) {
  QuickMarks marks{0, 0};
#pragma unroll 1
  for (uint32_t e = 0; e < own; ++e) {
    const uint32_t key = key_of_kept(scores[quick_place(first + e)]);
    marks.above |= (key > high ? 1u : 0u) << e;
    marks.inside |= (key >= low && key <= high ? 1u : 0u) << e;
  }
  return marks;
}
template <int kBins>
__device__ __noinline__ QuickMarks mark_by_bin(const uint32_t* scores, BinRange range, float bin, uint32_t first,
                                               uint32_t own) {
  OverEdge inside(OverEdge::below(bin));
  // No score is over the last bin.
  OverEdge above(bin == kBins - 1 ? __uint_as_float(kCanonicalNan) : OverEdge::below(bin + 1.0f));
  const uint4* vectors = reinterpret_cast<const uint4*>(scores);
#pragma unroll 2
  for (uint32_t v = first / 4; v < (first + own) / 4; ++v) {
    const uint4 four = vectors[quick_place(v * 4) / 4];
    const uint32_t each[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float x = (__uint_as_float(each[e]) - range.low) * range.scale;
      inside.add(x), above.add(x);
    }
  }
  const uint32_t over = above.of(own);
  return {over, inside.of(own) & ~over};
}
template <int kBins>
__device__ __forceinline__ QuickMarks mark_scores(const QuickRow& r, const QuickCut& cut, uint32_t first,
                                                  uint32_t end) {
  const uint32_t own = first < end ? min(32u, end - first) : 0;
  return cut.by_keys ? mark_by_keys(r.scores, cut.low, cut.high, first, own)
                     : mark_by_bin<kBins>(r.scores, r.range, cut.bin, first, own);
}

__device__ __forceinline__ int32_t position_of(const QuickRow& r, uint32_t i) {
  return r.positions != nullptr ? r.positions[i] : r.first + static_cast<int32_t>(i);
}
__device__ __forceinline__ uint64_t entry_of(const QuickRow& r, uint32_t i) {
  const uint32_t key = key_of_kept(r.scores[quick_place(i)]);
  return static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(position_of(r, i));
}

/// A row of which this block has told its bins, or that it has alone: the cut, and the block's winners. By half a block.
template <bool kShared, int kBins, int kThreads>
class QuickSettler {
 public:
  /// bins: the block's of the row.
  __device__ __forceinline__ QuickSettler(const QuickJob& job, Team<kThreads> team, const QuickRow& row, uint32_t* bins)
      : job_(job), h_(team), room_(team.room), r_(row), bins_(bins), t_(team.thread()) {}

  /// dead: keys of the row that are not live, where it is alone.
  __device__ __forceinline__ void run(uint32_t dead) {
    const QuickCut cut = find_cut(dead);
    mark(cut);
    if (kShared) exchange(cut);
    const uint64_t last = rank(cut);
    choose(cut, last);
    write();
    if (r_.index == 0 && cut.wanted < static_cast<uint32_t>(job_.columns))
      fill_row(job_, r_.row, cut.wanted, t_, kThreads);
  }

 private:
  /// Words of 32 entries that a thread marks at most.
  static constexpr int kWords = kMostEntries / 32 / kThreads;

  __device__ __forceinline__ QuickCut find_cut(uint32_t dead) {
    const uint32_t k = static_cast<uint32_t>(job_.topk);
    if (t_ == 0) {
      room_.above = room_.inside = room_.number = 0, room_.bin = 0;
      if (kShared) wait_for_row(job_, r_.row, r_.blocks);
    }
    h_.sync();
    if (kShared) dead = __ldcg(&job_.headers[r_.row].y);
    const uint32_t counted = find_bin<kShared, kBins>(h_, bins_, job_.bins + r_.row * kQuickBins, k);
    const uint32_t live = static_cast<uint32_t>(r_.end) - dead;
    // All live keys are above, if they are no more than k.
    QuickCut cut{0.0f, 1, 0, true, false, false, 0, 0, min(live, k), 0};
    if (live <= k) return cut;
    const QuickBin bin =
        counted < k ? QuickBin{0, counted, live - counted} : QuickBin{room_.bin, room_.bin_above, room_.bin_inside};
    if (counted < k || bin.inside > kQuickCandidates) {
      cut = narrow<kShared, kBins, kThreads>(job_, room_, r_, bins_, h_.barrier, bin);
      steps_ = room_.number;
      h_.sync();
      if (t_ == 0) room_.number = 0;
      h_.sync();
    } else {
      cut.bin = static_cast<float>(bin.bin), cut.by_keys = false, cut.ranks = true;
      cut.inside = bin.inside, cut.need = k - bin.above, cut.place = kShared ? bins_[bin.bin] : 0;
    }
    return cut;
  }

  /// Keys above and inside; those to be ranked to where all blocks find them. A thread has `span` entries side by side.
  __device__ __forceinline__ void mark(const QuickCut& cut) {
    uint32_t span = 4;
    while (span * kThreads < r_.count) span *= 2;
    first_ = t_ * span;
    const uint32_t end = min(first_ + span, r_.count);
    uint64_t* to = kShared ? job_.candidates + r_.row * kQuickCandidates + cut.place : room_.candidates;
    uint32_t above = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      marks_[w] = {0, 0};
      if (w > 0 && span <= 32u * w) continue;
      marks_[w] = mark_scores<kBins>(r_, cut, first_ + 32 * w, end);
      above += __popc(marks_[w].above), inside_ += __popc(marks_[w].inside);
    }
    if (cut.ranks && inside_ != 0) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
#pragma unroll 1
        for (uint32_t rest = marks_[w].inside; rest != 0; rest &= rest - 1)
          to[atomicAdd(&room_.number, 1u)] = entry_of(r_, entry(w, rest));
      }
    }
    const uint32_t sum = __reduce_add_sync(~0u, above), sum_inside = __reduce_add_sync(~0u, inside_);
    if (h_.lane() == 0 && sum != 0) atomicAdd(&room_.above, sum);
    if (h_.lane() == 0 && sum_inside != 0) atomicAdd(&room_.inside, sum_inside);
    h_.sync();
  }

  /// The second meeting: how many keys the blocks before have above and inside, and all candidates.
  __device__ __forceinline__ void exchange(const QuickCut& cut) {
    uint2* shares = job_.shares + r_.row * gridDim.x;
    if (t_ == 0) {
      __stcg(shares + r_.index, uint2{room_.above, room_.inside});
      arrive_at_row(job_, r_.row), wait_for_row(job_, r_.row, (steps_ + 1) * r_.blocks);
    }
    h_.sync();
    if (t_ < 32) {
      uint2 before{0, 0};
#pragma unroll 4
      for (uint32_t i = t_; i < r_.index; i += 32) {
        const uint2 share = __ldcg(shares + i);
        before.x += share.x, before.y += share.y;
      }
      before = {__reduce_add_sync(~0u, before.x), __reduce_add_sync(~0u, before.y)};
      if (t_ == 0) room_.before_above = before.x, room_.before_inside = before.y;
    } else if (cut.ranks) {
      const auto* all = reinterpret_cast<const unsigned long long*>(job_.candidates + r_.row * kQuickCandidates);
      for (uint32_t i = t_ - 32; i < cut.inside; i += kThreads - 32) room_.candidates[i] = __ldcg(all + i);
    }
    h_.sync();
    base_ = room_.before_above, tied_ = room_.before_inside;
  }

  /// The last winner inside, if they are ranked; base_ counts the winners of the blocks before.
  __device__ __forceinline__ uint64_t rank(const QuickCut& cut) {
    if (!cut.ranks) {
      base_ += min(tied_, cut.need);
      return 0;
    }
    uint64_t mine = 0;
    uint32_t better = cut.need;
    if (t_ < cut.inside) {
      mine = room_.candidates[t_], better = 0;
#pragma unroll 4
      for (uint32_t i = 0; i < cut.inside; ++i) better += room_.candidates[i] > mine;
      if (better == cut.need - 1) room_.cut = mine;
    }
    const int32_t position = static_cast<int32_t>(~static_cast<uint32_t>(mine));
    base_ += h_.count(better < cut.need && position < r_.first);
    return room_.cut;
  }

  /// Winners inside join those above.
  __device__ __forceinline__ void choose(const QuickCut& cut, uint64_t last) {
    if (cut.ties) {
      uint32_t total, number = tied_ + h_.scan(inside_, &total);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        for (uint32_t rest = marks_[w].inside; rest != 0 && number < cut.need; rest &= rest - 1, ++number)
          marks_[w].above |= rest & -rest;
      }
      h_.sync();
    } else if (inside_ != 0) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
#pragma unroll 1
        for (uint32_t rest = marks_[w].inside; rest != 0; rest &= rest - 1) {
          if (entry_of(r_, entry(w, rest)) >= last) marks_[w].above |= rest & -rest;
        }
      }
    }
  }

  __device__ __forceinline__ void write() {
    uint32_t wins = 0, total;
#pragma unroll
    for (int w = 0; w < kWords; ++w) wins += __popc(marks_[w].above);
    const uint32_t rank = base_ + h_.scan(wins, &total);
    int32_t* out = job_.out + r_.row * job_.out_row + rank;
    if (job_.scores != nullptr || job_.shard.world_size > 1) return write_more(rank);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll 1
      for (uint32_t rest = marks_[w].above; rest != 0; rest &= rest - 1) *out++ = position_of(r_, entry(w, rest));
    }
  }
  __device__ __forceinline__ void write_more(uint32_t rank) {
    const GlobalPositions global(job_.shard);
    int32_t* const out = job_.out + r_.row * job_.out_row;
    float* const scores = job_.scores != nullptr ? job_.scores + r_.row * job_.scores_row : nullptr;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll 1
      for (uint32_t rest = marks_[w].above; rest != 0; rest &= rest - 1, ++rank) {
        const uint32_t i = entry(w, rest);
        out[rank] = global(position_of(r_, i));
        if (scores != nullptr) scores[rank] = canonical(__uint_as_float(r_.scores[quick_place(i)]));
      }
    }
  }

  /// The entry of the lowest bit of a word.
  __device__ __forceinline__ uint32_t entry(int word, uint32_t bits) const {
    return first_ + 32 * word + __ffs(static_cast<int>(bits)) - 1;
  }

  const QuickJob& job_;
  const Team<kThreads> h_;
  QuickRoom& room_;
  const QuickRow& r_;
  uint32_t* bins_;
  const uint32_t t_;
  uint32_t steps_ = 1, first_ = 0, inside_ = 0;  ///< meetings; this thread's first entry; its keys inside
  uint32_t base_ = 0, tied_ = 0;                 ///< winners, and keys inside, of the blocks before
  QuickMarks marks_[kWords];
};

}  // namespace topkey::cuda
