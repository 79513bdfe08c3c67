// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `rows`: device lengths to query rows, positions to slots.
#include "cuda/check.h"
#include "cuda/device/rows.cuh"
#include "cuda/device/select.cuh"
#include "cuda/launch.h"
#include "cuda/stages.h"

namespace topkey::cuda {
namespace {

constexpr int kThreads = 256;

__global__ __launch_bounds__(kThreads) void expand(const __grid_constant__ ExpandRows a, uint64_t* stats) {
  const int64_t ratio = a.ratio > 1 ? a.ratio : 1;
  for (int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x; row < a.capacity;
       row += int64_t{gridDim.x} * kThreads) {
    int64_t length = 0, position = -1, slot = -1;
    const int64_t request = request_in(a.query_start, row);
    if (request >= 0) {
      const int64_t first = integer(a.query_start, request), rows = integer(a.query_start, request + 1) - first;
      position = integer(a.seq_lens, request) - rows + row - first;
      if (position < 0) position = -1;  // more query rows than tokens: nothing to see, nothing to store
      length = local_length(a.shard, (position + 1) / ratio);
      const int64_t key_row = position / ratio;
      const bool completes = position >= 0 && (position + 1) % ratio == 0;
      if (a.slots.data != nullptr && completes && owns(a.shard, key_row)) {
        const int64_t last = a.slots.dtype == DType::i64 ? INT64_MAX : INT32_MAX;
        slot = slot_of(a.block_table, request, a.page_size, local_of(a.shard, key_row), last);
        count(stats, kSkippedSlots, slot < 0);
      }
    }
    if (a.row_request.data != nullptr) put_integer(a.row_request, row, request);
    if (a.lens.data != nullptr) put_integer(a.lens, row, length);
    if (a.positions.data != nullptr) put_integer(a.positions, row, position);
    if (a.slots.data != nullptr) put_integer(a.slots, row, slot);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) count(stats, kRows, static_cast<uint64_t>(a.capacity));
}

/// A block a row. With compact, a round of positions is read before any of its slots is written, and these never lie
/// behind it: slots may be the indices' own memory.
__global__ __launch_bounds__(kThreads) void translate(const __grid_constant__ ToSlots a, uint64_t* stats) {
  __shared__ uint32_t warps[kThreads / 32];
  const int64_t width = a.indices.shape[1];
  for (int64_t row = blockIdx.x; row < a.indices.shape[0]; row += gridDim.x) {
    const int64_t request = a.row_request.data != nullptr ? integer(a.row_request, row) : row;
    int64_t valid = 0;
    for (int64_t base = 0; base < width; base += kThreads) {
      const int64_t i = base + threadIdx.x;
      const int64_t position = i < width ? integer(a.indices, row, i) : -1;
      int64_t slot = -1;
      if (position >= 0 && owns(a.shard, position)) {
        slot = slot_of(a.block_table, request, a.page_size, local_of(a.shard, position), INT32_MAX);
        count(stats, kSkippedSlots, slot < 0);
      }
      uint32_t total = 0;
      const int64_t at = valid + block_scan(slot >= 0, warps, &total);
      if (a.compact && slot >= 0) *element<int32_t>(a.slots, row, at) = static_cast<int32_t>(slot);
      if (!a.compact && i < width) *element<int32_t>(a.slots, row, i) = static_cast<int32_t>(slot);
      valid += total;
    }
    __syncthreads();
    for (int64_t i = valid + threadIdx.x; a.compact && i < width; i += kThreads)
      *element<int32_t>(a.slots, row, i) = -1;
    if (a.counts.data != nullptr && threadIdx.x == 0) *element<int32_t>(a.counts, row) = static_cast<int32_t>(valid);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) count(stats, kRows, static_cast<uint64_t>(a.indices.shape[0]));
}

/// What a row of expand_pools sees.
struct PoolRow {
  int64_t request, complete;  ///< whole pools
  int64_t visible, open;      ///< tokens; those of the pool that is not whole and has columns

  __device__ PoolRow(const ExpandPools& a, int64_t row) {
    constexpr int64_t kMostTokens = int64_t{INT32_MAX} + 1;
    Window w = window_of(a.rows, row, kMostTokens);
    bool counted = a.rows.end.data != nullptr || a.rows.length.data != nullptr;
    if (a.positions.data != nullptr) {
      const int64_t position = integer(a.positions, row);
      w.end = (position < kMostTokens ? position : kMostTokens) + 1;
      counted = true;
    }
    request = w.request;
    visible = w.request < 0 || w.end <= w.start ? 0 : w.end - w.start;
    if (visible > kMostTokens) visible = kMostTokens;
    complete = visible / a.pool_size;
    open = counted ? visible % a.pool_size : 0;
    tail = counted;
  }
  /// A pool whose tokens have columns of their own.
  __device__ bool shows(int64_t id) const { return id >= 0 && id < complete; }
  bool tail;  ///< there are columns for an open pool
};

struct PoolCounts {
  uint32_t first, shown, wild;  ///< first shown id's index; how many are shown; ids of pools that are not whole
};
__device__ void count_pools(const ExpandPools& a, int64_t row, const PoolRow& p, PoolCounts& s) {
  if (threadIdx.x == 0) s = {UINT32_MAX, 0, 0};
  __syncthreads();
  for (int64_t i = threadIdx.x; i < a.pools.shape[1]; i += kThreads) {
    const int64_t id = *element<int32_t>(a.pools, row, i);
    if (p.shows(id)) atomicMin(&s.first, static_cast<uint32_t>(i)), atomicAdd(&s.shown, 1u);
    if (p.visible > 0 && id >= p.complete) atomicAdd(&s.wild, 1u);
  }
  __syncthreads();
}

/// Writes columns of one row; a column without a token gets the fill.
struct PoolWriter {
  const ExpandPools& a;
  int64_t row, table_row, base, fill_index, fill_slot;
  uint64_t* stats;

