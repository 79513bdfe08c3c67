// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `select`, and the second half of `search`, where there are many long rows: one thread block a row reads its scores
// once and keeps those that a sample says may win; of these it picks. Winners are marked in a bit for each position, so
// that they leave in the order of their positions. A row of which too few or too many were kept is picked from its scores
// in memory (device/select.cuh): exact on any data. Two blocks an SM: while one picks, the other one reads.
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "cuda/check.h"
#include "cuda/device/emit.cuh"
#include "cuda/device/entries.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/quantile.cuh"
#include "cuda/device/select.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/search_parts.h"
#include "cuda/stages.h"
#include "cuda/tuning.h"

namespace topkey::cuda {
namespace {

constexpr int kStreamThreads = 512;
constexpr uint32_t kList = 7424;     ///< keys that are kept at most
constexpr uint32_t kWhole = 4096;    ///< so short a row is kept whole
constexpr uint32_t kSamples = 2048;  ///< of a row, four neighbours a thread
constexpr uint32_t kMostKeys = 1 << 18;
constexpr uint32_t kReads = 8;  ///< vectors of a lane that are under way
constexpr uint32_t kStreamBins = kStreamThreads;
constexpr uint32_t kCandidates = kStreamThreads;  ///< keys about the last winner that are ranked, a thread each

struct StreamJob {
  Emission emission;
  const RowFact* facts;
  const float* scores;  ///< [group rows, chunk], kNotLiveScore where a key is not live; null: given
  Tensor given;         ///< f32 [R, N], unit stride, all live
  Group group;
  bool plain;  ///< the answer is positions alone
  uint64_t* stats;
};

struct StreamShared {
  SelectRoom select;                 ///< its bins: those, candidates, then winners before each 64 indices, in turns
  alignas(16) uint32_t keys[kList];  ///< scores as they are; before that, samples
  uint32_t indices[kList];           ///< in the row
  alignas(16) uint2 marks[kMostKeys / 64];  ///< a bit for each index: it wins
  float2 moments[kStreamThreads / 32];
  uint32_t found;  ///< more than kList: not all are there
  uint32_t number;
  uint64_t last;      ///< of the candidates
  uint32_t lost_key;  ///< of the best candidate that does not win
};
static_assert(sizeof(StreamShared) <= kSharedBytes && kSamples == 4 * kStreamThreads);
static_assert(kStreamBins + 2 * kCandidates <= kBins && kMostKeys / 64 * sizeof(uint16_t) <= kBins * sizeof(uint32_t));

/// Numbers of the order that lie in shared memory.
struct KeyList {
  static constexpr int kBatch = 4, kEach = 8;
  const uint32_t* keys;
  __device__ uint32_t raw(uint32_t i) const { return keys[i]; }
  __device__ uint32_t key_of_raw(uint32_t raw, uint32_t) const { return raw; }
};
__device__ __forceinline__ uint32_t key_of_kept(uint32_t raw) { return key_of(canonical(__uint_as_float(raw))); }
/// Kept scores.
struct ScoreList {
  static constexpr int kBatch = 4;
  const uint32_t* scores;
  __device__ uint32_t raw(uint32_t i) const { return scores[i]; }
  __device__ uint32_t key_of_raw(uint32_t raw, uint32_t) const { return key_of_kept(raw); }
};
/// Numbers in equal steps from `low` on; a better score is in no lower bin. The first and the last bin are open.
struct StreamBins {
  float scale, offset;
  __device__ StreamBins(float low, float bins_a_unit) : scale(bins_a_unit), offset(-low * bins_a_unit) {}
  __device__ __forceinline__ uint32_t of(uint32_t raw) const {
    const float at = __fmaf_rn(__uint_as_float(raw), scale, offset);
    return static_cast<uint32_t>(fminf(fmaxf(at, 0.0f), kStreamBins - 1.0f));  // NaN: 0
  }
};

/// A row as vectors of 4 scores at aligned addresses; before word `lead` and from word `last` on there are none.
struct StreamRow {
  const uint4* vectors;
  uint32_t lead, last;
  bool given;

