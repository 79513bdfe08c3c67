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

__global__ __launch_bounds__(kThreads) void clear(const __grid_constant__ Tensor t, int64_t rows) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    for (int64_t i = threadIdx.x; i < t.shape[1]; i += kThreads) *element<int32_t>(t, row, i) = -1;
  }
}

const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&clear), 0},
                                {reinterpret_cast<const void*>(&expand), 0},
                                {reinterpret_cast<const void*>(&translate), 0}};

}  // namespace

KernelList rows_kernels() { return {kEntries, 3}; }

void clear_rows(const Tensor& t, int64_t rows, const Exec& exec) {
  if (t.data == nullptr || rows == 0) return;
  const Launch launch("clear_rows", exec);
  clear<<<launch.blocks(rows, 4), kThreads, 0, launch.stream()>>>(t, rows);
  TOPKEY_CUDA_LAUNCHED("clear_rows");
}

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

}  // namespace topkey::cuda
