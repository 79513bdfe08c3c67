// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `search` for many query rows on Hopper: scores never leave the thread block that made them, but for those that
// may win. A threshold from a spread sample of the row's keys, which are its first ones, lets through little more than
// the winners; that it let enough through is counted, and a row where it did not is done again without. A list that
// fills up is thinned to its best topk, whose last is a threshold that needs no proof; where most would fill up, half of
// the keys give a sharper threshold first, of the sample's kind. A full list of equal scores
// keeps those of the lowest positions; from then on equal ones behind them are not listed. Persistent thread blocks take
// tiles of rows, the long ones first.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/device/prefill_load.cuh"
#include "cuda/device/prefill_score.cuh"
#include "cuda/device/prefill_settle.cuh"
#include "cuda/pick_blocks_sm90.h"
#include "cuda/prefill_room.h"
#include "cuda/prefill_sm90.h"
#include "cuda/stages.h"
#include "cuda/tuning.h"
#include "cuda/workspace.h"

namespace topkey::cuda {
namespace {

/// One warpgroup's work. kPublish: job.maxima are wanted.
template <int kHeads, bool kPublish>
class PrefillScorer {
 public:
  static constexpr int kRows = group_rows_of(kHeads);  ///< of this warpgroup
  static constexpr int kOwn = kHeads == 32 ? 2 : 1;    ///< of a thread

  __device__ PrefillScorer(const PrefillJob& job, PrefillShared& s, const uint8_t* codes, const uint8_t* queries)
      : job_(job), s_(s), group_(static_cast<int>(uniform(threadIdx.x / 128))) {
    codes_ = uniform(operand_low(shared_address(codes)) + (threadIdx.x >> 16));
    queries_ = uniform(operand_low(shared_address(queries)) + threadIdx.x / 128 * kGroupStep);
    stages_ = uniform(shared_address(s.stages) + (threadIdx.x >> 16));
    own_ = kept(static_cast<uint32_t>(warp()) * 16 + lane() / 4);
  }

  __device__ __forceinline__ void run() {
    for (uint32_t number = 0;; ++number) {
      const uint32_t slot = number & 1;
      wait_at(&s_.item_full[slot], number / 2 & 1);
      Item item = s_.items[slot];
      if (item.first_row < 0) return;
      if (item.units > 0) {
        score(item, slot);
      } else {
        answer_unscored_rows(item);
      }
      __syncwarp();
      if (lane() == 0) arrive_at(&s_.item_empty[slot]);
      sync();  // the lists are free, and what is shared of the rows
    }
  }

 private:
  static constexpr uint32_t kGroupStep = kPrefillColumns * kCodePitch >> 4, kStageStep = kTileKeys * kCodePitch >> 4;
  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x & 31; }
  __device__ __forceinline__ int warp() const { return static_cast<int>(threadIdx.x / 32 % 4); }
  __device__ __forceinline__ void sync() const { named_barrier(1 + group_, 128); }
  /// The thread's row i, of the tile.
  __device__ __forceinline__ int own_row(int i) const {
    const int c = static_cast<int>(lane() & 3);
    return group_ * kRows + (kHeads == 128 ? c / 2 : c + 4 * i);
  }
  __device__ __forceinline__ uint32_t own_column() const { return static_cast<uint32_t>(warp()) * 8 + lane() / 4; }
  __device__ __forceinline__ bool keeps() const { return kHeads != 128 || (lane() & 1) == 0; }
  __device__ __forceinline__ uint2* list_of(int row) const { return cuda::list_of(job_, kPrefillGroups * kRows, row); }
  /// Of the thread's column for its row i.
  __device__ __forceinline__ uint32_t begin_of(int i) const {
    return static_cast<uint32_t>(reinterpret_cast<uint64_t>(list_of(own_row(i)) + own_column()));
  }
  __device__ __forceinline__ bool is_active(int i) const { return (active_ >> i & 1u) != 0; }

  __device__ __forceinline__ void open(const Item& item) {
    if (threadIdx.x % 128 < kRows) {
      const int row = group_ * kRows + static_cast<int>(threadIdx.x % 128);
      int32_t low = 0, end = 0, scored = 0;
      if (is_in(item.active, row)) {
        const RowFact& f = job_.facts[item.first_row + row];
        low = f.low, end = f.high, scored = f.scored;
      }
      s_.low[row] = low, s_.end[row] = end, s_.scored[row] = scored != 0, s_.thinned[row] = false;
      s_.tie[row] = INT32_MAX;
      s_.least[row] = __uint_as_float(scored != 0 ? 0xFF800000u : 0x7F800000u), s_.dropped[row] = kNotLive;
    }
    sync();
    active_ = ~0u;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = own_row(i);
      Column& c = columns_[i];
      c = Column{begin_of(i), kept(static_cast<uint32_t>(reinterpret_cast<uint64_t>(list_of(row)) >> 32)),
                 s_.least[row]};
      if (!s_.scored[row]) active_ &= ~(1u << i);
      if (kPublish)
        maxima_[i] = static_cast<uint32_t>((item.first_row + row) * job_.maxima.step) +
                     (own_ / 16 * 16 + (lane() & 16) / 2 >> job_.maxima.shift);
    }
  }

