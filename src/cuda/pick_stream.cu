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
constexpr uint32_t kReads = 8;              ///< vectors of a lane that are under way
constexpr uint32_t kTies = kStreamThreads;  ///< keys equal to the last winner that are told apart, a thread each

struct StreamJob {
  Emission emission;
  const RowFact* facts;
  const float* scores;  ///< [group rows, chunk], kNotLiveScore where a key is not live; null: given
  Tensor given;         ///< f32 [R, N], unit stride, all live
  Group group;
  uint64_t* stats;
};

struct StreamShared {
  SelectRoom select;
  alignas(16) uint32_t keys[kList];  ///< scores, then of the order; before that, samples; at last the winners' indices
  uint32_t indices[kList];           ///< in the row
  alignas(16) uint32_t marks[kMostKeys / 32];  ///< a bit for each index: it wins
  uint32_t found;                              ///< more than kList: not all are there
  uint32_t ties;                               ///< of them, in place of the bins
};
static_assert(sizeof(StreamShared) <= kSharedBytes && kTies <= kBins && kSamples == 4 * kStreamThreads);

/// Numbers of the order that lie in shared memory.
struct KeyList {
  static constexpr int kBatch = 4, kEach = 8;
  const uint32_t* keys;
  __device__ uint32_t raw(uint32_t i) const { return keys[i]; }
  __device__ uint32_t key_of_raw(uint32_t raw, uint32_t) const { return raw; }
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

/// Of a row that is longer than kWhole, a score that the sample expects to be past the cut, and still few before it.
__device__ float least_kept(const StreamRow& row, uint32_t n, uint32_t k, StreamShared& s) {
  const uint32_t first = row.lead == 0 ? 0 : 1, vectors = row.last / 4 - first;
  const uint4 four = __ldg(row.vectors + first + static_cast<uint64_t>(threadIdx.x) * vectors / kStreamThreads);
  reinterpret_cast<uint4*>(s.keys)[threadIdx.x] = {row.key(four.x), row.key(four.y), row.key(four.z), row.key(four.w)};
  const float share = static_cast<float>(k) * (static_cast<float>(kSamples) / static_cast<float>(n));
  const uint32_t rank = static_cast<uint32_t>(share + 3.5f * sqrtf(share) + 4.0f);
  // Two digits of the order, cut off below, are near enough. count_digit begins with a barrier.
  count_digit<kStreamThreads>(KeyList{s.keys}, kSamples, DigitCounter{0, 21, 11, s.select.bins});
  find_digit<kStreamThreads>(rank, s.select);
  if (s.select.total < rank) return -INFINITY;
  const uint32_t high = s.select.digit, rest = rank - s.select.above;
  count_digit<kStreamThreads>(KeyList{s.keys}, kSamples, DigitCounter{high, 10, 11, s.select.bins});
  find_digit<kStreamThreads>(rest, s.select);
  const uint32_t key = high << 21 | s.select.digit << 10;
  constexpr uint32_t kMinusInfinity = 0x007FFFFFu;
  return key <= kMinusInfinity ? -INFINITY : score_of_key(key);
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

/// The kept scores as numbers of the order. Ends with a barrier.
__device__ __forceinline__ void order_kept(StreamShared& s, uint32_t count) {
  for (uint32_t i = threadIdx.x; i < count; i += kStreamThreads)
    s.keys[i] = key_of(canonical(__uint_as_float(s.keys[i])));
  __syncthreads();
}

__device__ __forceinline__ void mark(StreamShared& s, uint32_t index) {
  atomicOr(s.marks + index / 32, 1u << index % 32);
}
/// Marks the winners among the kept keys; of those equal to the last one, kTies at most, the first. Ends with a barrier.
__device__ __forceinline__ void mark_winners(StreamShared& s, uint32_t count, const Cut& cut) {
  for (uint32_t i = threadIdx.x; i < count; i += kStreamThreads) {
    const uint32_t key = s.keys[i];
    if (key > cut.key) mark(s, s.indices[i]);
    if (key == cut.key && cut.need > 0) s.select.bins[add_shared(&s.ties, 1)] = s.indices[i];
  }
  __syncthreads();
  if (cut.need == 0) return;
  const uint32_t ties = s.ties, own = threadIdx.x < ties ? s.select.bins[threadIdx.x] : UINT32_MAX;
  uint32_t before = 0;
#pragma unroll 4
  for (uint32_t i = 0; i < ties; ++i) before += s.select.bins[i] < own;
  if (threadIdx.x < ties && before < cut.need) mark(s, own);
  __syncthreads();
}
/// The marked indices of a row of n keys to s.keys, ascending. Ends with a barrier.
__device__ __forceinline__ void list_marked(StreamShared& s, uint32_t n) {
  const uint32_t each = ((n + 31) / 32 + 4 * kStreamThreads - 1) / (4 * kStreamThreads);  // fours of words
  const uint4* own = reinterpret_cast<const uint4*>(s.marks) + threadIdx.x * each;
  uint32_t count = 0, all = 0;
  for (uint32_t v = 0; v < each; ++v)
    count += __popc(own[v].x) + __popc(own[v].y) + __popc(own[v].z) + __popc(own[v].w);
  uint32_t to = block_scan(count, s.select.warps, &all);
  for (uint32_t w = 0; w < 4 * each; ++w) {
    const uint32_t word = threadIdx.x * 4 * each + w;
    for (uint32_t rest = s.marks[word]; rest != 0; rest &= rest - 1)
      s.keys[to++] = word * 32 + __ffs(static_cast<int>(rest)) - 1;
  }
  __syncthreads();
}
static_assert(kMostKeys / 32 % (4 * kStreamThreads) == 0);

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
__device__ __forceinline__ Cut answer_long(const StreamJob& job, int64_t r, const StreamRow& from, const float* scores,
                                           StreamShared& s, const RowWriter& writer) {
  const RowFact& f = job.facts[r];
  const uint32_t n = f.n, topk = f.topk;
  if (threadIdx.x == 0) s.found = s.ties = 0;
  for (uint32_t v = threadIdx.x; v < kMostKeys / 128; v += kStreamThreads)
    if (v * 128 < n + 128 * 4 * kStreamThreads) reinterpret_cast<uint4*>(s.marks)[v] = {0, 0, 0, 0};
  keep(from, least_kept(from, n, topk, s), s);
  const uint32_t found = s.found;
  if (found > kList || found < topk) return answer_from_memory(job, r, scores, s.select);
  order_kept(s, found);
  const Cut cut = find_cut<kStreamThreads>(KeyList{s.keys}, found, topk, s.select);
  if (cut.need > 0 && s.select.equal > kTies) return answer_from_memory(job, r, scores, s.select);
  mark_winners(s, found, cut);
  list_marked(s, n);
  const bool scored = job.emission.out.scores.data != nullptr;
  for (uint32_t j = threadIdx.x; j < cut.count; j += kStreamThreads) {
    const uint32_t i = s.keys[j];
    writer.put(j, int64_t{f.low} + i, scored ? canonical(scores[i]) : 0.0f);
  }
  __syncthreads();
  return cut;
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
  StreamJob job{p.emission, p.room.facts, p.room.scores, p.scores, group, p.emission.stats};
  pick_stream<<<launch.blocks(group.count, 2), kStreamThreads, sizeof(StreamShared), launch.stream()>>>(job);
  TOPKEY_CUDA_LAUNCHED("pick_stream");
  return true;
}

}  // namespace topkey::cuda
