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
#include "cuda/device/quick_lists.cuh"
#include "cuda/device/quick_load.cuh"
#include "cuda/plain_decode.h"
#include "cuda/stages.h"

namespace topkey::cuda {
namespace {

[[maybe_unused]] __device__ __forceinline__ void clear_exchange(const QuickJob& job) {
  uint4* bins = reinterpret_cast<uint4*>(job.bins);
  const uint32_t count = static_cast<uint32_t>(job.rows) * (kQuickBins / 4);
  for (uint32_t i = blockIdx.x * kQuickAll + threadIdx.x; i < count; i += gridDim.x * kQuickAll)
    __stcg(bins + i, uint4{0, 0, 0, 0});
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < job.rows) __stcg(job.headers + threadIdx.x, uint4{0, 0, 0, 0});
}

/// kPublish: of one row at a time the best score of each block of keys is wanted, too.
template <int kHeads, int kStages, int kShare, bool kPublish>
class QuickScorer {
 public:
  using Memory = QuickMemory<kHeads, kStages, kShare>;
  using Scores = OwnScores<kShare>;
  static constexpr int kBins = kBinsOf<kShare>;
  __device__ __forceinline__ QuickScorer(const QuickJob& job, const Memory& m)
      : job_(job),
        m_(m),
        s_(*m.s),
        group_(of_warp(threadIdx.x / 128)),
        codes_(of_warp(operand_low(shared_address(m.codes))) + group_ * kStages * (kTileKeys * kCodePitch / 16)),
        q_(of_warp(operand_low(shared_address(m.q)))),
        two_(m.s->first_tile != m.s->last_tile) {
    const uint32_t bins = kShare * kBins;
    kept_ = m.bins + (two_ ? 2 : 1) * bins, words_ = two_ ? job.words - bins : job.words;
    all_kept_ = (s_.last - s_.first) * kTileKeys <= min(words_ / kShare, static_cast<uint32_t>(kMostEntries));
  }

  __device__ __forceinline__ void run() {
    uint32_t* kept = kept_;
    if (Memory::kQueries == 2) begin_query(s_.first_tile, 0);
#pragma unroll 1
    for (uint32_t tile = s_.first_tile; tile <= s_.last_tile; ++tile) {
      const QuickSegment g = segment_of(s_, tile);
      const uint32_t slot = tile != s_.first_tile, turn = (tile - s_.first_tile) & (Memory::kQueries - 1);
      uint32_t* bins = m_.bins + slot * (kShare * kBins);
      for (uint32_t i = threadIdx.x; i < kShare * kBins / 4; i += kQuickThreads)
        reinterpret_cast<uint4*>(bins)[i] = {0, 0, 0, 0};
      if (Memory::kQueries == 1) begin_query(tile, 0);
      end_query(turn);
      if (Memory::kQueries == 2 && tile < s_.last_tile) begin_query(tile + 1, turn ^ 1);
      if (g.first < g.last) {
        const TileRows rows = rows_of_tile<kShare>(job_, tile);
        const QuickShare share = tile == s_.last_tile    ? s_.slots[1]
                                 : tile == s_.first_tile ? s_.slots[0]
                                                         : QuickShare{0, 1};
        QuickRow r = begin_row(tile, g, kept);
        r.row = rows.first + Scores::row(), r.index = share.index;
        r.blocks = Scores::row() < rows.count ? share.blocks : 0;
        kept += r.count * kShare;
        if (threadIdx.x < kShare) s_.dead[slot][threadIdx.x] = 0;
        score_units(tile, slot, r, turn, bins);
        if (threadIdx.x < kShare) s_.rows[slot][threadIdx.x] = r;
        sync_all();
        if (share.blocks > 1) {
          tell_bins<kShare>(job_, s_, rows, slot, bins);
        } else {
          settle<false>(slot, slot);
        }
      }
      sync_all();
    }
    sync_all();
    settle<true>(0, two_ ? 1 : 0);
  }

