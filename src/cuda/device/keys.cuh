// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Where a row's keys lie, dense or paged, and which of them can be read: the one place of this backend that does page
// arithmetic. Byte offsets are 64-bit.
#pragma once
#include "cuda/device/pages.cuh"
#include "cuda/device/rows.cuh"

namespace topkey::cuda {

/// Dense or paged keys behind one face; made on the host by source_of (keys.h). Positions [0, count) exist.
struct KeySource {
  KeyFormat format;
  bool paged, table_per_row;
  bool words;  ///< values may be read 4 bytes at a time
  int32_t head_dim, page_size;
  int64_t count, num_pages, page_stride;
  const uint8_t *values, *scales;  ///< of key 0, or of page 0
  int64_t value_step, scale_step;  ///< bytes from one key to the next
  PageLayout layout;               ///< of tiled pages; tile 0 for all others
  Tensor block_table;
};

/// Bytes of one key row; null values = it cannot be read.
struct KeyBytes {
  const uint8_t *values, *scale;
};

/// The keys' own table row for a query row; -1: a padding row, -2: a wild request id.
__device__ inline int32_t table_row_of(const KeySource& k, int64_t row, int64_t request) {
  if (request < 0) return -1;
  if (!k.paged) return 0;
  if (k.table_per_row) return static_cast<int32_t>(row);
  return request < k.block_table.shape[0] ? static_cast<int32_t>(request) : -2;
}
/// Page of a position inside [0, count), or -1.
__device__ __forceinline__ int64_t page_of(const KeySource& k, int32_t table_row, int64_t position) {
  const int64_t page =
      *element<int32_t>(k.block_table, table_row, static_cast<uint32_t>(position) / static_cast<uint32_t>(k.page_size));
  return page < 0 || page >= k.num_pages ? -1 : page;
}
__device__ __forceinline__ KeyBytes find_key(const KeySource& k, int32_t table_row, int64_t position) {
  if (!k.paged) return {k.values + position * k.value_step, k.scales + position * k.scale_step};
  const int64_t page = page_of(k, table_row, position);
  if (page < 0) return {nullptr, nullptr};
  const int64_t base = page * k.page_stride;
  const uint32_t row = static_cast<uint32_t>(position) % static_cast<uint32_t>(k.page_size);
  if (k.layout.tile > 0) {
    return {k.values + base + value_start(k.layout, row), k.values + base + scale_start(k.layout, row)};
  }
  return {k.values + base + row * k.value_step, k.scales + base + row * k.scale_step};
}

}  // namespace topkey::cuda
