// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Where a block of the quick decode kernel cannot keep all scores of its slice: windows of scores, one after the other, of
// which those that may still win go to a list, in the order of their positions. The row's bins speak of all its keys, so
// the bin of the block's own k-th best so far tells which: what is in a lower bin cannot be among the row's k best. Bins
// that do not tell enough apart cost an exact look. By all threads that score.
#pragma once
#include "cuda/device/quick_settle.cuh"

namespace topkey::cuda {

/// A row's list and the window in work: parts of the block's memory.
struct QuickList {
  uint32_t* values;    ///< [capacity] see quick_place
  int32_t* positions;  ///< [capacity]
  uint32_t* window;    ///< [window_size] likewise
  uint32_t capacity, window_size, count;
};
/// Of `words` words. Windows are whole units of all warpgroups.
__host__ __device__ inline QuickList list_of(uint32_t* memory, uint32_t words) {
  QuickList list{};
  list.window_size = words >= 20480 ? 8192 : words >= 10240 ? 4096 : 2048;
  list.capacity = words < list.window_size ? 0 : (words - list.window_size) / 2 / 32 * 32;
  list.values = memory, list.positions = reinterpret_cast<int32_t*>(memory + list.capacity);
  list.window = memory + 2 * list.capacity;
  return list;
}

/// Exclusive sum over all threads that score, and of all. Two barriers.
inline __device__ __noinline__ uint2 scan_all(QuickShared& s, uint32_t value) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32, up = sum_lanes_up(value);
  if (lane == 31) s.warps[warp] = up;
  named_barrier(7, kQuickThreads);
  const uint32_t of_warp = lane < kQuickThreads / 32 ? s.warps[lane] : 0;
  const uint32_t before = __reduce_add_sync(~0u, lane < warp ? of_warp : 0), total = __reduce_add_sync(~0u, of_warp);
  named_barrier(7, kQuickThreads);
  return {before + up - value, total};
}

/// What stays: keys of the order from `least` on; of those that are `least` itself, the first `ties`, of which `seen` came.
struct Keeps {
  uint32_t least, ties, seen;
};
/// Scores in work: how many, and the position of the first.
struct QuickWindow {
  uint32_t count;
  int32_t first;
};
/// Appends what stays of `count` entries, in their order, to the list, which may be where they are. at(i): entry i as
/// (bits, position). Returns what the list has then.
template <class At>
__device__ __forceinline__ uint32_t keep(QuickShared& s, const QuickList& list, uint32_t kept, uint32_t count,
                                         Keeps& keeps, const At& at) {
  constexpr uint32_t kEach = 4;
#pragma unroll 1
  for (uint32_t base = 0; base < count; base += kQuickThreads * kEach) {
    uint2 entries[kEach];
    uint32_t stay = 0, tied = 0;
#pragma unroll
    for (uint32_t e = 0; e < kEach; ++e) {
      const uint32_t i = base + threadIdx.x * kEach + e;
      entries[e] = i < count ? at(i) : uint2{kNotLiveScore, 0};
      const uint32_t key = key_of_kept(entries[e].x);
      stay |= (key > keeps.least ? 1u : 0u) << e, tied |= (key == keeps.least ? 1u : 0u) << e;
    }
    if (keeps.ties == ~0u) {
      stay |= tied;
    } else {
      const uint2 number = scan_all(s, __popc(tied));
#pragma unroll
      for (uint32_t e = 0; e < kEach; ++e) {
        if ((tied >> e & 1u) != 0 && keeps.seen + number.x + __popc(tied & ((1u << e) - 1)) < keeps.ties)
          stay |= 1u << e;
      }
      keeps.seen += number.y;
    }
    const uint2 scanned = scan_all(s, __popc(stay));  // all have read before any writes
    uint32_t to = kept + scanned.x;
#pragma unroll
    for (uint32_t e = 0; e < kEach; ++e) {
      if ((stay >> e & 1u) == 0) continue;
      list.values[quick_place(to)] = entries[e].x, list.positions[to] = static_cast<int32_t>(entries[e].y), ++to;
    }
    kept += scanned.y;
  }
  return kept;
}

