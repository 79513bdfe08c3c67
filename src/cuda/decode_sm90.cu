// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `search` for few query rows on Hopper: one launch scores and selects. All rows' keys are cut into units of 64,
// and these into equal slices, one a thread block; each warpgroup streams its units through shared memory and the tensor
// core; what a block finds of a row stays with it, and the blocks of a row settle the cut among them (device/
// decode_finish.cuh). The launch is cooperative: blocks wait for each other, so all of them must run at once.
#include <type_traits>

#include "cuda/check.h"
#include "cuda/decode_sm90.h"
#include "cuda/device/decode_answer.cuh"
#include "cuda/key_boxes.h"
#include "cuda/plain_decode.h"
#include "cuda/stages.h"
#include "cuda/workspace.h"

namespace topkey::cuda {
namespace {

/// Entries of a list that must be free for the next units, lest it be thinned.
[[maybe_unused]] constexpr uint32_t kThinBelow = kTileKeys * (kDecodeGroups + 1);

template <int kHeads, int kDim, class Loader>
class Decoder {
 public:
  __device__ Decoder(const DecodeJob& job, DecodeShared& s, const DecodeMemory& m)
      : job_(job),
        s_(s),
        m_(m),
        group_(threadIdx.x / 128),
        loader_(job, s.plan, {m.codes + group_ * kDecodeStages * kTileKeys * kCodePitch, s.keys[group_]}) {
    begin_queries();
    commit_copies();
#pragma unroll 1
    for (int i = 0; i < kDecodeStages - 1; ++i) loader_.issue(i);
    load_weights(s.plan.first_tile);
  }

  __device__ void score_slice() {
    const DecodePlan& p = s_.plan;
    load_queries(p.first_tile + 1);
    const uint64_t entries = uint64_t{p.last - p.first} * kTileKeys * static_cast<uint32_t>(job_.tile_rows);
    all_kept_ = entries <= job_.words;
    uint32_t used = 0;
    for (uint32_t tile = p.first_tile; tile <= p.last_tile; ++tile) {
      const Segment g = segment_of(p, tile);
      const int slot = tile == p.first_tile && g.shared() ? 0 : 1;
      used += open_segment(g, slot, used);
      score_segment(g, slot);
      close_segment(g, slot);
      settle_rows(job_, s_, g, slot, rows_of(g.tile), m_.bins);
      load_queries(tile + 2);
    }
  }

  /// What is left of rows that other blocks share: at most those of the first and of the last tile.
  __device__ void finish_shared() {
    const DecodePlan& p = s_.plan;
    const Segment first = segment_of(p, p.first_tile), last = segment_of(p, p.last_tile);
    const bool head = first.shared(), tail = last.shared() && p.last_tile != p.first_tile;
    if (head) ask_rows(first, 0);
    if (tail) ask_rows(last, 1);
    if (head) answer_rows(first, 0);
    if (tail) answer_rows(last, 1);
  }

 private:
  __device__ int rows_of(uint32_t tile) const { return s_.plan.tile_rows[tile]; }

  /// The first tile's codes travel with its first keys.
  __device__ void begin_queries() {
    const uint32_t tile = s_.plan.first_tile;
    for (int r = 0; r < rows_of(tile); ++r)
      copy_query<kHeads, kDim, kDecodeThreads>(job_.q, job_.first_row + s_.plan.tile_row[tile] + r, job_.heads,
                                               q_of(0, r), threadIdx.x, job_.query_alignment, copy_chunk);
  }
  __device__ void load_weights(uint32_t tile) {
    const int turn = (tile - s_.plan.first_tile) & 1;
    for (int r = 0; r < rows_of(tile); ++r)
      load_weights_of<kHeads>(job_.q, job_.first_row + s_.plan.tile_row[tile] + r, job_.heads, weights_of(turn, r),
                              threadIdx.x, kDecodeThreads);
  }
  /// Codes and weights of a later tile's rows to its turn's buffer.
  __device__ void load_queries(uint32_t tile) {
    if (tile <= s_.plan.last_tile) {
      const int turn = (tile - s_.plan.first_tile) & 1;
      for (int r = 0; r < rows_of(tile); ++r)
        load_query<kHeads, kDim, kDecodeThreads>(job_.q, job_.first_row + s_.plan.tile_row[tile] + r, job_.heads,
                                                 q_of(turn, r), weights_of(turn, r), threadIdx.x, job_.query_alignment);
      fence_tensor_reads();
    }
  }
  __device__ uint8_t* q_of(int turn, int r) const { return m_.q + (turn * job_.tile_rows + r) * kHeads * kCodePitch; }
  __device__ float* weights_of(int turn, int r) const { return m_.weights + (turn * job_.tile_rows + r) * kHeads; }

