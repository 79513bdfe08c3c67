// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `search` for few query rows on Hopper in the form that engines call most (plain_decode.h). What decode_sm90.cu does,
// in fewer instructions: such a call takes microseconds, and those that wait for one another can be seen in it. Rows of a
// request are scored side by side, as columns of one product (a tile), so that their keys are read once. A block keeps all
// scores of its slice of the keys, or, where they do not fit, lists (device/quick_lists.cuh). The launch is cooperative:
// blocks wait for each other, so all of them must run at once.
#include <algorithm>
#include <array>

#include "cuda/check.h"
#include "cuda/device/grid.cuh"
#include "cuda/device/quick_plan.cuh"
#include "cuda/device/quick_score.cuh"
#include "cuda/plain_decode.h"
#include "cuda/stages.h"

namespace topkey::cuda {
namespace {

[[maybe_unused]] __device__ __forceinline__ void clear_exchange(const QuickJob& job) {
  uint4* bins = reinterpret_cast<uint4*>(job.bins);
  const uint32_t count = static_cast<uint32_t>(job.rows) * (kQuickBins / 4);
  for (uint32_t i = blockIdx.x * kQuickAll + threadIdx.x; i < count; i += gridDim.x * kQuickAll)
    __stcg(bins + i, uint4{0, 0, 0, 0});
  if (blockIdx.x == gridDim.x - 1) {
    for (uint32_t i = threadIdx.x; i < static_cast<uint32_t>(job.rows); i += kQuickAll)
      __stcg(job.headers + i, uint4{0, 0, 0, 0});
  }
}

/// Where a warp that asks for keys goes on.
struct KeyRing {
  uint32_t stage = 0, turn = 1;
};
/// A warp that asks for one warpgroup's keys: each lane finds the page of one of the next units, then they ask in turn.
template <int kHeads, int kStages, int kShare>
__device__ __forceinline__ void bring_keys(const QuickJob& job, const KeyBoxes& boxes,
                                           const QuickMemory<kHeads, kStages, kShare>& m, uint32_t base_tile,
                                           KeyRing& ring) {
  QuickShared& s = *m.s;
  const uint32_t lane = threadIdx.x & 31, group = threadIdx.x / 32 - kQuickThreads / 32;
  uint8_t* codes = m.codes + group * (kStages * kTileKeys * kCodePitch);
  uint32_t &stage = ring.stage, &turn = ring.turn;
#pragma unroll 1
  for (uint32_t tile = s.first_tile; tile <= s.last_tile; ++tile) {
    const QuickSegment g = segment_of(s, tile);
    if (g.first >= g.last) continue;
    const uint32_t steps = 1 + (g.last - g.first + kQuickGroups - 1 - group) / kQuickGroups;
    const int32_t* table = pages_of_row(job, static_cast<int32_t>(rows_of_tile<kShare>(job, base_tile + tile).first));
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

/// Tiles without units: every live key of their rows is wanted, or there is none. By the warps that bring keys.
template <int kShare>
__device__ __forceinline__ void answer_unscored(const QuickJob& job, const QuickShared& s, uint32_t base_tile) {
  const uint32_t warp = (threadIdx.x - kQuickThreads) / 32 * gridDim.x + blockIdx.x;
#pragma unroll 1
  for (uint32_t tile = warp; tile < tiles_of_turn(job, base_tile); tile += kQuickGroups * gridDim.x) {
    if (s.before[tile] != s.before[tile + 1]) continue;
    const TileRows rows = rows_of_tile<kShare>(job, base_tile + tile);
#pragma unroll 1
    for (uint32_t row = rows.first; row < rows.first + rows.count; ++row) {
      const int32_t end = kShare == 1 ? s.ends[tile] : min(end_of_row(job, row), job.max_len);
      if (end > 0 && job.whole > 0) {
        answer_whole_row(job, row, end, threadIdx.x & 31, 32);
      } else {
        fill_row(job, row, 0, threadIdx.x & 31, 32);
      }
    }
  }
}

[[maybe_unused]] __device__ __forceinline__ void sync_block() { named_barrier(0, kQuickAll); }

template <int kHeads, int kStages, int kShare>
__global__ __launch_bounds__(kQuickAll, 1) void decode_quick(const __grid_constant__ KeyBoxes boxes,
                                                             const __grid_constant__ QuickJob job) {
#ifdef TOPKEY_HAS_WGMMA
  extern __shared__ uint8_t memory[];
  const QuickMemory<kHeads, kStages, kShare> m(memory);
  QuickShared& s = *m.s;
  if (threadIdx.x < kQuickGroups * kQuickStages) {
    init_barrier(&s.full[0][0] + threadIdx.x, 1), init_barrier(&s.empty[0][0] + threadIdx.x, 4);
    fence_tensor_reads();
  }
  if (threadIdx.x == kQuickThreads) prefetch_map(&boxes);
  const bool plans = threadIdx.x / 32 == 1;  // not the warp that speaks for the block
  TileEnds ends;
  if (plans) ends = read_ends<kShare>(job, 0);
  clear_exchange(job);
  // All threads of all blocks meet once: behind the wait the exchange is clear. Meanwhile each makes its plan.
  GridMeeting cleared;
  if (plans) make_plan<kShare>(job, s, ends);
  cleared.wait();
  const uint32_t all = static_cast<uint32_t>(job.all_tiles), step = static_cast<uint32_t>(job.tiles);
  // Those that score need more registers than an equal share.
  if (threadIdx.x >= kQuickThreads) {
    give_registers<32>();
    KeyRing ring;
#pragma unroll 1
    for (uint32_t base = 0; base < all; base += step) {
      if (base != 0) sync_block(), sync_block();
      if (s.first < s.last) bring_keys(job, boxes, m, base, ring);
      answer_unscored<kShare>(job, s, base);
    }
  } else {
    take_registers<112>();
    QuickScorer<kHeads, kStages, kShare> scorer(job, m);
#pragma unroll 1
    for (uint32_t base = 0; base < all; base += step) {
      // Blocks take their turns each at its own pace.
      if (base != 0) {
        sync_block();
        if (plans) make_plan<kShare>(job, s, read_ends<kShare>(job, base));
        sync_block();
      }
      if (s.first < s.last) scorer.run(base);
    }
  }
#endif
}

constexpr size_t kSharedOfHopper = 227 * 1024;
struct Choice {
  void (*kernel)(KeyBoxes, QuickJob);
  size_t fixed;
  int32_t heads, share;
  constexpr int64_t words() const { return static_cast<int64_t>(kSharedOfHopper - fixed) / 4 / 64 * 64; }
};
template <int kHeads, int kStages, int kShare>
constexpr Choice kChoice{decode_quick<kHeads, kStages, kShare>, QuickMemory<kHeads, kStages, kShare>::kFixed, kHeads,
                         kShare};
/// Better ones first; two stages leave room for more scores.
constexpr Choice kChoices[] = {kChoice<32, 2, 4>, kChoice<32, 2, 2>, kChoice<32, 3, 1>, kChoice<32, 2, 1>,
                               kChoice<64, 2, 2>, kChoice<64, 3, 1>, kChoice<64, 2, 1>};
constexpr int kNumChoices = sizeof(kChoices) / sizeof(Choice);
const std::array<KernelEntry, kNumChoices> kEntries = [] {
  std::array<KernelEntry, kNumChoices> entries{};
  for (int i = 0; i < kNumChoices; ++i)
    entries[i] = {reinterpret_cast<const void*>(kChoices[i].kernel), static_cast<int>(kSharedOfHopper)};
  return entries;
}();

static_assert(kChoice<64, 2, 1>.words() >= 32768, "128 rows of 32K keys");
static_assert(kChoice<64, 2, 2>.words() >= 32768 && kChoice<32, 2, 4>.words() >= 32768, "the same of fewer requests");

/// Of so many rows.
int32_t tiles_of(const PlainDecode& plain, int64_t share, int64_t rows) {
  return static_cast<int32_t>(share == 1 ? rows : rows / plain.table_n * ((plain.table_n + share - 1) / share));
}
/// Whether a kernel suits a launch of so many rows; then what it is told. It keeps all scores, or lists of two tiles at a
/// time, which must hold topk winners and in one bin more than are ranked.
bool fit(const Choice& choice, const PlainDecode& plain, int64_t rows, int64_t blocks, QuickJob& job, bool lists) {
  const int64_t share = choice.share, bins = share * (share == kMostShare ? kBinsOf<kMostShare> : kQuickBins);
  job.parts = static_cast<int32_t>((plain.table_n + share - 1) / share);
  job.tiles = tiles_of(plain, share, rows);
  const int64_t units = job.tiles * ((int64_t{plain.max_len} + kTileKeys - 1) / kTileKeys);
  // Slices of tiles that are cut where they end are longer; no slice need be shorter than two units a warpgroup.
  const int64_t whole = job.tiles <= blocks ? blocks / job.tiles * job.tiles : blocks;
  const int64_t keys = std::max<int64_t>((units + whole - 1) / whole, 2 * kQuickGroups) * kTileKeys;
  // A block has a second tile only where slices are much shorter than that, or there are more tiles than blocks.
  const int64_t words = keys * share, least = words + (job.tiles <= blocks ? 0 : bins);
  const bool all = least <= choice.words() && keys <= kMostEntries;
  job.words = static_cast<uint32_t>(all ? std::min(words + bins, choice.words()) : choice.words());
  const QuickList list = list_of(nullptr, static_cast<uint32_t>((job.words - bins) / 2 / share / 4 * 4));
  job.window = all ? INT32_MAX : static_cast<int32_t>(list.window_size);
  return all || (lists && list.capacity >= static_cast<uint32_t>(plain.topk) + kQuickCandidates + 64);
}
/// Null: none suits. One that keeps all scores comes before lists, but a read that rows share before that.
const Choice* choose(const PlainDecode& plain, int64_t rows, int64_t blocks, QuickJob& job) {
  const int32_t heads = plain.heads <= 32 ? 32 : 64;
  for (const int32_t share : {kMostShare, 2, 1}) {
    if (share > 1 && (plain.table_n <= share / 2 || plain.rows % plain.table_n != 0)) continue;
    for (const bool lists : {false, true}) {
      if (lists && share == kMostShare) continue;
      for (const Choice& c : kChoices) {
        if (c.heads == heads && c.share == share && fit(c, plain, rows, blocks, job, lists)) return &c;
      }
    }
  }
  return nullptr;
}

}  // namespace

size_t plain_decode_bytes(int64_t rows) {
  constexpr size_t kEach = kQuickBins * 4 + kQuickCandidates * 8 + kMaxBlocks * sizeof(uint2) + sizeof(uint4);
  return static_cast<size_t>(std::min<int64_t>(rows, kQuickAllRows)) * kEach;
}

KernelList decode_quick_kernels() { return {kEntries.data(), kNumChoices}; }

bool decode_quickly(const PlainDecode& plain, const KeyBoxes& boxes, void* workspace, const Launch& launch) {
  const int32_t together = std::max(plain.ends_n, plain.table_n);
  if (together > kQuickRows) return false;
  const int32_t turn = std::min(plain.rows, kQuickRows / together * together);  // rows of it
  const int32_t rows = std::min(plain.rows, kQuickAllRows / turn * turn);       // of a launch
  const int64_t blocks = std::min<int64_t>(launch.sms(), kMaxBlocks);
  QuickJob job{};
  if (int64_t{turn} * ((int64_t{plain.max_len} + kTileKeys - 1) / kTileKeys) >= int64_t{1} << 24) return false;
  const Choice* choice = choose(plain, turn, blocks, job);
  if (choice == nullptr) return false;
  job.bins = static_cast<uint32_t*>(workspace);
  job.candidates = reinterpret_cast<uint64_t*>(job.bins + rows * kQuickBins);
  job.shares = reinterpret_cast<uint2*>(job.candidates + rows * kQuickCandidates);
  job.headers = reinterpret_cast<uint4*>(job.shares + rows * kMaxBlocks);
  for (int32_t row = 0; row < plain.rows; row += rows) {
    static_cast<PlainDecode&>(job) = plain;
    job.rows = std::min(rows, plain.rows - row), job.all_tiles = tiles_of(plain, choice->share, job.rows);
    job.q += row * job.q_row, job.weights += row * job.w_row, job.out += row * job.out_row;
    if (job.scores != nullptr) job.scores += row * job.scores_row;
    if (job.whole_ends != nullptr) job.whole_ends += row;
    job.ends += row / job.ends_n, job.table += row / job.table_n * job.table_row;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks)), config.blockDim = dim3(kQuickAll);
    config.dynamicSmemBytes = choice->fixed + static_cast<size_t>(job.words) * 4, config.stream = launch.stream();
    cudaLaunchAttribute cooperative{};
    cooperative.id = cudaLaunchAttributeCooperative, cooperative.val.cooperative = 1;
    config.attrs = &cooperative, config.numAttrs = 1;
    TOPKEY_CUDA_CHECK(cudaLaunchKernelEx(&config, choice->kernel, boxes, job));
  }
  return true;
}

}  // namespace topkey::cuda
