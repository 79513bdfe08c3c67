// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What is known of each row before its keys are scored: window, reachable positions, candidate blocks sorted and without
// repeats, live keys. One thread block a row; wild values are counted here and nowhere else.
#include "cuda/check.h"
#include "cuda/device/select.cuh"
#include "cuda/search_parts.h"
#include "cuda/stages.h"

namespace topkey::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kSharedIds = 8192;

struct Kernel {
  LookParams p;
  Group group;
};

struct Shared {
  uint32_t warps[32];
  uint32_t last_id, kept;
  unsigned long long skipped, live, first_id;
};

/// Bitonic sort of ids, in shared memory where they fit.
__device__ void sort_ids(int32_t* ids, uint32_t size, int32_t* shared) {
  int32_t* at = size <= kSharedIds ? shared : ids;
  for (uint32_t i = threadIdx.x; at != ids && i < size; i += blockDim.x) at[i] = ids[i];
  __syncthreads();
  for (uint32_t width = 2; width <= size; width *= 2) {
    for (uint32_t step = width / 2; step > 0; step /= 2) {
      for (uint32_t pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
        const uint32_t low = pair / step * (step * 2) + pair % step, high = low + step;
        const bool up = (low & width) == 0;
        const int32_t a = at[low], b = at[high];
        if ((a > b) == up) at[low] = b, at[high] = a;
      }
      __syncthreads();
    }
  }
  for (uint32_t i = threadIdx.x; at != ids && i < size; i += blockDim.x) ids[i] = at[i];
  __syncthreads();
}

/// Sorts the row's candidates, drops repeats, wild ids and blocks without a reachable key, in place. Counts what the
/// tables cannot reach.
__device__ void keep_blocks(const LookParams& p, int64_t row, int32_t* ids, RowFact& f, int32_t* sort, Shared& s) {
  const Tensor& given = p.admit.candidates;
  const int64_t block = p.admit.candidate_block_size;
  const uint32_t size = power_of_two(static_cast<uint32_t>(given.shape[1]));
  for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
    const int32_t id = i < given.shape[1] ? *element<int32_t>(given, row, i) : -1;
    const BlockSpan span = block_span(f, block, id);
    ids[i] = id < 0 || span.first >= span.last ? INT32_MAX : id;
  }
  __syncthreads();
  sort_ids(ids, size, sort);
  uint32_t kept = 0, keys = 0;
  unsigned long long skipped = 0;
  if (threadIdx.x == 0) s.last_id = UINT32_MAX;
  __syncthreads();
  for (uint32_t base = 0; base < size; base += blockDim.x) {
    const uint32_t i = base + threadIdx.x;
    const int32_t id = i < size ? ids[i] : INT32_MAX;
    const int64_t before = i == base ? s.last_id : i < size ? ids[i - 1] : 0;
    const bool own = id != INT32_MAX && id != before;
    const BlockSpan span = block_span(f, block, id);
    const int64_t cut_first = most(span.first, f.low), cut_last = least(span.last, f.high);
    const int64_t reached = own && cut_first < cut_last ? cut_last - cut_first : 0;
    if (own) skipped += static_cast<unsigned long long>(span.last - span.first - reached);
    uint32_t total = 0, total_keys = 0;
    const uint32_t at = kept + block_scan(reached > 0, s.warps, &total);  // barriers: all ids of the round are read
    const uint32_t keys_before = keys + block_scan(static_cast<uint32_t>(reached), s.warps, &total_keys);
    if (threadIdx.x == blockDim.x - 1) s.last_id = static_cast<uint32_t>(id);
    if (reached > 0) ids[at] = id;
    if (reached > 0 && sharded(f)) ids[size + at] = static_cast<int32_t>(keys_before);
    kept += total, keys += total_keys;
    __syncthreads();
  }
  if (skipped != 0) atomicAdd(&s.skipped, skipped);
  f.blocks = kept;
  f.n = keys;
  if (kept == 0) return;
  f.lead = sharded(f) ? size : static_cast<uint32_t>(most(f.low - (f.start + int64_t{ids[0]} * block), 0));
}