  __device__ __forceinline__ void score(Item& item, uint32_t slot) {
#ifdef TOPKEY_HAS_WGMMA
    open(item);
    wait_at(&s_.query_full[group_], turn_);
    turn_ ^= 1;
    const uint32_t units = uniform(item.units);
    for (uint32_t step = 0; step < units;) {
      // In registers: while products run, a read of shared memory comes late.
      float4 weights[16];
#pragma unroll
      for (int i = 0; i < 16; ++i)
        weights[i] = reinterpret_cast<const float4*>(s_.weights[group_])[i * 4 + static_cast<int>(lane() & 3)];
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (by_maximum(i)) weights[i].x *= 2, weights[i].y *= 2, weights[i].z *= 2, weights[i].w *= 2;
      float dots[64];  // of the next unit and the first half of the columns
      wait_for(unit_);
      issue_dots_low<128, 128>(dots, codes_of(unit_), queries_);
      wgmma_wait<0>();
      bool sample, all, halfway;
      do {
        const uint32_t left = min(kCheckUnits, units - step);
        step += left;
#pragma unroll 1
        for (uint32_t i = 0; i < left; i += 2) {
          const uint32_t unit = uniform(unit_), both = uniform(i + 1 < left),
                         more = uniform(i + 2 < left || step < units);
          score_unit<false, false>(item, weights, dots, {unit, unit + both, both != 0, true});
          score_unit<true, true>(item, weights, dots, {unit + both, unit + both + more, true, both != 0});
          unit_ += 1 + both;
        }
        sample = step == item.sample && samples(item), all = step == units;
        halfway = step == item.halfway;
        if (all && lane() == 0) arrive_at(&s_.query_empty[group_]);
      } while (!look_at_lists(sample || halfway || all));
      settle_rows({group_, kRows, slot, step, sample, halfway, all});
      if (any_tie()) item.inner_low = INT32_MAX, item.inner_span = 0;  // there no unit begins
    }
#endif
  }

#ifdef TOPKEY_HAS_WGMMA
  __device__ __forceinline__ uint32_t stage_of(uint32_t unit) const {
    return stages_ + unit % kPrefillStages * static_cast<uint32_t>(sizeof(KeyStage));
  }
  __device__ __forceinline__ uint32_t codes_of(uint32_t unit) const {
    return codes_ + unit % kPrefillStages * kStageStep;
  }
  __device__ __forceinline__ void wait_for(uint32_t unit) const {
    wait_at(stage_of(unit) + offsetof(KeyStage, full), unit / kPrefillStages & 1);
  }
  /// A unit and the one behind it, the same if there is none; an item's last pair may be one unit twice, then only one of
  /// the two gives its stage back, and only one offers scores.
  struct Turn {
    uint32_t unit, next;
    bool releases, offers;
  };
  /// dots: of the unit's keys with the first half of the columns, under way if kFlies; then of the next unit's (of no use if
  /// it is the same), done if kCloses.
  template <bool kFlies, bool kCloses>
  __device__ __forceinline__ void score_unit(const Item& item, const float4 (&weights)[16], float (&dots)[64],
                                             const Turn& turn) {
    const uint32_t unit = turn.unit, next = turn.next, stage = stage_of(unit);
    UnitSums<kHeads> sums;
    float rest[64];
    issue_dots_low<128, 128>(rest, codes_of(unit), queries_ + kGroupStep / 2);
    wait_for(next);  // here, since a branch keeps the additions from going between the products' instructions
    if (kFlies) wgmma_wait<1>();
    hold(dots);
    sums.template add<0>(dots, weights);
    hold(sums.first), hold(sums.second);
    issue_dots_low<128, 128>(dots, codes_of(next), queries_);
    wgmma_wait<1>();
    const float scale[2] = {load_shared_float(stage + own_ * 4), load_shared_float(stage + own_ * 4 + 32)};
    const int32_t first = load_shared_int(stage + offsetof(KeyStage, first));
    if (lane() == 0 && turn.releases) arrive_at(stage + offsetof(KeyStage, empty));
    sums.template add<1>(rest, weights);
    if (!turn.offers) {
    } else if (static_cast<uint32_t>(first) - static_cast<uint32_t>(item.inner_low) <= item.inner_span) {
      offer_unit<true>(sums, scale, first);
    } else if (first != kUnreadable) {
      offer_unit<false>(sums, scale, first);
    }
    if (kCloses) wgmma_wait<0>();
  }
#endif

#ifdef TOPKEY_HAS_WGMMA
  /// kInside: all of the unit's keys, of which this is the first, are in all rows' windows, and no list was thinned between
  /// equal scores.
  template <bool kInside>
  __device__ __forceinline__ void offer_unit(const UnitSums<kHeads>& unit, const float (&scale)[2], int32_t first) {
    const int32_t position = first + static_cast<int32_t>(own_);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      bool live[2];
      float score[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int32_t at = position + 8 * k;
        const bool inside = kInside || within(i, at);
        live[k] = inside, score[k] = unit.sums[k][i] * scale[k];
        offer(columns_[i], inside && (kInside || wants(i, at, score[k])) && keeps(), score[k], at);
      }
      if (kPublish) publish<kInside>(i, first, live, score);
    }
  }
  /// Of the thread's row i: the lanes of its first key, and of the key half a block further.
  template <bool kInside>
  __device__ __forceinline__ void publish(int i, int32_t first, const bool (&live)[2], const float (&score)[2]) {
    const uint32_t best = best_of_blocks<kInside>(live, score, job_.maxima.shift);
    const uint32_t others = job_.maxima.shift > 3 ? 28 : 12;
    if ((lane() & others) == 0 && keeps() && is_active(i))
      job_.maxima.values[maxima_[i] + (static_cast<uint32_t>(first) >> job_.maxima.shift)] = __uint_as_float(best);
  }
