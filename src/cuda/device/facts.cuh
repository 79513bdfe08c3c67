// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What is known of a row before any of its keys is scored (made by look.cu, read by score and select), and the keys it
// looks at: index i of [0, n) stands for one reachable, admitted position, ascending. Without candidates that is low + i;
// with them the row's kept block ids are walked. Under a shard positions are this rank's own, and blocks and forced keys
// count from where the row begins in the whole request.
#pragma once
#include "cuda/device/rows.cuh"
#include "topkey/select.h"

namespace topkey::cuda {

struct RowFact {
  int64_t start, end;          ///< window
  int32_t request, table_row;  ///< table_row < 0: no key of the row can be found
  int32_t low, high;           ///< reachable positions
  uint32_t n;                  ///< keys looked at
  uint32_t live;               ///< those of them that are admitted and readable
  uint32_t blocks;             ///< candidate blocks kept
  uint32_t lead;               ///< keys of the first kept block that are not reachable; under a shard: see position_of
  uint32_t topk;
  int32_t scored;  ///< 0: all live keys are wanted and no score is
  Shard shard;
  int64_t whole_start, whole_end;  ///< the window in the whole request; without a shard the same window
};

__device__ __forceinline__ bool sharded(const RowFact& f) { return f.shard.world_size > 1; }
/// How far a position is from the start of the whole window, and the first position of that distance or more.
__device__ __forceinline__ int64_t distance_of(const RowFact& f, int64_t position) {
  return global_of(f.shard, position) - f.whole_start;
}
__device__ __forceinline__ int64_t position_at(const RowFact& f, int64_t distance) {
  const int64_t global = f.whole_start + distance;
  return sharded(f) ? local_length(f.shard, global < 0 ? 0 : global) : global;
}

struct BlockSpan {
  int64_t first, last;
};
/// The visible positions of candidate block `id`; first >= last: none.
__device__ inline BlockSpan block_span(const RowFact& f, int64_t block_size, int64_t id) {
  const int64_t first = position_at(f, id * block_size), last = position_at(f, (id + 1) * block_size);
  return {first > f.start ? first : f.start, last < f.end ? last : f.end};
}

/// Position of index i of a row. ids: the row's kept candidate blocks, null = none given. Under a shard a block has as many
/// keys as this rank owns of it: ids[lead + b] are the keys before kept block b.
__device__ __forceinline__ int64_t position_of(const RowFact& f, const int32_t* ids, uint32_t block_size, uint32_t i) {
  if (ids == nullptr) return int64_t{f.low} + i;
  if (sharded(f)) {
    const int32_t* before = ids + f.lead;
    uint32_t block = 0, end = f.blocks;
    while (end - block > 1) {
      const uint32_t middle = (block + end) / 2;
      if (static_cast<uint32_t>(before[middle]) <= i) {
        block = middle;
      } else {
        end = middle;
      }
    }
    const int64_t first = block_span(f, block_size, ids[block]).first;
    return (first > f.low ? first : f.low) + (i - before[block]);
  }
  const uint64_t at = uint64_t{i} + f.lead;
  return f.start + int64_t{ids[at / block_size]} * block_size + static_cast<int64_t>(at % block_size);
}

/// True if the mask hides the column; else *addend is what it adds to the score (0 for b8, and without a mask).
__device__ inline bool masked(const Tensor& mask, int64_t row, int64_t column, float* addend) {
  *addend = 0.0f;
  if (mask.data == nullptr) return false;
  if (mask.dtype == DType::b8) return *element<uint8_t>(mask, row, column) == 0;
  *addend = real(mask, row, column);
  return __float_as_uint(*addend) == 0xFF800000u;
}

}  // namespace topkey::cuda