  __device__ StreamRow(const float* scores, uint32_t n, bool is_given) : given(is_given) {
    lead = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(scores) / 4 % 4), last = lead + n;
    vectors = reinterpret_cast<const uint4*>(scores - lead);
  }
  __device__ uint32_t key(uint32_t raw) const {
    return !given && raw == kNotLiveScore ? kNotLive : key_of(canonical(__uint_as_float(raw)));
  }
};

/// A vector that the row's edge cuts: what is no score comes as kNotLiveScore.
__device__ __noinline__ uint4 read_edge(StreamRow row, uint32_t v) {
  uint32_t each[4];
#pragma unroll
  for (uint32_t e = 0; e < 4; ++e) {
    const uint32_t word = 4 * v + e;
    const bool inside = word >= row.lead && word < row.last;
    each[e] = inside ? reinterpret_cast<const uint32_t*>(row.vectors)[word] : kNotLiveScore;
  }
  return {each[0], each[1], each[2], each[3]};
}
__device__ __forceinline__ uint4 read(const StreamRow& row, uint32_t v) {
  return 4 * v >= row.lead && 4 * v + 4 <= row.last ? __ldcs(row.vectors + v) : read_edge(row, v);
}

/// What a row's sample says: a score that is expected to be past the cut, and still few before it; and the deviation of
/// scores, 0 where they are not as normal ones.
struct Guess {
  float least, deviation;
};
/// By two digits of the order, cut off below: of any numbers.
__device__ __noinline__ float least_by_digits(StreamShared& s, uint32_t rank) {
  for (uint32_t i = threadIdx.x; i < kSamples; i += kStreamThreads) s.indices[i] = key_of_kept(s.keys[i]);
  count_digit<kStreamThreads>(KeyList{s.indices}, kSamples, DigitCounter{0, 21, 11, s.select.bins});
  find_digit<kStreamThreads>(rank, s.select);
  if (s.select.total < rank) return -INFINITY;
  const uint32_t high = s.select.digit, rest = rank - s.select.above;
  count_digit<kStreamThreads>(KeyList{s.indices}, kSamples, DigitCounter{high, 10, 11, s.select.bins});
  find_digit<kStreamThreads>(rest, s.select);
  const uint32_t key = high << 21 | s.select.digit << 10;
  constexpr uint32_t kMinusInfinity = 0x007FFFFFu;
  return key <= kMinusInfinity ? -INFINITY : score_of_key(key);
}
/// The bin that holds the k-th best: select.digit, above (keys in better bins) and equal (keys in it). 0 in equal: none does.
/// Barriers before, inside and behind.
__device__ __forceinline__ void find_stream_bin(StreamShared& s, uint32_t k) {
  __syncthreads();
  if (threadIdx.x == 0) s.select.equal = 0;
  const uint32_t bin = kStreamBins - 1 - threadIdx.x, inside = s.select.bins[bin];
  uint32_t all = 0;
  const uint32_t above = block_scan(inside, s.select.warps, &all);
  if (above < k && k <= above + inside) s.select.digit = bin, s.select.above = above, s.select.equal = inside;
  __syncthreads();
}
/// Of a row that is longer than kWhole. The bins are empty before, and afterwards.
__device__ __forceinline__ Guess guess(const StreamRow& row, uint32_t n, uint32_t k, StreamShared& s) {
  const uint32_t first = row.lead == 0 ? 0 : 1, vectors = row.last / 4 - first, lane = threadIdx.x % 32;
  const uint4 four = __ldg(row.vectors + first + static_cast<uint64_t>(threadIdx.x) * vectors / kStreamThreads);
  const float share = static_cast<float>(k) * (static_cast<float>(kSamples) / static_cast<float>(n));
  const uint32_t rank = static_cast<uint32_t>(share + 3.5f * sqrtf(share) + 4.0f);
  const float quantile = upper_quantile(fminf(static_cast<float>(rank) / kSamples, 0.999f));
  reinterpret_cast<uint4*>(s.keys)[threadIdx.x] = four;
  const uint32_t each[4] = {four.x, four.y, four.z, four.w};
  float2 m{0.0f, 0.0f};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float x = fabsf(__uint_as_float(each[e])) < 1e15f ? __uint_as_float(each[e]) : 0.0f;
    m.x += x, m.y += x * x;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    m.x += __shfl_xor_sync(~0u, m.x, step), m.y += __shfl_xor_sync(~0u, m.y, step);
  if (lane == 0) s.moments[threadIdx.x / 32] = m;
  __syncthreads();
  m = s.moments[lane % (kStreamThreads / 32)];
#pragma unroll
  for (int step = kStreamThreads / 64; step > 0; step /= 2)
    m.x += __shfl_xor_sync(~0u, m.x, step), m.y += __shfl_xor_sync(~0u, m.y, step);
  const float mean = m.x / kSamples, variance = m.y / kSamples - mean * mean;
  const float deviation = sqrtf(fmaxf(variance, 0.0f));
  bool normal = deviation > fabsf(mean) * 1e-4f && deviation > 1e-30f;
  if (normal) {
    const float low = mean + (quantile - 1.0f) * deviation, a_unit = kStreamBins / 2.0f / deviation;
    const StreamBins bins(low, a_unit);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t bin = bins.of(each[e]);
      if (bin != 0) atomicAdd(s.select.bins + bin, 1u);  // most are in bin 0, and would wait for each other
    }
    find_stream_bin(s, rank);
    const uint32_t bin = s.select.digit, reached = s.select.above + s.select.equal;
    s.select.bins[threadIdx.x] = 0;
    normal = s.select.equal != 0 && bin != kStreamBins - 1 && reached <= rank + rank / 4 + 8;
    if (normal) return {low + static_cast<float>(bin) / a_unit, deviation};
  }
  const float least = least_by_digits(s, rank);
  __syncthreads();
  s.select.bins[threadIdx.x] = 0;
  return {least, 0.0f};
}

