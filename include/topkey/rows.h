// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `rows`: which query rows there are, which request each belongs to, what it may see; and the way from
// positions back to physical slots.
#pragma once
#include "topkey/format.h"
#include "topkey/types.h"

namespace topkey {

/// The R query rows and what each may see: a window [start, end) of key rows. Lengths count key rows: nothing here is
/// divided by a ratio again. A row finds its request by `request`, `q_indptr` or a uniform `next_n` (the first that
/// is given).
struct Rows {
  int64_t count;  ///< R. Padding rows: request < 0 or end <= start (both give only fill)
  /// i32 [R], or [R/next_n] with next_n: row j of b ends at end[b]-next_n+1+j. end, length absent: dense = N, paged =
  /// error
  Tensor end;
  Tensor length;    ///< i32 [R], instead of end: end = start + length
  Tensor start;     ///< i32 [R]; absent = 0. Dense keys: columns of the key matrix
  Tensor request;   ///< i32 [R], row of the tables; adjacent equal rows share key reads
  Tensor q_indptr;  ///< i32 [B+1], instead of request: rows q_indptr[b]..q_indptr[b+1]-1
  /// instead of both: next_n rows a request (0 = 1); count must be a multiple of it. Beside them: the form of `end`
  int32_t next_n;
  /// upper bound of end - start (0 = N or the table's width in keys); keys past it are not live. Time follows real
  /// lengths
  int64_t max_len;
};

/// From **device** lengths to rows, on the device, graph-safe: row r of request b (query_start[b] <= r <
/// query_start[b+1]) stands at token position p = seq_lens[b] - (query_start[b+1] - query_start[b]) + r -
/// query_start[b] and sees (p + 1) / ratio key rows, of which a shard's rank sees its own part. A token that
/// completes a key row ((p + 1) % ratio == 0) and is owned gets the slot of that key row: c = p / ratio, made local
/// under the shard, through the request's block table; else -1. A completed key row without a page gets -1, is
/// counted, and raises under strict. More query rows than tokens: length 0, position -1 for the first of them. Rows
/// of no request: request -1, length 0, position -1, slot -1. Cost: one pass over capacity rows.
struct ExpandRows {
  uint32_t struct_size;
  Tensor query_start;  ///< i32 [B+1], ascending from 0
  Tensor seq_lens;     ///< i32 [B], tokens of each request, this step's included
  int32_t ratio;       ///< tokens a key row (0 = 1)
  Shard shard;
  Tensor block_table;  ///< i32 [B,pages], for slots
  int32_t page_size;   ///< key rows a page, for slots
  int64_t capacity;    ///< rows to write; rows past it are dropped
  Tensor row_request;  ///< i32 [capacity]   (each output optional)
  Tensor lens;         ///< i32 [capacity], key rows this rank lets the row see
  Tensor positions;    ///< i32|i64 [capacity], token positions
  Tensor slots;        ///< i32|i64 [capacity], where the row's key goes: slot_mapping of store_k
};
TOPKEY_OP(expand_rows, ExpandRows)

/// Positions to physical slots: block_table[request, p / page_size] * page_size + p % page_size, with p made local
/// under a shard; -1 for a negative position or one another rank owns; -1, counted and raised under strict, for a
/// request or column outside the table, a negative page id, or a slot past int32.
struct ToSlots {
  uint32_t struct_size;
  Tensor indices;      ///< i32 [R,K] positions (global under a shard), -1 = none
  Tensor row_request;  ///< i32 [R]; absent: row r is request r
  Tensor block_table;  ///< i32 [B,pages]
  int32_t page_size;
  Shard shard;
  bool compact;   ///< move valid slots to the front of the row, order kept
  Tensor slots;   ///< i32 [R,>=K]
  Tensor counts;  ///< i32 [R] valid slots; optional
};
TOPKEY_OP(to_slots, ToSlots)

}  // namespace topkey
