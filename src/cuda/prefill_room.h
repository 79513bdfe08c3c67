// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The workspace of the prefill kernel (prefill_sm90.cu): facts, the lists of its thread blocks, and, where blocks are
// published, the best score of each block of as many rows as fit.
#pragma once
#include <algorithm>

#include "cuda/device/prefill_job.cuh"
#include "cuda/tuning.h"
#include "cuda/workspace.h"

namespace topkey::cuda {

constexpr int64_t kPrefillBlocks = 160;  ///< SMs of any GPU of compute capability 9.0

inline int tile_rows_of(int64_t heads) { return kPrefillGroups * group_rows_of(padded_heads(static_cast<int>(heads))); }
inline int64_t tiles_of(int64_t rows, int64_t heads) {
  return (std::min(rows, kGroupRows) + tile_rows_of(heads) - 1) / tile_rows_of(heads);
}

struct PrefillRoom {
  RowFact* facts;
  uint32_t* next;
  uint2* lists;
  float* maxima;
  size_t list_bytes, bytes;
};
/// Most maxima at a time.
inline int64_t most_maxima(const Shape& shape) {
  const int64_t all = std::min(shape.rows, kGroupRows) * (shape.keys / 8 + 64);
  return shape.blocks > 0 ? std::min((all + 63) / 64 * 64, kPrefillMaxima) : 0;
}
inline PrefillRoom prefill_room(const Shape& shape, void* workspace) {
  const int64_t rows = std::min(shape.rows, kGroupRows);
  const size_t facts = (static_cast<size_t>(rows) * sizeof(RowFact) + 255) / 256 * 256;
  const int64_t blocks = std::min(tiles_of(shape.rows, shape.heads), kPrefillBlocks);
  const int64_t wanted = (blocks + 1) * tile_rows_of(shape.heads) * kListLength * kListColumns * int64_t{sizeof(uint2)};
  uint8_t* base = static_cast<uint8_t*>(workspace);
  const size_t lists = static_cast<size_t>(std::min(wanted, kPrefillListBytes - most_maxima(shape) * 4));
  return {reinterpret_cast<RowFact*>(base),
          reinterpret_cast<uint32_t*>(base + facts),
          reinterpret_cast<uint2*>(base + facts + 256),
          reinterpret_cast<float*>(base + facts + 256 + lists),
          lists,
          facts + 256 + lists + static_cast<size_t>(most_maxima(shape)) * 4};
}
/// Blocks of a row, with those that its last unit may begin.
inline int64_t maxima_step(const Shape& shape, int32_t block_size) { return (shape.keys + 63) / 64 * 64 / block_size; }
/// Rows whose maxima fit: a tile for each SM or a multiple of that, if there is room.
inline int64_t rows_with_maxima(const Shape& shape, int32_t block_size, int64_t sms) {
  const int64_t rows = tile_rows_of(shape.heads), fit = most_maxima(shape) / maxima_step(shape, block_size) / rows;
  return std::min((fit > sms ? fit / sms * sms : fit) * rows, kGroupRows);
}

}  // namespace topkey::cuda
