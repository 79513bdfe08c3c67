// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `merge`: per-part selections (shards, chunks) to the selection of the whole. Exact, since a winner of the
// whole is a winner of its part: equal, bit for bit, to selecting on the whole, for any partition of the keys.
#pragma once
#include "topkey/select.h"
#include "topkey/types.h"

namespace topkey {

/// scores f32 and indices i32 [W,R,K] as an all-gather leaves them: global positions, each in one part only, -1 =
/// unused. The merged order is that of stage select without forced keys. rows gives count (R) and, for slots, each
/// row's request; its windows are not used; a row with request < 0 gets fill. out.blocks must be absent;
/// out.index_base is added.
struct MergeTopk {
  uint32_t struct_size;
  Tensor scores, indices;
  int32_t topk;
  Rows rows;
  Selection out;
};
TOPKEY_OP(merge_topk, MergeTopk)

}  // namespace topkey
