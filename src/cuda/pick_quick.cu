// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `select`, and the second half of `search`, where a row's scores fit shared memory: one thread block a row reads
// them once, and settles the cut with itself alone by the steps of the decode kernel (device/decode_answer.cuh): bins
// between bounds that the row's moments suggest, ranks inside the bin of the k-th best.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/device/decode_answer.cuh"
#include "cuda/search_parts.h"
#include "cuda/stages.h"

namespace topkey::cuda {
namespace {

struct QuickJob {
  DecodeJob decode;  ///< of it: where answers go
  const RowFact* facts;
  const float* scores;  ///< [group rows, chunk], kNotLiveScore where a key is not live; null: given
  Tensor given;         ///< f32 [R, N], unit stride, all live
  Group group;
  uint64_t* stats;
};

struct QuickShared {
  DecodeShared decode;
  uint32_t bins[kDecodeBins];
};

__device__ __forceinline__ const float* scores_of(const QuickJob& job, int64_t r) {
  return job.scores == nullptr ? element<float>(job.given, job.group.first_row + r, job.facts[r].low)
                               : job.scores + r * job.group.chunk;
}

/// Of a row that is scored, though none of its keys is wanted.
__device__ void count_nans(const QuickJob& job, int64_t r, uint32_t n) {
  const float* scores = scores_of(job, r);
  uint32_t nans = 0;
  for (uint32_t i = threadIdx.x; i < n; i += kDecodeThreads)
    nans += is_nan(scores[i]) && (job.scores == nullptr || __float_as_uint(scores[i]) != kNotLiveScore);
  count(job.stats, kNanScores, nans);
}

/// The row's scores as keys of the order, and what they add up to. Ends with a barrier.
__device__ void load_row(const QuickJob& job, DecodeShared& s, Kept& kept, uint32_t* keys, int64_t r, uint32_t n) {
  const bool given = job.scores == nullptr;
  const float* scores = scores_of(job, r);
  const uint32_t padded = (n + 63) / 64 * 64;
  float sum = 0.0f, squares = 0.0f;
  uint32_t live = 0, finite = 0;
  constexpr int kBatch = 4;
  for (uint32_t base = threadIdx.x; base < padded; base += kDecodeThreads * kBatch) {
    uint32_t raw[kBatch];
#pragma unroll
    for (int e = 0; e < kBatch; ++e) {
      const uint32_t i = base + e * kDecodeThreads;
      raw[e] = i < n ? __float_as_uint(__ldg(scores + i)) : kNotLiveScore;
    }
#pragma unroll
    for (int e = 0; e < kBatch; ++e) {
      const uint32_t i = base + e * kDecodeThreads;
      const float score = canonical(__uint_as_float(raw[e]));
      const bool lives = i < n && (given || raw[e] != kNotLiveScore);
      if (i < padded) keys[i] = lives ? key_of(score) : kNotLive;
      const bool counts = lives && fabsf(score) < 1e15f;
      const float x = counts ? score : 0.0f;
      live += lives, finite += counts, sum += x, squares += x * x;
    }
  }
  live = __reduce_add_sync(~0u, live), finite = __reduce_add_sync(~0u, finite);
  sum = add_lanes(sum), squares = add_lanes(squares);
  if ((threadIdx.x & 31) == 0) {
    atomicAdd(&kept.live, live);
    s.moments[threadIdx.x / 128][0][threadIdx.x % 128 / 32] = {sum, squares, static_cast<int>(finite)};
  }
  sync_scorers();
}

__device__ void open_row(const QuickJob& job, QuickShared& q, uint32_t* keys, int64_t r, const RowFact& f) {
  DecodeShared& s = q.decode;
  for (int b = threadIdx.x; b < kDecodeBins; b += kDecodeThreads) q.bins[b] = 0;
  if (threadIdx.x == 0) {
    Kept k{};
    k.keys = keys, k.count = (f.n + 63) / 64 * 64, k.topk = f.topk;
    k.first = f.low, k.last = f.high, k.row = static_cast<int>(r), k.start = f.start, k.request = f.request;
    s.kept[0][0] = k;
    s.open[0][0].meeting = Meeting(nullptr, 1), s.open[0][0].index = 0;
    s.plan.low[0] = f.low, s.plan.high[0] = f.high;
  }
  sync_scorers();
}

__global__ __launch_bounds__(kDecodeThreads, 2) void pick_quick(const __grid_constant__ QuickJob job) {
  extern __shared__ uint4 memory[];
  QuickShared& q = *reinterpret_cast<QuickShared*>(memory);
  DecodeShared& s = q.decode;
  uint32_t* keys = reinterpret_cast<uint32_t*>(memory + (sizeof(QuickShared) + 15) / 16);
  for (int64_t r = blockIdx.x; r < job.group.count; r += gridDim.x) {
    const RowFact& f = job.facts[r];
    if (f.n == 0 || f.topk == 0) {
      RowWriter(job.decode.emission, job.group.first_row + r, f.request, f.start).fill(0);
      if (f.scored) count_nans(job, r, f.n);
      continue;
    }
    open_row(job, q, keys, r, f);
    Kept& kept = s.kept[0][0];
    load_row(job, s, kept, keys, r, f.n);
    if (threadIdx.x == 0) set_range(s, 0, 0, f.topk), kept.range = s.ranges[0];
    sync_scorers();
    const BinRange range = s.ranges[0];
    const bool cuts = kept.live > f.topk;
    for (uint32_t i = threadIdx.x; cuts && i < kept.count; i += kDecodeThreads) {
      const uint32_t key = keys[i];
      const int bin = key == kNotLive ? 0 : range.bin_of_key(key);
      if (bin > 0) atomicAdd(q.bins + bin, 1u);
    }
    sync_scorers();
    ask_row(job.decode, s, 0, 0, q.bins);
    answer_row(job.decode, s, 0, 0, nullptr, 0);
    if (threadIdx.x == 0 && f.scored) {
      count(job.stats, kNanScores, kept.nans);
      count(job.stats, kTiedCuts, s.tied);
    }
    sync_scorers();
  }
}

constexpr int64_t kFixed = (sizeof(QuickShared) + 15) / 16 * 16;
constexpr int kMostShared = 227 * 1024;
const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&pick_quick), kMostShared}};

