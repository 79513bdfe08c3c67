// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Exact selection by one thread block over n keys of any source, in passes that only read: histograms of the order
// (order.cuh) digit by digit until the k-th key is known, then one pass that hands out the winners in index order. No
// buffer depends on the data, so none can overflow; ties at the cut go to the lowest indices. kThreads: of the block.
// A source has raw(i), what must be read of index i; key_of_raw(raw, i), its number of the order; and how many keys a thread reads at a time: kBatch to count, kEach in a row to hand out.
#pragma once
#include "cuda/device/order.cuh"

namespace topkey::cuda {

constexpr int kSelectThreads = 1024;
constexpr int kBins = 2048;  ///< 11 bits a digit: 11 + 11 + 10
struct SelectRoom {
  uint32_t bins[kBins];
  uint32_t warps[kSelectThreads / 32];
  uint32_t total, digit, above, equal, nans;
};

/// Exclusive sum over the block in thread order; *total of all. Both barriers inside: room may be reused at once.
__device__ inline uint32_t block_scan(uint32_t value, uint32_t* warps, uint32_t* total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint32_t sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  const int count = blockDim.x >> 5;
  if (warp == 0) {
    uint32_t own = lane < count ? warps[lane] : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, own, step);
      if (lane >= step) own += other;
    }
    if (lane < count) warps[lane] = own;
  }
  __syncthreads();
  const uint32_t before = (warp == 0 ? 0 : warps[warp - 1]) + sum - value;
  *total = warps[count - 1];
  __syncthreads();
  return before;
}

/// Which keys win: all above `key`, and of those equal to it the first `need` in index order.
struct Cut {
  uint32_t key, need;
  uint32_t count;  ///< winners: min(k, live)
  uint32_t live;
  bool tied;  ///< a key equal to the last winner was left out
};

/// Adds the digit `(key >> shift) % 2^bits` of all keys whose higher digits are `prefix` to room.bins.
struct DigitCounter {
  uint32_t prefix;
  int shift, bits;
  uint32_t* bins;

  __device__ __forceinline__ void operator()(uint32_t key) const {
    const bool inside = key != kNotLive && (shift + bits == 32 || key >> (shift + bits) == prefix);
    if (inside) atomicAdd(&bins[(key >> shift) & ((1u << bits) - 1)], 1u);
  }
};
template <int kThreads, class Source>
__device__ void count_digit(const Source& source, uint32_t n, const DigitCounter& add) {
  for (int b = threadIdx.x; b < kBins; b += blockDim.x) add.bins[b] = 0;
  __syncthreads();
  constexpr int kBatch = Source::kBatch;  // keys that a thread reads before it looks at the first of them
  for (uint64_t base = threadIdx.x; base < n; base += kThreads * kBatch) {
    uint32_t raws[kBatch];
#pragma unroll
    for (int e = 0; e < kBatch; ++e) {
      const uint64_t i = base + e * kThreads;
      raws[e] = source.raw(static_cast<uint32_t>(i < n ? i : n - 1));  // no branch between reads
    }
#pragma unroll
    for (int e = 0; e < kBatch; ++e) {
      const uint64_t i = base + e * kThreads;
      add(i < n ? source.key_of_raw(raws[e], static_cast<uint32_t>(i)) : kNotLive);
    }
  }
  __syncthreads();
}

/// The digit in which the k-th largest of the counted keys lies, the keys above it, and those in it.
template <int kThreads>
__device__ void find_digit(uint32_t k, SelectRoom& room) {
  constexpr int kOwn = kBins / kThreads;
  // Thread 0 owns the highest digits, so that the sums run from the top.
  const int first = kBins - kOwn * (static_cast<int>(threadIdx.x) + 1);
  uint32_t sum = 0;
#pragma unroll
  for (int b = 0; b < kOwn; ++b) sum += room.bins[first + b];
  uint32_t total = 0, above = block_scan(sum, room.warps, &total);
  if (threadIdx.x == 0) room.total = total;
  if (above < k && k <= above + sum) {
#pragma unroll
    for (int b = kOwn - 1; b >= 0; --b) {
      const uint32_t own = room.bins[first + b];
      if (above < k && k <= above + own) room.digit = first + b, room.above = above, room.equal = own;
      above += own;
    }
  }
  __syncthreads();
}

