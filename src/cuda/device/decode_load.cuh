// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The decode kernel's keys on their way to the tensor core: each warpgroup copies its own units, some ahead of the one
// that it multiplies; page ids are read one unit ahead of their copies, so that no copy waits for its address.
#pragma once
#include "cuda/device/decode_plan.cuh"

namespace topkey::cuda {

/// Of one warpgroup, one stage: where its 64 keys are, and what is beside their codes.
struct StageKeys {
  float scale[kTileKeys];
  uint8_t state[kTileKeys];  ///< kOutside, kReadable, kUnreadable
};
enum : uint8_t { kOutside, kReadable, kUnreadable };

/// A step of a warpgroup: its tile's sample, or a unit.
struct Step {
  uint32_t tile, unit;
  bool sample;
};
/// 64 positions: first, first + stride, ...; those outside [low, high) are no keys.
struct UnitKeys {
  int32_t first, stride, low, high, table_row;
};

__device__ __forceinline__ UnitKeys keys_of_step(const DecodePlan& p, const Step& s) {
  const int row = p.tile_row[s.tile];
  const int32_t low = p.tile_low[s.tile];
  const int64_t units = p.before[s.tile + 1] - p.before[s.tile];
  // Units are whole, so the last may reach past what the tile's rows see: their own windows decide later.
  UnitKeys k{low, 1, low, 0, p.table_row[row]};
  k.high = 0;
  for (int r = 0; r < p.tile_rows[s.tile]; ++r) k.high = max(k.high, p.high[row + r]);
  if (s.sample) {
    k.stride = static_cast<int32_t>(units);  // 64 keys spread over all of them
    k.first = low + k.stride / 2;
  } else {
    k.first = low + static_cast<int32_t>(s.unit - p.before[s.tile]) * kTileKeys;
  }
  return k;
}

/// The steps of one warpgroup in order.
struct StepCursor {
  Step at;
  __device__ bool done(const DecodePlan& p) const { return at.tile > p.last_tile; }
  __device__ void begin(const DecodePlan& p) { at = {p.first_tile, 0, true}; }
  __device__ void advance(const DecodePlan& p, uint32_t group) {
    const uint32_t first = max(p.before[at.tile], p.first), last = min(p.before[at.tile + 1], p.last);
    const uint32_t next = at.sample ? first + group : at.unit + kDecodeGroups;
    if (next < last) {
      at = {at.tile, next, false};
    } else {
      at = {at.tile + 1, 0, true};
    }
  }
};

template <int kDim>
class KeyLoader {
 public:
  static constexpr int kChunks = kDim / 16, kEach = kTileKeys * kChunks / 128;  ///< copies of a thread
  static constexpr int kPending = kDecodeStages - 2;

  /// codes, keys: of this warpgroup's stages.
  __device__ KeyLoader(const KeySource& source, const DecodePlan& plan, uint8_t* codes, StageKeys* keys)
      : source_(source), plan_(plan), codes_(codes), keys_(keys), group_(threadIdx.x / 128) {
    cursor_.begin(plan);
    if (plan.first == plan.last) cursor_.at.tile = plan.last_tile + 1;
    find_pages();
  }

  /// Begins to copy the next step's keys to `stage`, if there is one. One group of copies a call.
  __device__ void issue(int stage) {
    if (!cursor_.done(plan_)) {
      const UnitKeys k = keys_of_step(plan_, cursor_.at);
      const uint32_t chunk = lane() % kChunks;
      uint8_t* to = codes_ + stage * kTileKeys * kCodePitch;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const uint32_t row = lane() / kChunks + i * (128 / kChunks);
        const int32_t position = position_of(k, row);
        const bool inside = position < k.high && position >= k.low;
        const bool readable = inside && pages_[i] >= 0;
        const uint8_t* from = source_.values;
        int64_t scale = 0;
        if (readable) {
          const uint32_t offset =
              source_.paged ? static_cast<uint32_t>(position) % static_cast<uint32_t>(source_.page_size) : 0;
          const int64_t base = source_.paged ? pages_[i] * source_.page_stride : 0;
          const int64_t key = source_.paged ? offset : position;
          from += base + key * source_.value_step + chunk * 16;
          scale = base + key * source_.scale_step;
        }
        copy_16(shared_address(to + chunk_at(row, chunk)), from, readable ? 16 : 0);
        if (chunk == 0) {
          copy_4(shared_address(keys_[stage].scale + row), source_.scales + scale, readable ? 4 : 0);
          keys_[stage].state[row] = readable ? kReadable : inside ? kUnreadable : kOutside;
        }
      }
      cursor_.advance(plan_, group_);
      find_pages();
    }
    commit_copies();
  }
  /// The oldest issued step's keys are there, for the whole warpgroup; what was read of the step before is free.
  __device__ void wait() const {
    wait_copies<kPending>();
    fence_tensor_reads();
    named_barrier(1 + group_, 128);
  }

 private:
  __device__ static uint32_t lane() { return threadIdx.x % 128; }
  __device__ static int32_t position_of(const UnitKeys& k, uint32_t row) {
    return k.first + static_cast<int32_t>(row) * k.stride;
  }
  /// Page ids of the step that the cursor is at; -1: none.
  __device__ void find_pages() {
    if (cursor_.done(plan_)) return;
    if (!source_.paged) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) pages_[i] = 0;
      return;
    }
    const UnitKeys k = keys_of_step(plan_, cursor_.at);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int32_t position = position_of(k, lane() / kChunks + i * (128 / kChunks));
      const bool inside = position < k.high && position >= k.low;
      pages_[i] = inside ? static_cast<int32_t>(page_of(source_, k.table_row, position)) : -1;
    }
  }

  const KeySource& source_;
  const DecodePlan& plan_;
  uint8_t* codes_;
  StageKeys* keys_;
  const int group_;
  StepCursor cursor_{};
  int32_t pages_[kEach];
};

}  // namespace topkey::cuda
