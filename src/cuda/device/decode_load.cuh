// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The decode kernel's keys on their way to the tensor core: each warpgroup copies its own units, some ahead of the one
// that it multiplies. Where a unit lies in one page (or in dense rows) and all is aligned, one thread asks for it in one
// bulk copy, its page id read one unit ahead; else all threads of the warpgroup copy, key by key.
#pragma once
#include "cuda/device/decode_plan.cuh"

namespace topkey::cuda {

/// Of one warpgroup, one stage: where its 64 keys are, and what is beside their codes.
struct StageKeys {
  alignas(16) float scale[kTileKeys];
  uint64_t full, empty;      ///< barriers of bulk copies
  uint8_t state[kTileKeys];  ///< kOutside, kReadable, kUnreadable; not set where whole
  bool whole;                ///< all readable
};
enum : uint8_t { kOutside, kReadable, kUnreadable };

/// A step of a warpgroup: a unit, for the tile's sample or for its scores.
struct Step {
  uint32_t tile, unit;
  bool sample;
};
/// The sample is four units, one a warpgroup, spread over the tile; the same for all blocks that share it.
__device__ __forceinline__ uint32_t sample_unit(const DecodePlan& p, uint32_t tile, uint32_t group) {
  const uint32_t first = p.before[tile], units = p.before[tile + 1] - first;
  return first + static_cast<uint32_t>((uint64_t{units} * (2 * group + 1)) / (2 * kDecodeGroups));
}
__device__ __forceinline__ int32_t first_key_of_unit(const DecodePlan& p, uint32_t tile, uint32_t unit) {
  return p.tile_low[tile] + static_cast<int32_t>(unit - p.before[tile]) * kTileKeys;
}

/// Begins to copy any unit's keys.
template <int kDim>
inline __device__ __noinline__ void load_key_by_key(const KeySource& source, const DecodePlan& plan, uint8_t* codes,
                                                    StageKeys& keys, uint32_t tile, uint32_t unit) {
  constexpr uint32_t kChunks = kDim / 16, kRows = 128 / kChunks;
  const int32_t first = first_key_of_unit(plan, tile, unit);
  const int32_t low = plan.tile_low[tile], high = plan.tile_high[tile];
  const int32_t table_row = plan.table_row[plan.tile_row[tile]];
  const uint32_t thread = threadIdx.x % 128, chunk = thread % kChunks;
  if (thread == 0) keys.whole = false;
  KeyBytes bytes[kTileKeys / kRows];
#pragma unroll
  for (uint32_t i = 0; i < kTileKeys / kRows; ++i) {  // all lookups are under way before the first is used
    const int32_t position = first + static_cast<int32_t>(thread / kChunks + i * kRows);
    bytes[i] = {nullptr, nullptr};
    if (position < high && position >= low) bytes[i] = find_key(source, table_row, position);
  }
#pragma unroll
  for (uint32_t i = 0; i < kTileKeys / kRows; ++i) {
    const uint32_t row = thread / kChunks + i * kRows;
    const int32_t position = first + static_cast<int32_t>(row);
    const bool readable = bytes[i].values != nullptr;
    copy_16(shared_address(codes + chunk_at(row, chunk)), readable ? bytes[i].values + chunk * 16 : source.values,
            readable ? 16 : 0);
    if (chunk != 0) continue;
    copy_4(shared_address(keys.scale + row), readable ? bytes[i].scale : source.scales, readable ? 4 : 0);
    keys.state[row] = readable ? kReadable : position < high && position >= low ? kUnreadable : kOutside;
  }
}

/// Copies any unit's keys at once, for the whole warpgroup.
template <int kDim>
inline __device__ __noinline__ void bring(const KeySource& source, const DecodePlan& plan, uint8_t* codes,
                                          StageKeys& keys, uint32_t tile, uint32_t unit) {
  load_key_by_key<kDim>(source, plan, codes, keys, tile, unit);
  commit_copies();
  wait_copies<0>();
  fence_tensor_reads();
  named_barrier(1 + threadIdx.x / 128, 128);
}

/// Walks over a warpgroup's steps: of each tile its part of the sample, then its units.
class StepWalk {
 public:
  __device__ StepWalk(const DecodePlan& plan, uint32_t group) : plan_(plan), group_(group), at_{0, 0, true} {
    if (plan.first < plan.last) at_ = {plan.first_tile, sample_unit(plan, plan.first_tile, group), true};
  }
  __device__ __forceinline__ bool done() const { return at_.tile > plan_.last_tile; }
  __device__ __forceinline__ const Step& at() const { return at_; }
  __device__ __forceinline__ void advance() {
    const uint32_t first = max(plan_.before[at_.tile], plan_.first), last = min(plan_.before[at_.tile + 1], plan_.last);
    const uint32_t next = at_.sample ? first + group_ : at_.unit + kDecodeGroups;
    if (next < last) {
      at_ = {at_.tile, next, false};
    } else {
      at_ = {at_.tile + 1, 0, true};
      if (!done()) at_.unit = sample_unit(plan_, at_.tile, group_);
    }
  }

 private:
  const DecodePlan& plan_;
  const uint32_t group_;
  Step at_;
};

/// What a loader works with: one warpgroup's stages.
struct Stages {
  uint8_t* codes;
  StageKeys* keys;
};

/// Any layout: all threads of the warpgroup copy.
template <int kDim>
class KeyLoader {
 public:
  static constexpr int kPending = kDecodeStages - 1;  ///< groups of copies under way behind wait() and issue()

