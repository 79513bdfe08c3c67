// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Synthetic traces of every operation: what `make-trace` writes, what `check --random` draws, what `info` tries each
// cell with.
#pragma once
#include <cstdint>
#include <string>

#include "support/problem.h"
#include "support/trace.h"

namespace topkey::cli {

struct Sample {
  std::string op = "paged_mqa_topk";
  support::ProblemSpec spec;  ///< `paged` follows from op
  int32_t topk = 8;
  /// Draw also what is optional: windows, candidates, masks, forced keys, orders, fills, slots, blocks, ...
  bool options = false;
};

/// Queries and keys of normal data are quantised by the library's producers and keep their bf16 vectors beside them
/// (q_bf16, keys_bf16, weights_raw); other patterns and exact inputs are codes from the start. The same Sample gives
/// the same bytes.
support::Trace make_sample(const Sample& sample);
/// Those of the operations that score nothing (sample_stages.cpp).
support::Trace make_stage_sample(const Sample& sample);
/// Those of pool_k, compress_k and expand_pools (sample_pools.cpp).
support::Trace make_pool_sample(const Sample& sample);

/// Random arguments for check: geometry, pattern and options from the seed.
Sample random_sample(const std::string& op, uint64_t seed);

}  // namespace topkey::cli
