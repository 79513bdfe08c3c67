// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See include/topkey/indexer.h. indexer.cpp is the layer over key rows, and what both layers share;
// indexer_kpool.cpp the one over k-pools.
#pragma once
#include "backend_table.h"
#include "check.h"
#include "topkey/indexer.h"

namespace topkey::layer {

void check(const IndexerConfig& config);
size_t workspace_bytes(const IndexerConfig& config, const IndexerLimits& limits, const Exec& exec);
void forward(const IndexerConfig& config, const IndexerStep& step, const Exec& exec);

void check_kpool(const IndexerConfig& config);
size_t kpool_workspace_bytes(const IndexerConfig& config, const IndexerLimits& limits, const Exec& exec);
void forward_kpool(const IndexerConfig& config, const IndexerStep& step, const Exec& exec);

// ---- the stages of the k-pool layer, which its ranks run too
int32_t pool_size_of(const IndexerConfig& config);
void check_kpool_step(const Check& c, const IndexerConfig& config, const IndexerStep& step);
/// k is stored only with all that pooling needs.
bool stores_pools(const Check& c, const IndexerStep& step);
PoolK pool_args(const IndexerConfig& config, const IndexerStep& step);
/// Leaves pools in the first columns of what is to be answered.
PagedMqaTopk pool_search(const Check& c, const IndexerConfig& config, const IndexerStep& step);
/// Expands the pools where pool_search has left them.
ExpandPools expand_args(const Check& c, const IndexerConfig& config, const IndexerStep& step);

// ---- shared by both
/// `op` is the layer's name in errors.
void check_config(const char* op, const IndexerConfig& config);
void check_step(const Check& c, const IndexerConfig& config, const IndexerStep& step);
PagedMqaTopk search_args(const IndexerConfig& config, const IndexerStep& step);
/// A step with the largest shapes within the limits and every output, without data: for size queries.
IndexerStep largest_step(const Check& c, const IndexerConfig& config, const IndexerLimits& limits);
/// Unless `cleared`: -1 in all columns of the step's rows. Of a caller's team one member does it, the others wait.
void clear_buffers(const Check& c, const IndexerStep& step, const Exec& exec);
/// exec of a dry run: device values are checked, nothing is written.
Exec dry_run(const Exec& exec);

}  // namespace topkey::layer
