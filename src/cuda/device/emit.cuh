// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The one way by which answers leave this backend: a row's winners to indices, slots, scores and counts, the rest to fill.
#pragma once
#include "cuda/device/rows.cuh"
#include "topkey/select.h"

namespace topkey::cuda {

struct Emission {
  Selection out;
  int32_t topk;         ///< columns to write
  Shard shard;          ///< positions become global under it
  bool absolute_slots;  ///< slot_map translates the position, else position - start
  uint64_t* stats;
};

/// One row's writer.
struct RowWriter {
  const Emission& e;
  int64_t row, start, base, slot_row;

  __device__ RowWriter(const Emission& emission, int64_t r, int64_t request, int64_t first)
      : e(emission), row(r), start(first) {
    base = e.out.index_base.data != nullptr ? integer(e.out.index_base, row) : 0;
    slot_row = e.out.slot_map.table_per_row ? row : request;
  }
  __device__ void put(uint32_t j, int64_t position, float score) const {
    const Selection& out = e.out;
    if (out.indices.data != nullptr)
      *element<int32_t>(out.indices, row, j) =
          static_cast<int32_t>(e.shard.world_size > 1 ? global_of(e.shard, position) + base : position - start + base);
    if (out.scores.data != nullptr) *element<float>(out.scores, row, j) = score;
    if (out.slots.data == nullptr) return;
    const int64_t slot = slot_of(out.slot_map.block_table, slot_row, out.slot_map.page_size,
                                 e.absolute_slots ? position : position - start, INT32_MAX);
    *element<int32_t>(out.slots, row, j) = static_cast<int32_t>(slot);
    count(e.stats, kSkippedSlots, slot < 0);
  }
  /// By the first `threads` threads of the block, all of them unless told; after a barrier behind the last put.
  __device__ void fill(uint32_t used, uint32_t threads = 0) const {
    fill_by(used, threadIdx.x, threads == 0 ? blockDim.x : threads);
  }
  /// By `threads` threads, of which this one is `thread`.
  __device__ void fill_by(uint32_t used, uint32_t thread, uint32_t threads) const {
    const Selection& out = e.out;
    const bool repeat = out.fill == Fill::repeat && used > 0;
    const int32_t value = out.fill == Fill::value ? out.fill_value : -1;
    const int32_t index = repeat && out.indices.data != nullptr ? *element<int32_t>(out.indices, row, 0) : value;
    const int32_t slot = repeat && out.slots.data != nullptr ? *element<int32_t>(out.slots, row, 0) : value;
    for (int64_t j = int64_t{used} + thread; j < e.topk; j += threads) {
      if (out.indices.data != nullptr) *element<int32_t>(out.indices, row, j) = index;
      if (out.slots.data != nullptr) *element<int32_t>(out.slots, row, j) = slot;
      if (out.scores.data != nullptr) *element<float>(out.scores, row, j) = __uint_as_float(0xFF800000u);
    }
    if (out.counts.data != nullptr && thread == 0) *element<int32_t>(out.counts, row) = static_cast<int32_t>(used);
  }
};

}  // namespace topkey::cuda
