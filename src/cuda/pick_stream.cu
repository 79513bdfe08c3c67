// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `select`, and the second half of `search`, where there are many long rows: one thread block a row reads its scores
// once and keeps those that a sample says may win; of these it picks. What is kept lies in groups of neighbours, so that
// winners leave in the order of their positions. A row of which too few or too many were kept is picked from its scores
// in memory (device/select.cuh): exact on any data.
#include <algorithm>
#include <cmath>

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

constexpr uint32_t kList = 8192;     ///< keys that are kept at most
constexpr uint32_t kWhole = 4096;    ///< so short a row is kept whole
constexpr uint32_t kSamples = 2048;  ///< of a row
constexpr uint32_t kMostKeys = 1 << 18;
constexpr uint32_t kGroup = 128;  ///< neighbours that one read of a warp brings
constexpr uint32_t kReads = 4;    ///< of a warp that are under way

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
  uint32_t keys[kList];     ///< scores, then of the order; before that, samples
  uint32_t indices[kList];  ///< in the row
  uint32_t
      groups[kMostKeys / kGroup + kReads];  ///< where the kept keys of each begin, times 256, and how many there are
  uint32_t found;                           ///< more than kList: not all are there
};

/// Numbers of the order that lie in shared memory.
struct KeyList {
  static constexpr int kBatch = 4;
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

/// Bits of scores that are kept, the first lowest: the sign of a difference to the next number below the least is shifted
/// in. A NaN is not kept: the NaN that this device's arithmetic makes has no sign.
__device__ __forceinline__ uint32_t mark(const uint4 (&four)[kReads], float below) {
  uint32_t marks = 0;
#pragma unroll
  for (int e = kReads - 1; e >= 0; --e) {
    const uint32_t each[4] = {four[e].x, four[e].y, four[e].z, four[e].w};
#pragma unroll
    for (int i = 3; i >= 0; --i) marks = __funnelshift_l(__float_as_uint(below - __uint_as_float(each[i])), marks, 1);
  }
  return marks;
}
__device__ __forceinline__ float next_below(float x) {
  const uint32_t u = __float_as_uint(x);
  if (x == 0.0f) return __uint_as_float(0x80000001u);
  return x == -INFINITY ? x : __uint_as_float(x > 0.0f ? u - 1 : u + 1);
}
/// Of four where every live one is kept.
__device__ __noinline__ uint32_t mark_live(StreamRow row, uint4 four, uint32_t v) {
  const uint32_t each[4] = {four.x, four.y, four.z, four.w};
  uint32_t marks = 0;
  for (uint32_t e = 0; e < 4; ++e) {
    const bool inside = 4 * v + e >= row.lead && 4 * v + e < row.last;
    marks |= (inside && row.key(each[e]) != kNotLive ? 1u : 0u) << e;
  }
  return marks;
}

/// Which score of the row the sample expects to be past the cut, and still few before it. NaN: every live key is kept.
__device__ float least_kept(const StreamRow& row, uint32_t n, uint32_t k, StreamShared& s) {
  if (n <= kWhole) return __uint_as_float(kCanonicalNan);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(row.vectors) + row.lead;
#pragma unroll
  for (uint32_t i = threadIdx.x; i < kSamples; i += kSelectThreads)
    s.keys[i] = row.key(__ldg(words + static_cast<uint64_t>(i) * n / kSamples));
  __syncthreads();
  const float share = static_cast<float>(k) * (static_cast<float>(kSamples) / static_cast<float>(n));
  const uint32_t rank = static_cast<uint32_t>(share + 3.5f * sqrtf(share) + 4.0f);
  const Cut cut = find_cut(KeyList{s.keys}, kSamples, rank, s.select);
  // Also where the sample has fewer live keys than that.
  constexpr uint32_t kMinusInfinity = 0x007FFFFFu;
  return cut.key <= kMinusInfinity ? -INFINITY : score_of_key(cut.key);
}

/// How many of a warp's kept scores come before a lane's in each of four groups, and how many there are: a byte each.
struct Places {
  uint32_t before, all;