 private:
  /// What all lanes of a warp have: the shuffle tells the compiler, so that it stays out of their registers.
  __device__ __forceinline__ static uint32_t of_warp(uint32_t value) { return __shfl_sync(~0u, value, 0); }
  __device__ __forceinline__ static void sync_all() { named_barrier(7, kQuickThreads); }

  /// A tile's codes, weights and ends on their way.
  __device__ __forceinline__ void begin_query(uint32_t tile, uint32_t turn) {
    constexpr uint32_t kChunks = Memory::kColumns * 8;
    const TileRows rows = rows_of_tile<kShare>(job_, tile);
    const uint32_t heads = static_cast<uint32_t>(job_.heads);
    uint8_t* to = m_.q + turn * (Memory::kColumns * kCodePitch);
#pragma unroll
    for (uint32_t i = threadIdx.x; i < (kChunks + kQuickThreads - 1) / kQuickThreads * kQuickThreads;
         i += kQuickThreads) {
      const uint32_t row = i / (kHeads * 8), head = i / 8 % kHeads, chunk = i % 8;
      if (kChunks % kQuickThreads != 0 && i >= kChunks) break;
      const bool present = head < heads && row < rows.count;
      const uint8_t* from =
          job_.q + rows.first * job_.q_row + (present ? row * job_.q_row + head * job_.q_head + chunk * 16 : 0);
      copy_16(shared_address(to + chunk_at(column_of<kShare>(row, head), chunk)), from, present ? 16 : 0);
    }
    commit_copies();
    const uint32_t row = threadIdx.x / kHeads, head = threadIdx.x % kHeads;
    weight_ = row < rows.count && head < heads ? __ldg(job_.weights + (rows.first + row) * job_.w_row + head) : 0.0f;
    if (kShare > 1 && threadIdx.x < kShare)
      end_ = threadIdx.x < rows.count ? end_of_row(job_, static_cast<int32_t>(rows.first + threadIdx.x)) : 0;
  }
  __device__ __forceinline__ void end_query(uint32_t turn) {
    if (threadIdx.x < Memory::kColumns) {
      const uint32_t column = column_of<kShare>(threadIdx.x / kHeads, threadIdx.x % kHeads);
      m_.weights[turn * Memory::kColumns + weight_of_column(column)] = 0.5f * weight_;
    }
    if (kShare > 1 && threadIdx.x < kShare) s_.row_ends[threadIdx.x] = max(0, min(end_, job_.max_len));
    wait_copies<0>();
    fence_tensor_reads();
    sync_all();
  }

  /// Of this lane's row of a tile what is known before it is scored.
  __device__ __forceinline__ QuickRow begin_row(uint32_t tile, const QuickSegment& g, uint32_t* kept) {
    QuickRow r;
    r.end = kShare == 1 ? s_.ends[tile] : s_.row_ends[Scores::row()];
    r.first = static_cast<int32_t>(g.first - s_.before[tile]) * kTileKeys;
    r.count = (g.last - g.first) * kTileKeys, r.scores = kept + Scores::row() * r.count, r.positions = nullptr;
    r.range = {0, 0};
    return r;
  }

  /// Rows of these tiles that are shared with other blocks, or are not: one after the other, two side by side where rows
  /// share a read. In the order of rows in all blocks, as those of a row wait for each other.
  template <bool kShared>
  __device__ __forceinline__ void settle(uint32_t first_slot, uint32_t last_slot) {
    constexpr int kTeam = kTeamOf<kShare>;
    const uint32_t team = threadIdx.x / kTeam;
#pragma unroll 1
    for (uint32_t i = first_slot * kShare + team; i < (last_slot + 1) * kShare; i += kQuickThreads / kTeam) {
      const uint32_t slot = i / kShare, row = i % kShare;
      const QuickRow r = s_.rows[slot][row];
      if (kShared ? r.blocks <= 1 : r.blocks != 1) continue;  // 0: the tile has no such row
      QuickSettler<kShared, kBins, kTeam>(job_, {s_.rooms[team], 8 + static_cast<int>(team)}, r, m_.bins + i * kBins)
          .run(s_.dead[slot][row]);
    }
  }