/// Keys of [first, last) whose page can be read, added up by one thread.
__device__ int64_t readable(const KeySource& k, int32_t table_row, int64_t first, int64_t last) {
  int64_t found = 0;
  for (int64_t at = first; at < last;) {
    const int64_t next = least((at / k.page_size + 1) * k.page_size, last);
    if (page_of(k, table_row, at) >= 0) found += next - at;
    at = next;
  }
  return found;
}

/// Live keys and those whose page id is wild.
__device__ void count_live(const LookParams& p, int64_t row, const int32_t* ids, const RowFact& f, Shared& s) {
  const uint32_t block = static_cast<uint32_t>(p.admit.candidate_block_size);
  long long live = 0, skipped = 0;
  if (p.admit.mask.data != nullptr) {
    for (uint32_t i = threadIdx.x; i < f.n; i += blockDim.x) {
      float addend;
      live += !masked(p.admit.mask, row, position_of(f, ids, block, i), &addend);
    }
  } else if (!p.keys.paged) {
    live = threadIdx.x == 0 ? f.n : 0;
  } else if (ids == nullptr) {
    const int64_t first_page = f.low / p.keys.page_size, pages = f.n == 0 ? 0 : (f.high - 1) / p.keys.page_size + 1;
    for (int64_t page = first_page + threadIdx.x; page < pages; page += blockDim.x) {
      const int64_t first = most(page * p.keys.page_size, f.low), last = least((page + 1) * p.keys.page_size, f.high);
      const int64_t found = readable(p.keys, f.table_row, first, last);
      live += found, skipped += last - first - found;
    }
  } else {
    for (uint32_t b = threadIdx.x; b < f.blocks; b += blockDim.x) {
      const BlockSpan span = block_span(f, block, ids[b]);
      const int64_t first = most(span.first, f.low), last = least(span.last, f.high);
      const int64_t found = readable(p.keys, f.table_row, first, last);
      live += found, skipped += last - first - found;
    }
  }
  if (live != 0) atomicAdd(&s.live, static_cast<unsigned long long>(live));
  if (skipped != 0) atomicAdd(&s.skipped, static_cast<unsigned long long>(skipped));
}

__global__ __launch_bounds__(kThreads) void look_at_rows(const __grid_constant__ Kernel k) {
  extern __shared__ int32_t sort[];
  __shared__ Shared s;
  const LookParams& p = k.p;
  if (p.taken != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *p.taken = 0;
  for (int64_t r = blockIdx.x; r < k.group.count; r += gridDim.x) {
    const int64_t row = k.group.first_row + r;
    if (threadIdx.x == 0) s.skipped = s.live = 0;
    __syncthreads();
    int64_t skipped = 0;
    RowFact f = window_fact(p, row, &skipped);
    int32_t* ids = p.ids != nullptr ? p.ids + r * p.id_stride : nullptr;
    if (p.has_candidates) {
      f.n = 0;
      if (ids != nullptr && f.table_row >= 0 && f.end > f.start) keep_blocks(p, row, ids, f, sort, s);
    }
    __syncthreads();
    count_live(p, row, ids, f, s);
    __syncthreads();
    if (threadIdx.x == 0) {
      f.live = static_cast<uint32_t>(s.live);
      f.scored = f.live > 0 && (p.needs_scores || f.live > f.topk);
      p.facts[r] = f;
      count(p.stats, kSkippedPages, s.skipped + static_cast<uint64_t>(skipped));
      if (f.scored) count(p.stats, kScoredKeys, f.live);
      if (r == 0) count(p.stats, kRows, static_cast<uint64_t>(k.group.count));
    }
    __syncthreads();
  }
}

const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&look_at_rows), kSharedIds * 4}};

}  // namespace

KernelList look_kernels() { return {kEntries, 1}; }

void look(const LookParams& params, const Group& group, const Launch& launch) {
  const size_t size = params.id_stride > 0 ? power_of_two(static_cast<uint32_t>(params.admit.candidates.shape[1])) : 0;
  const size_t shared = size <= kSharedIds ? size * 4 : 0;
  look_at_rows<<<launch.blocks(group.count, 8), kThreads, shared, launch.stream()>>>({params, group});
  TOPKEY_CUDA_LAUNCHED("look");
}

}  // namespace topkey::cuda
