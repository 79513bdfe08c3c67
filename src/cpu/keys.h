// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Where keys are, dense or paged: the one place of this backend that does page arithmetic. Readable keys come in
// chunks, runs of equally spaced rows (a page, or all of a dense matrix).
#pragma once
#include <algorithm>
#include <cstdint>

#include "topkey/topkey.h"

namespace topkey::cpu {

struct Source {
  KeyFormat format;
  int64_t head_dim;
  int64_t count;  ///< positions [0, count) exist: N, or the table's width in keys
  const uint8_t* values;
  const uint8_t* scales;
  int64_t value_step, scale_step;  ///< bytes from key to key inside a chunk; 0 in tiled pages
  // paged only
  bool paged, table_per_row;
  Tensor block_table;
  int64_t pages, page_stride, page_size, scale_base;
  PageLayout layout;

  bool tiled() const { return paged && layout.tile > 0; }
};
Source make_source(const DenseKeys& dense);
Source make_source(const PagedKeys& paged);

/// The table row of a query row; -1: padding; -2: a wild request id.
inline int64_t table_row_of(const Source& s, int64_t row, int64_t request) {
  if (request < 0) return -1;
  if (!s.paged) return 0;
  if (s.table_per_row) return row;
  return request < s.block_table.shape[0] ? request : -2;
}

struct Chunk {
  int64_t first, count;  ///< positions
  const uint8_t* values;
  const uint8_t* scales;  ///< null where the format has none of its own
  int64_t row;            ///< in its page
};
// In tiled pages rows do not lie whole: values and scales of a chunk are then the page, to be read by read_row.

/// Calls f(Chunk) for the readable keys of [first, last), ascending; returns how many were not readable. 0 <= first,
/// last <= count.
template <class F>
int64_t for_each_chunk(const Source& s, int64_t table_row, int64_t first, int64_t last, F&& f) {
  if (first >= last) return 0;
  if (!s.paged) {
    f(Chunk{first, last - first, s.values + first * s.value_step,
            s.scales == nullptr ? nullptr : s.scales + first * s.scale_step, first});
    return 0;
  }
  const int32_t* table = static_cast<const int32_t*>(s.block_table.data) + table_row * s.block_table.stride[0];
  int64_t unreadable = 0, column = first / s.page_size, offset = first - column * s.page_size;
  for (int64_t at = first; at < last; ++column, offset = 0) {
    const int64_t n = std::min(s.page_size - offset, last - at);
    const int64_t page = table[column * s.block_table.stride[1]];
    if (page >= 0 && page < s.pages) {
      const uint8_t* base = s.values + page * s.page_stride;
      f(Chunk{at, n, base + offset * s.value_step,
              s.scale_base < 0 ? nullptr : base + s.scale_base + offset * s.scale_step, offset});
    } else {
      unreadable += n;
    }
    at += n;
  }
  return unreadable;
}

}  // namespace topkey::cpu
