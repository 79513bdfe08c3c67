// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Device memory of layers and ranks (memory.h): rows cleared, copied and put in order by kernels, a warp a row, so that a
// step can be captured; copies to and from the host only for transports that block.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/device/rows.cuh"
#include "cuda/launch.h"
#include "cuda/stages.h"
#include "memory.h"

namespace topkey::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr unsigned kAll = 0xFFFFFFFFu;

__device__ int lane() { return static_cast<int>(threadIdx.x % 32); }
__device__ int64_t first_row() { return int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; }
__device__ int64_t row_step() { return int64_t{gridDim.x} * kWarps; }

template <class Word>
__device__ void copy_words(char* to, const char* from, int64_t bytes) {
  for (int64_t i = lane(); i < bytes / static_cast<int64_t>(sizeof(Word)); i += 32)
    reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(from)[i];
}
/// By a warp, in the widest words that both addresses and the length allow.
__device__ void copy_bytes(void* to_row, const void* from_row, int64_t bytes) {
  char* to = static_cast<char*>(to_row);
  const char* from = static_cast<const char*>(from_row);
  const uint64_t all = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | static_cast<uint64_t>(bytes);
  if (all % 16 == 0) {
    copy_words<uint4>(to, from, bytes);
  } else if (all % 4 == 0) {
    copy_words<uint32_t>(to, from, bytes);
  } else {
    copy_words<char>(to, from, bytes);
  }
}
__device__ const char* at(const void* base, int64_t bytes) { return static_cast<const char*>(base) + bytes; }
__device__ char* at(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }

__global__ __launch_bounds__(kThreads) void clear(const __grid_constant__ Tensor t, int64_t rows) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    for (int64_t i = threadIdx.x; i < t.shape[1]; i += kThreads) *element<int32_t>(t, row, i) = -1;
  }
}

__global__ __launch_bounds__(kThreads) void copy_all(const __grid_constant__ RowCopy a) {
  for (int64_t r = first_row(); r < a.rows; r += row_step())
    copy_bytes(at(a.to, r * a.to_step), at(a.from, r * a.from_step), a.bytes);
}

__device__ int64_t bound(const Tensor& indptr, int64_t b) {
  const int64_t value = integer(indptr, b);
  return value < 0 ? 0 : value;
}
__device__ Shard of_rank(Shard shard, int64_t rank) {
  shard.rank = static_cast<int32_t>(rank);
  return shard;
}

/// A warp a rank: 32 requests at a time, summed across the lanes.
__global__ __launch_bounds__(kThreads) void count_keys(const __grid_constant__ OwnedKeys a) {
  const int64_t requests = a.indptr.shape[0] - 1;
  for (int64_t rank = first_row(); rank < a.owned.shape[0]; rank += row_step()) {
    const Shard shard = of_rank(a.shard, rank);
    int64_t before = 0;
    if (lane() == 0) *element<int32_t>(a.owned, rank, 0) = 0;
    for (int64_t base = 0; base < requests; base += 32) {
      const int64_t b = base + lane();
      int64_t sum = 0;
      if (b < requests) {
        const int64_t length = bound(a.indptr, b + 1) - bound(a.indptr, b);
        sum = local_length(shard, length < 0 ? 0 : length);
      }
      for (int step = 1; step < 32; step *= 2) {
        const int64_t other = __shfl_up_sync(kAll, static_cast<long long>(sum), step);
        if (lane() >= step) sum += other;
      }
      const int64_t most = before + sum < INT32_MAX ? before + sum : INT32_MAX;
      if (b < requests) *element<int32_t>(a.owned, rank, b + 1) = static_cast<int32_t>(most);
      before += __shfl_sync(kAll, static_cast<long long>(sum), 31);
    }
  }
}

__global__ __launch_bounds__(kThreads) void place_parts(const __grid_constant__ KeyParts a) {
  const Shard& shard = a.keys.shard;
  for (int64_t row = first_row(); row < a.total; row += row_step()) {
    const int64_t request = request_in(a.keys.indptr, row);
    if (request < 0) continue;
    const int64_t position = row - bound(a.keys.indptr, request), rank = position / run_of(shard) % shard.world_size;
    const int64_t i = *element<int32_t>(a.keys.owned, rank, request) + local_of(shard, position) - a.first;
    if (i < 0 || i >= a.rows) continue;
    copy_bytes(at(a.out, row * a.out_step), at(a.parts, (rank * a.rows + i) * a.bytes), a.bytes);
  }
}

