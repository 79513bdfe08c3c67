// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What the parts of the prefill kernel share. A thread block takes tiles of a few query rows; two warpgroups multiply and
// keep, each for its half of the rows, the same stages of 64 keys; a third brings keys and queries. A tile is worked on
// as one item or more: rows of one table row, whose windows lie together.
#pragma once
#include "cuda/device/block_maxima.cuh"
#include "cuda/device/emit.cuh"
#include "cuda/device/facts.cuh"
#include "cuda/device/key_boxes.cuh"
#include "cuda/device/keys.cuh"
#include "cuda/device/order.cuh"
#include "cuda/device/tiles_sm90.cuh"

namespace topkey::cuda {

constexpr int kPrefillGroups = 2;  ///< warpgroups that multiply
constexpr int kPrefillThreads = 128 * (kPrefillGroups + 1);
constexpr int kPrefillColumns = 256;              ///< (row, head) columns of a warpgroup's product
constexpr int kLoaderWarps = 3;                   ///< bring queries; a fourth warp beside them the keys
constexpr int kItemBarrier = 1 + kPrefillGroups;  ///< of the two by which these learn of items, behind the groups' own
constexpr int kListColumns = 32;                  ///< threads that score one row, each with a column of its list
constexpr int kPrefillStages = 8;                 ///< of 64 keys, under way
constexpr int kSampleUnits = 32;                  ///< of the sample that gives a row its threshold: 2,048 keys
constexpr int kShortUnits = 128;                  ///< rows of at most so many take half of it,
constexpr uint32_t kRoomyLength = 160;            ///< where columns have room for what it lets through
constexpr uint32_t kCheckUnits = 8;  ///< after so many the lists are looked at: two entries of a column a unit at most
constexpr int kMaximumFours = 2;     ///< of eight fours of a thread's columns: 2 gave 2 % (2,048 x 32,768), 4 no more
constexpr int kPrefillBins = 512;
constexpr int kPrefillCandidates = 128;
constexpr int kMarkWords = 1024;  ///< winners are marked in a map of so many words at a time

/// Rows of a warpgroup.
__host__ __device__ constexpr int group_rows_of(int heads) { return kPrefillColumns / heads; }

/// Values are as they should be here, before what follows.
template <int kCount>
__device__ __forceinline__ void hold(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i]));
}

struct PrefillJob {
  KeyBoxes boxes;  ///< first: it wants the alignment
  KeySource keys;
  Query q;
  Emission emission;
  const RowFact* facts;  ///< [rows]
  uint32_t* next;        ///< tiles that have been taken; 0 at first
  uint2* lists;          ///< [turn, tile rows, length, kListColumns] score bits and position
  uint2* turned;         ///< the same of thread blocks from `turn` on
  uint64_t* stats;
  int64_t first_row;
  int32_t rows, tiles;
  int heads, query_alignment;
  int32_t turn;
  int page_shift;      ///< log2 of the page size; -1: not a power of two
  uint32_t length;     ///< most entries of a column
  BlockMaxima maxima;  ///< of blocks of 8 or 16 keys that begin at position 0
};

/// Rank in a sample of m of n keys that, all but surely, `want` of the n reach.
__device__ __forceinline__ float rank_in_sample(float want, float m, float n) {
  const float share = fminf(want / n, 1.0f), mean = m * share;
  return ceilf(mean + 5.0f * sqrtf(mean * (1.0f - share)) + 4.0f);
}

struct Item {
  int32_t first_row;  ///< of the tile, in the group; < 0: there are no more
  uint32_t active;    ///< the tile's rows that are answered here, a bit each
  uint32_t failed;    ///< those of them that found too few
  bool exact;         ///< take no threshold from a sample
  uint32_t units, stride;
  uint32_t sample;      ///< units of the sample
  uint32_t halfway;     ///< units after which lists are thinned by a better threshold; 0: never
  int32_t low;          ///< first key of unit 0, a multiple of 64
  int32_t inner_low;    ///< units that all scored rows see whole begin from here on
  uint32_t inner_span;  ///< to so much further
  int32_t table_row;
};

