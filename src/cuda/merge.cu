// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `merge`: the parts' entries in any order, so ties go by position and not by index: the cut is found by score, then
// among its equals by position; the winners are sorted.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/device/emit.cuh"
#include "cuda/device/select.cuh"
#include "cuda/room.h"
#include "cuda/stages.h"
#include "cuda/tuning.h"

namespace topkey::cuda {
namespace {

struct Job {
  Tensor scores, indices;
  Rows rows;
  Emission emission;
  uint64_t* sort;  ///< null: in shared memory
  int64_t sort_length;
};

/// Entries of one row as numbers of the order.
struct Parts {
  static constexpr int kBatch = 4;
  const Job& job;
  int64_t row;
  uint32_t width;  ///< entries a part

  __device__ int32_t position(uint32_t i) const { return *element<int32_t>(job.indices, i / width, row, i % width); }
  __device__ uint32_t key(uint32_t i) const {
    if (position(i) < 0) return kNotLive;
    return key_of(canonical(*element<float>(job.scores, i / width, row, i % width)));
  }
  __device__ uint32_t raw(uint32_t i) const { return key(i); }
  __device__ uint32_t key_of_raw(uint32_t raw, uint32_t) const { return raw; }
};
/// Of them, those equal to a key: the lower the position, the larger the number.
struct Equals {
  static constexpr int kBatch = 4;
  Parts parts;
  uint32_t equal;

  __device__ uint32_t key(uint32_t i) const {
    return parts.key(i) == equal ? ~static_cast<uint32_t>(parts.position(i)) : kNotLive;
  }
  __device__ uint32_t raw(uint32_t i) const { return key(i); }
  __device__ uint32_t key_of_raw(uint32_t raw, uint32_t) const { return raw; }
};

struct Shared {
  SelectRoom select;
  uint32_t taken;
};

__device__ void merge_row(const Job& job, int64_t row, Shared& s, uint64_t* sort) {
  const uint32_t width = static_cast<uint32_t>(job.scores.shape[2]),
                 n = static_cast<uint32_t>(job.scores.shape[0]) * width;
  const Parts parts{job, row, width};
  const int64_t request = window_of(job.rows, row, 0).request;
  const RowWriter writer(job.emission, row, request, 0);
  if (request < 0) {
    writer.fill(0);
    return;
  }
  const Cut cut = find_cut(parts, n, static_cast<uint32_t>(job.emission.topk), s.select);
  uint32_t lowest = 0;  // of the equals' numbers that win
  if (cut.need > 0) {
    const Cut among = find_cut(Equals{parts, cut.key}, n, cut.need, s.select);
    lowest = among.key + (among.need == 0);
  }
  const uint32_t size = power_of_two(cut.count);
  const bool by_score = job.emission.out.order == Order::score;
  if (threadIdx.x == 0) s.taken = 0;
  for (uint32_t i = cut.count + threadIdx.x; i < size; i += blockDim.x) sort[i] = UINT64_MAX;
  __syncthreads();
  uint32_t nans = 0;
  for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
    const uint32_t key = parts.key(i);
    nans += key == kNanKey;
    if (key == kNotLive) continue;
    const uint32_t position = static_cast<uint32_t>(parts.position(i));
    if (key < cut.key || (key == cut.key && (cut.need == 0 || ~position < lowest))) continue;
    const uint32_t at = atomicAdd(&s.taken, 1u);
    if (at < cut.count)
      sort[at] = by_score ? static_cast<uint64_t>(~key) << 32 | position : static_cast<uint64_t>(position) << 32 | key;
  }
  __syncthreads();
  sort_block(sort, size);
  for (uint32_t j = threadIdx.x; j < cut.count; j += blockDim.x) {
    const uint32_t low = static_cast<uint32_t>(sort[j]), high = static_cast<uint32_t>(sort[j] >> 32);
    writer.put(j, by_score ? low : high, score_of_key(by_score ? ~high : low));
  }
  __syncthreads();
  writer.fill(cut.count);
  count(job.emission.stats, kNanScores, nans);
  if (threadIdx.x != 0) return;
  count(job.emission.stats, kScoredKeys, cut.live);
  count(job.emission.stats, kTiedCuts, cut.tied);
}

__global__ __launch_bounds__(kSelectThreads) void merge_rows(const __grid_constant__ Job job) {
  extern __shared__ uint64_t memory[];
  __shared__ Shared s;
  uint64_t* sort = job.sort != nullptr ? job.sort + blockIdx.x * job.sort_length : memory;
  for (int64_t row = blockIdx.x; row < job.rows.count; row += gridDim.x) {
    merge_row(job, row, s, sort);
    __syncthreads();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) count(job.emission.stats, kRows, static_cast<uint64_t>(job.rows.count));
}

const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&merge_rows), kSharedSort * 8}};

}  // namespace

KernelList merge_kernels() { return {kEntries, 1}; }

void merge_topk(const MergeTopk& a, const Exec& exec) {
  if (a.rows.count == 0) return;
  const Launch launch("merge_topk", exec);
  Shape shape{};
  shape.rows = a.rows.count, shape.keys = a.scores.shape[0] * a.scores.shape[2], shape.topk = a.topk;
  const Room room = make_room(Op::merge_topk, shape, exec.workspace);
  const Job job{a.scores, a.indices, a.rows, {a.out, a.topk, Shard{}, true, exec.stats}, room.sort, room.sort_length};
  const uint32_t wanted = static_cast<uint32_t>(std::max<int64_t>(room.list_length, 1));
  const size_t shared = room.sort != nullptr ? 0 : size_t{8} * power_of_two(wanted);
  const uint32_t blocks =
      launch.blocks(room.sort != nullptr ? std::min(a.rows.count, room.sort_blocks) : a.rows.count, 2);
  merge_rows<<<blocks, kSelectThreads, shared, launch.stream()>>>(job);
  TOPKEY_CUDA_LAUNCHED("merge_rows");
}

}  // namespace topkey::cuda
