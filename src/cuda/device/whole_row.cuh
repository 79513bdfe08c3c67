// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A row of which every live key is wanted and no score: its answer is its positions, but for those whose page does not
// exist. No key is read.
#pragma once
#include <cstdint>

namespace topkey::cuda {

/// One row of a search over pages of a power of two of keys.
struct WholeRow {
  const int32_t* pages;
  int32_t* out;
  int32_t n;  ///< keys; 0 or less: none
  int32_t page_shift, num_pages, columns, fill;

  __device__ __forceinline__ bool absent(int32_t page) const {
    return static_cast<uint32_t>(page) >= static_cast<uint32_t>(num_pages);
  }
};

/// By one warp: where pages are missing.
static __device__ __noinline__ void answer_live_keys(WholeRow row) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  int32_t used = 0;
#pragma unroll 1
  for (int32_t base = 0; base < row.n; base += 32) {
    const int32_t j = base + lane;
    const bool live = j < row.n && !row.absent(__ldg(row.pages + (j >> row.page_shift)));
    const uint32_t lanes = __ballot_sync(~0u, live);
    if (live) row.out[used + __popc(lanes & ((1u << lane) - 1))] = j;
    used += __popc(lanes);
  }
#pragma unroll 1
  for (int32_t j = used + lane; j < row.columns; j += 32) row.out[j] = row.fill;
}

/// By `threads` threads, of which this is number `thread`: whole warps.
__device__ __forceinline__ void answer_whole_row(const WholeRow& row, uint32_t thread, uint32_t threads) {
  bool absent = false;
#pragma unroll 1
  for (int32_t p = static_cast<int32_t>(thread % 32); p << row.page_shift < row.n; p += 32)
    absent |= row.absent(__ldg(row.pages + p));
  if (__any_sync(~0u, absent)) {
    if (thread < 32) answer_live_keys(row);
    return;
  }
#pragma unroll 1
  for (int32_t j = static_cast<int32_t>(thread); j < row.columns; j += static_cast<int32_t>(threads))
    row.out[j] = j < row.n ? j : row.fill;
}

}  // namespace topkey::cuda