/// Keeps the row's scores from `least` on, as they are, in any order; no NaN. Ends with a barrier.
__device__ __forceinline__ void keep(const StreamRow& row, float least, StreamShared& s) {
  constexpr uint32_t kTurn = kReads * 32;  // vectors of a warp
  const uint32_t lane = threadIdx.x % 32, vectors = (row.last + 3) / 4;
  const uint32_t keys = static_cast<uint32_t>(__cvta_generic_to_shared(s.keys));
#pragma unroll 1
  for (uint32_t base = threadIdx.x / 32 * kTurn; base < vectors; base += kStreamThreads / 32 * kTurn) {
    uint4 four[kReads];
    if (4 * base >= row.lead && 4 * (base + kTurn) <= row.last) {
#pragma unroll
      for (uint32_t e = 0; e < kReads; ++e) four[e] = __ldcs(row.vectors + base + e * 32 + lane);
    } else {
#pragma unroll
      for (uint32_t e = 0; e < kReads; ++e) {
        const uint32_t v = base + e * 32 + lane;
        four[e] = v < vectors ? read(row, v) : uint4{kNotLiveScore, kNotLiveScore, kNotLiveScore, kNotLiveScore};
      }
    }
    uint32_t own = 0;
#pragma unroll
    for (uint32_t e = 0; e < kReads; ++e) {
      own += (__uint_as_float(four[e].x) >= least) + (__uint_as_float(four[e].y) >= least) +
             (__uint_as_float(four[e].z) >= least) + (__uint_as_float(four[e].w) >= least);
    }
    const uint32_t up = sum_lanes_up(own);
    uint32_t at = 0;
    if (lane == 31) {
      at = add_shared(&s.found, up);
      if (at + up > kList) at = UINT32_MAX;
    }
    at = __shfl_sync(~0u, at, 31);
    if (at == UINT32_MAX) continue;  // found says so
    uint32_t to = keys + 4 * (at + up - own);
    const uint32_t first = (base + lane) * 4 - row.lead;
#pragma unroll
    for (uint32_t e = 0; e < kReads; ++e) {
      constexpr int kGap = static_cast<int>(kList) * 4;
      store_over<kGap>(to, four[e].x, least, first + e * 128);
      store_over<kGap>(to, four[e].y, least, first + e * 128 + 1);
      store_over<kGap>(to, four[e].z, least, first + e * 128 + 2);
      store_over<kGap>(to, four[e].w, least, first + e * 128 + 3);
    }
  }
  __syncthreads();
}
static_assert(offsetof(StreamShared, indices) - offsetof(StreamShared, keys) == kList * 4);

