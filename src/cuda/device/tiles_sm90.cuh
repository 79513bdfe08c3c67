// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Codes from memory into the tiles that the tensor core reads (dot_sm90.cuh): a chunk of 16 codes, a row of queries.
#pragma once
#include <algorithm>

#include "cuda/device/dot_sm90.cuh"
#include "cuda/device/keys.cuh"
#include "topkey/score.h"

namespace topkey::cuda {

/// Heads of a product: those of the call, padded with heads of weight 0.
__host__ __device__ constexpr int padded_heads(int heads) { return heads <= 32 ? 32 : heads <= 64 ? 64 : 128; }

__device__ __forceinline__ uint8_t* align_tile(uint8_t* memory) {
  return memory + (kCodeAlignment - shared_address(memory) % kCodeAlignment) % kCodeAlignment;
}

/// 16 codes to shared memory, zeros if not `present`. alignment: of `from`, 16 or 4, else bytes are read one by one. Done
/// behind the copies' wait and a barrier in any case.
__device__ __forceinline__ void copy_chunk(uint8_t* to, const uint8_t* from, bool present, int alignment) {
  const uint32_t at = shared_address(to);
  if (alignment == 16) {
    copy_16(at, from, present ? 16 : 0);
  } else if (alignment == 4) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) copy_4(at + i, from + (present ? i : 0), present ? 4 : 0);
  } else {
    for (int i = 0; i < 16; ++i) to[i] = present ? from[i] : 0;
  }
}

/// The same at once: 16 codes from an address of any alignment.
__device__ __forceinline__ void move_chunk(uint8_t* to, const uint8_t* from, bool present, int alignment) {
  uint4 codes{0, 0, 0, 0};
  if (present && alignment == 16) {
    codes = __ldg(reinterpret_cast<const uint4*>(from));
  } else if (present) {
    uint32_t words[4] = {0, 0, 0, 0};
    for (int i = 0; i < 16; ++i) words[i / 4] |= static_cast<uint32_t>(from[i]) << (8 * (i % 4));
    codes = {words[0], words[1], words[2], words[3]};
  }
  *reinterpret_cast<uint4*>(to) = codes;
}

/// Half the weights of one query row.
template <int kHeads>
__device__ __forceinline__ void load_weights_of(const Query& q, int64_t row, int heads, float* half_weights, int thread,
                                                int threads) {
  for (int h = thread; h < kHeads; h += threads) half_weights[h] = h < heads ? 0.5f * real(q.weights, row, h) : 0.0f;
}

/// Codes of all heads of one query row, each chunk by `copy`, which is copy_chunk (begun only) or move_chunk.
template <int kHeads, int kDim, int kThreads, class Copy>
__device__ __forceinline__ void copy_query(const Query& q, int64_t row, int heads, uint8_t* codes, int thread,
                                           int alignment, const Copy& copy) {
  constexpr int kChunks = kDim / 16;
  const uint8_t* values = static_cast<const uint8_t*>(q.values.data) + row * q.values.stride[0];
  for (int i = thread; i < kHeads * kChunks; i += kThreads) {
    const int head = i / kChunks, chunk = i % kChunks;
    const bool present = head < heads;
    copy(codes + chunk_at(head, chunk), values + (present ? head * q.values.stride[1] + chunk * 16 : 0), present,
         alignment);
  }
}

/// Codes of all heads of one query row, and half its weights: by kThreads threads, of which this is `thread`. Behind a
/// fence_tensor_reads() of each and a barrier.
template <int kHeads, int kDim, int kThreads>
__device__ void load_query(const Query& q, int64_t row, int heads, uint8_t* codes, float* half_weights, int thread,
                           int alignment) {
  copy_query<kHeads, kDim, kThreads>(q, row, heads, codes, thread, alignment, move_chunk);
  load_weights_of<kHeads>(q, row, heads, half_weights, thread, kThreads);
}

/// The largest of 16, 4 and 1 that divides the address and the steps between rows.
inline int alignment_of(const void* data, std::initializer_list<int64_t> steps) {
  uint64_t all = reinterpret_cast<uint64_t>(data);
  for (const int64_t step : steps) all |= static_cast<uint64_t>(step);
  return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 1;
}
inline int alignment_of(const KeySource& keys) {
  return alignment_of(keys.values, {keys.value_step, keys.paged ? keys.page_stride : 0});
}
inline int alignment_of(const Query& q) {
  return alignment_of(q.values.data, {q.values.stride[0], q.values.stride[1]});
}

}  // namespace topkey::cuda
