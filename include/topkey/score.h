// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `score`: scores as a matrix, for callers who want it. The product is `search`, which never forms it.
// fp8: S[m,n] = (sum_h weights[m,h] * max(0, sum_d q[m,h,d] * k[n,d])) * kscale[n]; other formats likewise without
// the outer scale. Each backend's arithmetic is named, fixed and bounded (docs/numerics.md).
#pragma once
#include "topkey/format.h"
#include "topkey/rows.h"
#include "topkey/types.h"

namespace topkey {

struct Query {
  /// fp8 keys: f8_e4m3fn|u8 [R,H,D]; fp8_fnuz: u8 [R,H,D]; mxfp4: u8 [R,H,D/2]; other keys: f32|bf16|f16 [R,H,D]; unit
  Tensor values;
  Tensor scales;   ///< mxfp4 only: u8|e8m0 [R,H,D/32] or i32 [R,H]
  Tensor weights;  ///< f32|bf16 [R,H]; D^-0.5, H^-0.5 and the fp8 q scale folded in
};

/// Dense keys [N,...]: logits f32|bf16 [R,>=N], unit; column n = key n. Only columns inside [start, end) are written,
/// unless `clean`: then -inf outside it in all N columns. A visible key that is not live gets -inf. mask as in Admit.
/// bf16 logits are the f32 score rounded to nearest even. Logits must not overlap inputs. Cost: one read of the keys,
/// 2*R*N*H*D FLOP, R*N written.
struct MqaLogits {
  uint32_t struct_size;
  Query q;
  DenseKeys keys;
  Rows rows;
  Tensor mask;
  bool clean;
  Tensor logits;
};
TOPKEY_OP(mqa_logits, MqaLogits)

/// Paged keys: column = position in the request (local under a shard); logits [R, >= max_len], where max_len absent =
/// the table's width in keys; with rows.start it must be [R, >= the table's width in keys]. clean: -inf outside the
/// window in all columns below max_len.
struct PagedMqaLogits {
  uint32_t struct_size;
  Query q;
  PagedKeys keys;
  Rows rows;
  bool clean;
  Tensor logits;
};
TOPKEY_OP(paged_mqa_logits, PagedMqaLogits)

}  // namespace topkey
