// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What the kernels of plain decode calls are told (plain_decode.h), in few words: such a call takes microseconds, and each
// parameter that is read, each instruction in a row of dependent ones, can be seen in them.
#pragma once
#include "cuda/device/rows.cuh"
#include "cuda/device/whole_row.cuh"

namespace topkey::cuda {

struct PlainDecode {
  const uint8_t* q;           ///< e4m3 [rows, heads, 128]
  const float* weights;       ///< [rows, heads]
  const int32_t* ends;        ///< [rows], or of each request's newest row, if ends_n > 1
  const int32_t* table;       ///< page ids [rows / table_n, ...]
  const uint8_t* scales;      ///< of page 0
  int32_t* out;               ///< [rows, columns]
  float* scores;              ///< of the winners, or null
  const int32_t* whole_ends;  ///< [rows] of a cut over ranks, or null: what is past them is not live
  int64_t q_row, q_head, w_row, table_row, page_stride, out_row, scores_row;
  int32_t rows, heads, topk, columns, max_len, num_pages, page_shift, fill;
  int32_t ends_n, table_n;  ///< rows of one end, and of one row of the table
  int32_t whole;            ///< rows of so many keys at most are wanted whole, and no score of theirs
  Shard shard;              ///< positions become global under it
  uint32_t blocks;          ///< that share a row (decode_short_sm90.cu)
};

/// Where row r ends, before any limit; negative or 0: nowhere.
__device__ __forceinline__ int32_t end_of_row(const PlainDecode& job, int32_t r) {
  if (job.whole_ends != nullptr) {
    const int64_t whole = local_length(job.shard, max(__ldg(job.whole_ends + r), 0));
    return static_cast<int32_t>(min(static_cast<long long>(__ldg(job.ends + r)), static_cast<long long>(whole)));
  }
  if (job.ends_n <= 1) return __ldg(job.ends + r);
  const int32_t request = r / job.ends_n, newest = __ldg(job.ends + request);
  return max(newest, 0) - job.ends_n + 1 + (r - request * job.ends_n);
}
__device__ __forceinline__ const int32_t* pages_of_row(const PlainDecode& job, int32_t r) {
  return job.table + (job.table_n > 1 ? r / job.table_n : r) * job.table_row;
}

/// Row r, of n <= job.whole keys; see answer_whole_row.
__device__ __forceinline__ void answer_whole_row(const PlainDecode& job, int32_t r, int32_t n, uint32_t thread,
                                                 uint32_t threads) {
  int32_t* out = job.out + r * job.out_row;
  answer_whole_row({pages_of_row(job, r), out, n, job.page_shift, job.num_pages, job.columns, job.fill}, thread,
                   threads);
}

}  // namespace topkey::cuda
