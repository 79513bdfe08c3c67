// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `search` for few query rows on Hopper in the form that engines call most (plain_decode.h). What decode_sm90.cu does,
// in fewer instructions: such a call takes microseconds, and those that wait for one another can be seen in it. A block keeps all scores of its slice of the keys, or, where they do not fit, lists (device/quick_lists.cuh). The
// launch is cooperative: blocks wait for each other, so all of them must run at once.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/device/grid.cuh"
#include "cuda/device/quick_lists.cuh"
#include "cuda/plain_decode.h"
#include "cuda/stages.h"

namespace topkey::cuda {
namespace {

template <int kHeads, int kStages>
struct QuickMemory {
  uint8_t* codes;  ///< [groups][stages][64, 128]
  uint8_t* q;      ///< [2][kHeads, 128]
  float* weights;  ///< [2][kHeads] halved
  uint32_t* bins;  ///< [2][kQuickBins]
  QuickShared* s;
  uint32_t* scores;
};
template <int kHeads, int kStages>
constexpr size_t fixed_bytes() {
  return 1024 + kQuickGroups * kStages * kTileKeys * kCodePitch + 2 * kHeads * (kCodePitch + 4) + 2 * kQuickBins * 4 +
         (sizeof(QuickShared) + 15) / 16 * 16;
}

[[maybe_unused]] __device__ __forceinline__ void clear_exchange(const QuickJob& job) {
  uint4* bins = reinterpret_cast<uint4*>(job.bins);
  const uint32_t count = static_cast<uint32_t>(job.rows) * (kQuickBins / 4);
  for (uint32_t i = blockIdx.x * kQuickAll + threadIdx.x; i < count; i += gridDim.x * kQuickAll)
    __stcg(bins + i, uint4{0, 0, 0, 0});
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < job.rows) __stcg(job.headers + threadIdx.x, uint4{0, 0, 0, 0});
}

constexpr int kRowsOfLane = kQuickRows / 32;
struct RowEnds {
  int32_t of[kRowsOfLane];
};
/// Of a lane's rows, side by side; by one warp.
[[maybe_unused]] __device__ __forceinline__ RowEnds read_ends(const QuickJob& job) {
  RowEnds ends;
#pragma unroll
  for (int e = 0; e < kRowsOfLane; ++e) {
    const int r = static_cast<int>(threadIdx.x & 31) * kRowsOfLane + e;
    ends.of[e] = r < job.rows ? end_of_row(job, r) : 0;
  }
  return ends;
}
/// Rows to units of 64 keys, and this block's slice of them. Blocks have at least a unit for each of their warpgroups; rows
/// that are equally long are cut where they end.
[[maybe_unused]] __device__ __forceinline__ void make_plan(const QuickJob& job, QuickShared& s, RowEnds ends) {
  const uint32_t lane = threadIdx.x & 31, b = blockIdx.x;
  uint32_t own[kRowsOfLane], units = 0, longest = 0;
#pragma unroll
  for (int e = 0; e < kRowsOfLane; ++e) {
    ends.of[e] = max(0, min(ends.of[e], job.max_len));
    own[e] = static_cast<uint32_t>(ends.of[e] + kTileKeys - 1) / kTileKeys;
    units += own[e], longest = max(longest, own[e]);
  }
  longest = __reduce_max_sync(~0u, longest);
  bool equal = true;
#pragma unroll
  for (int e = 0; e < kRowsOfLane; ++e) equal = equal && (own[e] == 0 || own[e] == longest);
  equal = __all_sync(~0u, equal);
  const uint32_t up = sum_lanes_up(units), total = __shfl_sync(~0u, up, 31);
  uint32_t working = min(max(total / kQuickGroups, 1u), gridDim.x);
  if (equal && total != 0) {
    const uint32_t rows = total / longest;
    if (rows <= gridDim.x) working = min(gridDim.x / rows, max(longest / kQuickGroups, 1u)) * rows;
  }
  const uint32_t first = b < working ? total * b / working : 0, last = b < working ? total * (b + 1) / working : 0;
  uint32_t before = up - units;
#pragma unroll
  for (int e = 0; e < kRowsOfLane; ++e) {
    const uint32_t r = lane * kRowsOfLane + e;
    s.ends[r] = ends.of[e], s.before[r] = before;
    const bool begins = before <= first && first < before + own[e], closes = before < last && last <= before + own[e];
    if (begins || closes) {
      // Block of unit u: (u + 1) * working - 1, divided by total.
      const uint32_t low = ((before + 1) * working - 1) / total, high = ((before + own[e]) * working - 1) / total;
      if (begins) s.first_row = r, s.slots[0] = {b - low, high - low + 1};
      if (closes) s.last_row = r, s.slots[1] = {b - low, high - low + 1};
    }
    before += own[e];
  }
  if (lane == 0) s.first = first, s.last = last;
  if (lane == 31) s.before[kQuickRows] = total;
}

/// A block's units of one row.
struct QuickSegment {
  uint32_t first, last;  ///< of the whole launch
};
__device__ __forceinline__ QuickSegment segment_of(const QuickShared& s, uint32_t row) {
  return {max(s.before[row], s.first), min(s.before[row + 1], s.last)};
}
/// Of a row's sample: a unit a warpgroup, spread over the row, the same for all blocks.
__device__ __forceinline__ uint32_t sample_unit(const QuickShared& s, uint32_t row, uint32_t group) {
  const uint32_t first = s.before[row], units = s.before[row + 1] - first;
  return first + units * (2 * group + 1) / (2 * kQuickGroups);
}

/// A warp that asks for one warpgroup's keys: each lane finds the page of one of the next units, then they ask in turn.
template <int kHeads, int kStages>
__device__ __forceinline__ void bring_keys(const QuickJob& job, const KeyBoxes& boxes,
                                           const QuickMemory<kHeads, kStages>& m) {
  QuickShared& s = *m.s;
  const uint32_t lane = threadIdx.x & 31, group = threadIdx.x / 32 - kQuickThreads / 32;
  uint8_t* codes = m.codes + group * (kStages * kTileKeys * kCodePitch);
  uint32_t stage = 0, turn = 1;
#pragma unroll 1
  for (uint32_t row = s.first_row; row <= s.last_row; ++row) {
    const QuickSegment g = segment_of(s, row);
    if (g.first >= g.last) continue;
    const uint32_t steps = 1 + (g.last - g.first + kQuickGroups - 1 - group) / kQuickGroups;
    const int32_t* table = pages_of_row(job, static_cast<int32_t>(row));
#pragma unroll 1
    for (uint32_t base = 0; base < steps; base += 32) {
      const uint32_t step = base + lane;
      const uint32_t unit = step == 0 ? sample_unit(s, row, group) : g.first + group + (step - 1) * kQuickGroups;
      const uint32_t key = (unit - s.before[row]) * kTileKeys;
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

template <int kHeads, int kStages>
class QuickScorer {
 public:
  __device__ __forceinline__ QuickScorer(const QuickJob& job, const QuickMemory<kHeads, kStages>& m)
      : job_(job), m_(m), s_(*m.s), group_(threadIdx.x / 128) {}

  __device__ __forceinline__ void run() {
    uint32_t used = 0;
    all_kept_ = (s_.last - s_.first) * kTileKeys <= job_.words;
    begin_query(s_.first_row, 0);
#pragma unroll 1
    for (uint32_t row = s_.first_row; row <= s_.last_row; ++row) {
      const QuickSegment g = segment_of(s_, row);
      const uint32_t slot = row != s_.first_row, turn = (row - s_.first_row) & 1;
      uint32_t* bins = m_.bins + slot * kQuickBins;
      if (threadIdx.x < kQuickBins / 4) reinterpret_cast<uint4*>(bins)[threadIdx.x] = {0, 0, 0, 0};
      end_query(turn);
      if (row < s_.last_row) begin_query(row + 1, turn ^ 1);
      if (g.first < g.last) {
        QuickRow r;
        r.row = row, r.end = s_.ends[row];
        r.first = static_cast<int32_t>(g.first - s_.before[row]) * kTileKeys;
        r.count = (g.last - g.first) * kTileKeys, r.scores = m_.scores + used, r.positions = nullptr;
        const QuickShare share = row == s_.last_row    ? s_.slots[1]
                                 : row == s_.first_row ? s_.slots[0]
                                                       : QuickShare{0, 1};
        r.index = share.index, r.blocks = share.blocks;
        used += r.count;
        if (threadIdx.x == 0) s_.dead[slot] = 0;
        score_units(g, slot, r, turn, bins);
        sync_all();
        if (threadIdx.x == 0) s_.rows[slot] = r;
        if (r.blocks > 1) {
          tell_bins(job_, s_, r, slot, bins);
          continue;
        }
        if (threadIdx.x < kHalf) QuickSettler<false>(job_, Half{s_.rooms[0], 8}, r, bins).run(s_.dead[slot]);
      }
      sync_all();
    }
    sync_all();
    const uint32_t half = threadIdx.x / kHalf;
    // One row alone is its last.
    if (half == 0 ? s_.first_row != s_.last_row && s_.slots[0].blocks > 1 : s_.slots[1].blocks > 1) {
      const uint32_t slot = s_.first_row != s_.last_row ? half : 0;
      const QuickRow r = s_.rows[slot];
      QuickSettler<true>(job_, Half{s_.rooms[half], 8 + static_cast<int>(half)}, r, m_.bins + slot * kQuickBins).run(0);
    }
  }

 private:
  __device__ __forceinline__ static void sync_all() { named_barrier(7, kQuickThreads); }

  /// A row's codes and weights on their way to a buffer.
  __device__ __forceinline__ void begin_query(uint32_t row, uint32_t turn) {
    const uint32_t head = threadIdx.x / 8, chunk = threadIdx.x % 8;
    if (head < kHeads) {
      const bool present = head < static_cast<uint32_t>(job_.heads);
      const uint8_t* from = job_.q + row * job_.q_row + (present ? head * job_.q_head + chunk * 16 : 0);
      copy_16(shared_address(m_.q + turn * (kHeads * kCodePitch) + chunk_at(head, chunk)), from, present ? 16 : 0);
    }
    commit_copies();
    weight_ =
        threadIdx.x < static_cast<uint32_t>(job_.heads) ? __ldg(job_.weights + row * job_.w_row + threadIdx.x) : 0.0f;
  }
  __device__ __forceinline__ void end_query(uint32_t turn) {
    if (threadIdx.x < kHeads) m_.weights[turn * kHeads + threadIdx.x] = 0.5f * weight_;
    wait_copies<0>();
    fence_tensor_reads();
    sync_all();
  }

  /// This warpgroup's part of the sample, then of the units: scores to where the block keeps them and to bins.
  __device__ __forceinline__ void score_units(const QuickSegment& g, uint32_t slot, QuickRow& r, uint32_t turn,
                                              uint32_t* bins) {
    const uint32_t own = own_key();
    uint32_t unit = sample_unit(s_, r.row, group_), units_at_once = g.last - g.first;
    uint32_t* scores = r.scores;
    QuickList list{};
    if (!all_kept_) {
      const uint32_t words = s_.first_row == s_.last_row ? job_.words : job_.words / 2 / 4 * 4;
      list = list_of(m_.scores + (slot == 0 ? 0 : words), words);
      scores = list.window, units_at_once = list.window_size / kTileKeys;
    }
    bool sample = true;
    r.range = {0, 0};
#pragma unroll 1
    for (uint32_t begin = g.first; begin < g.last; begin += units_at_once) {
      const uint32_t end = min(g.last, begin + units_at_once);
#pragma unroll 1
      while (sample || unit < end) {
        bool absent;
        const float score = next_score(turn, &absent);
        const int32_t first = static_cast<int32_t>(unit - s_.before[r.row]) * kTileKeys;
        const bool live = !absent && first + static_cast<int32_t>(own) < r.end;
        if (sample) {
          r.range = range_of_sample(s_, owner() && live, score, job_.topk, min(r.end, job_.window));
          sample = false, unit = g.first + group_;
          continue;
        }
        if (owner()) {
          scores[quick_place((unit - begin) * kTileKeys + own)] = live ? __float_as_uint(score) : kNotLiveScore;
          const int bin = r.range.bin(score);
          if (live && bin > 0) atomicAdd(bins + bin, 1u);
        }
        if (absent && threadIdx.x % 128 == 0)
          atomicAdd(&s_.dead[slot], static_cast<uint32_t>(min(kTileKeys, r.end - first)));
        unit += kQuickGroups;
      }
      if (all_kept_) return;
      const int32_t first = static_cast<int32_t>(begin - s_.before[r.row]) * kTileKeys;
      list.count = take_window(job_, s_, list, r.range, {(end - begin) * kTileKeys, first}, bins);
    }
    r.scores = list.values, r.positions = list.positions, r.count = (list.count + 3) / 4 * 4;  // vectors of 4 are read
    if (list.count + threadIdx.x < r.count) list.values[quick_place(list.count + threadIdx.x)] = kNotLiveScore;
  }

  /// Which of a unit's keys is this lane's; two lanes have it, of which one owns it.
  __device__ __forceinline__ static uint32_t own_key() {
    const uint32_t thread = threadIdx.x % 128;
    return thread / 32 * 16 + thread % 32 / 4 + 8 * (thread & 1);
  }
  __device__ __forceinline__ static bool owner() { return (threadIdx.x & 2) == 0; }
  /// This lane's key of the warpgroup's next unit: its score, and whether the unit's page does not exist.
  __device__ __forceinline__ float next_score(uint32_t turn, bool* absent) {
    wait_at(&s_.full[group_][stage_], phase_);
    float dots[kHeads / 2], sums[2];
    const uint8_t* codes = m_.codes + (group_ * kStages + stage_) * (kTileKeys * kCodePitch);
    issue_dots<kHeads, 128>(dots, operand_at(shared_address(codes)),
                            operand_at(shared_address(m_.q + turn * (kHeads * kCodePitch))));
    const float scale = s_.scale[group_][stage_][own_key()];
    *absent = s_.absent[group_][stage_] != 0;
    wgmma_wait<0>();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive_at(&s_.empty[group_][stage_]);
    phase_ ^= stage_ == kStages - 1;
    stage_ = stage_ == kStages - 1 ? 0 : stage_ + 1;
    add_heads<kHeads>(dots, m_.weights + turn * kHeads, sums);
    sums[0] = join_groups(sums[0]), sums[1] = join_groups(sums[1]);
    return canonical(((threadIdx.x & 1) != 0 ? sums[1] : sums[0]) * scale);
  }

  const QuickJob& job_;
  const QuickMemory<kHeads, kStages>& m_;
  QuickShared& s_;
  const uint32_t group_;
  uint32_t stage_ = 0, phase_ = 0;
  float weight_ = 0.0f;
  bool all_kept_ = true;
};

template <int kHeads, int kStages>
__global__ __launch_bounds__(kQuickAll, 1) void decode_quick(const __grid_constant__ KeyBoxes boxes,
                                                             const __grid_constant__ QuickJob job) {
#ifdef TOPKEY_HAS_WGMMA
  extern __shared__ uint8_t memory[];
  QuickMemory<kHeads, kStages> m;
  m.codes = align_tile(memory);
  m.q = m.codes + kQuickGroups * kStages * kTileKeys * kCodePitch;
  m.weights = reinterpret_cast<float*>(m.q + 2 * kHeads * kCodePitch);
  m.bins = reinterpret_cast<uint32_t*>(m.weights + 2 * kHeads);
  m.s = reinterpret_cast<QuickShared*>(m.bins + 2 * kQuickBins);
  m.scores = reinterpret_cast<uint32_t*>(reinterpret_cast<uint8_t*>(m.s) + (sizeof(QuickShared) + 15) / 16 * 16);
  QuickShared& s = *m.s;
  if (threadIdx.x < kQuickGroups * kQuickStages) {
    init_barrier(&s.full[0][0] + threadIdx.x, 1), init_barrier(&s.empty[0][0] + threadIdx.x, 4);
    fence_tensor_reads();
  }
  if (threadIdx.x == kQuickThreads) {
    prefetch_map(&boxes);
    s.first_row = 1, s.last_row = 0;
  }
  const bool plans = threadIdx.x / 32 == 1;  // not the warp that speaks for the block
  RowEnds ends;
  if (plans) ends = read_ends(job);
  clear_exchange(job);
  // All threads of all blocks meet once: behind the wait the exchange is clear. Meanwhile each makes its plan.
  GridMeeting cleared;
  if (plans) make_plan(job, s, ends);
  cleared.wait();
  if (s.first < s.last) {
    if (threadIdx.x >= kQuickThreads) {
      bring_keys(job, boxes, m);
    } else {
      QuickScorer<kHeads, kStages>(job, m).run();
    }
  }
  for (int32_t r = static_cast<int32_t>(blockIdx.x); r < job.rows; r += static_cast<int32_t>(gridDim.x)) {
    if (s.ends[r] == 0) fill_row(job, r, 0, threadIdx.x, kQuickAll);
  }
#endif
}

constexpr size_t kSharedOfHopper = 227 * 1024;
struct Choice {
  void (*kernel)(KeyBoxes, QuickJob);
  size_t fixed;
  int64_t most() const {
    return std::min<int64_t>(static_cast<int64_t>(kSharedOfHopper - fixed) / 4, kWords * 32 * kHalf);
  }
};
/// Two stages leave room for more scores.
constexpr Choice kChoices[2][2] = {
    {{decode_quick<32, 3>, fixed_bytes<32, 3>()}, {decode_quick<32, 2>, fixed_bytes<32, 2>()}},
    {{decode_quick<64, 3>, fixed_bytes<64, 3>()}, {decode_quick<64, 2>, fixed_bytes<64, 2>()}}};
const KernelEntry kEntries[] = {
    {reinterpret_cast<const void*>(kChoices[0][0].kernel), static_cast<int>(kSharedOfHopper)},
    {reinterpret_cast<const void*>(kChoices[0][1].kernel), static_cast<int>(kSharedOfHopper)},
    {reinterpret_cast<const void*>(kChoices[1][0].kernel), static_cast<int>(kSharedOfHopper)},
    {reinterpret_cast<const void*>(kChoices[1][1].kernel), static_cast<int>(kSharedOfHopper)}};

static_assert(fixed_bytes<64, 2>() + 32768 * 4 <= kSharedOfHopper, "128 rows of 32K keys");

/// The kernel for so many rows at once, and what it keeps: all scores, or lists of two rows at a time, which must hold topk
/// winners and in one bin more than are ranked. Null: neither fits.
const Choice* fit(const PlainDecode& plain, int64_t rows, int64_t blocks, QuickJob& job) {
  const int64_t units = rows * ((int64_t{plain.max_len} + kTileKeys - 1) / kTileKeys);
  if (units >= int64_t{1} << 24) return nullptr;
  // Slices of rows that are cut where they end are longer; no slice need be shorter than two units a warpgroup.
  const int64_t whole = rows <= blocks ? blocks / rows * rows : blocks;
  const int64_t entries = std::max<int64_t>((units + whole - 1) / whole, 2 * kQuickGroups) * kTileKeys;
  const Choice* choice = kChoices[plain.heads <= 32 ? 0 : 1];
  if (entries > choice->most() && entries <= choice[1].most()) ++choice;
  const bool lists = entries > choice->most();
  job.words = static_cast<uint32_t>(std::min(entries, choice->most() / 64 * 64));
  const QuickList list = list_of(nullptr, job.words / 2 / 4 * 4);
  job.window = lists ? static_cast<int32_t>(list.window_size) : INT32_MAX;
  const bool suits = list.capacity >= static_cast<uint32_t>(plain.topk) + kQuickCandidates + 64;
  return lists && !suits ? nullptr : choice;
}

}  // namespace

size_t plain_decode_bytes(int64_t rows) {
  constexpr size_t kEach = kQuickBins * 4 + kQuickCandidates * 8 + kMaxBlocks * sizeof(uint2) + sizeof(uint4);
  return static_cast<size_t>(std::min<int64_t>(rows, kQuickRows)) * kEach;
}

KernelList decode_quick_kernels() { return {kEntries, 4}; }

bool decode_quickly(const PlainDecode& plain, const KeyBoxes& boxes, void* workspace, const Launch& launch) {
  const int32_t together = std::max(plain.ends_n, plain.table_n);
  if (together > kQuickRows) return false;
  const int32_t rows = std::min(plain.rows, kQuickRows / together * together);  // of a launch
  const int64_t blocks = std::min<int64_t>(launch.sms(), kMaxBlocks);
  QuickJob job{};
  const Choice* choice = fit(plain, rows, blocks, job);
  if (choice == nullptr) return false;
  job.bins = static_cast<uint32_t*>(workspace);
  job.candidates = reinterpret_cast<uint64_t*>(job.bins + rows * kQuickBins);
  job.shares = reinterpret_cast<uint2*>(job.candidates + rows * kQuickCandidates);
  job.headers = reinterpret_cast<uint4*>(job.shares + rows * kMaxBlocks);
  for (int32_t row = 0; row < plain.rows; row += rows) {
    static_cast<PlainDecode&>(job) = plain;
    job.rows = std::min(rows, plain.rows - row);
    job.q += row * job.q_row, job.weights += row * job.w_row, job.out += row * job.out_row;
    if (job.scores != nullptr) job.scores += row * job.scores_row;
    if (job.whole_ends != nullptr) job.whole_ends += row;
    job.ends += row / job.ends_n;
    if (job.requests != nullptr) {
      job.requests += row;
    } else {
      job.table += row / job.table_n * job.table_row;
    }
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
