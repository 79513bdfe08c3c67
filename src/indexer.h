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

// ---- shared by both
/// `op` is the layer's name in errors.
void check_config(const char* op, const IndexerConfig& config);
void check_step(const Check& c, const IndexerConfig& config, const IndexerStep& step);
PagedMqaTopk search_args(const IndexerConfig& config, const IndexerStep& step);
/// A step with the largest shapes within the limits and every output, without data: for size queries.
IndexerStep largest_step(const Check& c, const IndexerConfig& config, const IndexerLimits& limits);
/// Unless `cleared`: -1 in all columns of the step's rows. Of a caller's team one member does it, the others wait.
void clear_buffers(const IndexerStep& step, const Backend& searcher, const Exec& exec);
/// exec of a dry run: device values are checked, nothing is written.
Exec dry_run(const Exec& exec);

}  // namespace topkey::layer