  __device__ int64_t slot(int64_t token) const {
    return slot_of(a.out.slot_map.block_table, table_row, a.out.slot_map.page_size, token, INT32_MAX);
  }
  __device__ void put(int64_t column, int64_t token) const {
    const bool has = token >= 0;
    if (a.out.slots.data != nullptr) {
      const int64_t at = has ? slot(token) : fill_slot;
      count(stats, kSkippedSlots, has && at < 0);
      *element<int32_t>(a.out.slots, row, column) = static_cast<int32_t>(at);
    }
    if (a.out.indices.data != nullptr)
      *element<int32_t>(a.out.indices, row, column) = static_cast<int32_t>(has ? token + base : fill_index);
  }
};

/// A block a row, from its last columns to its first, and a round of ids is read before any of its tokens is written: ids
/// may stand in the first columns of the row.
__global__ __launch_bounds__(kThreads) void expand_ids(const __grid_constant__ ExpandPools a, uint64_t* stats) {
  __shared__ PoolCounts s;
  __shared__ int32_t ids[kThreads];
  const int64_t size = a.pool_size, pools = a.pools.shape[1];
  for (int64_t row = blockIdx.x; row < a.rows.count; row += gridDim.x) {
    const PoolRow p(a, row);
    count_pools(a, row, p, s);
    const int64_t fill = a.out.fill == Fill::value ? a.out.fill_value : -1;
    PoolWriter writer{a, row, a.out.slot_map.table_per_row ? row : p.request, 0, fill, fill, stats};
    if (a.out.index_base.data != nullptr) writer.base = integer(a.out.index_base, row);
    int64_t first = p.open > 0 ? p.complete * size : -1;
    if (s.first < pools) first = *element<int32_t>(a.pools, row, s.first) * size;
    if (a.out.fill == Fill::repeat && first >= 0) {
      writer.fill_index = first + writer.base;
      if (a.out.slots.data != nullptr) writer.fill_slot = writer.slot(first);
    }
    if (threadIdx.x == 0) {
      count(stats, kSkippedPages, s.wild);
      if (a.out.counts.data != nullptr)
        *element<int32_t>(a.out.counts, row) = static_cast<int32_t>(s.shown * size + p.open);
    }
    __syncthreads();  // the first id has been read
    for (int64_t o = threadIdx.x; p.tail && o < size - 1; o += kThreads)
      writer.put(pools * size + o, o < p.open ? p.complete * size + o : -1);
    for (int64_t base = (pools - 1) / kThreads * kThreads; base >= 0; base -= kThreads) {
      const int64_t i = base + threadIdx.x, n = pools - base < kThreads ? pools - base : kThreads;
      if (i < pools) ids[threadIdx.x] = *element<int32_t>(a.pools, row, i);
      __syncthreads();
      for (int64_t c = threadIdx.x; c < n * size; c += kThreads) {
        const int64_t id = ids[c / size];
        writer.put(base * size + c, p.shows(id) ? id * size + c % size : -1);
      }
      __syncthreads();
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) count(stats, kRows, static_cast<uint64_t>(a.rows.count));
}

const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&expand), 0},
                                {reinterpret_cast<const void*>(&translate), 0},
                                {reinterpret_cast<const void*>(&expand_ids), 0}};

}  // namespace

KernelList rows_kernels() { return {kEntries, 3}; }

void expand_rows(const ExpandRows& a, const Exec& exec) {
  if (a.capacity == 0) return;
  const Launch launch("expand_rows", exec);
  expand<<<launch.blocks((a.capacity + kThreads - 1) / kThreads, 4), kThreads, 0, launch.stream()>>>(a, exec.stats);
  TOPKEY_CUDA_LAUNCHED("expand_rows");
}

void to_slots(const ToSlots& a, const Exec& exec) {
  if (a.indices.shape[0] == 0) return;
  const Launch launch("to_slots", exec);
  translate<<<launch.blocks(a.indices.shape[0], 4), kThreads, 0, launch.stream()>>>(a, exec.stats);
  TOPKEY_CUDA_LAUNCHED("to_slots");
}

void expand_pools(const ExpandPools& a, const Exec& exec) {
  if (a.rows.count == 0) return;
  const Launch launch("expand_pools", exec);
  expand_ids<<<launch.blocks(a.rows.count, 4), kThreads, 0, launch.stream()>>>(a, exec.stats);
  TOPKEY_CUDA_LAUNCHED("expand_pools");
}

}  // namespace topkey::cuda