__global__ __launch_bounds__(kThreads) void place_order(const __grid_constant__ TokenParts a) {
  for (int64_t t = first_row(); t < a.order.shape[0]; t += row_step()) {
    const int64_t from = integer(a.order, t), behind = from - a.own;
    char* to = at(a.out, t * a.bytes);
    if (from >= 0 && behind < 0) {
      copy_bytes(to, at(a.front, from * a.front_step), a.bytes);
    } else if (from < 0 || behind >= a.world * a.each) {
      for (int64_t i = lane(); i < a.bytes; i += 32) to[i] = static_cast<char>(0xFF);
    } else {
      const int64_t i = behind % a.each - a.first;
      if (i >= 0 && i < a.rows) copy_bytes(to, at(a.parts, (behind / a.each * a.rows + i) * a.bytes), a.bytes);
    }
  }
}

const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&clear), 0},
                                {reinterpret_cast<const void*>(&copy_all), 0},
                                {reinterpret_cast<const void*>(&count_keys), 0},
                                {reinterpret_cast<const void*>(&place_parts), 0},
                                {reinterpret_cast<const void*>(&place_order), 0}};

bool captured(const Exec& exec) {
  const Launch launch("exec.stream", exec);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  // The legacy stream answers with an error while another one captures: then nothing may be waited for either.
  const cudaError_t error = cudaStreamIsCapturing(launch.stream(), &capture);
  if (error != cudaSuccess) cudaGetLastError();
  return error != cudaSuccess || capture != cudaStreamCaptureStatusNone;
}

void copy(void* to, const void* from, size_t bytes, const Exec& exec) {
  const Launch launch("copy", exec);
  if (bytes > 0) TOPKEY_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, launch.stream()));
  TOPKEY_CUDA_CHECK(cudaStreamSynchronize(launch.stream()));
}

void clear_rows(const Tensor& t, int64_t rows, const Exec& exec) {
  if (t.data == nullptr || rows == 0) return;
  const Launch launch("clear_rows", exec);
  clear<<<launch.blocks(rows, 4), kThreads, 0, launch.stream()>>>(t, rows);
  TOPKEY_CUDA_LAUNCHED("clear_rows");
}

uint32_t blocks_for(const Launch& launch, int64_t rows) { return launch.blocks((rows + kWarps - 1) / kWarps, 8); }

void copy_rows(const RowCopy& a, const Exec& exec) {
  if (a.rows == 0) return;
  const Launch launch("copy_rows", exec);
  copy_all<<<blocks_for(launch, a.rows), kThreads, 0, launch.stream()>>>(a);
  TOPKEY_CUDA_LAUNCHED("copy_rows");
}

void count_owned(const OwnedKeys& a, const Exec& exec) {
  const Launch launch("count_owned", exec);
  count_keys<<<blocks_for(launch, a.owned.shape[0]), kThreads, 0, launch.stream()>>>(a);
  TOPKEY_CUDA_LAUNCHED("count_owned");
}

void place_keys(const KeyParts& a, const Exec& exec) {
  if (a.total == 0) return;
  const Launch launch("place_keys", exec);
  place_parts<<<blocks_for(launch, a.total), kThreads, 0, launch.stream()>>>(a);
  TOPKEY_CUDA_LAUNCHED("place_keys");
}

void place_tokens(const TokenParts& a, const Exec& exec) {
  const int64_t tokens = a.order.shape[0];
  if (tokens == 0) return;
  const Launch launch("place_tokens", exec);
  place_order<<<blocks_for(launch, tokens), kThreads, 0, launch.stream()>>>(a);
  TOPKEY_CUDA_LAUNCHED("place_tokens");
}

}  // namespace

const Memory kMemory = {captured, copy, clear_rows, copy_rows, count_owned, place_keys, place_tokens};

KernelList memory_kernels() { return {kEntries, 5}; }

}  // namespace topkey::cuda
