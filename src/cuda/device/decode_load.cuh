// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The decode kernel's keys on their way to the tensor core: each warpgroup copies its own units, some ahead of the one
// that it multiplies. A unit that lies whole in one page takes few instructions, and its page id is read one unit ahead,
// so that no copy waits for its address; what is left (samples, edges, wild pages, odd page sizes) goes key by key.
#pragma once
#include "cuda/device/decode_plan.cuh"

namespace topkey::cuda {

/// Of one warpgroup, one stage: where its 64 keys are, and what is beside their codes.
struct StageKeys {
  float scale[kTileKeys];
  uint8_t state[kTileKeys];  ///< kOutside, kReadable, kUnreadable; not set where whole
  bool whole;                ///< all readable
};
enum : uint8_t { kOutside, kReadable, kUnreadable };

/// A step of a warpgroup: its tile's sample, or a unit.
struct Step {
  uint32_t tile, unit;
  bool sample;
};

/// Positions of a step's keys: first, first + stride, ...
struct StepKeys {
  int32_t first, stride;
};
__device__ __forceinline__ StepKeys keys_of_step(const DecodePlan& p, const Step& s) {
  const int32_t low = p.tile_low[s.tile];
  if (!s.sample) return {low + static_cast<int32_t>(s.unit - p.before[s.tile]) * kTileKeys, 1};
  const int32_t stride = static_cast<int32_t>(p.before[s.tile + 1] - p.before[s.tile]);  // spread over all units
  return {low + stride / 2, stride};
}

/// Begins to copy any step's keys.
template <int kDim>
__device__ __noinline__ void load_key_by_key(const KeySource& source, const DecodePlan& plan, uint8_t* codes,
                                             StageKeys& keys, Step step) {
  constexpr uint32_t kChunks = kDim / 16, kRows = 128 / kChunks;
  const StepKeys k = keys_of_step(plan, step);
  const int32_t low = plan.tile_low[step.tile], high = plan.tile_high[step.tile];
  const int32_t table_row = plan.table_row[plan.tile_row[step.tile]];
  const uint32_t thread = threadIdx.x % 128, chunk = thread % kChunks;
  if (thread == 0) keys.whole = false;
  KeyBytes bytes[kTileKeys / kRows];
#pragma unroll
  for (uint32_t i = 0; i < kTileKeys / kRows; ++i) {  // all lookups are under way before the first is used
    const int32_t position = k.first + static_cast<int32_t>(thread / kChunks + i * kRows) * k.stride;
    bytes[i] = {nullptr, nullptr};
    if (position < high && position >= low) bytes[i] = find_key(source, table_row, position);
  }
#pragma unroll
  for (uint32_t i = 0; i < kTileKeys / kRows; ++i) {
    const uint32_t row = thread / kChunks + i * kRows;
    const int32_t position = k.first + static_cast<int32_t>(row) * k.stride;
    const bool readable = bytes[i].values != nullptr;
    copy_16(shared_address(codes + chunk_at(row, chunk)), readable ? bytes[i].values + chunk * 16 : source.values,
            readable ? 16 : 0);
    if (chunk != 0) continue;
    copy_4(shared_address(keys.scale + row), readable ? bytes[i].scale : source.scales, readable ? 4 : 0);
    keys.state[row] = readable ? kReadable : position < high && position >= low ? kUnreadable : kOutside;
  }
}

template <int kDim>
class KeyLoader {
 public:
  static constexpr int kChunks = kDim / 16, kRows = 128 / kChunks, kEach = kTileKeys / kRows;  ///< copies of a thread
  static constexpr int kPending = kDecodeStages - 2;

