// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What each query-side operation wants: score, select, search, merge. The producers' side is in validate_producers.cpp.
#include "validate.h"

#include <algorithm>
#include <array>
#include <span>

#include "validate_parts.h"

namespace topkey {
namespace {

std::array<Check::Named, 5> outputs_of(const Selection& out) {
  return {{{"out.indices", &out.indices},
           {"out.slots", &out.slots},
           {"out.scores", &out.scores},
           {"out.counts", &out.counts},
           {"out.blocks", &out.blocks}}};
}

void check_enum(const Check& c, const char* name, int32_t value, int32_t last) { c.number(name, value, 0, last); }

/// q.values, scales, weights for keys of `format` and head_dim. Returns heads.
int64_t check_query(const Check& c, const Query& q, KeyFormat format, int64_t head_dim, int64_t count) {
  const Extent rows = at_least(count);
  const int64_t width = format == KeyFormat::mxfp4 ? head_dim / 2 : head_dim;
  c.tensor("q.values", q.values, query_dtypes(format), {rows, at_least(1), exactly(width)}, kUnit);
  const int64_t heads = q.values.shape[1];
  c.number("q.values heads", heads, 1, kMaxDim);
  check_query_scales(c, "q.scales", q.scales, format, {rows, heads, head_dim}, 0);
  c.tensor("q.weights", q.weights, kWeights, {rows, exactly(heads)}, kUnit);
  return heads;
}

bool check_mask(const Check& c, const char* name, const Tensor& mask, int64_t rows, int64_t keys) {
  return c.tensor(name, mask, set_of({DType::b8, DType::f32, DType::f16}), {at_least(rows), at_least(keys)},
                  kUnit | kOptional);
}

/// keys: columns of a mask; < 0: paged keys, which take none.
void check_admit(const Check& c, const Admit& admit, int64_t rows, int64_t keys) {
  if (c.tensor("admit.candidates", admit.candidates, kI32, {at_least(rows), any()}, kUnit | kOptional)) {
    c.number("admit.candidate_block_size", admit.candidate_block_size, 1, kMaxKeys);
  }
  if (keys < 0) {
    c.absent("admit.mask", admit.mask, "for paged keys");
  } else {
    check_mask(c, "admit.mask", admit.mask, rows, keys);
  }
  c.number("admit.force_first", admit.force_first, 0, kMaxKeys);
  c.number("admit.force_last", admit.force_last, 0, kMaxKeys);
}

}  // namespace

void check_selection(const Check& c, const Selection& out, const RowFacts& rows, int64_t topk, bool block_size) {
  const Extent r = at_least(rows.count), k = at_least(topk);
  const bool indices = c.tensor("out.indices", out.indices, kI32, {r, k}, kUnit | kOptional | kOutput);
  const bool slots = c.tensor("out.slots", out.slots, kI32, {r, k}, kUnit | kOptional | kOutput);
  TOPKEY_REQUIRE(c, indices || slots, "out.indices", "given (or out.slots)", describe(out.indices));
  c.tensor("out.scores", out.scores, kF32, {r, k}, kUnit | kOptional | kOutput);
  c.tensor("out.counts", out.counts, kI32, {r}, kOptional | kOutput);
  c.tensor("out.index_base", out.index_base, kI32, {r}, kOptional);
  if (c.tensor("out.blocks", out.blocks, kI32, {r, at_least(1)}, kUnit | kOptional | kOutput) && block_size) {
    c.number("out.block_size", out.block_size, 1, kMaxKeys);
  }
  if (slots) {
    check_block_table(c, "out.slot_map.block_table", out.slot_map.block_table,
                      out.slot_map.table_per_row ? rows.count : rows.requests);
    c.number("out.slot_map.page_size", out.slot_map.page_size, 1, kMaxKeys);
  } else {
    c.absent("out.slot_map.block_table", out.slot_map.block_table, "without out.slots");
  }
  const auto named = outputs_of(out);
  for (size_t i = 0; i < named.size(); ++i) c.apart(rows.count, named[i], std::span(named).first(i));
  check_enum(c, "out.order", static_cast<int32_t>(out.order), 2);
  check_enum(c, "out.fill", static_cast<int32_t>(out.fill), 2);
}

namespace {

int64_t check_paged(const Check& c, const PagedKeys& keys, const RowFacts& rows) {
  check_cache(c, keys.cache);
  check_shard(c, keys.shard);
  check_block_table(c, "keys.block_table", keys.block_table, keys.table_per_row ? rows.count : rows.requests);
  const int64_t width = keys.block_table.shape[1];
  return width > kMaxKeys / keys.cache.page_size ? kMaxKeys : width * keys.cache.page_size;
}

/// Block ids and forced keys speak of the whole request, of which this rank's window says too little.
void check_sharded(const Check& c, const PagedMqaTopk& a) {
  const Extent r = at_least(a.rows.count);
  if (!a.keys.shard.active()) {
    c.absent("whole_start", a.whole_start, "without a shard");
    c.absent("whole_end", a.whole_end, "without a shard");
    return;
  }
  const bool start = c.tensor("whole_start", a.whole_start, kI32, {r}, kOptional);
  const bool end = c.tensor("whole_end", a.whole_end, kI32, {r}, kOptional);
  const bool from_start = c.has(a.admit.candidates) || c.has(a.out.blocks) || a.admit.force_first > 0;
  TOPKEY_REQUIRE(c, start || !from_start || !c.has(a.rows.start), "whole_start",
                 "given under a shard beside rows.start with candidates, blocks or force_first",
                 describe(a.whole_start));
  TOPKEY_REQUIRE(c, end || (!c.has(a.out.blocks) && a.admit.force_last == 0), "whole_end",
                 "given under a shard with blocks or force_last", describe(a.whole_end));
  // Of a request's drafts each sees another part of the whole, not one key of this rank more than the one before.
  const bool per_request = c.has(a.rows.end) && a.rows.end.shape[0] != a.rows.count;
  TOPKEY_REQUIRE(c, !per_request, "rows.end", "i32 [" + std::to_string(a.rows.count) + "] under a shard",
                 describe(a.rows.end));
}

void check_block_scores(const Check& c, const PagedMqaTopk& a) {
  if (!c.has(a.out.blocks)) {
    c.absent("block_scores", a.block_scores, "without out.blocks");
    return;
  }
  c.tensor("block_scores", a.block_scores, kF32, {at_least(a.rows.count), at_least(a.out.blocks.shape[1])},
           kUnit | kOptional | kOutput);
  c.apart(a.rows.count, {"block_scores", &a.block_scores}, outputs_of(a.out));
}

int64_t bounded(int64_t keys, const Rows& rows) {
  return rows.max_len > 0 && rows.max_len < keys ? rows.max_len : keys;
}

int64_t check_scores(const Check& c, const Tensor& scores, const Rows& rows) {
  c.tensor("scores", scores, kFloats, {at_least(rows.count), any()}, kUnit);
  c.number("scores columns", scores.shape[1], 0, kMaxKeys);
  return scores.shape[1];
}

Shape scored_shape(const Query& q, KeyFormat format, int64_t rows, int64_t keys, int64_t heads, int64_t head_dim) {
  Shape s{};
  s.format = format;
  s.scored = true;
  s.q_dtype = q.values.dtype;
  s.rows = rows;
  s.keys = keys;
  s.heads = heads;
  s.head_dim = head_dim;
  s.candidates = -1;
  return s;
}

int64_t dense_count(const Check& c, const DenseKeys& keys, int64_t* head_dim) {
  check_format(c, "keys.format", keys.format);
  *head_dim = check_dense(c, {"keys.values", "keys.scales"}, keys, any(), -1, 0);
  const int64_t n = keys.values.shape[0];
  if (c.has(keys.scales))
    TOPKEY_REQUIRE(c, keys.scales.shape[0] >= n, "keys.scales", "a row for each key", describe(keys.scales));
  c.number("keys.values rows", n, 0, kMaxKeys);
  return n;
}

}  // namespace

Shape validate(const MqaLogits& a, Mode mode) {
  const Check c("mqa_logits", mode);
  int64_t head_dim = 0;
  const int64_t n = dense_count(c, a.keys, &head_dim);
  const RowFacts rows = check_rows(c, a.rows, true);
  const int64_t heads = check_query(c, a.q, a.keys.format, head_dim, rows.count);
  check_mask(c, "mask", a.mask, rows.count, n);
  c.tensor("logits", a.logits, kWeights, {at_least(rows.count), at_least(n)}, kUnit | kOutput);
  return scored_shape(a.q, a.keys.format, rows.count, bounded(n, a.rows), heads, head_dim);
}

Shape validate(const PagedMqaLogits& a, Mode mode) {
  const Check c("paged_mqa_logits", mode);
  const RowFacts rows = check_rows(c, a.rows, false);
  const int64_t width = check_paged(c, a.keys, rows);
  // A column is a position: with a start of its own a row may reach past max_len columns.
  const int64_t keys = c.has(a.rows.start) ? width : bounded(width, a.rows);
  const int64_t heads = check_query(c, a.q, a.keys.cache.format, a.keys.cache.head_dim, rows.count);
  c.tensor("logits", a.logits, kWeights, {at_least(rows.count), at_least(keys)}, kUnit | kOutput);
  Shape s = scored_shape(a.q, a.keys.cache.format, rows.count, keys, heads, a.keys.cache.head_dim);
  s.tiled = tile_rows(a.keys.cache.layout) > 0;
  return s;
}

Shape validate(const Topk& a, Mode mode) {
  const Check c("topk", mode);
  c.number("topk", a.topk, 1, kMaxTopk);
  const RowFacts rows = check_rows(c, a.rows, true);
  const int64_t n = check_scores(c, a.scores, a.rows);
  c.tensor("row_topk", a.row_topk, kI32, {at_least(rows.count)}, kOptional);
  check_admit(c, a.admit, rows.count, n);
  check_selection(c, a.out, rows, a.topk, true);
  Shape s{};
  s.rows = rows.count;
  s.keys = bounded(n, a.rows);
  s.topk = a.topk;
  s.blocks = c.has(a.out.blocks) ? a.out.blocks.shape[1] : 0;
  s.candidates = c.has(a.admit.candidates) ? a.admit.candidates.shape[1] : -1;
  return s;
}

Shape validate(const SelectBlocks& a, Mode mode) {
  const Check c("select_blocks", mode);
  const RowFacts rows = check_rows(c, a.rows, true);
  const int64_t n = check_scores(c, a.scores, a.rows);
  c.number("block_size", a.block_size, 1, kMaxKeys);
  c.tensor("blocks", a.blocks, kI32, {at_least(rows.count), at_least(1)}, kUnit | kOutput);
  Shape s{};
  s.rows = rows.count;
  s.keys = bounded(n, a.rows);
  s.blocks = a.blocks.shape[1];
  s.candidates = -1;
  return s;
}

Shape validate(const MqaTopk& a, Mode mode) {
  const Check c("mqa_topk", mode);
  c.number("topk", a.topk, 1, kMaxTopk);
  int64_t head_dim = 0;
  const int64_t n = dense_count(c, a.keys, &head_dim);
  const RowFacts rows = check_rows(c, a.rows, true);
  const int64_t heads = check_query(c, a.q, a.keys.format, head_dim, rows.count);
  check_admit(c, a.admit, rows.count, n);
  check_selection(c, a.out, rows, a.topk, true);
  Shape s = scored_shape(a.q, a.keys.format, rows.count, bounded(n, a.rows), heads, head_dim);
  s.topk = a.topk;
  s.blocks = c.has(a.out.blocks) ? a.out.blocks.shape[1] : 0;
  s.candidates = c.has(a.admit.candidates) ? a.admit.candidates.shape[1] : -1;
  return s;
}

Shape validate(const PagedMqaTopk& a, Mode mode) {
  const Check c("paged_mqa_topk", mode);
  c.number("topk", a.topk, 1, kMaxTopk);
  const RowFacts rows = check_rows(c, a.rows, false);
  const int64_t keys = bounded(check_paged(c, a.keys, rows), a.rows);
  check_sharded(c, a);
  const int64_t heads = check_query(c, a.q, a.keys.cache.format, a.keys.cache.head_dim, rows.count);
  check_admit(c, a.admit, rows.count, -1);
  check_selection(c, a.out, rows, a.topk, true);
  check_block_scores(c, a);
  Shape s = scored_shape(a.q, a.keys.cache.format, rows.count, keys, heads, a.keys.cache.head_dim);
  s.tiled = tile_rows(a.keys.cache.layout) > 0;
  s.topk = a.topk;
  s.blocks = c.has(a.out.blocks) ? a.out.blocks.shape[1] : 0;
  s.candidates = c.has(a.admit.candidates) ? a.admit.candidates.shape[1] : -1;
  s.whole = a.keys.shard.active() && (c.has(a.rows.start) || c.has(a.admit.candidates) || c.has(a.out.blocks) ||
                                      a.admit.force_first > 0 || a.admit.force_last > 0);
  return s;
}

Shape validate(const MergeTopk& a, Mode mode) {
  const Check c("merge_topk", mode);
  c.number("topk", a.topk, 1, kMaxTopk);
  const RowFacts rows = check_rows(c, a.rows, true);
  c.tensor("scores", a.scores, kF32, {any(), at_least(rows.count), any()}, kUnit);
  const Tensor& s = a.scores;
  c.tensor("indices", a.indices, kI32, {exactly(s.shape[0]), at_least(rows.count), exactly(s.shape[2])}, kUnit);
  check_selection(c, a.out, rows, a.topk, false);
  c.number("force_first", a.force_first, 0, kMaxKeys);
  c.number("force_last", a.force_last, 0, kMaxKeys);
  TOPKEY_REQUIRE(c, a.force_last == 0 || c.has(a.rows.end) || c.has(a.rows.length), "rows.end",
                 "given (or rows.length) with force_last", describe(a.rows.end));
  Shape shape{};
  shape.rows = rows.count;
  shape.keys = s.shape[0] * s.shape[2];
  shape.topk = a.topk;
  shape.whole = c.has(a.rows.start) || c.has(a.out.blocks) || a.force_first > 0 || a.force_last > 0;
  if (!c.has(a.out.blocks)) {
    c.absent("block_ids", a.block_ids, "without out.blocks");
    c.absent("block_scores", a.block_scores, "without out.blocks");
    return shape;
  }
  const Extent blocks = at_least(a.out.blocks.shape[1]);
  c.tensor("block_ids", a.block_ids, kI32, {any(), at_least(rows.count), blocks}, kUnit);
  const Tensor& ids = a.block_ids;
  c.tensor("block_scores", a.block_scores, kF32, {exactly(ids.shape[0]), at_least(rows.count), exactly(ids.shape[2])},
           kUnit);
  shape.blocks = a.out.blocks.shape[1];
  shape.keys = std::max(shape.keys, ids.shape[0] * ids.shape[2]);
  return shape;
}

}  // namespace topkey