  /// This warpgroup's part of the sample, then of the units: scores to where the block keeps them and to bins.
  __device__ __forceinline__ void score_units(uint32_t tile, uint32_t slot, QuickRow& r, uint32_t turn,
                                              uint32_t* bins) {
    const QuickSegment g{of_warp(segment_of(s_, tile).first), of_warp(segment_of(s_, tile).last)};
    const uint32_t before = of_warp(s_.before[tile]);
    uint32_t unit = of_warp(sample_unit(s_, tile, group_)), units_at_once = g.last - g.first;
    uint32_t* scores = r.scores;
    const uint32_t own_bins = shared_address(bins + Scores::row() * kBins);
    Lists lists{};
    if (kShare < kMostShare && !all_kept_) {
      lists.words = words_ / (two_ ? 2 : 1) / kShare / 4 * 4, lists.memory = kept_ + slot * kShare * lists.words;
      const QuickList list = lists.of(Scores::row());
      scores = list.window, units_at_once = of_warp(list.window_size / kTileKeys);
    }
    uint32_t own_places[Scores::kKeys];
#pragma unroll
    for (int e = 0; e < Scores::kKeys; ++e) own_places[e] = quick_place(Scores::key() + 8 * e);
    bool sample = true;
#pragma unroll 1
    for (uint32_t begin = g.first; begin < g.last; begin += units_at_once) {
      const uint32_t end = min(g.last, begin + units_at_once);
#pragma unroll 1
      while (sample || unit < end) {
        Scores own;
        const int32_t first = static_cast<int32_t>(unit - before) * kTileKeys;
        const bool absent = score_unit(turn, first, r.end, own);
        if (sample) {
          r.range = range_of_sample(s_, own, job_.topk, min(r.end, job_.window));
          sample = false, unit = g.first + group_;
          continue;
        }
        if constexpr (kPublish) publish(r.row, first + static_cast<int32_t>(Scores::key()), own);
#pragma unroll
        for (int e = 0; e < Scores::kKeys; ++e) {
          const uint32_t place = quick_place_of(unit - begin, own_places[e]);
          if (Scores::owner()) scores[place] = own.live[e] ? __float_as_uint(own.of[e]) : kNotLiveScore;
          const int bin = min(r.range.bin(own.of[e]), kBins - 1);
          add_one_if(own.live[e] && bin > 0, own_bins + bin * 4);
        }
        if (absent && threadIdx.x % 128 < kShare)
          atomicAdd(&s_.dead[slot][threadIdx.x % 128], static_cast<uint32_t>(max(0, min(kTileKeys, r.end - first))));
        unit += kQuickGroups;
      }
      if (kShare == kMostShare || all_kept_) return;
      const QuickWindow window{(end - begin) * kTileKeys, static_cast<int32_t>(begin - before) * kTileKeys};
#pragma unroll
      for (int i = 0; kShare < kMostShare && i < kShare; ++i) {
        const BinRange range{__shfl_sync(~0u, r.range.low, i), __shfl_sync(~0u, r.range.scale, i)};
        lists.counts[i] = take_window(job_, s_, lists.of(i), range, window, bins + i * kBins);
      }
    }
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const QuickList list = lists.of(i);
      const uint32_t count = (list.count + 3) / 4 * 4;  // vectors of 4 are read
      if (list.count + threadIdx.x < count) list.values[quick_place(list.count + threadIdx.x)] = kNotLiveScore;
      if (Scores::row() == i) r.scores = list.values, r.positions = list.positions, r.count = count;
    }
  }

  __device__ __forceinline__ void publish(uint32_t row, int32_t position, const Scores& own) {
    static_assert(!kPublish || kShare == 1);
    const BlockMaxima& to = job_.maxima;
    const uint32_t best = best_of_block(own.live[0], own.of[0], to.shift);
    if (Scores::owner() && (position & ((1 << to.shift) - 1)) == 0)
      to.values[row * to.step + (position >> to.shift)] = __uint_as_float(best);
  }