/// The k-th best of list and window by digits of the order, and how many of its equals are among the k best.
inline __device__ __noinline__ Keeps kth_of(QuickShared& s, QuickList list, uint32_t in_window, uint32_t k) {
  uint32_t* bins = reinterpret_cast<uint32_t*>(s.rooms[0].candidates);
  uint32_t prefix = 0, wanted = k;
#pragma unroll 1
  for (int shift = 24; shift >= 0; shift -= 8) {
    named_barrier(7, kQuickThreads);
    for (uint32_t b = threadIdx.x; b < 256; b += kQuickThreads) bins[b] = 0;
    named_barrier(7, kQuickThreads);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < list.count + in_window; i += kQuickThreads) {
      const uint32_t bits = i < list.count ? list.values[quick_place(i)] : list.window[quick_place(i - list.count)];
      const uint32_t key = key_of_kept(bits);
      if (shift == 24 || key >> (shift + 8) == prefix) atomicAdd(bins + (key >> shift & 255), 1u);
    }
    named_barrier(7, kQuickThreads);
    const uint32_t own = threadIdx.x < 256 ? bins[255 - threadIdx.x] : 0;  // thread 0: the highest
    const uint2 scanned = scan_all(s, own);
    if (scanned.x < wanted && wanted <= scanned.x + own)
      s.rooms[0].bin = 255 - threadIdx.x, s.rooms[0].bin_above = scanned.x;
    named_barrier(7, kQuickThreads);
    prefix = prefix << 8 | s.rooms[0].bin, wanted -= s.rooms[0].bin_above;
  }
  named_barrier(7, kQuickThreads);
  return {prefix, wanted, 0};
}

/// Where a bin is too full for the list: what may win of list and window, if need be the k best. Returns what the list has.
inline __device__ __noinline__ uint32_t take_exactly(const QuickJob& job, QuickShared& s, QuickList list,
                                                     BinRange range, QuickWindow window, int bin) {
  const uint32_t k = static_cast<uint32_t>(job.topk);
  if (threadIdx.x < 32) {
    const uint32_t edge = first_key_of_bin(range, bin);
    if (threadIdx.x == 0) s.rooms[0].edges[0] = edge;
  }
  named_barrier(7, kQuickThreads);
  Keeps keeps{s.rooms[0].edges[0], ~0u, 0};
  const auto of_window = [&](uint32_t i) {
    return uint2{list.window[quick_place(i)], static_cast<uint32_t>(window.first + static_cast<int32_t>(i))};
  };
  const auto of_list = [&](uint32_t i) {
    return uint2{list.values[quick_place(i)], static_cast<uint32_t>(list.positions[i])};
  };
  uint32_t stay = 0;
  for (uint32_t i = threadIdx.x; i < window.count; i += kQuickThreads)
    stay += key_of_kept(list.window[quick_place(i)]) >= keeps.least;
  const uint32_t come = scan_all(s, stay).y;
  list.count = keep(s, list, 0, list.count, keeps, of_list);
  if (list.count + come > list.capacity) {
    keeps = kth_of(s, list, window.count, k);
    list.count = keep(s, list, 0, list.count, keeps, of_list);
  }
  return keep(s, list, list.count, window.count, keeps, of_window);
}

/// What may win of a window goes to the list. bins: of the row's keys
/// so far. Begins and ends with a barrier. Returns what the list has.
inline __device__ __noinline__ uint32_t take_window(const QuickJob& job, QuickShared& s, QuickList list, BinRange range,
                                                    QuickWindow window, const uint32_t* bins) {
  named_barrier(7, kQuickThreads);
  const uint32_t k = static_cast<uint32_t>(job.topk);
  const uint32_t counted = find_bin<false, kQuickBins>(Team<kQuickThreads>{s.rooms[0], 7}, bins, nullptr, k);
  if (threadIdx.x == 0) s.rooms[0].number = counted < k ? 0 : s.rooms[0].bin;
  named_barrier(7, kQuickThreads);
  const uint32_t bin = s.rooms[0].number, span = list.window_size / kQuickThreads, begin = threadIdx.x * span;
  const uint32_t own = begin < window.count ? min(span, window.count - begin) : 0;
  const QuickMarks marks = bin == 0 ? mark_by_keys(list.window, kNanKey, ~0u, begin, own)
                                    : mark_by_bin<kQuickBins>(list.window, range, static_cast<float>(bin), begin, own);
  uint32_t stay = marks.above | marks.inside;
  const uint2 scanned = scan_all(s, __popc(stay));
  if (list.count + scanned.y > list.capacity) {
    list.count = take_exactly(job, s, list, range, window, static_cast<int>(bin));
  } else {
    uint32_t to = list.count + scanned.x;
#pragma unroll 1
    for (; stay != 0; stay &= stay - 1, ++to) {
      const uint32_t i = begin + __ffs(static_cast<int>(stay)) - 1;
      list.values[quick_place(to)] = list.window[quick_place(i)],
      list.positions[to] = window.first + static_cast<int32_t>(i);
    }
    list.count += scanned.y;
  }
  named_barrier(7, kQuickThreads);
  return list.count;
}
static_assert(8192 / kQuickThreads <= 32);

}  // namespace topkey::cuda