/// The row's last winner: a kept key wins if its number is larger, or the same and its index under `before`.
struct Last {
  uint32_t key, before;
  bool tied;  ///< the same number did not win elsewhere
};
/// Ranks those kept keys of which is(raw) is true: `count` of them, of which `need` win.
template <class Is>
__device__ __forceinline__ Last rank_kept(StreamShared& s, uint32_t found, uint32_t count, uint32_t need,
                                          const Is& is) {
  auto* candidates = reinterpret_cast<uint64_t*>(s.select.bins + kStreamBins);
  for (uint32_t i = threadIdx.x; i < found; i += kStreamThreads) {
    const uint32_t raw = s.keys[i];
    if (is(raw)) candidates[add_shared(&s.number, 1)] = static_cast<uint64_t>(key_of_kept(raw)) << 32 | ~s.indices[i];
  }
  __syncthreads();
  if (threadIdx.x < count) {
    const uint64_t mine = candidates[threadIdx.x];
    uint32_t better = 0;
#pragma unroll 4
    for (uint32_t i = 0; i < count; ++i) better += candidates[i] > mine;
    if (better == need - 1) s.last = mine;
    if (better == need) s.lost_key = static_cast<uint32_t>(mine >> 32);
  }
  __syncthreads();
  const auto key = static_cast<uint32_t>(s.last >> 32);
  return {key, ~static_cast<uint32_t>(s.last) + 1, count > need && s.lost_key == key};
}
/// Of more than k kept keys. False: too many are about the last winner.
__device__ __forceinline__ bool find_last(StreamShared& s, uint32_t found, uint32_t k, const Guess& guess, Last* last) {
  if (guess.deviation > 0.0f) {
    const StreamBins bins(guess.least, kStreamBins / guess.deviation);
    for (uint32_t i = threadIdx.x; i < found; i += kStreamThreads) atomicAdd(s.select.bins + bins.of(s.keys[i]), 1u);
    find_stream_bin(s, k);
    const uint32_t bin = s.select.digit, count = s.select.equal;
    if (count <= kCandidates) {
      *last = rank_kept(s, found, count, k - s.select.above, [&](uint32_t raw) { return bins.of(raw) == bin; });
      return true;
    }
  }
  const Cut cut = find_cut<kStreamThreads>(ScoreList{s.keys}, found, k, s.select);
  *last = {cut.key, 0, false};
  if (cut.need == 0) return true;
  const uint32_t count = s.select.equal;
  if (count > kCandidates) return false;
  *last = rank_kept(s, found, count, cut.need, [&](uint32_t raw) { return key_of_kept(raw) == cut.key; });
  return true;
}

/// emit(j, i) for each winner: entry i of what is kept, winner number j by position.
template <class Emit>
__device__ __forceinline__ void hand_out_kept(StreamShared& s, uint32_t n, uint32_t found, const Last& last,
                                              const Emit& emit) {
  uint32_t* words = reinterpret_cast<uint32_t*>(s.marks);
  uint32_t wins = 0;  // a bit for each of this thread's entries
  uint32_t e = 0;
  for (uint32_t i = threadIdx.x; i < found; i += kStreamThreads, ++e) {
    const uint32_t key = key_of_kept(s.keys[i]), index = s.indices[i];
    if (key < last.key || (key == last.key && index >= last.before)) continue;
    atomicOr(words + index / 32, 1u << index % 32);
    wins |= 1u << e;
  }
  __syncthreads();
  auto* before = reinterpret_cast<uint16_t*>(s.select.bins);
  const uint32_t pairs = (n + 63) / 64, each = (pairs + kStreamThreads - 1) / kStreamThreads,
                 first = threadIdx.x * each;
  uint32_t own = 0, all = 0;
  for (uint32_t p = first; p < first + each; ++p) own += __popc(s.marks[p].x) + __popc(s.marks[p].y);
  uint32_t sum = block_scan(own, s.select.warps, &all);
  for (uint32_t p = first; p < first + each; ++p) {
    before[p] = static_cast<uint16_t>(sum);
    sum += __popc(s.marks[p].x) + __popc(s.marks[p].y);
  }
  __syncthreads();
  for (; wins != 0; wins &= wins - 1) {
    const uint32_t i = threadIdx.x + (__ffs(static_cast<int>(wins)) - 1) * kStreamThreads, index = s.indices[i];
    const uint2 pair = s.marks[index / 64];
    const uint32_t lower = (1u << index % 32) - 1;
    const uint32_t inside = (index & 32) != 0 ? __popc(pair.x) + __popc(pair.y & lower) : __popc(pair.x & lower);
    emit(before[index / 64] + inside, i);
  }
  __syncthreads();
}
static_assert((kList + kStreamThreads - 1) / kStreamThreads <= 32 && kList < 65536);
static_assert(kMostKeys / 64 % kStreamThreads == 0);

