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
  MergeTopk a;
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
  int64_t start, end;

  __device__ int32_t position(uint32_t i) const { return *element<int32_t>(job.a.indices, i / width, row, i % width); }
  __device__ float score(uint32_t i) const {
    return canonical(*element<float>(job.a.scores, i / width, row, i % width));
  }
  /// Only a merge with keys forced at the end has been given an end.
  __device__ bool forced(int64_t position) const {
    return position - start < job.a.force_first || (job.a.force_last > 0 && end - position <= job.a.force_last);
  }
  __device__ uint32_t key(uint32_t i) const {
    const int32_t at = position(i);
    if (at < 0) return kNotLive;
    return forced(at) ? kForcedKey : key_of(score(i));
  }
  __device__ uint32_t raw(uint32_t i) const { return key(i); }
  __device__ uint32_t key_of_raw(uint32_t raw, uint32_t) const { return raw; }
  /// Score of the entry at this position: the number of a forced key does not say it.
  __device__ float score_at(uint32_t at, uint32_t n) const {
    for (uint32_t i = 0; i < n; ++i) {
      if (static_cast<uint32_t>(position(i)) == at) return score(i);
    }
    return __uint_as_float(kCanonicalNan);
  }
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

/// Published blocks of all parts, sorted by id, of equal ids the best first: the first of each id stands for it.
struct MergedBlocks {
  static constexpr int kBatch = 4, kEach = 4;
  const uint64_t* sorted;
  uint32_t newest;

  __device__ uint32_t id(uint32_t i) const { return static_cast<uint32_t>(sorted[i] >> 32); }
  __device__ uint32_t key(uint32_t i) const {
    if (i > 0 && id(i - 1) == id(i)) return kNotLive;
    return id(i) == newest ? kForcedKey : ~static_cast<uint32_t>(sorted[i]);
  }
  __device__ uint32_t raw(uint32_t i) const { return key(i); }
  __device__ uint32_t key_of_raw(uint32_t raw, uint32_t) const { return raw; }
};

/// The best blocks of a row to out.blocks. The highest id is the newest block of the row: every part publishes it.
__device__ void merge_blocks(const Job& job, int64_t row, Shared& s, uint64_t* sort) {
  const Tensor &ids = job.a.block_ids, &out = job.a.out.blocks;
  const uint32_t width = static_cast<uint32_t>(ids.shape[2]), n = static_cast<uint32_t>(ids.shape[0]) * width;
  const uint32_t size = power_of_two(n), wanted = static_cast<uint32_t>(out.shape[1]);
  if (threadIdx.x == 0) s.taken = 0;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
    const int32_t id = *element<int32_t>(ids, i / width, row, i % width);
    if (id < 0) continue;
    const uint32_t key = key_of(canonical(*element<float>(job.a.block_scores, i / width, row, i % width)));
    sort[atomicAdd(&s.taken, 1u)] = static_cast<uint64_t>(id) << 32 | ~key;
  }
  __syncthreads();
  const uint32_t used = s.taken;
  for (uint32_t i = used + threadIdx.x; i < size; i += blockDim.x) sort[i] = UINT64_MAX;
  __syncthreads();
  sort_block(sort, size);
  Cut cut{};
  if (used > 0) {
    const MergedBlocks blocks{sort, static_cast<uint32_t>(sort[used - 1] >> 32)};
    cut = find_cut(blocks, used, wanted, s.select);
    hand_out(blocks, used, cut, s.select,
             [&](uint32_t j, uint32_t i) { *element<int32_t>(out, row, j) = static_cast<int32_t>(blocks.id(i)); });
  }
  for (uint32_t j = cut.count + threadIdx.x; j < wanted; j += blockDim.x) *element<int32_t>(out, row, j) = -1;
  __syncthreads();  // the sorted blocks have been read
}

__device__ void merge_row(const Job& job, int64_t row, Shared& s, uint64_t* sort) {
  const uint32_t width = static_cast<uint32_t>(job.a.scores.shape[2]),
                 n = static_cast<uint32_t>(job.a.scores.shape[0]) * width;
  const Window w = window_of(job.a.rows, row, 0);
  const Parts parts{job, row, width, w.start, w.end};
  const RowWriter writer(job.emission, row, w.request, w.start);
  if (w.request < 0) {
    writer.fill(0);
    const Tensor& blocks = job.a.out.blocks;
    for (int64_t j = threadIdx.x; blocks.data != nullptr && j < blocks.shape[1]; j += blockDim.x)
      *element<int32_t>(blocks, row, j) = -1;
    return;
  }
  if (job.a.out.blocks.data != nullptr) merge_blocks(job, row, s, sort);
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
    if (key == kNotLive) continue;
    nans += is_nan(parts.score(i));
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
    const uint32_t key = by_score ? ~high : low, position = by_score ? low : high;
    writer.put(j, position, key == kForcedKey ? parts.score_at(position, n) : score_of_key(key));
  }
  __syncthreads();
  writer.fill(cut.count);
  count(job.emission.stats, kNanScores, nans);
  if (threadIdx.x != 0) return;
  count(job.emission.stats, kScoredKeys, cut.live);
  count(job.emission.stats, kTiedCuts, cut.tied && cut.key != kForcedKey);
}

__global__ __launch_bounds__(kSelectThreads) void merge_rows(const __grid_constant__ Job job) {
  extern __shared__ uint64_t memory[];
  __shared__ Shared s;
  uint64_t* sort = job.sort != nullptr ? job.sort + blockIdx.x * job.sort_length : memory;
  for (int64_t row = blockIdx.x; row < job.a.rows.count; row += gridDim.x) {
    merge_row(job, row, s, sort);
    __syncthreads();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) count(job.emission.stats, kRows, static_cast<uint64_t>(job.a.rows.count));
}

const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&merge_rows), kSharedSort * 8}};

}  // namespace

KernelList merge_kernels() { return {kEntries, 1}; }

void merge_topk(const MergeTopk& a, const Exec& exec) {
  if (a.rows.count == 0) return;
  const Launch launch("merge_topk", exec);
  Shape shape{};
  shape.rows = a.rows.count, shape.keys = a.scores.shape[0] * a.scores.shape[2], shape.topk = a.topk;
  if (a.out.blocks.data != nullptr) {
    shape.blocks = a.out.blocks.shape[1];
    shape.keys = std::max(shape.keys, a.block_ids.shape[0] * a.block_ids.shape[2]);
  }
  const Room room = make_room(Op::merge_topk, shape, exec.workspace);
  const Job job{a, {a.out, a.topk, Shard{}, true, exec.stats}, room.sort, room.sort_length};
  const uint32_t wanted = static_cast<uint32_t>(std::max<int64_t>(room.sorted, 1));
  const size_t shared = room.sort != nullptr ? 0 : size_t{8} * power_of_two(wanted);
  const uint32_t blocks =
      launch.blocks(room.sort != nullptr ? std::min(a.rows.count, room.sort_blocks) : a.rows.count, 2);
  merge_rows<<<blocks, kSelectThreads, shared, launch.stream()>>>(job);
  TOPKEY_CUDA_LAUNCHED("merge_rows");
}

}  // namespace topkey::cuda