  /// Of a tile's rows, where not all scores are kept.
  struct Lists {
    uint32_t* memory;
    uint32_t words;  ///< of each
    uint32_t counts[kShare];
    __device__ __forceinline__ QuickList of(uint32_t row) const {
      QuickList list = list_of(memory + row * words, words);
#pragma unroll
      for (uint32_t i = 0; i < kShare; ++i) {
        if (i == row) list.count = counts[i];
      }
      return list;
    }
  };

  /// This lane's scores of the warpgroup's next unit, whose keys stand from `first` on in a row that ends at `end`. Returns
  /// whether the unit's page does not exist.
  __device__ __forceinline__ bool score_unit(uint32_t turn, int32_t first, int32_t end, Scores& own) {
    wait_at(&s_.full[group_][stage_], phase_);
    constexpr int kColumns = Memory::kColumns;
    float dots[kColumns / 2], sums[2][kShare], scores[kShare == 2 ? 1 : 2];
    issue_dots_low<kColumns, 128>(dots, of_warp(codes_ + stage_ * (kTileKeys * kCodePitch / 16)),
                                  q_ + turn * (kColumns * kCodePitch / 16));
    float scales[Scores::kKeys];
#pragma unroll
    for (int e = 0; e < Scores::kKeys; ++e) scales[e] = s_.scale[group_][stage_][Scores::key() + 8 * e];
    const bool absent = s_.absent[group_][stage_] != 0;
    wgmma_wait<0>();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive_at(&s_.empty[group_][stage_]);
    phase_ ^= stage_ == kStages - 1;
    stage_ = stage_ == kStages - 1 ? 0 : stage_ + 1;
    add_rows<kShare, kColumns>(dots, m_.weights + turn * kColumns, sums);
    join_rows(sums, scores);
    if (kShare == 1 && (threadIdx.x & 1) != 0) scores[0] = scores[1];
#pragma unroll
    for (int e = 0; e < Scores::kKeys; ++e) {
      own.of[e] = __fadd_rn(scores[e] * scales[e], 0.0f);  // no -0
      own.live[e] = Scores::owner() && !absent && first + static_cast<int32_t>(Scores::key()) + 8 * e < end;
    }
    return absent;
  }

  const QuickJob& job_;
  const Memory& m_;
  QuickShared& s_;
  const uint32_t group_, codes_, q_;  ///< of the warpgroup; its first stage and the queries as operands
  const bool two_;                    ///< tiles at least
  uint32_t *kept_, words_;
  uint32_t stage_ = 0, phase_ = 0;
  float weight_ = 0.0f;
  int32_t end_ = 0;
  bool all_kept_;
};