/// From the scores in memory.
__device__ __noinline__ Cut answer_from_memory(const StreamJob& job, int64_t r, const float* scores,
                                               SelectRoom& select) {
  const RowFact& f = job.facts[r];
  const RowWriter writer(job.emission, job.group.first_row + r, f.request, f.start);
  const KeptScores kept{{&f, nullptr, 1, 0, 0, 0}, scores, nullptr, nullptr, 0, job.scores == nullptr};
  const Entries<KeptScores> entries{kept};
  const Cut cut = find_cut<kStreamThreads>(entries, f.n, f.topk, select);
  hand_out<kStreamThreads>(entries, f.n, cut, select,
                           [&](uint32_t j, uint32_t i) { writer.put(j, kept.position(i), kept.score(i)); });
  return cut;
}

__device__ __noinline__ void count_nans(const StreamJob& job, StreamRow row, uint32_t n) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(row.vectors) + row.lead;
  uint32_t nans = 0;
  for (uint32_t i = threadIdx.x; i < n; i += kStreamThreads) nans += row.key(words[i]) == kNanKey;
  count(job.stats, kNanScores, nans);
}

/// A short row: all its keys in shared memory.
__device__ __forceinline__ Cut answer_short(const StreamRow& from, const RowFact& f, StreamShared& s,
                                            const RowWriter& writer) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(from.vectors) + from.lead;
  for (uint32_t i = threadIdx.x; i < f.n; i += kStreamThreads) s.keys[i] = from.key(words[i]);
  const KeyList keys{s.keys};
  const Cut cut = find_cut<kStreamThreads>(keys, f.n, f.topk, s.select);
  hand_out<kStreamThreads>(keys, f.n, cut, s.select,
                           [&](uint32_t j, uint32_t i) { writer.put(j, int64_t{f.low} + i, score_of_key(s.keys[i])); });
  return cut;
}
/// The first bytes of the row that this block takes next, towards L2.
__device__ __forceinline__ void ask_ahead(const StreamJob& job, int64_t r) {
  if (r >= job.group.count) return;
  const float* next =
      job.scores == nullptr ? element<float>(job.given, job.group.first_row + r) : job.scores + r * job.group.chunk;
  const int64_t columns = job.scores == nullptr ? job.given.shape[1] : job.group.chunk;
  const uint32_t bytes = static_cast<uint32_t>(columns < kStreamAhead / 4 ? columns * 4 : kStreamAhead);
  for (uint32_t at = threadIdx.x * 128; at < bytes; at += kStreamThreads * 128)
    prefetch_to_l2(reinterpret_cast<const char*>(next) + at);
}
__device__ __forceinline__ Cut answer_long(const StreamJob& job, int64_t r, const StreamRow& from, const float* scores,
                                           StreamShared& s, const RowWriter& writer) {
  const RowFact& f = job.facts[r];
  const uint32_t n = f.n, topk = f.topk;
  if (threadIdx.x == 0) s.found = s.number = 0;
  s.select.bins[threadIdx.x] = 0;
  for (uint32_t v = threadIdx.x; v < (n + 64 * kStreamThreads) / 64 && v < kMostKeys / 64; v += kStreamThreads)
    s.marks[v] = {0, 0};
  const Guess about = guess(from, n, topk, s);
  keep(from, about.least, s);
  ask_ahead(job, r + gridDim.x);
  const uint32_t found = s.found;
  Last last;
  if (found > kList || found < topk || !find_last(s, found, topk, about, &last))
    return answer_from_memory(job, r, scores, s.select);
  if (job.plain) {
    int32_t* out = element<int32_t>(job.emission.out.indices, writer.row);
    const int32_t first = f.low - static_cast<int32_t>(f.start);
    hand_out_kept(s, n, found, last, [&](uint32_t j, uint32_t i) { s.keys[j] = s.indices[i]; });
    for (uint32_t j = threadIdx.x; j < topk; j += kStreamThreads) out[j] = first + static_cast<int32_t>(s.keys[j]);
  } else {
    hand_out_kept(s, n, found, last, [&](uint32_t j, uint32_t i) {
      writer.put(j, int64_t{f.low} + s.indices[i], canonical(__uint_as_float(s.keys[i])));
    });
  }
  return {last.key, 0, topk, f.live, last.tied};
}

