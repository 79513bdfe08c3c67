// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What a search is told of its rows, and of it a row's window and which of its positions can be reached: for every kernel
// that looks at rows.
#pragma once
#include "cuda/device/facts.cuh"
#include "cuda/device/keys.cuh"

namespace topkey::cuda {

struct LookParams {
  KeySource keys;
  Rows rows;
  Admit admit;
  Tensor row_topk;
  Shard shard;  ///< of the keys; whole_start and whole_end are read under it alone
  Tensor whole_start, whole_end;
  int32_t topk;
  int64_t width;  ///< columns that a matrix of scores has; else keys.count
  bool has_candidates;
  bool needs_scores;  ///< scored even where all live keys are wanted
  RowFact* facts;
  int32_t* ids;
  int64_t id_stride;
  uint64_t* stats;
  uint32_t* taken;  ///< a counter of the next kernel's, to be 0; or null
};

__device__ inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
__device__ inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/// The row's window, its own and in the whole request: under a shard what both of them show.
__device__ inline void set_window(const LookParams& p, int64_t row, Window& w, RowFact& f) {
  f.whole_start = w.start, f.whole_end = w.end;
  if (p.shard.world_size > 1) {
    f.shard = p.shard;
    f.whole_start = p.whole_start.data != nullptr ? integer(p.whole_start, row) : 0;
    f.whole_end = p.whole_end.data != nullptr ? integer(p.whole_end, row) : INT32_MAX;
    w.start = most(w.start, position_at(f, 0));
    if (p.whole_end.data != nullptr) w.end = least(w.end, position_at(f, f.whole_end - f.whole_start));
  }
  f.start = w.start, f.end = w.end;
}

/// Window and reach of a row; by every thread alike.
__device__ inline RowFact window_fact(const LookParams& p, int64_t row, int64_t* skipped) {
  Window w = window_of(p.rows, row, p.keys.count);
  RowFact f{};
  set_window(p, row, w, f);
  f.request = static_cast<int32_t>(w.request);
  f.table_row = table_row_of(p.keys, row, w.request);
  f.topk = static_cast<uint32_t>(p.topk);
  if (p.row_topk.data != nullptr) f.topk = static_cast<uint32_t>(least(most(integer(p.row_topk, row), 0), p.topk));
  *skipped = f.table_row == -2;
  if (f.table_row < 0 || w.end <= w.start) {
    if (f.table_row < 0) f.end = f.start, f.whole_end = f.whole_start;  // fill only, and no newest block
    return f;
  }
  const int64_t count = least(p.keys.count, p.width);
  const int64_t low = most(w.start, 0);
  int64_t high = p.rows.max_len > 0 ? least(count, w.start + p.rows.max_len) : count;
  high = most(least(w.end, high), low);
  const int64_t low_cut = least(low, high);
  if (low_cut < high) f.low = static_cast<int32_t>(low_cut), f.high = static_cast<int32_t>(high);
  f.n = static_cast<uint32_t>(f.high - f.low);
  if (!p.has_candidates) *skipped += w.end - w.start - f.n;
  return f;
}

}  // namespace topkey::cuda
