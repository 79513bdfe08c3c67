// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The names of every argument in a trace: one line each, read by one visitor and written by another (call.cpp). Tensors
// are named as in docs/formats.md, numbers stand in the metadata. What C++ and Python pass as an object (norm, rope,
// shard, slot_map) keeps its name before a dot; what they pass flat is flat. Outputs are not here: they follow from the
// inputs.
#pragma once
#include <initializer_list>

#include "topkey/topkey.h"

namespace topkey::support {

using Names = std::initializer_list<const char*>;
inline constexpr Names kFormatNames = {"fp8", "mxfp4", "bf16", "f16", "f32", "q8_0", "fp8_fnuz"};
inline constexpr Names kLayoutNames = {"planar", "interleaved", "tiled16", "tiled32", "tiled64"};
inline constexpr Names kOrderNames = {"position", "score", "any"};
inline constexpr Names kFillNames = {"minus_one", "repeat", "value"};
inline constexpr Names kNormNames = {"none", "layer", "rms"};
inline constexpr Names kScaleNames = {"ue8m0", "f32"};
inline constexpr Names kRuleNames = {"automatic",   "v32_key",   "v32_query", "v4_query", "v4_key",
                                     "kpool_query", "kpool_key", "cpu_query", "mxfp4",    "q8_0"};

template <class Io>
void fields(Io& io, Query& q) {
  io("q", q.values);
  io("q_scale", q.scales);
  io("weights", q.weights);
}
template <class Io>
void fields(Io& io, DenseKeys& keys) {
  io("keys", keys.values);
  io("key_scale", keys.scales);
  io("format", keys.format, kFormatNames);
}
template <class Io>
void fields(Io& io, KeyCache& cache) {
  io("cache", cache.pages);
  io("format", cache.format, kFormatNames);
  io("layout", cache.layout, kLayoutNames);
  io("page_size", cache.page_size);
  io("head_dim", cache.head_dim);
}
template <class Io>
void fields(Io& io, Shard& shard) {
  io("shard.rank", shard.rank);
  io("shard.world_size", shard.world_size);
  io("shard.interleave", shard.interleave);
}
template <class Io>
void fields(Io& io, PagedKeys& keys) {
  fields(io, keys.cache);
  fields(io, keys.shard);
  io("block_table", keys.block_table);
  io("table_per_row", keys.table_per_row);
}
template <class Io>
void fields(Io& io, Rows& rows) {
  io("count", rows.count);
  io("ends", rows.end);
  io("lens", rows.length);
  io("starts", rows.start);
  io("row_request", rows.request);
  io("q_indptr", rows.q_indptr);
  io("next_n", rows.next_n);
  io("max_len", rows.max_len);
}
template <class Io>
void fields(Io& io, Admit& admit) {
  io("candidates", admit.candidates);
  io("candidate_block", admit.candidate_block_size);
  io("mask", admit.mask);
  io("force_first", admit.force_first);
  io("force_last", admit.force_last);
}
template <class Io>
void fields(Io& io, Selection& out) {
  io("block_size", out.block_size);
  io("index_base", out.index_base);
  io("slot_map.block_table", out.slot_map.block_table);
  io("slot_map.table_per_row", out.slot_map.table_per_row);
  io("slot_map.page_size", out.slot_map.page_size);
  io("order", out.order, kOrderNames);
  io("fill", out.fill, kFillNames);
  io("fill_value", out.fill_value);
}
template <class Io>
void fields(Io& io, Norm& norm) {
  io("norm.kind", norm.kind, kNormNames);
  io("norm.weight", norm.weight);
  io("norm.bias", norm.bias);
  io("norm.eps", norm.eps);
}
template <class Io>
void fields(Io& io, Rope& rope) {
  io("positions", rope.positions);
  io("rope.cos_sin", rope.cos_sin);
  io("rope.dim", rope.dim);
  io("rope.interleaved", rope.interleaved);
  io("rope.trailing", rope.trailing);
}

template <class Io>
void fields(Io& io, ExpandRows& a) {
  io("query_start", a.query_start);
  io("seq_lens", a.seq_lens);
  io("ratio", a.ratio);
  fields(io, a.shard);
  io("block_table", a.block_table);
  io("page_size", a.page_size);
  io("capacity", a.capacity);
}
template <class Io>
void fields(Io& io, ToSlots& a) {
  io("indices", a.indices);
  io("row_request", a.row_request);
  io("block_table", a.block_table);
  io("page_size", a.page_size);
  fields(io, a.shard);
  io("compact", a.compact);
}
template <class Io>
void fields(Io& io, QuantizeQ& a) {
  io("q", a.q);
  io("weights", a.weights);
  io("softmax_scale", a.softmax_scale);
  io("head_scale", a.head_scale);
  io("rule", a.rule, kRuleNames);
  fields(io, a.rope);
  io("hadamard", a.hadamard);
  io("format", a.format, kFormatNames);
}
template <class Io>
void fields(Io& io, QuantizeK& a) {
  io("k", a.k);
  fields(io, a.norm);
  fields(io, a.rope);
  io("hadamard", a.hadamard);
  io("scale", a.scale, kScaleNames);
  io("rule", a.rule, kRuleNames);
  io("format", a.out.format, kFormatNames);
}
template <class Io>
void fields(Io& io, StoreK& a) {
  io("k", a.k);
  io("k_scales", a.k_scales);
  fields(io, a.norm);
  fields(io, a.rope);
  io("hadamard", a.hadamard);
  io("scale", a.scale, kScaleNames);
  io("rule", a.rule, kRuleNames);
  io("slot_mapping", a.slot_mapping);
  fields(io, a.cache);
}
template <class Io>
void fields(Io& io, GatherK& a) {
  fields(io, a.keys);
  io("indptr", a.indptr);
  io("total", a.total);
}
template <class Io>
void fields(Io& io, MqaLogits& a) {
  fields(io, a.q);
  fields(io, a.keys);
  fields(io, a.rows);
  io("mask", a.mask);
  io("clean", a.clean);
}
template <class Io>
void fields(Io& io, PagedMqaLogits& a) {
  fields(io, a.q);
  fields(io, a.keys);
  fields(io, a.rows);
  io("clean", a.clean);
}
template <class Io>
void fields(Io& io, Topk& a) {
  io("scores", a.scores);
  io("row_topk", a.row_topk);
  fields(io, a.rows);
  fields(io, a.admit);
  io("topk", a.topk);
  fields(io, a.out);
}
template <class Io>
void fields(Io& io, SelectBlocks& a) {
  io("scores", a.scores);
  fields(io, a.rows);
  io("block_size", a.block_size);
}
template <class Io>
void fields(Io& io, MqaTopk& a) {
  fields(io, a.q);
  fields(io, a.keys);
  fields(io, a.rows);
  fields(io, a.admit);
  io("topk", a.topk);
  fields(io, a.out);
}
template <class Io>
void fields(Io& io, PagedMqaTopk& a) {
  fields(io, a.q);
  fields(io, a.keys);
  fields(io, a.rows);
  fields(io, a.admit);
  io("topk", a.topk);
  fields(io, a.out);
  io("whole_start", a.whole_start);
  io("whole_end", a.whole_end);
}
template <class Io>
void fields(Io& io, MergeTopk& a) {
  io("scores", a.scores);
  io("indices", a.indices);
  io("topk", a.topk);
  fields(io, a.rows);
  fields(io, a.out);
  io("force_first", a.force_first);
  io("force_last", a.force_last);
  io("block_scores", a.block_scores);
  io("block_ids", a.block_ids);
}
template <class Io>
void fields(Io& io, PoolK& a) {
  io("k", a.k);
  io("gate", a.gate);
  io("ape", a.ape);
  io("positions", a.positions);
  io("q_indptr", a.q_indptr);
  io("slot_mapping", a.slot_mapping);
  io("tail", a.tail);
  io("tail_slots", a.tail_slots);
  io("pool_size", a.pool_size);
  io("scale", a.scale, kScaleNames);
  fields(io, a.cache);
  io("row_request", a.request);
  io("next_n", a.next_n);
}
template <class Io>
void fields(Io& io, CompressK& a) {
  io("kv", a.kv);
  io("score", a.score);
  io("ape", a.ape);
  io("positions", a.positions);
  io("state", a.state);
  io("state_slots", a.state_slots);
  io("query_start", a.query_start);
  io("rms_weight", a.rms_weight);
  io("eps", a.eps);
  io("cos_sin", a.cos_sin);
  io("slot_mapping", a.slot_mapping);
  fields(io, a.cache);
  io("rule", a.rule, kRuleNames);
  io("state_table", a.state_table);
}
template <class Io>
void fields(Io& io, ExpandPools& a) {
  io("pools", a.pools);
  fields(io, a.rows);
  io("pool_size", a.pool_size);
  fields(io, a.out);
  io("positions", a.positions);
}

}  // namespace topkey::support
