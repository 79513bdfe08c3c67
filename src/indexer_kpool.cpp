// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The layer over k-pools as a table of contents: clear the buffer, store the pools that this step completes, find every
// row's best pools, expand them to tokens where they stand and append the open pool's. Each stage is the public
// operation.
#include <algorithm>

#include "call.h"
#include "indexer.h"

namespace topkey::layer {

int32_t pool_size_of(const IndexerConfig& config) { return std::max(config.pool_size, 1); }

bool stores_pools(const Check& c, const IndexerStep& step) {
  return c.has(step.k) && c.has(step.gate) && c.has(step.ape) && c.has(step.positions);
}

PoolK pool_args(const IndexerConfig& config, const IndexerStep& step) {
  PoolK a{};
  a.k = step.k;
  a.gate = step.gate;
  a.ape = step.ape;
  a.positions = step.positions;
  a.q_indptr = step.rows.q_indptr;
  a.request = step.rows.request;
  a.next_n = step.rows.next_n;
  a.slot_mapping = step.slot_mapping;
  a.tail = step.tail;
  a.tail_slots = step.tail_slots;
  a.pool_size = pool_size_of(config);
  a.scale = config.scale;
  a.cache = step.keys.cache;
  return a;
}

namespace {

/// Where the search leaves pools. Slots are those of tokens, so that pools stand there as indices.
Tensor pool_columns(const Check& c, const IndexerStep& step) {
  return c.has(step.out.indices) ? step.out.indices : step.out.slots;
}

}  // namespace

PagedMqaTopk pool_search(const Check& c, const IndexerConfig& config, const IndexerStep& step) {
  PagedMqaTopk a = search_args(config, step);
  a.topk = config.topk / pool_size_of(config);
  const Tensor blocks = a.out.blocks;
  const int32_t block_size = a.out.block_size;
  a.out = Selection{};
  a.out.order = step.out.order;
  a.out.indices = pool_columns(c, step);
  a.out.blocks = blocks;
  a.out.block_size = block_size;
  return a;
}

ExpandPools expand_args(const Check& c, const IndexerConfig& config, const IndexerStep& step) {
  ExpandPools a{};
  a.pools = pool_columns(c, step);
  a.pools.shape[1] = config.topk / pool_size_of(config);
  // Who the rows are; what they see is said by their positions.
  a.rows = step.rows;
  a.rows.end = a.rows.length = Tensor{};
  a.positions = step.positions;
  a.pool_size = pool_size_of(config);
  a.out = step.out;
  a.out.order = Order::position;  // pools are expanded in the order in which they stand
  return a;
}

void check_kpool_step(const Check& c, const IndexerConfig& config, const IndexerStep& step) {
  check_step(c, config, step);
  c.absent("rows.start", step.rows.start, "in the k-pool layer");
  c.absent("out.scores", step.out.scores, "in the k-pool layer (a pool's score is no token's)");
  c.absent("k_scales", step.k_scales, "in the k-pool layer");
  TOPKEY_REQUIRE(c, step.norm.kind == NormKind::none && step.rope.dim == 0 && !step.hadamard, "norm, rope and hadamard",
                 "absent in the k-pool layer (pool_k rotates by itself)", "one of them");
  // Under a shard positions are of the whole request, lengths of this rank's pools: both are given.
  const bool tokens = c.has(step.positions);
  if (tokens && step.rows.count > 0) c.tensor("positions", step.positions, kInts, {at_least(step.rows.count)}, 0);
}

void check_kpool(const IndexerConfig& config) {
  check_config("indexer_kpool", config);
  const Check c("indexer_kpool", Mode::call);
  c.number("ratio", config.ratio, 0, 1);
  const int32_t size = pool_size_of(config);
  TOPKEY_REQUIRE(c, config.topk % size == 0, "topk", "a multiple of pool_size " + std::to_string(size),
                 std::to_string(config.topk));
}

size_t kpool_workspace_bytes(const IndexerConfig& config, const IndexerLimits& limits, const Exec& exec) {
  check_kpool(config);
  const Check c("indexer_kpool_workspace_bytes", Mode::query);
  IndexerStep step = largest_step(c, config, limits);
  const int64_t rows = limits.max_rows, dim = config.head_dim, size = pool_size_of(config);
  step.k = step.gate = tensor(nullptr, DType::bf16, {rows, dim});
  step.ape = tensor(nullptr, DType::f32, {size, dim});
  step.positions = step.tail_slots = tensor(nullptr, DType::i64, {rows});
  step.tail = tensor(nullptr, DType::bf16, {1, 2, size, dim});
  step.out.scores = Tensor{};
  step.out.indices = step.out.slots = tensor(nullptr, DType::i32, {rows, int64_t{config.topk} + size - 1});
  return std::max({pool_k_workspace_bytes(pool_args(config, step), exec),
                   paged_mqa_topk_workspace_bytes(pool_search(c, config, step), exec),
                   expand_pools_workspace_bytes(expand_args(c, config, step), exec)});
}

void forward_kpool(const IndexerConfig& config, const IndexerStep& step, const Exec& exec) {
  if (step.skip_step) return;
  check_kpool(config);
  const Check c("indexer_kpool_forward", Mode::call);
  check_kpool_step(c, config, step);
  const PoolK pool = pool_args(config, step);
  const PagedMqaTopk search = pool_search(c, config, step);
  const ExpandPools expand = expand_args(c, config, step);
  // All stages are checked before any of them writes; the last one first, for it knows the width of the buffer.
  const Backend& expander = check_call(expand, exec);
  const Backend& searcher = check_call(search, exec);
  const Backend* pooler = stores_pools(c, step) ? &check_call(pool, exec) : nullptr;
  if (exec.strict) {
    const Exec dry = dry_run(exec);
    if (pooler != nullptr) run_checked(*pooler, pool, dry);
    run_checked(searcher, search, dry);
  }
  clear_buffers(c, step, exec);
  if (pooler != nullptr) run_checked(*pooler, pool, exec);
  run_checked(searcher, search, exec);
  run_checked(expander, expand, exec);
}

}  // namespace topkey::layer
