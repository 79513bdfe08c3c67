// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A step of either layer on one of several ranks: its arguments by name (fields.h).
#pragma once
#include "support/call_fields.h"
#include "topkey/topkey.h"

namespace topkey::python {

/// What of it follows from other parts (heads, head_dim, format, where this rank stands) is filled in at the call.
struct RankArgs {
  IndexerConfig config;
  IndexerStep step;
  ShardSpec spec;
  ShardStep shard;
};

inline constexpr support::Names kRoleNames = {"none", "source", "consumer"};

template <class Io>
void rank_fields(Io& io, RankArgs& a) {
  io("topk", a.config.topk);
  io("ratio", a.config.ratio);
  io("pool_size", a.config.pool_size);
  io("scale", a.config.scale, support::kScaleNames);
  io("role", a.config.role, kRoleNames);
  io("candidate_block_size", a.config.candidate_block_size);
  io("candidate_ratio", a.config.candidate_ratio);
  support::fields(io, a.step.q);
  io("k", a.step.k);
  io("gate", a.step.gate);
  io("ape", a.step.ape);
  io("positions", a.step.positions);
  io("slot_mapping", a.step.slot_mapping);
  io("tail_slots", a.step.tail_slots);
  io("block_table", a.step.keys.block_table);
  io("table_per_row", a.step.keys.table_per_row);
  support::fields(io, a.step.rows);
  io("num_decode_rows", a.step.num_decode_rows);
  io("cleared", a.step.cleared);
  support::fields(io, a.spec.context);
  io("shard_decode", a.spec.shard_decode);
  io("whole_end", a.shard.whole_end);
  io("key_indptr", a.shard.key_indptr);
  io("total_keys", a.shard.total_keys);
  io("gathered_start", a.shard.gathered_start);
  io("token_order", a.shard.token_order);
  io("token_positions", a.shard.token_positions);
  io("token_request", a.shard.token_request);
  support::fields(io, a.step.keys.cache);
}

template <class Io>
void rank_output_fields(Io& io, RankArgs& a) {
  io("cache", a.step.keys.cache.pages);
  io("tail", a.step.tail);
  io("indices", a.step.out.indices);
  io("candidates", a.step.candidates);  // of a consumer read only
  io("gathered", a.shard.gathered.values);
  io("gathered_scales", a.shard.gathered.scales);
}

}  // namespace topkey::python
