// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `rows`: which query rows there are, which request each belongs to, what it may see; in what form answers are
// given; and the way from positions back to physical slots, from pools back to tokens.
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

/// Order of the valid entries. position: ascending. score: the order of the selection itself, so that the answer for
/// a smaller topk is a prefix. any: the same set in whatever order the backend has it; no faster so far, so all
/// backends give position.
enum class Order : int32_t { position, score, any };
/// Unused trailing slots: -1, the row's first entry again (-1 where there is none), or fill_value. Scores there are
/// -inf.
enum class Fill : int32_t { minus_one, repeat, value };

/// The block table of the cache that the attention reads, which may differ from the key cache's.
struct SlotMap {
  Tensor block_table;  ///< i32 [B,pages]
  bool table_per_row;  ///< one row a query row
  int32_t page_size;
};

/// Outputs, each optional but indices or slots; all written in one pass, row strides free. Columns beyond topk and
/// rows beyond rows.count are not touched.
struct Selection {
  Tensor indices;  ///< i32 [R,>=topk] position - start + index_base[r]; global position under a shard
  Tensor slots;    ///< i32 [R,>=topk] page * page_size + offset by slot_map, same order; -1 where the map has no page.
      /// < Paged keys: of the key's (local) position; dense keys, given scores: of position - start; merge: of the
      /// index.
  ///< A request beyond the map gives -1, counted; the row's indices stay
  Tensor scores;       ///< f32 [R,>=topk], same order, canonical; -inf in unused slots. Short rows are then scored too
  Tensor counts;       ///< i32 [R] entries used
  Tensor blocks;       ///< i32 [R,C]: also publish the best C candidate blocks: ascending ids, -1 unused
  int32_t block_size;  ///< keys a published block
  Tensor index_base;   ///< i32 [R]; absent = 0
  SlotMap slot_map;
  Order order;
  Fill fill;
  int32_t fill_value;
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

/// Pool ids to token positions, with the open pool appended: columns [0, K * pool_size) hold the tokens of the pools,
/// column c = pools[c / pool_size] * pool_size + c % pool_size; the next pool_size - 1 columns hold the tokens of the
/// pool that is not complete yet, which no key row stands for: visible / pool_size * pool_size + o for o < visible %
/// pool_size. Columns without a token (a negative id, a complete pool) get the fill, wherever they stand. A row sees
/// rows.end (or length) tokens, or positions[r] + 1; with neither given only the K * pool_size columns are written. A
/// pool that the row cannot see in whole gives fill, is counted, and raises under strict. Fill-only rows as everywhere.
/// out.order and rows.start must be 0; scores and blocks absent. slot_map translates the position. `pools` may be the
/// first columns of out.indices or of out.slots (the same address and row stride). Cost: one pass over the output.
struct ExpandPools {
  uint32_t struct_size;
  Tensor pools;  ///< i32 [R,K] pool ids in any order, -1 = none
  Rows rows;     ///< request for slots; lengths count tokens
  int32_t pool_size;
  Selection out;     ///< [R,>=K * pool_size + pool_size - 1]; counts = columns that hold a token
  Tensor positions;  ///< i32|i64 [R], instead of rows.end; < 0: fill only
};
TOPKEY_OP(expand_pools, ExpandPools)

}  // namespace topkey
