// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The calls of a sharded step, and the workspace of all of it.
#include "indexer.h"
#include "shard/layer.h"

namespace topkey::shard {

StoreK store_args(const Step& s) {
  StoreK a{};
  a.k = s.step.k;
  a.k_scales = s.step.k_scales;
  a.norm = s.step.norm;
  a.rope = s.step.rope;
  a.hadamard = s.step.hadamard;
  a.scale = s.config.scale;
  a.slot_mapping = s.step.slot_mapping;
  a.cache = s.step.keys.cache;
  return a;
}

namespace {

/// Tensors without data lose their dtype too, by which a query of sizes would take them for given.
void drop_absent(std::initializer_list<Tensor*> tensors) {
  for (Tensor* t : tensors) {
    if (!there(*t)) *t = Tensor{};
  }
}

Check check_of(const Step& s) { return {s.op(), Mode::call}; }

}  // namespace

bool stores(const Step& s) { return s.pools ? layer::stores_pools(check_of(s), s.step) : there(s.step.k); }

PoolK pool_args(const Step& s) {
  PoolK a = layer::pool_args(s.config, s.step);
  if (s.orders_tokens()) {
    a.positions = s.in.token_positions, a.request = s.in.token_request;
    a.q_indptr = Tensor{};
  }
  drop_absent({&a.request, &a.q_indptr, &a.tail, &a.tail_slots});
  return a;
}

ExpandPools expand_args(const Step& s, const Tensor& pools) {
  ExpandPools a = layer::expand_args(check_of(s), s.config, s.step);
  const int64_t columns = a.pools.shape[1];
  a.pools = pools;
  a.pools.shape[1] = columns;
  drop_absent({&a.rows.request, &a.rows.q_indptr, &a.rows.start, &a.positions, &a.out.indices, &a.out.slots,
               &a.out.counts, &a.out.scores, &a.out.blocks, &a.out.index_base, &a.out.slot_map.block_table});
  return a;
}

PagedMqaTopk search_args(const Step& s) {
  PagedMqaTopk a = s.pools ? layer::pool_search(check_of(s), s.config, s.step) : layer::search_args(s.config, s.step);
  a.whole_start = s.in.whole_start;
  a.whole_end = s.in.whole_end;
  return a;
}

PagedMqaTopk search_rows(const PagedMqaTopk& whole, RowRange rows) {
  PagedMqaTopk a = whole;
  const auto cut = [&](Tensor& t) { t = there(t) ? rows_of(t, rows.first, rows.size()) : Tensor{}; };
  a.rows.count = rows.size();
  for (Tensor* t : {&a.q.values, &a.q.scales, &a.q.weights, &a.rows.end, &a.rows.length, &a.rows.start, &a.rows.request,
                    &a.admit.candidates, &a.out.indices, &a.out.slots, &a.out.scores, &a.out.counts, &a.out.blocks,
                    &a.out.index_base, &a.whole_start, &a.whole_end}) {
    cut(*t);
  }
  // Without rows.request the first next_n rows are the first request's, and so on.
  const int64_t each = next_n_of(whole.rows);
  const auto cut_table = [&](Tensor& t, bool per_row) {
    if (per_row) return cut(t);
    if (there(t) && !there(whole.rows.request)) t = rows_of(t, rows.first / each, (rows.size() + each - 1) / each);
  };
  cut_table(a.keys.block_table, a.keys.table_per_row);
  cut_table(a.out.slot_map.block_table, a.out.slot_map.table_per_row);
  return a;
}

namespace {

/// Absent data; a query of sizes takes dtypes for presence.
Tensor shape_of(DType dtype, std::initializer_list<int64_t> extents) { return tensor(nullptr, dtype, extents); }

size_t merge_bytes(const IndexerConfig& c, const Entries& entries, int64_t rows, int32_t ranks, const Exec& exec) {
  MergeTopk m{};
  m.scores = shape_of(DType::f32, {ranks, rows, entries.winners});
  m.indices = shape_of(DType::i32, {ranks, rows, entries.winners});
  m.topk = static_cast<int32_t>(chosen_keys(c));
  m.rows.count = rows;
  m.out.indices = shape_of(DType::i32, {rows, m.topk});
  if (entries.blocks > 0) {
    m.block_scores = shape_of(DType::f32, {ranks, rows, entries.blocks});
    m.block_ids = shape_of(DType::i32, {ranks, rows, entries.blocks});
    m.out.blocks = shape_of(DType::i32, {rows, entries.blocks});
  }
  return merge_topk_workspace_bytes(m, exec);
}

size_t gather_bytes(const WorstStep& w, const Exec& exec) {
  const IndexerConfig& c = w.config;
  const IndexerLimits& limits = w.limits;
  const int64_t total = std::min<int64_t>(limits.max_requests * std::max<int64_t>(limits.max_len, 1), kMaxKeys);
  const int64_t dim = c.head_dim;
  GatherK a{};
  a.keys.cache = {shape_of(DType::u8, {1, row_bytes(c.format, dim)}), c.format, Layout::planar, 1, c.head_dim};
  a.keys.shard = w.spec.context;
  a.keys.block_table = shape_of(DType::i32, {limits.max_requests, kMaxKeys});
  a.indptr = shape_of(DType::i32, {limits.max_requests + 1});
  a.total = total;
  a.out.values = shape_of(dense_dtype(c.format), {total, dense_elements(c.format, dim)});
  if (is_fp8(c.format)) a.out.scales = shape_of(DType::f32, {total});
  if (c.format == KeyFormat::mxfp4) a.out.scales = shape_of(DType::u8, {total, dim / 32});
  a.out.format = c.format;
  return gather_k_bytes(a, exec);
}

/// On top of what one rank needs by itself.
size_t context_bytes(const WorstStep& w, size_t alone, const Exec& exec) {
  const Entries entries = entries_of(w.config, 0);
  const int32_t ranks = w.spec.context.world_size;
  // A step of shorter contexts has smaller entries, so more rows at a time, which may fill the limit better.
  const size_t row = static_cast<size_t>(entries.row_bytes()) * static_cast<size_t>(ranks);
  const size_t least =
      row * static_cast<size_t>(std::max(w.limits.max_next_n, 1));  // of one request, where none is told
  const size_t received = std::min(static_cast<size_t>(w.limits.max_rows) * row, std::max(limit_of(w.spec), least));
  return padded(received) + std::max(alone, merge_bytes(w.config, entries, w.limits.max_rows, ranks, exec));
}

/// Rows of all prefill ranks together.
IndexerLimits limits_of_all(const WorstStep& w) {
  IndexerLimits all = w.limits;
  if (w.spec.prefill_size > 1) all.max_rows = std::min<int64_t>(all.max_rows * w.spec.prefill_size, kMaxKeys);
  return all;
}

/// What one rank needs by itself, with as many more keys to store as prefill ranks bring.
size_t alone_bytes(const WorstStep& w, const Exec& exec) {
  const IndexerLimits all = limits_of_all(w);
  if (!w.pools) return SparseAttnIndexer(w.config).workspace_bytes(all, exec);
  // Ranks ask the search for scores too, which the layer of one rank has no use for.
  IndexerStep step = layer::largest_step(Check("indexer_kpool_sharded_workspace_bytes", Mode::query), w.config, all);
  PagedMqaTopk search = layer::search_args(w.config, step);
  search.topk = static_cast<int32_t>(chosen_keys(w.config));
  return std::max(SparseAttnIndexerKpool(w.config).workspace_bytes(all, exec),
                  paged_mqa_topk_workspace_bytes(search, exec));
}

/// New keys of all ranks on their way into the cache.
size_t prefill_bytes(const WorstStep& w, size_t alone) {
  const int32_t ranks = w.spec.prefill_size;
  // k as f32, at the worst, or codes and their scales; of tokens k and then gate, bf16: packed, then of all ranks.
  const int64_t row = w.pools ? 2 * w.config.head_dim : 4 * w.config.head_dim + 4;
  // Smaller rows may fill the limit better, but a rank's part of what it receives is no more than this.
  const size_t each =
      static_cast<size_t>(std::max(limit_of(w.spec) / static_cast<size_t>(ranks), static_cast<size_t>(row)));
  const size_t part = std::min(static_cast<size_t>(std::max<int64_t>(w.limits.max_rows, 1) * row), each);
  const size_t exchange = static_cast<size_t>(1 + ranks) * part + 8 * kLine;
  if (!w.pools) return exchange + alone;
  return 2 * padded(static_cast<size_t>(limits_of_all(w).max_rows * row)) + std::max(exchange, alone);
}

/// Row shards: rows on their way that are not contiguous; of pools those of all rows, then a call, or blocks on their way.
size_t rows_bytes(const WorstStep& w, size_t alone) {
  const auto packed = [&](int64_t columns) { return padded(static_cast<size_t>(w.limits.max_rows * columns * 4)); };
  if (!w.pools) return std::max(alone, packed(std::max(w.config.topk, w.config.candidate_topk_blocks)));
  const Entries entries = entries_of(w.config, 0);
  return packed(entries.winners) + std::max(alone, packed(entries.blocks));
}

}  // namespace

size_t workspace_bytes(const WorstStep& w, const Exec& exec) {
  const bool context = w.spec.context.active(), prefill = w.spec.prefill_size > 1;
  const size_t alone = alone_bytes(w, exec);
  size_t most = context ? context_bytes(w, alone, exec) : alone;
  if (context && prefill) most = std::max(most, gather_bytes(w, exec));
  if (w.spec.row_shards > 1) most = std::max(most, rows_bytes(w, alone));
  if (prefill || (w.pools && w.spec.prefill_size == 1)) most = std::max(most, prefill_bytes(w, alone));
  return most;
}

}  // namespace topkey::shard