__global__ __launch_bounds__(kStreamThreads, 2) void pick_stream(const __grid_constant__ StreamJob job) {
  extern __shared__ uint4 memory[];
  StreamShared& s = *reinterpret_cast<StreamShared*>(memory);
  for (int64_t r = blockIdx.x; r < job.group.count; r += gridDim.x) {
    const RowFact& f = job.facts[r];
    const int64_t row = job.group.first_row + r;
    const RowWriter writer(job.emission, row, f.request, f.start);
    const float* scores =
        job.scores == nullptr ? element<float>(job.given, row, f.low) : job.scores + r * job.group.chunk;
    const StreamRow from(scores, f.n, job.scores == nullptr);
    if (job.stats != nullptr && f.scored) count_nans(job, from, f.n);
    Cut cut{};
    if (f.n > 0 && f.topk > 0)
      cut = f.n <= kWhole ? answer_short(from, f, s, writer) : answer_long(job, r, from, scores, s, writer);
    writer.fill(cut.count);
    if (threadIdx.x == 0 && f.scored) count(job.stats, kTiedCuts, cut.tied);
    __syncthreads();
  }
}

const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&pick_stream), sizeof(StreamShared)}};

/// Whether so few keys are kept of a row, nearly always, that they fit.
bool fits(int64_t keys, int64_t topk) {
  if (keys <= int64_t{kWhole}) return true;
  const double share = static_cast<double>(topk) * kSamples / static_cast<double>(keys);
  const double rank = share + 3.5 * std::sqrt(share) + 4;
  return (rank + 4 * std::sqrt(rank)) * static_cast<double>(keys) / kSamples <= kList;
}

}  // namespace

KernelList pick_stream_kernels() { return {kEntries, 1}; }

bool stream_suits(int64_t rows, int64_t keys, int64_t topk) {
  return rows >= kStreamRows && keys >= kStreamKeys && keys < int64_t{kMostKeys} - 4 && fits(keys, topk);
}

bool pick_in_stream(const PickParams& p, const Group& group, const Launch& launch) {
  const bool kept = p.room.scores != nullptr;
  const bool flat = !kept && p.scores.dtype == DType::f32 && p.scores.stride[1] == 1 && p.mask.data == nullptr;
  const bool simple = p.has_entries && !p.has_blocks && p.room.ids == nullptr && !present(p.admit.candidates) &&
                      p.admit.force_first == 0 && p.admit.force_last == 0 && p.emission.out.order != Order::score;
  const int64_t keys = kept ? group.chunk : p.keys;
  const bool whole = group.first_key == 0 && (!kept || group.chunk >= p.keys);
  if (!simple || !(kept || flat) || !whole || !stream_suits(group.count, keys, p.emission.topk)) return false;
  const Selection& out = p.emission.out;
  const bool plain = out.slots.data == nullptr && out.scores.data == nullptr && out.indices.data != nullptr &&
                     out.index_base.data == nullptr && out.indices.stride[1] == 1 && p.emission.shard.world_size <= 1;
  StreamJob job{p.emission, p.room.facts, p.room.scores, p.scores, group, plain, p.emission.stats};
  pick_stream<<<launch.blocks(group.count, 2), kStreamThreads, sizeof(StreamShared), launch.stream()>>>(job);
  TOPKEY_CUDA_LAUNCHED("pick_stream");
  return true;
}

}  // namespace topkey::cuda
