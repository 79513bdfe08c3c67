// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `merge`: per-part selections (shards, chunks) to the selection of the whole. Exact, since a winner of the
// whole is a winner of its part: equal, bit for bit, to selecting on the whole, for any partition of the keys.
#pragma once
#include "topkey/select.h"
#include "topkey/types.h"

namespace topkey {

/// scores f32 and indices i32 [W,R,K] as an all-gather leaves them: global positions, each in one part only, -1 =
/// unused. The merged order is that of stage select. rows gives count (R), each row's request (< 0: fill only; slots
/// need it), and the row's window in the whole where it is asked for: start is subtracted from the indices as in a
/// search (slots are those of the position itself), force_first counts from it, force_last from end. Other windows are
/// not looked at. out.index_base is added.
///
/// Published blocks merge in the same call: out.blocks [R,C'] are the best of block_scores and block_ids [W,R,C], as
/// paged_mqa_topk publishes them under a shard. A block counts with the best score that any part gives it; the highest
/// id of a row is its newest block and always among them. Each part's C must be at least C'.
struct MergeTopk {
  uint32_t struct_size;
  Tensor scores, indices;
  int32_t topk;
  Rows rows;
  Selection out;
  int32_t force_first, force_last;  ///< of the window in rows: rows.end must be given for force_last
  Tensor block_scores, block_ids;   ///< f32 and i32 [W,R,C], with out.blocks
};
TOPKEY_OP(merge_topk, MergeTopk)

}  // namespace topkey
