// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Parts of a sharded step of the layer: its calls, made from configuration and step, and its chunks.
#pragma once
#include <string>

#include "indexer.h"
#include "shard/comm.h"
#include "shard/host.h"

namespace topkey::shard {

struct RowRange {
  int64_t first, last;
  int64_t size() const { return last - first; }
};

/// In 63 bits: rows are reckoned with signed numbers.
inline size_t limit_of(const ShardSpec& spec) {
  return spec.exchange_limit > 0 ? std::min<size_t>(spec.exchange_limit, INT64_MAX) : kExchangeLimit;
}

/// Decode rows that every rank has, in front; those that are dealt out are rows like the others.
inline int64_t common_rows(const Step& s) { return s.spec.shard_decode ? 0 : s.step.num_decode_rows; }

inline int64_t next_n_of(const Rows& rows) { return std::max(rows.next_n, 1); }

/// The calls of a whole step, as the layer makes them on one rank.
StoreK store_args(const Step& s);
PoolK pool_args(const Step& s);
PagedMqaTopk search_args(const Step& s);
/// `pools` [R, topk / pool_size or more], by whatever call they were chosen.
ExpandPools expand_args(const Step& s, const Tensor& pools);
/// The same for some of its rows: of whole requests, where no tensor says which is whose.
PagedMqaTopk search_rows(const PagedMqaTopk& whole, RowRange rows);

/// Key rows selected for a row: topk of them, or as many pools as make topk tokens.
inline int64_t chosen_keys(const IndexerConfig& config) { return config.topk / layer::pool_size_of(config); }

/// Entries a rank sends for a row: winners (scores and positions), and blocks where the layer is a source.
struct Entries {
  int64_t winners, blocks;
  int64_t row_bytes() const { return 8 * (winners + blocks); }
};
Entries entries_of(const IndexerConfig& config, int64_t max_len);
/// Rows answered at once, from shapes alone.
int64_t chunk_rows(Entries entries, int32_t ranks, size_t limit);

/// Whether the step has keys to store: with pools, all that pooling needs.
bool stores(const Step& s);
size_t store_bytes(const Step& s, const Exec& exec);
/// Stores the step's keys or pools, gathered from the prefill ranks where there are several.
void store_keys(const Step& s, const Exec& exec);
/// Of the layer over k-pools (layer_pools.cpp).
size_t store_pools_bytes(const Step& s, const Exec& exec);
void store_pools(const Step& s, const Exec& exec);
/// Rows [first, last) of every rank, in the workspace, rank after rank; the tensor then shows them.
void gather_part(Comm& comm, Tensor& t, RowRange rows, Workspace& room, const Exec& exec);
/// Key rows gathered at once, of each rank.
int64_t key_chunk(int64_t row_bytes, int64_t rows, int32_t ranks, size_t limit);

/// What ranks compare of this step over one of its communicators (agree()).
Question question_of(const Step& s, const topkey_communicator& comm, const Exec& exec);

}  // namespace topkey::shard
