// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Checks of the structs that operations share (keys, queries, rows, norm, rope, ...), for validate_*.cpp alone.
#pragma once
#include "backend_table.h"
#include "check.h"

namespace topkey {

constexpr int64_t kMaxDim = 65536;  // head_dim and heads: far past any model, small enough that products stay in range
constexpr int64_t kMaxTopk = kMaxKeys;

void check_format(const Check& c, const char* name, KeyFormat format);
void check_dim(const Check& c, const char* name, KeyFormat format, int64_t head_dim);
/// values and scales [>=rows or exactly rows, ...]; head_dim < 0: taken from values. Returns head_dim.
struct DenseNames {
  const char *values, *scales;
};
int64_t check_dense(const Check& c, DenseNames names, const DenseKeys& keys, Extent rows, int64_t head_dim,
                    unsigned flags);
/// Dtypes of queries that meet keys of `format`.
DTypes query_dtypes(KeyFormat format);
/// Scales of mxfp4 queries, u8|e8m0 [R,H,D/32] or i32 [R,H]; absent for others.
struct QueryExtents {
  Extent rows;
  int64_t heads, head_dim;
};
void check_query_scales(const Check& c, const char* name, const Tensor& scales, KeyFormat format,
                        const QueryExtents& extents, unsigned flags);
void check_cache(const Check& c, const KeyCache& cache);
/// Of an operation on a cache: format, head_dim, tiles.
Shape cache_shape(const KeyCache& cache, int64_t rows);
void check_shard(const Check& c, const Shard& shard);
void check_block_table(const Check& c, const char* name, const Tensor& table, int64_t at_least_rows);
void check_rope(const Check& c, const Rope& rope, int64_t rows, int64_t head_dim);
void check_norm(const Check& c, const Norm& norm, int64_t head_dim);
void check_hadamard(const Check& c, bool hadamard, int64_t head_dim);
/// rule and scale must suit the format and the side (query or key).
void check_rule(const Check& c, QuantRule rule, ScaleRule scale, KeyFormat format, bool query);

struct RowFacts {
  int64_t count;
  int64_t requests;  ///< rows a request table must have, where the host knows; else 0
};
/// default_end: dense operations have one (N), paged ones need end or length.
RowFacts check_rows(const Check& c, const Rows& rows, bool has_default_end);
/// Outputs of at least `topk` columns.
void check_selection(const Check& c, const Selection& out, const RowFacts& rows, int64_t topk, bool has_blocks);

}  // namespace topkey
