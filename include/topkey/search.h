// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `search`, the product: score and select in one pass, no logits matrix, bit-equal to mqa_logits + topk of the
// same backend. Prefill rows and decode rows are the same thing here. The same arguments give the same bits on every
// call, batch, thread count and stream. Keys that are not live because of a wild value are counted (exec.stats) and
// never returned; strict raises instead.
#pragma once
#include "topkey/score.h"
#include "topkey/select.h"
#include "topkey/types.h"

namespace topkey {

/// Dense keys. Cost: one read of the keys a request, 2*R*N*H*D FLOP; with candidates only admitted keys are read and
/// scored.
struct MqaTopk {
  uint32_t struct_size;
  Query q;
  DenseKeys keys;
  Rows rows;
  Admit admit;
  int32_t topk;
  Selection out;
};
TOPKEY_OP(mqa_topk, MqaTopk)

/// Straight from pages: key position p of request b lies in page block_table[b, p / page_size], row p % page_size.
/// Under a shard the windows count this rank's keys and indices are global positions (no start is subtracted: a merge
/// does that). Candidates, blocks and forced keys speak of the row's window in the whole request, which whole_start
/// and whole_end give.
struct PagedMqaTopk {
  uint32_t struct_size;
  Query q;
  PagedKeys keys;
  Rows rows;
  Admit admit;
  int32_t topk;
  Selection out;
  /// Under a shard only: i32 [R] the row's window in global key rows. whole_start absent = 0; needed beside rows.start
  /// where candidates, blocks or force_first are given. whole_end: needed for blocks and force_last
  Tensor whole_start, whole_end;
  /// f32 [R,C], under a shard and with out.blocks: the score of each published block on this rank, canonical; NaN for a
  /// block without a live key here, -inf where unused. What merge_topk wants of each rank
  Tensor block_scores;
};
TOPKEY_OP(paged_mqa_topk, PagedMqaTopk)

}  // namespace topkey