int64_t quick_bytes(int64_t keys) { return kFixed + (keys + 63) / 64 * 64 * 4; }

}  // namespace

KernelList pick_quick_kernels() { return {kEntries, 1}; }

bool pick_quickly(const PickParams& p, const Group& group, const Launch& launch) {
  const bool kept = p.room.scores != nullptr;
  const bool flat = !kept && p.scores.dtype == DType::f32 && p.scores.stride[1] == 1 && p.mask.data == nullptr;
  const bool simple = p.has_entries && !p.has_blocks && p.room.ids == nullptr && !present(p.admit.candidates) &&
                      p.admit.force_first == 0 && p.admit.force_last == 0 && p.emission.out.order != Order::score;
  const int64_t keys = kept ? group.chunk : p.keys;
  const bool whole = group.first_key == 0 && (!kept || group.chunk >= p.keys);
  if (!simple || !(kept || flat) || !whole || quick_bytes(keys) > launch.shared_bytes()) return false;
  QuickJob job{};
  job.decode.emission = p.emission, job.decode.first_row = group.first_row;
  job.facts = p.room.facts, job.scores = p.room.scores, job.given = p.scores, job.group = group;
  job.stats = p.emission.stats;
  const int64_t bytes = quick_bytes(keys);
  const int fit = static_cast<int>(std::clamp<int64_t>(launch.shared_bytes() / (bytes + 1024), 1, 2));
  pick_quick<<<launch.blocks(group.count, fit), kDecodeThreads, static_cast<size_t>(bytes), launch.stream()>>>(job);
  TOPKEY_CUDA_LAUNCHED("pick_quick");
  return true;
}

}  // namespace topkey::cuda