  __device__ KeyLoader(const DecodeJob& job, const DecodePlan& plan, const Stages& stages)
      : job_(job), plan_(plan), stages_(stages), walk_(plan, threadIdx.x / 128) {}

  /// Begins to copy the next step's keys to `stage`, if there is one. One group of copies a call.
  __device__ __forceinline__ void issue(int stage) {
    if (!walk_.done()) {
      load_key_by_key<kDim>(job_.look.keys, plan_, stages_.codes + stage * (kTileKeys * kCodePitch),
                            stages_.keys[stage], walk_.at().tile, walk_.at().unit);
      walk_.advance();
    }
    commit_copies();
  }
  /// The oldest issued step's keys are there, for the whole warpgroup; what was read of the step before is free.
  __device__ __forceinline__ void wait(int, uint32_t, uint32_t, uint32_t) const {
    wait_copies<kDecodeStages - 2>();
    fence_tensor_reads();
    named_barrier(1 + threadIdx.x / 128, 128);
  }
  __device__ __forceinline__ void release(int) const {}

 private:
  const DecodeJob& job_;
  const DecodePlan& plan_;
  const Stages stages_;
  StepWalk walk_;
};

/// Whole units in one page: a thread of a warp apart asks for them (BulkAsker); here they are waited for.
class BulkLoader {
 public:
  static constexpr int kPending = 0;

  __device__ BulkLoader(const DecodeJob& job, const DecodePlan& plan, const Stages& stages)
      : job_(job), plan_(plan), stages_(stages) {}
  __device__ __forceinline__ void issue(int) {}
  /// The keys of `stage`, those of this unit, are there, or are brought.
  __device__ __forceinline__ void wait(int stage, uint32_t phase, uint32_t tile, uint32_t unit) const {
    wait_at(&stages_.keys[stage].full, phase);
    if (!stages_.keys[stage].whole)
      bring<128>(job_.look.keys, plan_, stages_.codes + stage * (kTileKeys * kCodePitch), stages_.keys[stage], tile,
                 unit);
  }
  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive_at(&stages_.keys[stage].empty);
  }

 private:
  const DecodeJob& job_;
  const DecodePlan& plan_;
  const Stages stages_;
};

/// Asks for one warpgroup's units, as far ahead as there are stages. A warp: each lane finds the page of one of the next
/// units, all at once; then they ask in turn.
class BulkAsker {
 public:
  __device__ BulkAsker(const DecodeJob& job, const DecodePlan& plan, const Stages& stages, uint32_t group)
      : job_(job), plan_(plan), stages_(stages), group_(group) {}

  /// pause(): called once, when as many units as there are stages are asked for, or all.
  template <class Pause>
  __device__ void run(const Pause& pause) {
    uint32_t asked = 0;
    const uint32_t lane = threadIdx.x & 31;
    for (uint32_t tile = plan_.first_tile; tile <= plan_.last_tile && plan_.first < plan_.last; ++tile) {
      const uint32_t first = max(plan_.before[tile], plan_.first), last = min(plan_.before[tile + 1], plan_.last);
      const uint32_t steps = 1 + (last - first + kDecodeGroups - 1 - group_) / kDecodeGroups;
      for (uint32_t base = 0; base < steps; base += 32) {
        const uint32_t step = base + lane, unit = step == 0 ? sample_unit(plan_, tile, group_)
                                                            : first + group_ + (step - 1) * kDecodeGroups;
        const Place place = step < steps ? find(tile, unit) : Place{0, 0};
        const uint32_t count = min(32u, steps - base);
        for (uint32_t i = 0; i < count; ++i, ++asked) {
          if (asked == kDecodeStages) pause();
          if (lane == i) ask(place, static_cast<int>(asked % kDecodeStages), asked / kDecodeStages & 1);
          __syncwarp();
        }
      }
    }
    if (asked <= kDecodeStages) pause();
  }

 private:
  struct Place {
    int32_t key, page;  ///< page < 0: not in one piece
  };
  __device__ __forceinline__ Place find(uint32_t tile, uint32_t unit) const {
    const KeySource& source = job_.look.keys;
    const int32_t first = first_key_of_unit(plan_, tile, unit);
    if (!source.paged) return {first, first + kTileKeys <= source.count ? 0 : -1};
    const uint32_t column = job_.page_shift >= 0
                                ? static_cast<uint32_t>(first) >> job_.page_shift
                                : static_cast<uint32_t>(first) / static_cast<uint32_t>(source.page_size);
    const int32_t page = *element<int32_t>(source.block_table, plan_.table_row[plan_.tile_row[tile]], column);
    return {first - static_cast<int32_t>(column) * source.page_size, page < source.num_pages ? page : -1};
  }
  __device__ __forceinline__ void ask(const Place& place, int stage, uint32_t turn) const {
    const KeySource& source = job_.look.keys;
    StageKeys& keys = stages_.keys[stage];
    wait_at(&keys.empty, turn ^ 1);
    keys.whole = place.page >= 0;
    if (place.page < 0) return arrive_at(&keys.full);
    arrive_expecting(&keys.full, kTileKeys * (kCodePitch + 4));
    copy_box(shared_address(stages_.codes + stage * (kTileKeys * kCodePitch)), &job_.boxes, 0, place.key, place.page,
             &keys.full);
    copy_bulk(shared_address(keys.scale), source.scales + place.page * source.page_stride + int64_t{place.key} * 4,
              kTileKeys * 4, &keys.full);
  }

  const DecodeJob& job_;
  const DecodePlan& plan_;
  const Stages stages_;
  const uint32_t group_;
};

}  // namespace topkey::cuda
