// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What a block of the quick decode kernel has in shared memory, and the warps that bring keys to it.
#pragma once
#include "cuda/device/key_boxes.cuh"
#include "cuda/device/quick_plan.cuh"

namespace topkey::cuda {

/// Of a block that scores kShare rows of a request at a time.
template <int kHeads, int kStages, int kShare>
struct QuickMemory {
  static constexpr int kQueries =
      kShare == 1 ? 2 : 1;  ///< tiles whose queries are there: the next one's come early, or not
  static constexpr int kColumns = kShare * kHeads;  ///< of a product
  uint8_t* codes;                                   ///< [groups][stages][64, 128]
  uint8_t* q;                                       ///< [kQueries][kColumns, 128]; see column_of
  float* weights;                                   ///< [kQueries][kColumns] halved; see weight_of_column
  QuickShared* s;
  uint32_t* bins;  ///< [tiles of the block: 1 or 2][kShare, kBins], then what is kept

  __device__ __forceinline__ explicit QuickMemory(uint8_t* memory) : codes(align_tile(memory)) {
    q = codes + kQuickGroups * kStages * kTileKeys * kCodePitch;
    weights = reinterpret_cast<float*>(q + kQueries * kColumns * kCodePitch);
    s = reinterpret_cast<QuickShared*>(weights + kQueries * kColumns);
    bins = reinterpret_cast<uint32_t*>(reinterpret_cast<uint8_t*>(s) + kSharedBytesOfBlock);
  }
  static constexpr size_t kSharedBytesOfBlock = (sizeof(QuickShared) + 15) / 16 * 16;
  static constexpr size_t kFixed = 1024 + kQuickGroups * kStages * kTileKeys * kCodePitch +
                                   kQueries * kColumns * (kCodePitch + 4) + kSharedBytesOfBlock +
                                   kShare * kBinsOf<kShare> * 4;
};

/// A warp that asks for one warpgroup's keys: each lane finds the page of one of the next units, then they ask in turn.
template <int kHeads, int kStages, int kShare>
__device__ __forceinline__ void bring_keys(const QuickJob& job, const KeyBoxes& boxes,
                                           const QuickMemory<kHeads, kStages, kShare>& m) {
  QuickShared& s = *m.s;
  const uint32_t lane = threadIdx.x & 31, group = threadIdx.x / 32 - kQuickThreads / 32;
  uint8_t* codes = m.codes + group * (kStages * kTileKeys * kCodePitch);
  uint32_t stage = 0, turn = 1;
#pragma unroll 1
  for (uint32_t tile = s.first_tile; tile <= s.last_tile; ++tile) {
    const QuickSegment g = segment_of(s, tile);
    if (g.first >= g.last) continue;
    const uint32_t steps = 1 + (g.last - g.first + kQuickGroups - 1 - group) / kQuickGroups;
    const int32_t* table = pages_of_row(job, static_cast<int32_t>(rows_of_tile<kShare>(job, tile).first));
#pragma unroll 1
    for (uint32_t base = 0; base < steps; base += 32) {
      const uint32_t step = base + lane;
      const uint32_t unit = step == 0 ? sample_unit(s, tile, group) : g.first + group + (step - 1) * kQuickGroups;
      const uint32_t key = (unit - s.before[tile]) * kTileKeys;
      int32_t page = -1;
      if (step < steps) page = __ldg(table + (key >> job.page_shift));
      if (page >= job.num_pages) page = -1;
      const uint32_t count = min(32u, steps - base);
#pragma unroll 1
      for (uint32_t i = 0; i < count; ++i) {
        if (lane == i) {
          uint64_t* full = &s.full[group][stage];
          wait_at(&s.empty[group][stage], turn);
          s.absent[group][stage] = page < 0;
          if (page < 0) {
            arrive_at(full);
          } else {
            const uint32_t in_page = key & ((1u << job.page_shift) - 1);
            arrive_expecting(full, kTileKeys * (kCodePitch + 4));
            copy_box(shared_address(codes + stage * (kTileKeys * kCodePitch)), &boxes, 0, static_cast<int32_t>(in_page),
                     page, full);
            copy_bulk(shared_address(s.scale[group][stage]), job.scales + page * job.page_stride + int64_t{in_page} * 4,
                      kTileKeys * 4, full);
          }
        }
        __syncwarp();
        if (++stage == kStages) stage = 0, turn ^= 1;
      }
    }
  }
}

}  // namespace topkey::cuda
