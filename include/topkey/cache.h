// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `cache`: keys into the paged cache and out of it again. Any page size, any page stride that is a multiple of
// 4 bytes.
#pragma once
#include "topkey/format.h"
#include "topkey/quantize.h"
#include "topkey/types.h"

namespace topkey {

/// Norm, rope, Hadamard, quantise, scatter: one pass. Or scatter of ready codes (k in the cache's own codes, k_scales
/// given where the format has scales). Row t goes to slot_mapping[t] = page * page_size + offset; a negative slot is
/// not written and its row not looked at; a slot outside the cache is not written and counted. Equal slots in one
/// call: one of the rows, whole. Inf and NaN as in QuantizeK. k and the cache must not overlap.
struct StoreK {
  uint32_t struct_size;
  Tensor k;         ///< f32|bf16|f16 [>=T,D]; ready codes: as DenseKeys.values of cache.format; unit
  Tensor k_scales;  ///< ready codes only: as DenseKeys.scales
  Norm norm;
  Rope rope;  ///< positions [>=T]
  bool hadamard;
  ScaleRule scale;
  QuantRule rule;
  Tensor slot_mapping;  ///< i32|i64 [T]
  KeyCache cache;
};
TOPKEY_OP(store_k, StoreK)

/// Pages to flat rows: out row i of request b (indptr[b] <= i < indptr[b+1]) = key row i - indptr[b] of b; rows from
/// indptr[B] on are untouched. A key that cannot be read (page id outside the cache, position beyond the table)
/// becomes a NaN key, never zeros, and is counted. Under a shard the rows are this rank's own, in local order.
struct GatherK {
  uint32_t struct_size;
  PagedKeys keys;  ///< block_table per request
  Tensor indptr;   ///< i32 [B+1], ascending from 0
  /// host upper bound of indptr[B]; more than out has rows raises. Rows past it are not written, and are counted
  int64_t total;
  DenseKeys out;  ///< [>=total,...] in the cache's format
};
TOPKEY_OP(gather_k, GatherK)

}  // namespace topkey
