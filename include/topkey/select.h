// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `select`: the k best of given scores, exactly, under one order: forced keys first, then score descending,
// then position ascending; -0 equals +0; every NaN alike and below -inf. The answer is the first min(topk, live) keys
// in that order. A key is *visible* inside its row's window, *admitted* if candidates and mask let it, *live* if also
// readable.
#pragma once
#include "topkey/rows.h"
#include "topkey/types.h"

namespace topkey {

/// Narrows the visible keys; a key not admitted is never returned.
struct Admit {
  Tensor candidates;  ///< i32 [R,C] block ids counted from the row's start; any order, repeats and wild ids ignored
  int32_t candidate_block_size;  ///< keys a block
  Tensor mask;  ///< dense keys and given scores: b8 [R,N] (0 hides), or f32|f16 [R,N] added to scores, -inf hides
  int32_t force_first,
      force_last;  ///< so many first and last visible keys (of the window, live or not) win before any other, if live
};

/// Selection on given scores. Where a row's live keys fit topk no score decides anything: they count as scored only
/// if scores, score order or blocks are asked for.
struct Topk {
  uint32_t struct_size;
  Tensor scores;    ///< f32|bf16|f16 [R,N], unit
  Tensor row_topk;  ///< i32 [R], each row's own count, clamped to 0..topk; absent = topk
  Rows rows;
  Admit admit;
  int32_t topk;
  Selection out;
};
TOPKEY_OP(topk, Topk)

/// Best blocks of given scores: a block's score is that of its best live key; a row's newest block is always among
/// them; ties to the lower block; other blocks without a live key never; ascending ids, unused = -1. Blocks count
/// from the row's start.
struct SelectBlocks {
  uint32_t struct_size;
  Tensor scores;  ///< f32|bf16|f16 [R,N], unit
  Rows rows;
  int32_t block_size;
  Tensor blocks;  ///< i32 [R,C]
};
TOPKEY_OP(select_blocks, SelectBlocks)

}  // namespace topkey