  /// Clears what is kept of the tile's rows; ends with a barrier. Returns the words taken.
  __device__ uint32_t open_segment(const Segment& g, int slot, uint32_t used) {
    const uint32_t keys = (g.last - g.first) * kTileKeys, rows = static_cast<uint32_t>(job_.tile_rows);
    const bool only = s_.plan.first_tile == s_.plan.last_tile;
    const uint32_t half = only ? job_.words : job_.words / 2, list = half / rows / 2 / 4 * 4;
    if (threadIdx.x < rows_of(g.tile)) {
      const uint32_t r = threadIdx.x;
      const int32_t first =
          s_.plan.tile_low[g.tile] + static_cast<int32_t>(g.first - s_.plan.before[g.tile]) * kTileKeys;
      Kept k{};
      k.keys = m_.scores + (all_kept_ ? used + r * keys : (slot == 1 && !only ? half : 0) + r * list * 2);
      k.positions = all_kept_ ? nullptr : reinterpret_cast<int32_t*>(k.keys + list);
      k.capacity = list, k.count = all_kept_ ? keys : 0, k.least = kNanKey,
      k.topk = static_cast<uint32_t>(job_.look.topk);
      k.first = first, k.last = first + static_cast<int32_t>(keys);
      k.tile_row = static_cast<int>(r), k.row = s_.plan.tile_row[g.tile] + k.tile_row;
      k.request = s_.plan.request[k.row], k.start = s_.plan.start[k.row];
      s_.fit = list / kTileKeys;
      s_.kept[slot][r] = k;
    }
    for (uint32_t b = threadIdx.x; b < rows * kDecodeBins; b += kDecodeThreads) m_.bins[b] = 0;
    sync_scorers();
    return keys * rows;
  }

  /// Waits for the next step's keys, begins to copy those of another.
  __device__ __forceinline__ void take_step(uint32_t tile, uint32_t unit) {
    loader_.wait(stage_, phase_, tile, unit);
    loader_.issue(stage_ == 0 ? kDecodeStages - 1 : stage_ - 1);
  }
  __device__ __forceinline__ float score_step(int turn, int r) const {
    const uint8_t* codes = m_.codes + (group_ * kDecodeStages + stage_) * kTileKeys * kCodePitch;
    return score_keys<kHeads, kDim>(codes, q_of(turn, r), weights_of(turn, r),
                                    s_.keys[group_][stage_].scale[own_key_of_unit()]);
  }
  __device__ __forceinline__ void leave_step() {
    loader_.release(stage_);
    phase_ ^= stage_ == kDecodeStages - 1;
    stage_ = stage_ == kDecodeStages - 1 ? 0 : stage_ + 1;
  }

  /// The tile's sample gives its rows' bins their bounds. The barriers also make its queries visible.
  __device__ void score_sample(const Segment& g) {
    take_step(g.tile, sample_unit(s_.plan, g.tile, group_));
    wait_copies<Loader::kPending>();  // the first tile's queries
    fence_tensor_reads();
    sync_scorers();
    const StageKeys& keys = s_.keys[group_][stage_];
    const uint32_t own = own_key_of_unit();
    const int32_t position =
        first_key_of_unit(s_.plan, g.tile, sample_unit(s_.plan, g.tile, group_)) + static_cast<int32_t>(own);
    const bool readable = owns_key_of_unit() && (keys.whole || keys.state[own] == kReadable);
#pragma unroll 1
    for (int r = 0; r < rows_of(g.tile); ++r) {
      const int row = s_.plan.tile_row[g.tile] + r;
      const float score = score_step((g.tile - s_.plan.first_tile) & 1, r);
      add_sample(s_, group_, r, readable && position >= s_.plan.low[row] && position < s_.plan.high[row], score);
    }
    leave_step();
    sync_scorers();
    if (threadIdx.x < rows_of(g.tile))
      set_range(s_, threadIdx.x, s_.plan.tile_row[g.tile] + threadIdx.x, static_cast<uint32_t>(job_.look.topk));
    sync_scorers();
  }