  /// codes, keys: of this warpgroup's stages.
  __device__ KeyLoader(const DecodeJob& job, const DecodePlan& plan, uint8_t* codes, StageKeys* keys)
      : job_(job), plan_(plan), codes_(codes), keys_(keys), group_(threadIdx.x / 128), at_{plan.first_tile, 0, true} {
    const uint32_t thread = threadIdx.x % 128, chunk = thread % kChunks, row = thread / kChunks;
    from_ = job.look.keys.values + row * job.look.keys.value_step + chunk * 16;
    to_ = shared_address(codes + chunk_at(row, chunk));
  }

  /// Begins to copy the next step's keys to `stage`, if there is one. One group of copies a call.
  __device__ __forceinline__ void issue(int stage) {
    if (at_.tile <= plan_.last_tile) {
      const KeySource& source = job_.look.keys;
      const int32_t first =
          plan_.tile_low[at_.tile] + static_cast<int32_t>(at_.unit - plan_.before[at_.tile]) * kTileKeys;
      const bool there = !source.paged || (page_ >= 0 && page_ < source.num_pages);
      const bool whole = there && job_.quick && !at_.sample && first + kTileKeys <= plan_.tile_high[at_.tile];
      if (whole) {
        const int32_t key = source.paged ? first - page_column_ * source.page_size : first;
        const int64_t base = source.paged ? page_ * source.page_stride : 0;
        const uint8_t* from = from_ + base + key * source.value_step;
        const uint32_t to = to_ + stage * (kTileKeys * kCodePitch);
#pragma unroll
        for (int i = 0; i < kEach; ++i)  // rows a multiple of 8 apart have the same swizzle
          copy_16(to + i * (kRows * kCodePitch), from + i * kRows * source.value_step, 16);
        const uint32_t thread = threadIdx.x % 128;
        if (thread < kTileKeys)
          copy_4(shared_address(keys_[stage].scale + thread),
                 source.scales + base + (key + static_cast<int32_t>(thread)) * source.scale_step, 4);
        if (thread == 0) keys_[stage].whole = true;
      } else {
        load_key_by_key<kDim>(source, plan_, codes_ + stage * (kTileKeys * kCodePitch), keys_[stage], at_);
      }
      advance();
    }
    commit_copies();
  }
  /// The oldest issued step's keys are there, for the whole warpgroup; what was read of the step before is free.
  __device__ __forceinline__ void wait() const {
    wait_copies<kPending>();
    fence_tensor_reads();
    named_barrier(1 + group_, 128);
  }

 private:
  __device__ __forceinline__ void advance() {
    const uint32_t first = max(plan_.before[at_.tile], plan_.first), last = min(plan_.before[at_.tile + 1], plan_.last);
    const uint32_t next = at_.sample ? first + group_ : at_.unit + kDecodeGroups;
    if (next < last) {
      at_ = {at_.tile, next, false};
      find_page();
    } else {
      at_ = {at_.tile + 1, 0, true};
    }
  }
  /// Of the unit that comes next. What is read is not looked at before then.
  __device__ __forceinline__ void find_page() {
    const KeySource& source = job_.look.keys;
    page_ = 0;
    if (!source.paged || !job_.quick) return;
    const uint32_t first = plan_.tile_low[at_.tile] + (at_.unit - plan_.before[at_.tile]) * kTileKeys;
    page_column_ = job_.page_shift >= 0 ? first >> job_.page_shift : first / static_cast<uint32_t>(source.page_size);
    // Past the tile's end there may be no such column; then nothing asks for the page.
    const bool there = static_cast<int32_t>(first) + kTileKeys <= plan_.tile_high[at_.tile];
    if (there) page_ = *element<int32_t>(source.block_table, plan_.table_row[plan_.tile_row[at_.tile]], page_column_);
  }

  const DecodeJob& job_;
  const DecodePlan& plan_;
  uint8_t* codes_;
  StageKeys* keys_;
  const uint32_t group_;
  Step at_;
  int32_t page_ = 0, page_column_ = 0;
  const uint8_t* from_;  ///< this thread's first chunk of key 0
  uint32_t to_;          ///< and where it goes in stage 0
};

}  // namespace topkey::cuda
