// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The layer as a table of contents: clear the buffer, store the keys, answer the rows. Each stage is the public
// operation. And what the k-pool layer shares with it.
#include "indexer.h"

#include <algorithm>

#include "call.h"
#include "check.h"

namespace topkey::layer {
namespace {

StoreK store_args(const IndexerConfig& config, const IndexerStep& step) {
  StoreK a{};
  a.k = step.k;
  a.k_scales = step.k_scales;
  a.norm = step.norm;
  a.rope = step.rope;
  a.hadamard = step.hadamard;
  a.scale = config.scale;
  a.slot_mapping = step.slot_mapping;
  a.cache = step.keys.cache;
  return a;
}

int64_t tokens_of_key(const IndexerConfig& config) { return std::max<int64_t>({config.ratio, config.pool_size, 1}); }

/// Keys of this layer that stand for one block of its source: tokens a block, over tokens a key.
int64_t consumed_block_size(const IndexerConfig& config) {
  const int64_t own = tokens_of_key(config), source = config.candidate_ratio > 0 ? config.candidate_ratio : own;
  return source * config.candidate_block_size / own;
}

void check_candidate_ratio(const Check& c, const IndexerConfig& config) {
  c.number("candidate_ratio", config.candidate_ratio, 0, kMaxKeys);
  if (config.role != CandidateRole::consumer || config.candidate_ratio == 0) return;
  const int64_t own = tokens_of_key(config), tokens = int64_t{config.candidate_ratio} * config.candidate_block_size;
  TOPKEY_REQUIRE(
      c, tokens % own == 0 && tokens / own <= kMaxKeys, "candidate_ratio",
      "such that a source's block is a whole number of key rows of " + std::to_string(own) + " tokens",
      std::to_string(config.candidate_ratio) + " with blocks of " + std::to_string(config.candidate_block_size));
}

}  // namespace

PagedMqaTopk search_args(const IndexerConfig& config, const IndexerStep& step) {
  PagedMqaTopk a{};
  a.q = step.q;
  a.keys = step.keys;
  a.rows = step.rows;
  a.topk = config.topk;
  a.admit.force_first = config.force_first;
  a.admit.force_last = config.force_last;
  a.out = step.out;
  // A wider buffer than configured is used in its first columns only. Blocks count this layer's keys.
  Tensor candidates = step.candidates;
  candidates.shape[1] = config.candidate_topk_blocks;
  if (config.role == CandidateRole::source) {
    a.out.blocks = candidates;
    a.out.block_size = config.candidate_block_size;
  } else if (config.role == CandidateRole::consumer) {
    a.admit.candidates = candidates;
    a.admit.candidate_block_size = static_cast<int32_t>(consumed_block_size(config));
  }
  return a;
}

void check_step(const Check& c, const IndexerConfig& config, const IndexerStep& step) {
  const KeyCache& cache = step.keys.cache;
  TOPKEY_REQUIRE(c, cache.format == config.format, "keys.cache.format",
                 std::string("the configured ") + format_name(config.format), format_name(cache.format));
  TOPKEY_REQUIRE(c, cache.head_dim == config.head_dim, "keys.cache.head_dim",
                 "the configured " + std::to_string(config.head_dim), std::to_string(cache.head_dim));
  TOPKEY_REQUIRE(c, step.rows.count == 0 || step.q.values.shape[1] == config.heads, "q.values",
                 "of the configured " + std::to_string(config.heads) + " heads", describe(step.q.values));
  c.number("num_decode_rows", step.num_decode_rows, 0, step.rows.count);
  // From a request's end the rows before its last step back a token each; which key rows they see is not told by that.
  const bool together = config.ratio > 1 || config.pool_size > 1, per_row = step.rows.end.shape[0] == step.rows.count;
  TOPKEY_REQUIRE(c, !together || step.rows.next_n <= 1 || !c.has(step.rows.end) || per_row, "rows.end",
                 "i32 [rows] where a key row is several tokens", describe(step.rows.end));
  c.absent("out.blocks", step.out.blocks, "(the layer gives `candidates`)");
  if (config.role == CandidateRole::none) {
    c.absent("candidates", step.candidates, "without a candidate role");
  } else {
    c.tensor("candidates", step.candidates, kI32, {at_least(step.rows.count), at_least(config.candidate_topk_blocks)},
             kUnit);
  }
  if (!c.has(step.k)) c.absent("slot_mapping", step.slot_mapping, "without k");
}

void clear_buffers(const Check& c, const IndexerStep& step, const Exec& exec) {
  if (step.cleared) return;
  // Of a caller's team one member clears; the others wait, lest a late clear wipes an answer.
  const bool alone = exec.team == nullptr;
  if (alone || exec.team->rank == 0) {
    // All columns of the step's rows, as the engines' consumers expect of rows that no one answers.
    const Memory& memory = memory_of(c.op(), exec);
    memory.clear_rows(step.out.indices, step.rows.count, exec);
    memory.clear_rows(step.out.slots, step.rows.count, exec);
  }
  if (!alone && exec.team->size > 1) exec.team->barrier(exec.team->ctx);
}

Exec dry_run(const Exec& exec) {
  Exec dry = exec;
  dry.flags |= kCheckOnly;
  dry.stats = nullptr;
  return dry;
}

void check_config(const char* op, const IndexerConfig& config) {
  const Check c(op, Mode::call);
  c.number("heads", config.heads, 1, 65536);
  c.number("head_dim", config.head_dim, 1, 65536);
  c.number("topk", config.topk, 1, kMaxKeys);
  c.number("ratio", config.ratio, 0, kMaxKeys);
  c.number("pool_size", config.pool_size, 0, kMaxKeys);
  c.number("format", static_cast<int64_t>(config.format), 0, static_cast<int64_t>(KeyFormat::fp8_fnuz));
  c.number("scale", static_cast<int64_t>(config.scale), 0, 1);
  c.number("role", static_cast<int64_t>(config.role), 0, 2);
  c.number("force_first", config.force_first, 0, kMaxKeys);
  c.number("force_last", config.force_last, 0, kMaxKeys);
  if (config.role == CandidateRole::none) return;
  c.number("candidate_block_size", config.candidate_block_size, 1, kMaxKeys);
  c.number("candidate_topk_blocks", config.candidate_topk_blocks, 1, kMaxKeys);
  check_candidate_ratio(c, config);
}

void check(const IndexerConfig& config) {
  check_config("indexer", config);
  const Check c("indexer", Mode::call);
  c.number("pool_size", config.pool_size, 0, 0);
}

IndexerStep largest_step(const Check& c, const IndexerConfig& config, const IndexerLimits& limits) {
  c.number("max_rows", limits.max_rows, 0, kMaxKeys);
  c.number("max_requests", limits.max_requests, 0, kMaxKeys);
  c.number("max_len", limits.max_len, 0, kMaxKeys);
  c.number("max_next_n", limits.max_next_n, 0, kMaxKeys);
  const KeyFormat f = config.format;
  const int64_t rows = limits.max_rows, dim = config.head_dim;
  IndexerStep step{};
  step.keys.cache = {tensor(nullptr, DType::u8, {1, row_bytes(f, dim)}), f, Layout::planar, 1, config.head_dim};
  // As wide as a table can be: an engine's may be wider than max_len, and what is asked for hardly depends on it.
  step.keys.block_table = tensor(nullptr, DType::i32, {1, kMaxKeys});
  const bool codes = is_fp8(f) || f == KeyFormat::mxfp4;
  step.q.values =
      tensor(nullptr, codes ? DType::u8 : DType::f32, {rows, config.heads, f == KeyFormat::mxfp4 ? dim / 2 : dim});
  if (f == KeyFormat::mxfp4) step.q.scales = tensor(nullptr, DType::u8, {rows, config.heads, dim / 32});
  step.q.weights = tensor(nullptr, DType::f32, {rows, config.heads});
  step.rows.count = rows;
  step.rows.end = tensor(nullptr, DType::i32, {rows});
  step.rows.request = tensor(nullptr, DType::i32, {rows});
  // Every optional output at once: the worst that a step can ask for.
  const Tensor columns = tensor(nullptr, DType::i32, {rows, config.topk});
  step.out.indices = step.out.slots = columns;
  step.out.scores = tensor(nullptr, DType::f32, {rows, config.topk});
  step.out.slot_map = {step.keys.block_table, false, 1};
  step.candidates = tensor(nullptr, DType::i32, {rows, std::max(config.candidate_topk_blocks, 1)});
  step.slot_mapping = tensor(nullptr, DType::i64, {rows});
  return step;
}

size_t workspace_bytes(const IndexerConfig& config, const IndexerLimits& limits, const Exec& exec) {
  check(config);
  IndexerStep step = largest_step(Check("indexer_workspace_bytes", Mode::query), config, limits);
  step.k = tensor(nullptr, DType::f32, {limits.max_rows, config.head_dim});
  return std::max(paged_mqa_topk_workspace_bytes(search_args(config, step), exec),
                  store_k_workspace_bytes(store_args(config, step), exec));
}

void forward(const IndexerConfig& config, const IndexerStep& step, const Exec& exec) {
  if (step.skip_step) return;
  check(config);
  const Check c("indexer_forward", Mode::call);
  check_step(c, config, step);
  for (const Tensor* t : {&step.gate, &step.ape, &step.positions, &step.tail, &step.tail_slots}) {
    c.absent("gate, ape, positions, tail and tail_slots", *t, "but in the k-pool layer");
  }
  const PagedMqaTopk search = search_args(config, step);
  const StoreK store = store_args(config, step);
  // Both stages are checked before either writes.
  const bool stores = c.has(step.k);
  const Backend& searcher = check_call(search, exec);
  const Backend* storer = stores ? &check_call(store, exec) : nullptr;
  if (exec.strict) {
    const Exec dry = dry_run(exec);
    if (storer != nullptr) run_checked(*storer, store, dry);
    run_checked(searcher, search, dry);
  }
  clear_buffers(c, step, exec);
  if (storer != nullptr) run_checked(*storer, store, exec);
  run_checked(searcher, search, exec);
}

}  // namespace topkey::layer
