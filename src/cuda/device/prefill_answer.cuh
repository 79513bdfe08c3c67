// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// How a row's answer leaves the prefill kernel: of rows that need no scores, and of winners that are marked as bits of a
// map of positions.
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

constexpr uint32_t kFound = 32 * 32;  ///< marks that are dealt out at a time

/// put(rank, position) for the marked positions from `base` on, of which `used` come before. Leaves the map empty. A lane
/// finds the marks of kEach words (a power of two; words: a multiple of 32 * kEach); what it found is dealt out anew, so
/// that all lanes put, side by side.
template <uint32_t kEach, class Put>
__device__ __forceinline__ uint32_t each_mark(SelectScratch& w, uint32_t* marks, uint32_t words, int32_t base,
                                              uint32_t used, const Put& put) {
  const uint32_t lane = threadIdx.x & 31;
#pragma unroll 1
  for (uint32_t first = 0; first < words; first += 32 * kEach) {
    uint32_t* const own_words = marks + first + lane * kEach;
    uint32_t bits[kEach], own = 0;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) bits[i] = own_words[i], own += __popc(bits[i]);
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) own_words[i] = 0;
    uint32_t before = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, before, step);
      if (lane >= static_cast<uint32_t>(step)) before += other;
    }
    const uint32_t total = __shfl_sync(~0u, before, 31);
    before -= own;
    const bool dealt = kEach == 1 || total <= kFound;
    const int32_t origin = base + static_cast<int32_t>(first * 32);
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      for (; bits[i] != 0; bits[i] &= bits[i] - 1, ++before) {
        const uint32_t at = (lane * kEach + i) * 32 + __ffs(static_cast<int>(bits[i])) - 1;
        if (dealt) {
          w.found[before] = static_cast<uint16_t>(at);
        } else {
          put(used + before, origin + static_cast<int32_t>(at));
        }
      }
    }
    __syncwarp();
#pragma unroll 4
    for (uint32_t i = lane; dealt && i < total; i += 32) put(used + i, origin + w.found[i]);
    used += total;
    __syncwarp();
  }
  return used;
}

}  // namespace topkey::cuda