/// Tiles without units: every live key of their rows is wanted, or there is none. By the warps that bring keys.
template <int kShare>
__device__ __forceinline__ void answer_unscored(const QuickJob& job, const QuickShared& s) {
  const uint32_t warp = (threadIdx.x - kQuickThreads) / 32 * gridDim.x + blockIdx.x;
#pragma unroll 1
  for (uint32_t tile = warp; tile < static_cast<uint32_t>(job.tiles); tile += kQuickGroups * gridDim.x) {
    if (s.before[tile] != s.before[tile + 1]) continue;
    const TileRows rows = rows_of_tile<kShare>(job, tile);
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

template <int kHeads, int kStages, int kShare, bool kPublish>
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
  if (threadIdx.x == kQuickThreads) {
    prefetch_map(&boxes);
    s.first_tile = 1, s.last_tile = 0, s.first = s.last = 0;
  }
  // Who picks from the maxima may be made ready, and waits for the end of this.
  if (kPublish) cudaTriggerProgrammaticLaunchCompletion();
  const bool plans = threadIdx.x / 32 == 1;  // not the warp that speaks for the block
  TileEnds ends;
  if (plans) ends = read_ends<kShare>(job);
  clear_exchange(job);
  // All threads of all blocks meet once: behind the wait the exchange is clear. Meanwhile each makes its plan.
  GridMeeting cleared;
  if (plans) make_plan<kShare>(job, s, ends);
  cleared.wait();
  const bool brings = threadIdx.x >= kQuickThreads;
  if (s.first < s.last) {
    // Those that score need more registers than an equal share.
    if (brings) {
      give_registers<32>();
      bring_keys(job, boxes, m);
    } else {
      take_registers<112>();
      QuickScorer<kHeads, kStages, kShare, kPublish>(job, m).run();
    }
  }
  if (brings) answer_unscored<kShare>(job, s);
#endif
}

constexpr size_t kSharedOfHopper = 227 * 1024;
struct Choice {
  void (*kernel)(KeyBoxes, QuickJob);
  size_t fixed;
  int32_t heads, share;
  bool publishes;
  constexpr int64_t words() const { return static_cast<int64_t>(kSharedOfHopper - fixed) / 4 / 64 * 64; }
};
template <int kHeads, int kStages, int kShare, bool kPublish = false>
constexpr Choice kChoice{decode_quick<kHeads, kStages, kShare, kPublish>, QuickMemory<kHeads, kStages, kShare>::kFixed,
                         kHeads, kShare, kPublish};
/// Better ones first; two stages leave room for more scores.
constexpr Choice kChoices[] = {kChoice<32, 2, 4>,       kChoice<32, 2, 2>,       kChoice<32, 3, 1>,
                               kChoice<32, 2, 1>,       kChoice<64, 2, 2>,       kChoice<64, 3, 1>,
                               kChoice<64, 2, 1>,       kChoice<32, 3, 1, true>, kChoice<32, 2, 1, true>,
                               kChoice<64, 3, 1, true>, kChoice<64, 2, 1, true>};
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
  const bool publishes = job.maxima.values != nullptr;
  for (const int32_t share : {kMostShare, 2, 1}) {
    if (share > 1 && (plain.table_n <= share / 2 || plain.rows % plain.table_n != 0)) continue;
    for (const bool lists : {false, true}) {
      if (lists && share == kMostShare) continue;
      for (const Choice& c : kChoices) {
        if (c.heads == heads && c.share == share && c.publishes == publishes && fit(c, plain, rows, blocks, job, lists))
          return &c;
      }
    }
  }
  return nullptr;
}

}  // namespace

size_t plain_decode_bytes(int64_t rows) {
  constexpr size_t kEach = kQuickBins * 4 + kQuickCandidates * 8 + kMaxBlocks * sizeof(uint2) + sizeof(uint4);
  return static_cast<size_t>(std::min<int64_t>(rows, kQuickRows)) * kEach;
}

KernelList decode_quick_kernels() { return {kEntries.data(), kNumChoices}; }

bool decode_quickly(const PlainDecode& plain, const KeyBoxes& boxes, void* workspace, const Launch& launch,
                    const BlockMaxima& maxima) {
  const int32_t together = std::max(plain.ends_n, plain.table_n);
  if (together > kQuickRows) return false;
  const int32_t rows = std::min(plain.rows, kQuickRows / together * together);  // of a launch
  const int64_t blocks = std::min<int64_t>(launch.sms(), kMaxBlocks);
  QuickJob job{};
  job.maxima = maxima;
  if (int64_t{rows} * ((int64_t{plain.max_len} + kTileKeys - 1) / kTileKeys) >= int64_t{1} << 24) return false;
  const Choice* choice = choose(plain, rows, blocks, job);
  if (choice == nullptr) return false;
  job.bins = static_cast<uint32_t*>(workspace);
  job.candidates = reinterpret_cast<uint64_t*>(job.bins + rows * kQuickBins);
  job.shares = reinterpret_cast<uint2*>(job.candidates + rows * kQuickCandidates);
  job.headers = reinterpret_cast<uint4*>(job.shares + rows * kMaxBlocks);
  for (int32_t row = 0; row < plain.rows; row += rows) {
    static_cast<PlainDecode&>(job) = rows_of(plain, row, std::min(rows, plain.rows - row));
    job.tiles = tiles_of(plain, choice->share, job.rows);
    if (maxima.values != nullptr) job.maxima.values = maxima.values + row * maxima.step;
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