constexpr int kMaxPrefillRows = kPrefillGroups * 8;

/// Entries of a column that the next units could overfill.
__device__ __forceinline__ uint32_t nearly_full_of(const PrefillJob& job) { return job.length - 2 * kCheckUnits; }
/// Short rows are kept whole.
__device__ __forceinline__ bool samples(const Item& item) { return !item.exact && item.units > 2 * kSampleUnits; }
/// Item::halfway. Where lists would fill up under the sample's threshold, a better one comes from half of the keys.
__device__ __forceinline__ uint32_t halfway_of(const PrefillJob& job, const Item& item) {
  if (!samples(item) || item.units <= kShortUnits) return 0;
  const float want = static_cast<float>(job.emission.topk), seen = kSampleUnits * kTileKeys;
  const float all = static_cast<float>(item.units) * kTileKeys, rank = rank_in_sample(want, seen, all);
  // Of a column: what is expected, two deviations of the threshold's, three of the column's.
  const float mean = rank * all / (seen * kListColumns);
  const float most = mean * (1.0f + 2.0f * rsqrtf(rank)) + 3.0f * sqrtf(mean);
  return most > static_cast<float>(nearly_full_of(job)) ? item.units / 2 / kCheckUnits * kCheckUnits : 0;
}

/// A warp's own, while it selects.
struct SelectScratch {
  union {
    alignas(kPrefillBins * 4) uint32_t bins[kPrefillBins];  ///< so that a place in it is an address by bits
    uint16_t found[32 * 32];                                ///< marks, as they are handed out
  };
  uint64_t candidates[kPrefillCandidates];
};

/// What lies beside a stage's codes.
struct KeyStage {
  alignas(16) float scale[kTileKeys];
  uint64_t full, empty;
  int32_t first;  ///< position of the first key; kUnreadable
};
constexpr int32_t kUnreadable = INT32_MIN;

struct PrefillShared {
  KeyStage stages[kPrefillStages];
  uint64_t item_full[2], item_empty[2];
  uint64_t query_full[kPrefillGroups], query_empty[kPrefillGroups];
  Item items[2];
  int32_t low[kMaxPrefillRows], end[kMaxPrefillRows];  ///< windows
  bool scored[kMaxPrefillRows];                        ///< here and now
  bool thinned[kMaxPrefillRows];                       ///< since a list was full
  float least[kMaxPrefillRows];                        ///< scores below cannot win; inf for a row that is not scored
  float high[kMaxPrefillRows];                         ///< about the best score
  uint32_t dropped[kMaxPrefillRows];                   ///< best key that thinning dropped
  uint16_t counts[kMaxPrefillRows][kListColumns];
  alignas(16) float weights[kPrefillGroups][kPrefillColumns];  ///< halved; see weight_at
  int32_t tie[kMaxPrefillRows];  ///< of scores that are just `least` none behind it can win
  SelectScratch scratch[kPrefillGroups * 4];
  alignas(16) uint32_t marks[kPrefillGroups * 4][kMarkWords];  ///< empty but for while they are used
};

/// Column n of a product is one head of one row, so that a lane (c = lane % 4 holds columns 8j + 2c + {0, 1}) has whole
/// rows: one of 64 heads, two of 32, half a one of 128.
template <int kHeads>
__device__ __forceinline__ int row_of_column(int n) {
  const int c = n % 8 / 2;
  return kHeads == 32 ? c + 4 * (n / 128) : kHeads == 64 ? c : c / 2;
}
template <int kHeads>
__device__ __forceinline__ int head_of_column(int n) {
  const int own = n / 8 * 2 + n % 2;
  if (kHeads == 128) return own / 4 * 8 + 4 * (n % 4 / 2) + own % 4;
  return own % kHeads;
}
/// Where a column's weight lies: the eight weights of a lane's two next groups of columns side by side.
__device__ __forceinline__ int weight_at(int n) { return n / 16 * 16 + n % 8 / 2 * 4 + n / 8 % 2 * 2 + n % 2; }

}  // namespace topkey::cuda