  /// Units [unit, end), of which this warpgroup takes every fourth. Returns the first that it did not take.
  __device__ __forceinline__ uint32_t score_units(const Segment& g, int slot, uint32_t unit, uint32_t end) {
    const int32_t inner_low = s_.plan.inner_low[g.tile], inner_high = s_.plan.inner_high[g.tile];
    const int turn = (g.tile - s_.plan.first_tile) & 1, rows = rows_of(g.tile), row0 = s_.plan.tile_row[g.tile];
    int32_t first = s_.plan.tile_low[g.tile] + static_cast<int32_t>(unit - s_.plan.before[g.tile]) * kTileKeys;
    uint32_t live = 0;
    const uint32_t own = own_key_of_unit();
    for (; unit < end; unit += kDecodeGroups, first += kDecodeGroups * kTileKeys) {
      take_step(g.tile, unit);
      const StageKeys& keys = s_.keys[group_][stage_];
      const bool whole = keys.whole && first >= inner_low && first + kTileKeys <= inner_high;
      const uint32_t entry = (unit - g.first) * kTileKeys + own;
      if (whole) live += kTileKeys;
#pragma unroll 1
      for (int r = 0; r < rows; ++r) {
        const float score = score_step(turn, r);
        Kept& kept = s_.kept[slot][r];
        uint32_t* bins = m_.bins + r * kDecodeBins;
        const BinRange range = s_.ranges[r];
        if (whole && all_kept_) {
          keep_live(kept, bins, range, owns_key_of_unit(), score, entry);
        } else if (whole) {
          add_to_list(kept, bins, range, owns_key_of_unit() ? key_of(score) : kNotLive,
                      first + static_cast<int32_t>(own));
        } else {
          const int32_t position = first + static_cast<int32_t>(own);
          const uint8_t state = keys.whole ? kReadable : keys.state[own];
          const bool mine =
              owns_key_of_unit() && position >= s_.plan.low[row0 + r] && position < s_.plan.high[row0 + r];
          keep_any(kept, bins, range, owns_key_of_unit(), mine && state == kReadable, mine && state == kUnreadable,
                   score, entry, position);
        }
      }
      leave_step();
    }
    if (threadIdx.x % 128 == 0 && live != 0) {
      for (int r = 0; r < rows; ++r) atomicAdd(&s_.kept[slot][r].live, live);
    }
    return unit;
  }

  __device__ void score_segment(const Segment& g, int slot) {
    score_sample(g);
    uint32_t unit = g.first + static_cast<uint32_t>(group_);
    for (uint32_t begin = g.first; begin < g.last;) {
      const uint32_t end = all_kept_ ? g.last : min(g.last, begin + s_.fit);
      unit = score_units(g, slot, unit, end);
      begin = end;
      if (begin < g.last) make_room(g, slot);
    }
  }

  /// Drops what cannot win from lists that are nearly full; then s.fit.
  __device__ void make_room(const Segment& g, int slot) {
    sync_scorers();
    for (int r = 0; r < rows_of(g.tile); ++r) {
      Kept& k = s_.kept[slot][r];
      if (k.capacity - k.count < kThinBelow)  // the same in all threads
        thin_list(s_, k, m_.bins + r * kDecodeBins);
    }
    sync_scorers();
    if (threadIdx.x == 0) {
      uint32_t most = 0;
      for (int r = 0; r < rows_of(g.tile); ++r) most = max(most, s_.kept[slot][r].count);
      s_.fit = (s_.kept[slot][0].capacity - most) / kTileKeys;
    }
    sync_scorers();
  }

