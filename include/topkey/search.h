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
/// Under a shard rows.start, candidates, blocks and forced keys must be absent (windows count this rank's keys,
/// outputs are global).
struct PagedMqaTopk {
  uint32_t struct_size;
  Query q;
  PagedKeys keys;
  Rows rows;
  Admit admit;
  int32_t topk;
  Selection out;
};
TOPKEY_OP(paged_mqa_topk, PagedMqaTopk)

}  // namespace topkey