#endif

  /// Whether the thread's row i sees the position, and whether it may want the score there. Slow: nothing is kept in
  /// registers for them.
  __device__ __forceinline__ bool within(int i, int32_t at) const {
    const uint32_t row = opaque(static_cast<uint32_t>(own_row(i)) * 4);
    return (at >= load_shared_int(shared_address(s_.low) + row)) & (at < load_shared_int(shared_address(s_.end) + row));
  }
  __device__ __forceinline__ bool wants(int i, int32_t at, float score) const {
    const uint32_t row = opaque(static_cast<uint32_t>(own_row(i)) * 4);
    return !((at > load_shared_int(shared_address(s_.tie) + row)) & (score == columns_[i].least));
  }
  __device__ __forceinline__ uint32_t entries_of(int i) const {
    return (columns_[i].next - begin_of(i)) / (kListColumns * sizeof(uint2));
  }
  __device__ __forceinline__ uint32_t nearly_full() const { return nearly_full_of(job_); }

  /// Whether rows must be looked at now: the same in the whole warpgroup.
  __device__ __forceinline__ bool look_at_lists(bool must) {
    bool full = false;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (!is_active(i)) columns_[i].next = begin_of(i);  // took inf and NaN
      full = full || entries_of(i) > nearly_full();
    }
    return named_barrier_or(1 + group_, 128, full) || must;
  }
  __device__ __forceinline__ void tell_counts() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (!keeps()) continue;
      s_.counts[own_row(i)][own_column()] = static_cast<uint16_t>(entries_of(i));
    }
    sync();
  }
  __device__ __forceinline__ void settle_rows(const Look& look) {
    tell_counts();
    settle_lists(job_, s_, look);
    sync();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (!keeps()) continue;
      if (is_active(i)) columns_[i].least = s_.least[own_row(i)];
      columns_[i].next = begin_of(i) + s_.counts[own_row(i)][own_column()] * (kListColumns * sizeof(uint2));
    }
    sync();
  }

  /// Whether of some row equal scores are not wanted from some position on.
  __device__ __forceinline__ bool any_tie() const {
    bool any = false;
#pragma unroll
    for (int row = 0; row < kRows; ++row) any = any | (s_.tie[group_ * kRows + row] != INT32_MAX);
    return any;
  }
  __device__ __forceinline__ void answer_unscored_rows(const Item& item) {
#pragma unroll 1
    for (int row = group_ * kRows + warp(); row < (group_ + 1) * kRows; row += 4) {
      if (is_in(item.active, row)) answer_unscored(job_, item.first_row + row, job_.facts[item.first_row + row]);
    }
  }

  const PrefillJob& job_;
  PrefillShared& s_;
  const int group_;
  uint32_t codes_, queries_;  ///< operands of stage 0 and of the warpgroup's columns
  uint32_t stages_, own_;     ///< where stages are told of; the first of the thread's two keys
  Column columns_[kOwn];
  uint32_t active_ = 0;  ///< rows of the thread that are scored, a bit each
  uint32_t unit_ = 0;    ///< units done, of all items
  uint32_t turn_ = 0;
  uint32_t maxima_[kOwn];  ///< of the thread's rows: where those of position 0 and its place in a unit are
};