  __device__ __forceinline__ explicit Places(uint32_t marks) {
    const uint32_t own = __popc(marks & 0xFu) | __popc(marks & 0xF0u) << 8 | __popc(marks & 0xF00u) << 16 |
                         __popc(marks & 0xF000u) << 24;
    const uint32_t sum = sum_lanes_up(own);
    all = __shfl_sync(~0u, sum, 31), before = sum - own;
  }
  /// Of all groups before group e.
  __device__ __forceinline__ uint32_t first(uint32_t e) const {
    return __dp4a(e < 4 ? all & ((1u << 8 * e) - 1) : all, 0x01010101u, 0u);
  }
};
static_assert(kReads == 4 && kGroup < 256);

/// Keeps the row's scores from `least` on, as they are. Ends with a barrier.
__device__ __forceinline__ void keep(const StreamRow& row, float least, StreamShared& s) {
  constexpr uint32_t kTurn = kReads * kGroup / 4;  // vectors of a warp
  const uint32_t lane = threadIdx.x % 32, vectors = (row.last + 3) / 4;
  const bool all = is_nan(least);
  const float below = next_below(least);
#pragma unroll 1
  for (uint32_t base = threadIdx.x / 32 * kTurn; base < vectors; base += kSelectThreads / 32 * kTurn) {
    uint4 four[kReads];
#pragma unroll
    for (uint32_t e = 0; e < kReads; ++e) {
      const uint32_t v = base + e * 32 + lane;
      four[e] = v < vectors ? read(row, v) : uint4{kNotLiveScore, kNotLiveScore, kNotLiveScore, kNotLiveScore};
    }
    uint32_t marks = mark(four, below);
#pragma unroll 1
    for (uint32_t e = 0; all && e < kReads; ++e) {
      if (e == 0) marks = 0;
      const uint32_t v = base + e * 32 + lane;
      if (v < vectors) marks |= mark_live(row, read(row, v), v) << 4 * e;
    }
    const Places places(marks);
    uint32_t at = 0;
    if (lane == 0) at = add_shared(&s.found, places.first(4));
    at = __shfl_sync(~0u, at, 0);
    if (at + places.first(4) > kList) continue;  // the same in every lane; found says so
    if (lane < kReads) s.groups[base / 32 + lane] = (at + places.first(lane)) << 8 | (places.all >> 8 * lane & 255u);
#pragma unroll
    for (uint32_t e = 0; e < kReads; ++e) {
      const uint32_t each[4] = {four[e].x, four[e].y, four[e].z, four[e].w};
      uint32_t to = at + places.first(e) + (places.before >> 8 * e & 255u);
      const uint32_t first = (base + e * 32 + lane) * 4 - row.lead;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        if ((marks >> (4 * e + i) & 1u) == 0) continue;
        s.keys[to] = each[i], s.indices[to] = first + i;
        ++to;
      }
    }
  }
  __syncthreads();
}

/// The kept scores as numbers of the order. Ends with a barrier.
__device__ __forceinline__ void order_kept(StreamShared& s, uint32_t count) {
  for (uint32_t i = threadIdx.x; i < count; i += kSelectThreads)
    s.keys[i] = key_of(canonical(__uint_as_float(s.keys[i])));
  __syncthreads();
}

/// emit(j, i) for each winner of the list, as hand_out does it; groups ascend with position.
template <class Emit>
__device__ void hand_out_groups(StreamShared& s, uint32_t groups, const Cut& cut, const Emit& emit) {
  uint32_t above = 0, equal = 0;
  for (uint32_t base = 0; base < groups; base += kSelectThreads) {
    const uint32_t packed = base + threadIdx.x < groups ? s.groups[base + threadIdx.x] : 0;
    const uint32_t begin = packed >> 8, end = begin + (packed & 255u);
    uint32_t wins = 0, ties = 0;
    for (uint32_t i = begin; i < end; ++i) wins += s.keys[i] > cut.key, ties += s.keys[i] == cut.key;
    if (cut.need == 0) ties = 0;
    uint32_t total = 0;
    const uint32_t before = block_scan(wins << 16 | ties, s.select.warps, &total);
    uint32_t a = above + (before >> 16), q = equal + (before & 0xFFFFu);
    for (uint32_t i = begin; wins + ties != 0 && i < end; ++i) {
      const uint32_t key = s.keys[i];
      if (key < cut.key || (key == cut.key && cut.need == 0)) continue;
      const uint32_t tie = key == cut.key;
      if (tie == 0 || q < cut.need) emit(a + (q < cut.need ? q : cut.need), i);
      a += 1 - tie, q += tie;
    }
    above += total >> 16, equal += total & 0xFFFFu;
  }
  __syncthreads();
}

/// From the scores in memory.
__device__ __noinline__ Cut answer_from_memory(const StreamJob& job, int64_t r, const float* scores,
                                               SelectRoom& select) {
  const RowFact& f = job.facts[r];
  const RowWriter writer(job.emission, job.group.first_row + r, f.request, f.start);
  const KeptScores kept{{&f, nullptr, 1, 0, 0, 0}, scores, nullptr, nullptr, 0, job.scores == nullptr};
  const Entries<KeptScores> entries{kept};
  const Cut cut = find_cut(entries, f.n, f.topk, select);
  hand_out(entries, f.n, cut, select, [&](uint32_t j, uint32_t i) { writer.put(j, kept.position(i), kept.score(i)); });
  return cut;
}

__device__ __noinline__ void count_nans(const StreamJob& job, StreamRow row, uint32_t n) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(row.vectors) + row.lead;
  uint32_t nans = 0;
  for (uint32_t i = threadIdx.x; i < n; i += kSelectThreads) nans += row.key(words[i]) == kNanKey;
  count(job.stats, kNanScores, nans);
}

__global__ __launch_bounds__(kSelectThreads, 1) void pick_stream(const __grid_constant__ StreamJob job) {
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
    if (f.n > 0 && f.topk > 0) {
      if (threadIdx.x == 0) s.found = 0;
      const float least = least_kept(from, f.n, f.topk, s);
      __syncthreads();
      keep(from, least, s);
      const uint32_t found = s.found;
      if (found > kList || (!is_nan(least) && found < f.topk)) {
        cut = answer_from_memory(job, r, scores, s.select);
      } else {
        order_kept(s, found);
        cut = find_cut(KeyList{s.keys}, found, f.topk, s.select);
        hand_out_groups(s, (from.last + kGroup - 1) / kGroup, cut, [&](uint32_t j, uint32_t i) {
          writer.put(j, int64_t{f.low} + s.indices[i], score_of_key(s.keys[i]));
        });
      }
    }
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
  pick_stream<<<launch.blocks(group.count, 1), kSelectThreads, sizeof(StreamShared), launch.stream()>>>(job);
  TOPKEY_CUDA_LAUNCHED("pick_stream");
  return true;
}

}  // namespace topkey::cuda
