// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What the collectives and a sharded step of the layer want.
#include "indexer.h"
#include "shard.h"
#include "validate.h"
#include "validate_parts.h"

namespace topkey {

void validate_communicator(const char* op, const char* name, const topkey_communicator* comm) {
  const Check c(op, Mode::call);
  TOPKEY_REQUIRE(c, comm != nullptr, name, "a communicator", "null");
  const size_t size = comm->struct_size == 0 ? sizeof *comm : comm->struct_size;
  TOPKEY_REQUIRE(c, size >= sizeof *comm, name, "a struct of this library's version", "an older one");
  const std::string prefix = std::string(name) + ".";
  c.number((prefix + "size").c_str(), comm->size, 1, 1 << 20);
  c.number((prefix + "rank").c_str(), comm->rank, 0, comm->size - 1);
  TOPKEY_REQUIRE(c, comm->all_gather != nullptr && comm->all_gatherv != nullptr, name,
                 "filled with all_gather and all_gatherv", "a null function");
}

namespace {

void check_sizes(const Check& c, const int64_t* sizes, int32_t ranks, int64_t rows) {
  TOPKEY_REQUIRE(c, sizes != nullptr, "row_shard_sizes", "rows of each rank", "null");
  int64_t sum = 0;
  for (int32_t r = 0; r < ranks; ++r) {
    c.number("row_shard_sizes", sizes[r], 0, rows - sum);
    sum += sizes[r];
  }
}

/// The rank of a cut is that of its communicator.
void check_place(const Check& c, const char* name, int32_t rank, int32_t size, const topkey_communicator& comm) {
  TOPKEY_REQUIRE(c, size == comm.size && rank == comm.rank, name,
                 "rank " + std::to_string(comm.rank) + " of " + std::to_string(comm.size) + " as the communicator says",
                 "rank " + std::to_string(rank) + " of " + std::to_string(size));
}

}  // namespace

void validate(const ExchangeRows& a, const topkey_communicator* comm) {
  const Check c("exchange_rows", Mode::call);
  const DTypes all = kFloats | kInts | kE4m3 | kE8m0 | set_of({DType::b8});
  if (a.buffer.ndim == 1) {
    c.tensor("buffer", a.buffer, all, {any()}, kOutput);
  } else {
    c.tensor("buffer", a.buffer, all, {any(), at_least(1)}, kUnit | kOutput);
    c.number("width", a.width, 1, a.buffer.shape[1]);
  }
  c.number("first_row", a.first_row, 0, a.buffer.shape[0]);
  check_sizes(c, a.row_shard_sizes, comm->size, a.buffer.shape[0] - a.first_row);
}

void validate_sharded(const GatherK& a, const topkey_communicator* comm) {
  const Check c("gather_k_sharded", Mode::call);
  validate(a, Mode::call);
  if (a.keys.shard.active()) check_place(c, "keys.shard", a.keys.shard.rank, a.keys.shard.world_size, *comm);
}

void validate(const ShardSpec& spec, const char* op) {
  const Check c(op, Mode::call);
  check_shard(c, spec.context);
  c.number("row_shards", spec.row_shards, 0, 1 << 20);
  c.number("row_rank", spec.row_rank, 0, spec.row_shards > 1 ? spec.row_shards - 1 : 0);
  c.number("prefill_size", spec.prefill_size, 0, 1 << 20);
  c.number("prefill_rank", spec.prefill_rank, 0, spec.prefill_size > 1 ? spec.prefill_size - 1 : 0);
  if (spec.row_shards <= 1) return;
  // Row shards want every key on every rank and the same rows there.
  TOPKEY_REQUIRE(c, !spec.context.active(), "row_shards", "0 with a context shard", std::to_string(spec.row_shards));
  TOPKEY_REQUIRE(c, spec.prefill_size <= 1, "row_shards", "0 with prefill ranks", std::to_string(spec.row_shards));
}

namespace {

/// Rows are answered in parts: each must say for itself what it sees and which request it belongs to. Only where all are
/// answered alike may the latter follow from next_n, for then parts of whole requests do.
void check_rows(const Check& c, const shard::Step& s) {
  const Rows& rows = s.step.rows;
  const Extent r = at_least(rows.count);
  const bool alike = s.spec.row_shards <= 1 && s.spec.prefill_size <= 1;
  if (!c.tensor("rows.request", rows.request, kI32, {r}, alike ? unsigned{kOptional} : 0u)) {
    const Tensor& table = s.step.keys.block_table;
    TOPKEY_REQUIRE(c, s.step.keys.table_per_row || table.shape[0] >= rows.count / std::max(rows.next_n, 1),
                   "rows.request", "given, or block_table have a row for each next_n rows", describe(table));
  }
  c.absent("rows.q_indptr", rows.q_indptr, "in a sharded step (give rows.request)");
  TOPKEY_REQUIRE(c, !c.has(rows.end) || rows.end.shape[0] >= rows.count, "rows.end",
                 "i32 [" + std::to_string(rows.count) + "] in a sharded step", describe(rows.end));
}

void check_context(const Check& c, const shard::Step& s) {
  const Shard &spec = s.spec.context, &keys = s.step.keys.shard;
  validate_communicator(c.op(), "comm", s.in.comm);
  check_place(c, "context", spec.rank, spec.world_size, *s.in.comm);
  TOPKEY_REQUIRE(c, keys.rank == spec.rank && keys.world_size == spec.world_size && keys.run() == spec.run(),
                 "keys.shard", "the context of the spec",
                 "rank " + std::to_string(keys.rank) + " of " + std::to_string(keys.world_size) + ", interleave " +
                     std::to_string(keys.run()));
  const Extent r = at_least(s.step.rows.count);
  const bool start = c.tensor("whole_start", s.in.whole_start, kI32, {r}, kOptional);
  TOPKEY_REQUIRE(c, start || !c.has(s.step.rows.start), "whole_start", "given beside rows.start",
                 describe(s.in.whole_start));
  if (s.spec.prefill_size <= 1) return;
  c.absent("whole_start", s.in.whole_start, "with prefill ranks");
  c.absent("rows.start", s.step.rows.start, "with prefill ranks");
  c.tensor("whole_end", s.in.whole_end, kI32, {r}, 0);
  c.tensor("key_indptr", s.in.key_indptr, kI32, {at_least(1)}, 0);
  c.number("total_keys", s.in.total_keys, 0, kMaxKeys);
  c.tensor("gathered_start", s.in.gathered_start, kI32, {r}, 0);
  TOPKEY_REQUIRE(c, s.in.gathered.format == s.config.format, "gathered.format",
                 std::string("the configured ") + format_name(s.config.format), format_name(s.in.gathered.format));
  TOPKEY_REQUIRE(c, !s.step.keys.table_per_row, "keys.table_per_row", "false with prefill and context ranks", "true");
}

/// Rows that are not of prefill on every rank, then as many more as every other rank has; and where tokens lie there.
void check_prefill_tokens(const Check& c, const shard::Step& s) {
  if (!layer::stores_pools(c, s.step)) return;
  const int64_t own = s.spec.shard_decode ? 0 : s.step.num_decode_rows, dim = s.config.head_dim;
  c.tensor("k", s.step.k, set_of({DType::bf16}), {at_least(own), exactly(dim)}, kUnit);
  c.tensor("gate", s.step.gate, set_of({DType::bf16}), {at_least(s.step.k.shape[0]), exactly(dim)}, kUnit);
  c.tensor("slot_mapping", s.step.slot_mapping, kInts, {any()}, 0);
  const Extent tokens = at_least(s.step.slot_mapping.shape[0]);
  c.tensor("token_order", s.in.token_order, kI32, {tokens}, 0);
  c.tensor("token_positions", s.in.token_positions, kInts, {tokens}, 0);
  c.tensor("token_request", s.in.token_request, kI32, {tokens}, 0);
}

/// Slots (and positions) of this rank's decode keys, then of every rank's prefill keys, rank after rank.
void check_prefill_keys(const Check& c, const shard::Step& s) {
  if (s.pools) return check_prefill_tokens(c, s);
  if (!c.has(s.step.k)) return;
  const int64_t own = s.spec.shard_decode ? 0 : s.step.num_decode_rows, ranks = s.spec.prefill_size;
  c.tensor("slot_mapping", s.step.slot_mapping, kInts, {at_least(own)}, 0);
  const int64_t slots = s.step.slot_mapping.shape[0];
  TOPKEY_REQUIRE(c, (slots - own) % ranks == 0, "slot_mapping",
                 std::to_string(own) + " decode rows and as many more of each of " + std::to_string(ranks) + " ranks",
                 describe(s.step.slot_mapping));
  const int64_t keys = own + (slots - own) / ranks;
  TOPKEY_REQUIRE(c, s.step.k.shape[0] >= keys, "k", "at least " + std::to_string(keys) + " rows", describe(s.step.k));
  if (c.has(s.step.k_scales)) {
    TOPKEY_REQUIRE(c, s.step.k_scales.shape[0] >= keys, "k_scales", "at least " + std::to_string(keys) + " rows",
                   describe(s.step.k_scales));
  }
  if (s.step.rope.dim == 0) return;
  c.tensor("rope.positions", s.step.rope.positions, kInts, {at_least(slots)}, 0);
}

/// What the configuration says of any step of its layer.
void check_layer(const Check& c, const shard::Step& s) {
  if (!s.pools) {
    layer::check(s.config);
    return layer::check_step(c, s.config, s.step);
  }
  layer::check_kpool(s.config);
  layer::check_kpool_step(c, s.config, s.step);
  c.absent("whole_start", s.in.whole_start, "in the k-pool layer");
}

/// All stages of the k-pool layer, the last one first, for it knows the width of the buffer.
void check_pools(const Check& c, const shard::Step& s) {
  PagedMqaTopk search = layer::pool_search(c, s.config, s.step);
  search.whole_end = s.in.whole_end;
  validate(layer::expand_args(c, s.config, s.step), Mode::call);
  validate(search, Mode::call);
  if (!layer::stores_pools(c, s.step)) return;
  PoolK pool = layer::pool_args(s.config, s.step);
  if (s.orders_tokens()) {
    // As it is called on what has been gathered: of that only the shape is known here.
    const int64_t tokens = s.step.slot_mapping.shape[0], dim = s.config.head_dim;
    pool.k = tensor(s.step.k.data, DType::bf16, {tokens, dim});
    pool.gate = tensor(s.step.gate.data, DType::bf16, {tokens, dim});
    pool.positions = s.in.token_positions, pool.request = s.in.token_request;
    pool.q_indptr = Tensor{};
  }
  validate(pool, Mode::call);
}

}  // namespace

void validate(const shard::Step& s, const Exec& exec) {
  const char* op = s.op();
  const Check c(op, Mode::call);
  if (s.step.skip_step) return;
  validate_exec(op, exec);
  TOPKEY_REQUIRE(c, exec.team == nullptr, "exec.team", "absent in a sharded step", "a team");
  validate(s.spec, op);
  // Also where no cut uses one: ranks agree over whatever is given.
  if (s.in.comm != nullptr) validate_communicator(op, "comm", s.in.comm);
  if (s.in.prefill_comm != nullptr) validate_communicator(op, "prefill_comm", s.in.prefill_comm);
  check_layer(c, s);
  const bool context = s.spec.context.active();
  if (context || s.spec.row_shards > 1) check_rows(c, s);
  if (context) check_context(c, s);
  if (!context) {
    TOPKEY_REQUIRE(c, !s.step.keys.shard.active(), "keys.shard", "the context of the spec (none)", "a shard");
  }
  if (s.spec.row_shards > 1) {
    validate_communicator(op, "comm", s.in.comm);
    check_place(c, "row_rank", s.spec.row_rank, s.spec.row_shards, *s.in.comm);
    const int64_t rows = s.step.rows.count - s.step.num_decode_rows;
    check_sizes(c, s.in.row_shard_sizes, s.spec.row_shards, rows);
    int64_t sum = 0;
    for (int32_t r = 0; r < s.spec.row_shards; ++r) sum += s.in.row_shard_sizes[r];
    TOPKEY_REQUIRE(c, sum == rows, "row_shard_sizes", "all " + std::to_string(rows) + " prefill rows",
                   std::to_string(sum));
  }
  if (s.spec.prefill_size > 1 || s.orders_tokens()) {
    validate_communicator(op, "prefill_comm", s.in.prefill_comm);
    check_place(c, "prefill_rank", s.spec.prefill_rank, s.spec.prefill_size, *s.in.prefill_comm);
    check_prefill_keys(c, s);
  }
  if (s.pools) check_pools(c, s);
}

}  // namespace topkey