template <int kThreads = kSelectThreads, class Source>
__device__ Cut find_cut(const Source& source, uint32_t n, uint32_t k, SelectRoom& room) {
  constexpr int kShift[3] = {21, 10, 0}, kBits[3] = {11, 11, 10};
  Cut cut{kNotLive, 0, 0, 0, false};
  uint32_t prefix = 0, wanted = k;
#pragma unroll 1
  for (int digit = 0; digit < 3; ++digit) {
    count_digit<kThreads>(source, n, DigitCounter{prefix, kShift[digit], kBits[digit], room.bins});
    find_digit<kThreads>(wanted, room);
    if (digit == 0) {
      cut.live = room.total;
      cut.count = cut.live < k ? cut.live : k;
      if (cut.live <= k || k == 0) break;
    }
    prefix = (prefix << kBits[digit]) | room.digit;
    wanted -= room.above;
    const bool whole = room.equal == wanted;  // the digit's keys all win: what lies between digits is no tie
    cut.key = whole ? (prefix << kShift[digit]) - 1 : prefix;
    cut.need = whole ? 0 : wanted;
    cut.tied = !whole;
    __syncthreads();
    if (whole) break;
  }
  if (k == 0) cut.key = kForcedKey;
  __syncthreads();
  return cut;
}

/// emit(j, i) for each winner, j its number in index order. All threads return together.
template <int kThreads = kSelectThreads, class Source, class Emit>
__device__ void hand_out(const Source& source, uint32_t n, const Cut& cut, SelectRoom& room, const Emit& emit) {
  constexpr int kEach = Source::kEach;  // keys that a thread takes at a time
  uint32_t above = 0, equal = 0;
  for (uint64_t base = 0; base < n; base += kThreads * kEach) {
    const uint64_t first = base + threadIdx.x * kEach;
    uint32_t wins = 0, ties = 0;  // a bit for each of this thread's keys
    uint32_t raws[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) raws[e] = source.raw(static_cast<uint32_t>(first + e < n ? first + e : n - 1));
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const uint32_t key = first + e < n ? source.key_of_raw(raws[e], static_cast<uint32_t>(first) + e) : kNotLive;
      wins |= (key > cut.key ? 1u : 0u) << e;
      ties |= (key == cut.key && cut.need > 0 ? 1u : 0u) << e;
    }
    uint32_t total = 0;
    const uint32_t before = block_scan(__popc(wins) << 16 | __popc(ties), room.warps, &total);
    uint32_t a = above + (before >> 16), q = equal + (before & 0xFFFFu);
    for (uint32_t rest = wins | ties; rest != 0; rest &= rest - 1) {
      const uint32_t e = __ffs(static_cast<int>(rest)) - 1, tie = ties >> e & 1u;
      if (tie == 0 || q < cut.need) emit(a + (q < cut.need ? q : cut.need), static_cast<uint32_t>(first) + e);
      a += 1 - tie, q += tie;
    }
    above += total >> 16, equal += total & 0xFFFFu;
    if (above + (equal < cut.need ? equal : cut.need) == cut.count) break;  // the same in every thread
  }
  __syncthreads();
}

/// Ascending sort of `size` (a power of two) numbers by one block; shared or global memory.
__device__ inline void sort_block(uint64_t* values, uint32_t size) {
  for (uint32_t width = 2; width <= size && width != 0; width *= 2) {
    for (uint32_t step = width / 2; step > 0; step /= 2) {
      for (uint32_t pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
        const uint32_t low = pair / step * (step * 2) + pair % step, high = low + step;
        const bool up = (low & width) == 0;
        const uint64_t a = values[low], b = values[high];
        if ((a > b) == up) values[low] = b, values[high] = a;
      }
      __syncthreads();
    }
  }
}
__host__ __device__ inline uint32_t power_of_two(uint32_t n) {
  uint32_t p = 1;
  while (p < n) p *= 2;
  return p;
}

}  // namespace topkey::cuda
