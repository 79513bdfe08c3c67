// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The prefill kernel's third warpgroup: one warp takes tiles, cuts them into items and asks for their keys; three warps
// bring the queries.
#pragma once
#include "cuda/device/prefill_job.cuh"

namespace topkey::cuda {

/// One warp.
class KeyAsker {
 public:
  __device__ KeyAsker(const PrefillJob& job, PrefillShared& s, uint8_t* codes, int tile_rows)
      : job_(job), s_(s), codes_(codes), tile_rows_(tile_rows) {}

  __device__ __forceinline__ void run() {
    Item item;
    do {
      item = next();
      put(item);
    } while (item.first_row >= 0);
  }

 private:
  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x & 31; }

  /// Items that failed come first; the last one has no rows.
  __device__ __forceinline__ Item next() {
    Item item{};
    if (failed(number_, &item)) return item;
    while (rest_ == 0 && tile_ >= 0) take_tile();
    if (rest_ != 0) return cut_item();
    if (!failed(number_ + 1, &item)) item.first_row = -1;
    return item;
  }

  __device__ __forceinline__ void take_tile() {
    int32_t taken = 0;
    if (lane() == 0) taken = static_cast<int32_t>(atomicAdd(job_.next, 1u));
    // The last rows see most keys: the long tiles come first.
    tile_ = max(job_.tiles - 1 - __shfl_sync(~0u, taken, 0), -1);
    const int32_t row = tile_ * tile_rows_ + static_cast<int32_t>(lane());
    const bool present = tile_ >= 0 && lane() < static_cast<uint32_t>(tile_rows_) && row < job_.rows;
    if (present) {
      const RowFact& f = job_.facts[row];
      low_ = f.low, high_ = f.high, table_row_ = f.table_row, scored_ = f.scored != 0;
    }
    rest_ = __ballot_sync(~0u, present);
  }

  /// The next item of the tile: rows of one table row whose windows together are no more work than one by one.
  __device__ __forceinline__ Item cut_item() {
    const int leader = __ffs(static_cast<int>(rest_)) - 1;
    const int32_t table_row = __shfl_sync(~0u, table_row_, leader);
    bool mine = (rest_ >> lane() & 1u) != 0 && table_row_ == table_row;
    const int32_t own = mine && scored_ ? (high_ - (low_ & ~(kTileKeys - 1)) + kTileKeys - 1) / kTileKeys : 0;
    const int32_t apart = __reduce_add_sync(~0u, own);
    const int32_t low = __reduce_min_sync(~0u, own > 0 ? low_ : INT32_MAX) & ~(kTileKeys - 1);
    const int32_t end = __reduce_max_sync(~0u, own > 0 ? high_ : 0);
    if (apart > 0 && (int64_t{end} - low + kTileKeys - 1) / kTileKeys > apart)
      mine = static_cast<int>(lane()) == leader;
    Item item = item_of(mine, scored_, low_, high_);
    item.first_row = tile_ * tile_rows_, item.table_row = table_row;
    item.sample = item.units <= kShortUnits && job_.length >= kRoomyLength ? kSampleUnits / 2 : kSampleUnits;
    item.halfway = halfway_of(job_, item);
    rest_ &= ~item.active;
    return item;
  }

  __device__ __forceinline__ static Item item_of(bool mine, bool scored, int32_t low, int32_t high) {
    Item item{};
    item.active = __ballot_sync(~0u, mine);
    mine = mine && scored;
    if (__ballot_sync(~0u, mine) == 0) return item;
    item.low = __reduce_min_sync(~0u, mine ? low : INT32_MAX) & ~(kTileKeys - 1);
    item.inner_low = __reduce_max_sync(~0u, mine ? low : 0);
    const int32_t inner_high = __reduce_min_sync(~0u, mine ? high : INT32_MAX);
    if (int64_t{inner_high} - item.inner_low >= kTileKeys) {
      item.inner_span = static_cast<uint32_t>(inner_high - item.inner_low) - kTileKeys;
    } else {
      item.inner_low = INT32_MAX;  // no unit begins there
    }
    const int32_t end = __reduce_max_sync(~0u, mine ? high : 0);
    item.units = static_cast<uint32_t>((int64_t{end} - item.low + kTileKeys - 1) / kTileKeys);
    item.stride = stride_of(item.units);
    return item;
  }
  /// The golden ratio of all units, moved until it meets each of them.
  __device__ __forceinline__ static uint32_t stride_of(uint32_t units) {
    uint32_t stride = max(1u, static_cast<uint32_t>(static_cast<float>(units) * 0.618034f));
    for (; stride < units; ++stride) {
      uint32_t a = units, b = stride;
      while (b != 0) {
        const uint32_t next = a % b;
        a = b, b = next;
      }
      if (a == 1) break;
    }
    return stride < units ? stride : 1;
  }

  /// Waits until the slot of item `number` is free; *item is what was there before, where rows of it failed.
  __device__ __forceinline__ bool failed(uint32_t number, Item* item) {
    if (number < 2) return false;
    wait_at(&s_.item_empty[number & 1], (number / 2 - 1) & 1);
    Item& before = s_.items[number & 1];
    if (before.failed == 0) return false;
    *item = before;
    item->active = before.failed, item->failed = 0, item->exact = true, item->halfway = 0;
    __syncwarp();
    before.failed = 0;
    __syncwarp();
    return true;
  }