__device__ inline void init_prefill_barriers(PrefillShared& s) {
  for (int i = 0; i < kPrefillStages; ++i) init_barrier(&s.stages[i].full, 1), init_barrier(&s.stages[i].empty, 8);
  for (int i = 0; i < 2; ++i) init_barrier(&s.item_full[i], 1), init_barrier(&s.item_empty[i], 8 + kLoaderWarps);
  for (int i = 0; i < kPrefillGroups; ++i)
    init_barrier(&s.query_full[i], 32 * kLoaderWarps), init_barrier(&s.query_empty[i], 4);
  fence_tensor_reads();
}

constexpr size_t kPrefillAlignment = alignof(PrefillShared);
static_assert(kPrefillAlignment % kCodeAlignment == 0);
constexpr size_t kPrefillShared = kPrefillAlignment + kPrefillStages * kTileKeys * kCodePitch +
                                  kPrefillGroups * kPrefillColumns * kCodePitch + sizeof(PrefillShared);
static_assert(kPrefillShared <= 227 * 1024);

template <int kHeads, bool kPublish>
__global__ __launch_bounds__(kPrefillThreads, 1) void prefill_fp8_sm90(const __grid_constant__ PrefillJob job) {
#ifdef TOPKEY_HAS_WGMMA
  extern __shared__ uint8_t memory[];
  uint8_t* codes = memory + (kPrefillAlignment - shared_address(memory) % kPrefillAlignment) % kPrefillAlignment;
  uint8_t* queries = codes + kPrefillStages * kTileKeys * kCodePitch;
  PrefillShared& s = *reinterpret_cast<PrefillShared*>(queries + kPrefillGroups * kPrefillColumns * kCodePitch);
  if (threadIdx.x == 0) init_prefill_barriers(s);
  for (uint32_t i = threadIdx.x; i < kPrefillGroups * 4 * kMarkWords; i += kPrefillThreads)
    s.marks[i / kMarkWords][i % kMarkWords] = 0;
  __syncthreads();
  if (threadIdx.x >= kPrefillGroups * 128) {
    give_registers<40>();
    const uint32_t thread = threadIdx.x - kPrefillGroups * 128;
    if (thread < 32) {
      KeyAsker(job, s, codes, kPrefillGroups * group_rows_of(kHeads)).run();
    } else {
      bring_queries<kHeads>(job, s, queries, thread - 32);
    }
  } else {
    take_registers<232>();
    PrefillScorer<kHeads, kPublish>(job, s, codes, queries).run();
  }
#endif
}

#define TOPKEY_ENTRY(H)                                                                             \
  {reinterpret_cast<const void*>(&prefill_fp8_sm90<H, false>), static_cast<int>(kPrefillShared)}, { \
    reinterpret_cast<const void*>(&prefill_fp8_sm90<H, true>), static_cast<int>(kPrefillShared)     \
  }
const KernelEntry kEntries[] = {TOPKEY_ENTRY(32), TOPKEY_ENTRY(64), TOPKEY_ENTRY(128)};
template <bool kPublish>
auto kernel_of(int heads) {
  return heads == 32   ? prefill_fp8_sm90<32, kPublish>
         : heads == 64 ? prefill_fp8_sm90<64, kPublish>
                       : prefill_fp8_sm90<128, kPublish>;
}

/// Deals out the room of the lists to the thread blocks. A thread counts on in the lower half of an address, so no block's
/// lists may lie across a multiple of 4 GiB: the room of one block more lets those behind begin there.
void deal_lists(PrefillJob& job, const PrefillRoom& room, int64_t blocks) {
  uint2* const lists = room.lists;
  const int64_t columns = tile_rows_of(job.heads) * kListColumns;
  const int64_t fits = static_cast<int64_t>(room.list_bytes) / ((blocks + 1) * columns * int64_t{sizeof(uint2)});
  job.length = static_cast<uint32_t>(std::min<int64_t>(fits, kListLength));
  const uint64_t begin = reinterpret_cast<uint64_t>(lists), border = ((begin >> 32) + 1) << 32;
  const uint64_t bytes = static_cast<uint64_t>(columns) * job.length * sizeof(uint2);
  job.lists = lists, job.turned = reinterpret_cast<uint2*>(border);
  job.turn = static_cast<int32_t>(std::min((border - begin) / bytes, static_cast<uint64_t>(blocks)));
}

