// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See include/topkey/plan.h. These return plain vectors; c_api_layer.cpp carries them over the border.
#pragma once
#include <vector>

#include "topkey/plan.h"

namespace topkey::plan {

/// How many requests, from the front, decode.
int64_t decode_requests(const PlanStep& step);
std::vector<PrefillChunk> prefill_chunks(const PlanStep& step);
std::vector<Range> decode_chunks(int64_t rows, int64_t width, int64_t budget);
/// Rows of each of step.row_shards ranks; empty = not sharded. By cost, but cut where rounds of rows_at_once rows end if
/// that is sooner done (0 = not known).
std::vector<int64_t> shard_sizes(const PlanStep& step, int64_t first_prefill, int64_t rows_at_once);
/// Everything but chunks and shards.
StepPlan summary(const PlanStep& step);

}  // namespace topkey::plan