  /// Tells the others of an item and brings its keys. Its slot is free.
  __device__ __forceinline__ void put(const Item& item) {
    const uint32_t slot = number_ & 1;
    if (number_ >= 2) wait_at(&s_.item_empty[slot], (number_ / 2 - 1) & 1);
    if (lane() == 0) {
      s_.items[slot] = item;
      arrive_at(&s_.item_full[slot]);
    }
    __syncwarp();
    arrive_named_barrier(kItemBarrier + static_cast<int>(slot), 32 * (1 + kLoaderWarps));
    ++number_;
    for (uint32_t base = 0; base < item.units; base += 32) {
      const uint32_t step = base + lane(), count = min(32u, item.units - base);
      const uint32_t unit = static_cast<uint32_t>(uint64_t{step} * item.stride % item.units);
      const int32_t first = item.low + static_cast<int32_t>(unit) * kTileKeys;
      const Place place = step < item.units ? find(item.table_row, first) : Place{0, -1};
      for (uint32_t i = 0; i < count; ++i) {
        if (lane() == i) ask(place, first);
        __syncwarp();
        if (++stage_ == kPrefillStages) stage_ = 0, turn_ ^= 1;
      }
    }
  }

  struct Place {
    int32_t key, page;  ///< of the page, or of dense keys; page < 0: cannot be read
  };
  __device__ __forceinline__ Place find(int32_t table_row, int32_t first) const {
    const KeySource& source = job_.keys;
    if (!source.paged) return {first, 0};
    const uint32_t column = job_.page_shift >= 0
                                ? static_cast<uint32_t>(first) >> job_.page_shift
                                : static_cast<uint32_t>(first) / static_cast<uint32_t>(source.page_size);
    const int32_t page = *element<int32_t>(source.block_table, table_row, column);
    return {first - static_cast<int32_t>(column) * source.page_size, page < source.num_pages ? page : -1};
  }
  __device__ __forceinline__ void ask(const Place& place, int32_t first) {
    const KeySource& source = job_.keys;
    KeyStage& stage = s_.stages[stage_];
    uint64_t* full = &stage.full;
    wait_at(&stage.empty, turn_ ^ 1);
    stage.first = place.page >= 0 ? first : kUnreadable;
    if (place.page < 0) return arrive_at(full);
    const bool whole = source.paged || place.key + kTileKeys <= source.count;
    const uint8_t* scales = source.scales + place.page * source.page_stride + int64_t{place.key} * 4;
    float* to = stage.scale;
    if (!whole) {  // the last dense keys; no byte behind them is the caller's
      for (int i = 0; place.key + i < source.count; ++i) to[i] = reinterpret_cast<const float*>(scales)[i];
    }
    arrive_expecting(full, kTileKeys * (kCodePitch + (whole ? 4 : 0)));
    copy_box(shared_address(codes_ + stage_ * (kTileKeys * kCodePitch)), &job_.boxes, 0, place.key, place.page, full);
    if (whole) copy_bulk(shared_address(to), scales, kTileKeys * 4, full);
  }

  const PrefillJob& job_;
  PrefillShared& s_;
  uint8_t* codes_;
  const int tile_rows_;
  uint32_t number_ = 0;  ///< items told of
  int stage_ = 0;
  uint32_t turn_ = 0;
  int32_t tile_ = 0;                             ///< in work; < 0: there are no more
  uint32_t rest_ = 0;                            ///< its rows that are in no item yet, a bit each
  int32_t low_ = 0, high_ = 0, table_row_ = -1;  ///< of this lane's row of it
  bool scored_ = false;
};

/// Three warps: each item's queries, half of them for each warpgroup. thread: of all their threads.
template <int kHeads>
__device__ __forceinline__ void bring_queries(const PrefillJob& job, PrefillShared& s, uint8_t* queries,
                                              uint32_t thread) {
  constexpr uint32_t kThreads = kLoaderWarps * 32, kChunks = 8, kRows = group_rows_of(kHeads);
  uint32_t brought = 0;
  for (uint32_t number = 0;; ++number) {
    const uint32_t slot = number & 1;
    // Not the scorers' barrier: for so long three warps would look at it, however it hints at sleep.
    named_barrier(kItemBarrier + static_cast<int>(slot), 32 * (1 + kLoaderWarps));
    const int32_t first = s.items[slot].first_row;
    const uint32_t units = s.items[slot].units;
    __syncwarp();
    if ((thread & 31) == 0) arrive_at(&s.item_empty[slot]);
    if (first < 0) return;
    if (units == 0) continue;
    for (int group = 0; group < kPrefillGroups; ++group) {
      wait_at(&s.query_empty[group], (brought & 1) ^ 1);
      uint8_t* to = queries + group * kPrefillColumns * kCodePitch;
      const int32_t own = first + group * static_cast<int32_t>(kRows);
#pragma unroll 4
      for (uint32_t i = thread; i < kPrefillColumns * kChunks; i += kThreads) {
        const int column = static_cast<int>(i / kChunks), head = head_of_column<kHeads>(column);
        const int32_t row = own + row_of_column<kHeads>(column);
        const bool present = row < job.rows && head < job.heads;
        const uint8_t* from = static_cast<const uint8_t*>(job.q.values.data);
        if (present)
          from += (job.first_row + row) * job.q.values.stride[0] + head * job.q.values.stride[1] + i % kChunks * 16;
        copy_chunk(to + chunk_at(i / kChunks, i % kChunks), from, present, job.query_alignment);
      }
      commit_copies();
      for (int n = static_cast<int>(thread); n < kPrefillColumns; n += static_cast<int>(kThreads)) {
        const int head = head_of_column<kHeads>(n);
        const int32_t row = own + row_of_column<kHeads>(n);
        const bool present = row < job.rows && head < job.heads;
        s.weights[group][weight_at(n)] = present ? 0.5f * real(job.q.weights, job.first_row + row, head) : 0.0f;
      }
      wait_copies<0>();
      fence_tensor_reads();
      arrive_at(&s.query_full[group]);
    }
    ++brought;
  }
}

}  // namespace topkey::cuda