bool shape_suits(const Shape& shape) {
  return shape.format == KeyFormat::fp8 && shape.heads <= 128 && shape.rows >= kPrefillRows;
}
/// Whether blocks are published from here: their maxima fit for so many rows that no half of the SMs is idle.
bool blocks_suit(const Shape& shape, const Rows& rows, const Selection& out) {
  return (out.block_size == 8 || out.block_size == 16) && rows.start.data == nullptr && shape.keys > 0 &&
         rows_with_maxima(shape, out.block_size, kPrefillBlocks) >=
             std::min(shape.rows, 64 * int64_t{tile_rows_of(shape.heads)});
}

}  // namespace

KernelList prefill_kernels() { return {kEntries, sizeof kEntries / sizeof kEntries[0]}; }

size_t prefill_bytes(const Shape& shape) { return shape_suits(shape) ? prefill_room(shape, nullptr).bytes : 0; }

bool prefill_suits(const Shape& shape, const KeySource& keys, const Rows& rows, const Admit& admit,
                   const Selection& out, KeyBoxes* boxes) {
  // Rows of requests told by next_n alone are a decode step's, few of which share keys.
  const bool share = !keys.paged || rows.request.data != nullptr || rows.q_indptr.data != nullptr;
  return shape_suits(shape) && share && !keys.table_per_row && shape.topk > 0 && shape.topk <= kPrefillTopk &&
         shape.candidates < 0 && (shape.blocks == 0 || blocks_suit(shape, rows, out)) && !shape.whole &&
         keys.count < INT32_MAX - 256 && out.scores.data == nullptr && out.order != Order::score &&
         admit.mask.data == nullptr && admit.force_first == 0 && admit.force_last == 0 && alignment_of(keys) == 16 &&
         make_boxes(keys, boxes);
}

void prefill(const Shape& shape, const LookParams& look_at, const Query& q, const KeyBoxes& boxes,
             const Emission& emission, void* workspace, const Launch& launch) {
  const PrefillRoom room = prefill_room(shape, workspace);
  const Selection& out = emission.out;
  const int page_size = look_at.keys.page_size;
  PrefillJob job{};
  job.boxes = boxes, job.keys = look_at.keys, job.q = q, job.emission = emission;
  job.facts = room.facts, job.next = room.next, job.stats = look_at.stats;
  job.heads = static_cast<int>(q.values.shape[1]), job.query_alignment = alignment_of(q);
  job.page_shift = (page_size & (page_size - 1)) == 0 ? __builtin_ctz(static_cast<unsigned>(page_size)) : -1;
  const bool publishes = shape.blocks > 0;
  if (publishes) job.maxima = {room.maxima, maxima_step(shape, out.block_size), out.block_size == 8 ? 3 : 4};
  const int heads = padded_heads(job.heads);
  const auto kernel = publishes ? kernel_of<true>(heads) : kernel_of<false>(heads);
  const int64_t rows = publishes ? rows_with_maxima(shape, out.block_size, launch.sms()) : kGroupRows;
  for (int64_t row = 0; row < shape.rows; row += rows) {
    job.first_row = row, job.rows = static_cast<int32_t>(std::min(rows, shape.rows - row));
    job.tiles = (job.rows + tile_rows_of(job.heads) - 1) / tile_rows_of(job.heads);
    const int64_t blocks =
        std::min({static_cast<int64_t>(launch.sms()), static_cast<int64_t>(job.tiles), kPrefillBlocks});
    deal_lists(job, room, blocks);
    LookParams params = look_at;
    params.facts = room.facts, params.taken = room.next;
    look(params, Group{row, job.rows, 0, 0}, launch);
    // Units in absent pages are not scored: their blocks have no live key.
    if (publishes && job.keys.paged)
      TOPKEY_CUDA_CHECK(
          cudaMemsetAsync(room.maxima, 0xFF, static_cast<size_t>(job.rows * job.maxima.step) * 4, launch.stream()));
    kernel<<<static_cast<unsigned>(blocks), kPrefillThreads, kPrefillShared, launch.stream()>>>(job);
    TOPKEY_CUDA_LAUNCHED("prefill_fp8_sm90");
    if (publishes)
      pick_blocks(FactRows{room.facts, row, job.rows}, shape.keys, job.maxima, {out.blocks, out.block_size}, launch);
  }
}

}  // namespace topkey::cuda
