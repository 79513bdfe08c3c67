// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A query row's request and window as the caller's tensors say it, positions to slots, and the cut of keys over ranks.
// 64-bit and signed throughout: the tensors may hold anything.
#pragma once
#include "cuda/device/view.cuh"
#include "topkey/rows.h"

namespace topkey::cuda {

/// Request b with indptr[b] <= row < indptr[b+1], or -1. indptr ascends; garbage in it gives some request or none.
__device__ inline int64_t request_in(const Tensor& indptr, int64_t row) {
  int64_t low = 0, high = indptr.shape[0] - 1;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (integer(indptr, middle + 1) <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const bool inside = low + 1 < indptr.shape[0] && integer(indptr, low) <= row && row < integer(indptr, low + 1);
  return inside ? low : -1;
}

struct Window {
  int64_t request;  ///< < 0: a padding row
  int64_t start, end;
};

__device__ inline Window window_of(const Rows& rows, int64_t row, int64_t default_end) {
  const int64_t next_n = rows.next_n > 1 ? rows.next_n : 1;
  Window w;
  if (rows.request.data != nullptr) {
    w.request = integer(rows.request, row);
  } else if (rows.q_indptr.data != nullptr) {
    w.request = request_in(rows.q_indptr, row);
  } else {
    w.request = row / next_n;
  }
  w.start = rows.start.data != nullptr ? integer(rows.start, row) : 0;
  if (rows.length.data != nullptr) {
    w.end = w.start + integer(rows.length, row);
  } else if (rows.end.data == nullptr) {
    w.end = default_end;
  } else if (rows.end.shape[0] == rows.count) {
    w.end = integer(rows.end, row);
  } else {
    w.end = integer(rows.end, row / next_n) - next_n + 1 + row % next_n;
  }
  return w;
}

/// block_table[table_row, position / page_size] * page_size + offset; -1 where the table has no such row, column or
/// page, or the slot is past `last`.
__device__ inline int64_t slot_of(const Tensor& table, int64_t table_row, int64_t page_size, int64_t position,
                                  int64_t last) {
  if (position < 0 || table_row < 0 || table_row >= table.shape[0]) return -1;
  const int64_t column = position / page_size;
  if (column >= table.shape[1]) return -1;
  const int64_t page = integer(table, table_row, column);
  const int64_t slot = page * page_size + position % page_size;
  return page < 0 || slot > last ? -1 : slot;
}

__device__ inline int64_t run_of(const Shard& s) { return s.interleave > 0 ? s.interleave : 1; }
__device__ inline bool owns(const Shard& s, int64_t global) {
  return s.world_size <= 1 || global / run_of(s) % s.world_size == s.rank;
}
__device__ inline int64_t local_of(const Shard& s, int64_t global) {
  const int64_t run = run_of(s);
  return s.world_size > 1 ? global / (run * s.world_size) * run + global % run : global;
}
__device__ inline int64_t global_of(const Shard& s, int64_t local) {
  const int64_t run = run_of(s);
  return s.world_size > 1 ? local / run * (run * s.world_size) + s.rank * run + local % run : local;
}
/// How many of the first `length` key rows this rank owns.
__device__ inline int64_t local_length(const Shard& s, int64_t length) {
  if (s.world_size <= 1) return length;
  const int64_t run = run_of(s), base = length / run / s.world_size * run;
  const int64_t rest = length - base * s.world_size - s.rank * run;
  return base + (rest < 0 ? 0 : rest > run ? run : rest);
}

}  // namespace topkey::cuda