  __device__ void close_segment(const Segment& g, int slot) {
    sync_scorers();
    if (threadIdx.x < rows_of(g.tile)) {
      Kept& k = s_.kept[slot][threadIdx.x];
      k.range = s_.ranges[threadIdx.x];
      count(job_.look.stats, kSkippedPages, k.unreadable);
    }
    sync_scorers();
  }

  __device__ void answer_rows(const Segment& g, int slot) {
    // All units are scored: the stages are free.
    constexpr uint32_t kRoom = kDecodeGroups * kDecodeStages * kTileKeys * kCodePitch / 4;
    for (int r = 0; r < rows_of(g.tile); ++r)
      answer_row(job_, s_, slot, r, reinterpret_cast<uint32_t*>(m_.codes), kRoom);
  }
  __device__ void ask_rows(const Segment& g, int slot) {
    for (int r = 0; r < rows_of(g.tile); ++r) ask_row(job_, s_, slot, r, m_.bins);
  }

  const DecodeJob& job_;
  DecodeShared& s_;
  const DecodeMemory& m_;
  const int group_;
  Loader loader_;
  int stage_ = 0;
  uint32_t phase_ = 0;
  bool all_kept_ = true;
};

[[maybe_unused]] __device__ inline void clear_exchange(const DecodeJob& job) {
  const Exchange& e = job.exchange;
  const int64_t thread = int64_t{blockIdx.x} * kDecodeThreads + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * kDecodeThreads;
  uint4* bins = reinterpret_cast<uint4*>(e.bins);
  for (int64_t i = thread; i < int64_t{job.rows} * kDecodeBins / 4; i += threads) __stcg(bins + i, uint4{0, 0, 0, 0});
  uint4* rows = reinterpret_cast<uint4*>(e.rows);
  constexpr int64_t kEach = sizeof(RowExchange) / sizeof(uint4);
  for (int64_t i = thread; i < job.rows * kEach; i += threads) __stcg(rows + i, uint4{0, 0, 0, 0});
}

template <int kHeads>
constexpr size_t fixed_bytes(int tile_rows) {
  return 1024 + kDecodeGroups * kDecodeStages * kTileKeys * kCodePitch +
         static_cast<size_t>(tile_rows) * (2 * kHeads * (kCodePitch + 4) + kDecodeBins * 4) + sizeof(DecodeShared) + 16;
}

/// The warps apart: one thread of each asks for a warpgroup's keys, until the last. All threads of the grid meet once,
/// when the exchange is cleared; the first keys are on their way by then.
template <class Loader>
__device__ void bring_keys(const DecodeJob& job, DecodeShared& s, const DecodeMemory& m) {
  if constexpr (std::is_same_v<Loader, BulkLoader>) {
    const uint32_t group = (threadIdx.x - kDecodeThreads) / 32;
    BulkAsker asker(job, s.plan, {m.codes + group * kDecodeStages * kTileKeys * kCodePitch, s.keys[group]}, group);
    asker.run([] { meet_grid(); });
  } else {
    meet_grid();
  }
}

template <int kHeads, int kDim, class Loader>
__device__ void run_scorers(const DecodeJob& job, DecodeShared& s, const DecodeMemory& m, bool works) {
  if (works) {
    Decoder<kHeads, kDim, Loader> decoder(job, s, m);
    clear_exchange(job);
    meet_grid();
    decoder.score_slice();
    decoder.finish_shared();
  } else {
    clear_exchange(job);
    meet_grid();
  }
  answer_unscored(job, s);
}

template <int kHeads, int kDim, class Loader>
__global__ __launch_bounds__(kDecodeAll, 1) void decode_fp8_sm90(const __grid_constant__ DecodeJob job) {
#ifdef TOPKEY_HAS_WGMMA
  extern __shared__ uint8_t memory[];
  DecodeMemory m;
  m.codes = align_tile(memory);
  m.q = m.codes + kDecodeGroups * kDecodeStages * kTileKeys * kCodePitch;
  m.weights = reinterpret_cast<float*>(m.q + 2 * job.tile_rows * kHeads * kCodePitch);
  m.bins = reinterpret_cast<uint32_t*>(m.weights + 2 * job.tile_rows * kHeads);
  DecodeShared& s = *reinterpret_cast<DecodeShared*>(m.bins + job.tile_rows * kDecodeBins);
  m.scores = reinterpret_cast<uint32_t*>(reinterpret_cast<uint8_t*>(&s) + (sizeof(DecodeShared) + 15) / 16 * 16);
  if (threadIdx.x < kDecodeGroups * kDecodeStages) {
    StageKeys& keys = s.keys[threadIdx.x / kDecodeStages][threadIdx.x % kDecodeStages];
    init_barrier(&keys.full, 1), init_barrier(&keys.empty, 4);
    fence_tensor_reads();
  }
  look_at_decode_rows(job, s.plan);
  make_tiles(job, s.plan);
  cut_units(s.plan);
  const bool works = s.plan.first < s.plan.last, scores = threadIdx.x < kDecodeThreads;
  if (!scores) {
    bring_keys<Loader>(job, s, m);
  } else {
    run_scorers<kHeads, kDim, Loader>(job, s, m, works);
  }
#endif
}

struct Choice {
  void (*kernel)(DecodeJob);
  size_t (*bytes)(int tile_rows);
};
template <int kDim, class Loader>
Choice choose(int heads) {
  switch (padded_heads(heads)) {
    case 32: return {decode_fp8_sm90<32, kDim, Loader>, fixed_bytes<32>};
    case 64: return {decode_fp8_sm90<64, kDim, Loader>, fixed_bytes<64>};
    default: return {decode_fp8_sm90<128, kDim, Loader>, fixed_bytes<128>};
  }
}

constexpr size_t kSharedOfHopper = 227 * 1024;
#define TOPKEY_ENTRIES(D, Loader)                                                                            \
  {reinterpret_cast<const void*>(&decode_fp8_sm90<32, D, Loader>), static_cast<int>(kSharedOfHopper)},       \
      {reinterpret_cast<const void*>(&decode_fp8_sm90<64, D, Loader>), static_cast<int>(kSharedOfHopper)}, { \
    reinterpret_cast<const void*>(&decode_fp8_sm90<128, D, Loader>), static_cast<int>(kSharedOfHopper)       \
  }
const KernelEntry kEntries[] = {TOPKEY_ENTRIES(64, KeyLoader<64>), TOPKEY_ENTRIES(128, KeyLoader<128>),
                                TOPKEY_ENTRIES(128, BulkLoader)};

constexpr int64_t kMostRows = 1024;  ///< more are another kernel's

/// A list must hold topk winners and the units under way.
/// So much that thinning pays.
bool lists_suit(int64_t words, int tile_rows, int64_t topk) { return words / 4 / tile_rows >= topk + topk / 16 + 128; }
/// Rows that share keys at most, and the words that are left for scores; 0 rows if topk is too large.
int fit_tile(const Choice& choice, int64_t topk, int wanted, uint32_t* words) {
  for (int rows = wanted; rows > 0; rows = rows / 2) {
    if (choice.bytes(rows) > kSharedOfHopper) continue;
    *words = static_cast<uint32_t>((kSharedOfHopper - choice.bytes(rows)) / 4 / 64 * 64);
    if (lists_suit(*words, rows, topk)) return rows;
  }
  return 0;
}

size_t exchange_bytes(int64_t rows) {
  return static_cast<size_t>(rows) *
         (sizeof(RowExchange) + kDecodeBins * 4 + kMaxBlocks * sizeof(uint2) + kDecodeCandidates * 8);
}
Exchange exchange_in(void* workspace, int64_t rows) {
  Exchange e{};
  e.bins = static_cast<uint32_t*>(workspace);
  e.candidates = reinterpret_cast<uint64_t*>(e.bins + rows * kDecodeBins);
  e.shares = reinterpret_cast<uint2*>(e.candidates + rows * kDecodeCandidates);
  e.rows = reinterpret_cast<RowExchange*>(e.shares + rows * kMaxBlocks);
  return e;
}

bool shape_suits(const Shape& shape) {
  uint32_t words;
  const Choice choice = choose<128, BulkLoader>(static_cast<int>(shape.heads));
  return shape.format == KeyFormat::fp8 && shape.rows <= kMostRows && shape.topk > 0 && shape.candidates < 0 &&
         shape.blocks == 0 && shape.keys < INT32_MAX - 256 &&
         std::min<int64_t>(shape.rows, kDecodeRows) * (shape.keys / kTileKeys + 2) < INT32_MAX &&
         fit_tile(choice, shape.topk, 1, &words) > 0;
}

}  // namespace

KernelList decode_kernels() { return {kEntries, sizeof kEntries / sizeof kEntries[0]}; }

size_t decode_bytes(const Shape& shape) {
  if (!shape_suits(shape)) return 0;
  return std::max(exchange_bytes(std::min<int64_t>(shape.rows, kDecodeRows)), plain_decode_bytes(shape.rows));
}

bool decode_suits(const Shape& shape, const KeySource& keys, const Query& q, const Admit& admit, const Selection& out) {
  return shape_suits(shape) && keys.count < INT32_MAX - 256 && alignment_of(keys) == 16 && alignment_of(q) >= 4 &&
         reinterpret_cast<uintptr_t>(keys.scales) % 4 == 0 && keys.scale_step % 4 == 0 && admit.mask.data == nullptr &&
         admit.force_first == 0 && admit.force_last == 0 && out.order != Order::score && out.fill != Fill::repeat;
}

void decode(const LookParams& look, const Query& q, const Emission& emission, void* workspace, const Launch& launch) {
  PlainDecode plain;
  KeyBoxes plain_boxes;
  if (plain_decode(look, q, emission, &plain, &plain_boxes) &&
      (decode_shortly(plain, plain_boxes, launch) || decode_quickly(plain, plain_boxes, workspace, launch)))
    return;
  const int heads = static_cast<int>(q.values.shape[1]);
  DecodeJob job{};
  const bool bulk = make_boxes(look.keys, &job.boxes);
  const Choice choice = bulk                       ? choose<128, BulkLoader>(heads)
                        : look.keys.head_dim == 64 ? choose<64, KeyLoader<64>>(heads)
                                                   : choose<128, KeyLoader<128>>(heads);
  const bool by_request = look.rows.request.data != nullptr || look.rows.q_indptr.data != nullptr || !look.keys.paged;
  const int page_size = look.keys.page_size;
  job.look = look, job.q = q, job.emission = emission, job.heads = heads;
  job.query_alignment = alignment_of(q);
  job.page_shift = (page_size & (page_size - 1)) == 0 ? __builtin_ctz(static_cast<unsigned>(page_size)) : -1;
  const int wanted = by_request ? 2 : std::min(look.rows.next_n, 2);
  job.tile_rows = fit_tile(choice, look.topk, std::max(wanted, 1), &job.words);
  job.exchange = exchange_in(workspace, std::min<int64_t>(look.rows.count, kDecodeRows));
  for (int64_t row = 0; row < look.rows.count; row += kDecodeRows) {
    job.first_row = row, job.rows = static_cast<int>(std::min<int64_t>(look.rows.count - row, kDecodeRows));
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(launch.sms(), kMaxBlocks)));
    config.blockDim = dim3(kDecodeAll);
    config.dynamicSmemBytes = choice.bytes(job.tile_rows) + job.words * size_t{4};
    config.stream = launch.stream();
    cudaLaunchAttribute cooperative{};
    cooperative.id = cudaLaunchAttributeCooperative, cooperative.val.cooperative = 1;
    config.attrs = &cooperative, config.numAttrs = 1;
    TOPKEY_CUDA_CHECK(cudaLaunchKernelEx(&config, choice.kernel, job));
  }
}

}  // namespace topkey::cuda
