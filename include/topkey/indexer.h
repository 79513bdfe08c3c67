// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The two layers: a configuration and one step. Insert, search, shared output buffer, in the engines' order. No memory
// of their own, const, re-entrant; on a GPU capturable.
#pragma once
#include "topkey/cache.h"
#include "topkey/pool.h"
#include "topkey/search.h"

namespace topkey {

/// Two-level selection: a source layer publishes its best candidate blocks, later layers (consumers) score only those.
enum class CandidateRole : int32_t { none, source, consumer };

struct IndexerConfig {
  uint32_t struct_size;
  int32_t heads, head_dim, topk;
  int32_t ratio;      ///< tokens a key row (0 = 1); lengths given to a step count key rows all the same
  int32_t pool_size;  ///< k-pool layer: tokens a pool (0 = 1); topk counts tokens and is a multiple of it
  KeyFormat format;
  ScaleRule scale;
  CandidateRole role;
  int32_t candidate_block_size, candidate_topk_blocks;
  int32_t force_first, force_last;  ///< key rows: pools in the k-pool layer
  /// consumer: tokens a key row of the source, whose keys candidate_block_size then counts (0 = this layer's own). The
  /// tokens of a source's block must be a whole number of this layer's key rows
  int32_t candidate_ratio;
};

/// Upper bounds over all steps.
struct IndexerLimits {
  uint32_t struct_size;
  int64_t max_rows, max_requests;
  int64_t max_len;  ///< key rows of a request
  int32_t max_next_n;
};

/// Rows 0..num_decode_rows-1 are decode rows, the others prefill; all are answered by one search.
struct IndexerStep {
  uint32_t struct_size;
  Tensor k, k_scales;  ///< as in StoreK; k absent: the cache was written elsewhere
  /// k-pool layer only, as in PoolK, but positions are those of all rows. gate, ape or positions absent: k is not stored
  Tensor gate, ape, positions;
  Tensor slot_mapping;      ///< as in StoreK; k-pool layer: as in PoolK
  Tensor tail, tail_slots;  ///< k-pool layer only, as in PoolK
  Norm norm;
  Rope rope;
  bool hadamard;
  Query q;
  PagedKeys keys;
  Rows rows;
  int64_t num_decode_rows;
  Tensor candidates;  ///< i32 [>=R,C]: written by a source, read by a consumer
  Selection out;      ///< rows.count rows are written, no other row of the buffer; blocks are given by `candidates`
  bool cleared;       ///< the buffer's rows already hold -1: columns beyond topk are left alone
  bool skip_step;     ///< do nothing: the buffer is left as it is (an earlier layer's selection, for this one too)
};

namespace border {
/// `ask`, `run`: a layer's function of the C interface.
template <class Ask>
size_t layer_bytes(Ask* ask, const IndexerConfig& config, const IndexerLimits& limits, const Exec& exec) {
  const auto c_config = to_c<topkey_indexer_config>(config);
  const auto c_limits = to_c<topkey_indexer_limits>(limits);
  const auto c_exec = to_c<topkey_exec>(exec);
  const size_t bytes = ask(&c_config, &c_limits, &c_exec);
  if (bytes == SIZE_MAX) check(topkey_last_status());
  return bytes;
}
template <class Run>
void run_layer(Run* run, const IndexerConfig& config, const IndexerStep& step, const Exec& exec) {
  const auto c_config = to_c<topkey_indexer_config>(config);
  const auto c_step = to_c<topkey_indexer_step>(step);
  const auto c_exec = to_c<topkey_exec>(exec);
  check(run(&c_config, &c_step, &c_exec));
}
}  // namespace border

class SparseAttnIndexer {
 public:
  /// Throws where the configuration makes no sense, whatever the step.
  explicit SparseAttnIndexer(const IndexerConfig& config) : config_(config) {
    const auto c_config = border::to_c<topkey_indexer_config>(config_);
    border::check(topkey_indexer_check(&c_config));
  }

  /// Workspace of the worst step within the limits. Never shrinks when a limit grows.
  size_t workspace_bytes(const IndexerLimits& limits, const Exec& exec) const {
    return border::layer_bytes(topkey_indexer_workspace_bytes, config_, limits, exec);
  }

  /// In this order: unless `cleared`, all columns of rows [0, rows.count) of the index and slot buffers become -1;
  /// keys are stored; every row is answered. Throws before anything is written. (strict checks both stages first; a
  /// position that only the new keys select and that slot_map lacks may still raise after the store.)
  void forward(const IndexerStep& step, const Exec& exec) const {
    border::run_layer(topkey_indexer_forward, config_, step, exec);
  }

  const IndexerConfig& config() const noexcept { return config_; }

 private:
  IndexerConfig config_;
};

/// The layer over k-pools: keys are pools, the answer is tokens. A step's rows see pools (lengths from expand_rows with
/// ratio pool_size); slot_mapping has the slots of completed pools; step.positions says how many tokens a row sees
/// (position + 1), so that the tokens of its open pool can be appended: topk + pool_size - 1 columns. Without positions
/// only the first topk columns are written.
class SparseAttnIndexerKpool {
 public:
  /// Throws where the configuration makes no sense, whatever the step.
  explicit SparseAttnIndexerKpool(const IndexerConfig& config) : config_(config) {
    const auto c_config = border::to_c<topkey_indexer_config>(config_);
    border::check(topkey_indexer_kpool_check(&c_config));
  }

  /// Workspace of the worst step within the limits (max_len counts pools). Never shrinks when a limit grows.
  size_t workspace_bytes(const IndexerLimits& limits, const Exec& exec) const {
    return border::layer_bytes(topkey_indexer_kpool_workspace_bytes, config_, limits, exec);
  }

  /// In this order: unless `cleared`, all columns of rows [0, rows.count) of the index and slot buffers become -1;
  /// pools are stored (pool_k); every row's best topk / pool_size pools are found; they are expanded in place, and the
  /// open pool's tokens appended (expand_pools). Throws before anything is written. (strict checks the first two stages
  /// first; a position that slot_map lacks may still raise after them.)
  void forward(const IndexerStep& step, const Exec& exec) const {
    border::run_layer(topkey_indexer_kpool_forward, config_, step, exec);
  }

  const IndexerConfig& config() const noexcept { return config_; }

 private:
  IndexerConfig config_;
};

}  // namespace topkey
