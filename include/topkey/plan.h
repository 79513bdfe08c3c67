// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// `plan`: host work before a step, from upper bounds on lengths: which requests decode and which prefill, chunks
// under a memory budget, row shards, maxima. Pure functions, no backend. Nothing here may change a result when a
// bound is too high: a plan says how the work is cut, the device lengths say what it is. The fused search needs no
// chunks; they are for callers who gather keys or form logits.
#pragma once
#include <string>
#include <vector>

#include "topkey/error.h"
#include "topkey/topkey_c.h"
#include "topkey/types.h"

namespace topkey {

/// [first, last).
struct Range {
  int64_t first, last;
};

/// A prefill chunk: consecutive requests whose keys are gathered together, and the query rows that are answered from
/// them.
struct PrefillChunk {
  int64_t first_request, last_request;  ///< [first, last) of the step's requests
  int64_t first_row, last_row;          ///< [first, last) of the step's rows
  int64_t total_keys;                   ///< key rows of these requests (bound)
  bool skip_gather;                     ///< same requests as the chunk before: its gathered keys are still there
};

/// Batch order is the engines': decodes, short extends, long extends, first chunks.
struct PlanStep {
  uint32_t struct_size;
  int64_t num_requests;
  const int64_t* query_lens;  ///< [num_requests] query rows of each request, this step
  const int64_t* seq_lens;    ///< [num_requests] tokens of each request, this step's included; upper bounds
  const uint8_t* prefilling;  ///< [num_requests] nonzero: still in its prompt; null = none is looked at
  int64_t decode_threshold;   ///< most query rows of a decode request: 1 + speculative tokens (0 = 1)
  bool require_uniform;       ///< decode requests must all have the first one's number of rows (or none: graph padding)
  bool extends_prefill;       ///< short requests that are still in their prompt count as prefill
  int32_t ratio;              ///< tokens a key row (0 = 1)
  int64_t gather_rows;        ///< key rows that the gather buffer holds (0 = no limit)
  int64_t logits_bytes;       ///< budget of a chunk's f32 logits (0 = no limit)
  int32_t row_shards;         ///< ranks that share the prefill rows (0 = 1)
  int64_t min_shard_rows;     ///< fewer rows a rank than this: not sharded
};

struct StepPlan {
  int64_t num_decode_requests, num_decode_rows, num_prefill_rows;
  int64_t max_next_n;       ///< most rows of a decode request
  bool decode_uniform;      ///< all decode requests with rows have max_next_n of them
  int64_t max_decode_len;   ///< key rows (bound)
  int64_t max_prefill_len;  ///< key rows (bound)
  std::vector<PrefillChunk> chunks;
  std::vector<int64_t> row_shard_sizes;  ///< rows of each rank; empty = not sharded
};

/// This rank's part of the prefill rows.
struct RowShard {
  int64_t first_row, last_row;  ///< of the step

  /// All prefill rows where the plan is not sharded. Throws for a rank that the plan does not have.
  static RowShard of(const StepPlan& plan, int32_t rank) {
    const int64_t all = plan.num_decode_rows + plan.num_prefill_rows;
    if (plan.row_shard_sizes.empty()) return {plan.num_decode_rows, all};
    if (rank < 0 || static_cast<size_t>(rank) >= plan.row_shard_sizes.size()) {
      throw Error(Status::invalid_argument, "RowShard: rank must be one of the plan's, got " + std::to_string(rank));
    }
    int64_t first = plan.num_decode_rows;
    for (int32_t r = 0; r < rank; ++r) first += plan.row_shard_sizes[static_cast<size_t>(r)];
    return {first, first + plan.row_shard_sizes[static_cast<size_t>(rank)]};
  }
  /// The rows of `chunk` that this rank answers; empty (first == last) where it owns none. Gathering is never narrowed.
  Range narrow(const PrefillChunk& chunk) const {
    const int64_t first = chunk.first_row > first_row ? chunk.first_row : first_row;
    const int64_t last = chunk.last_row < last_row ? chunk.last_row : last_row;
    return first < last ? Range{first, last} : Range{first_row, first_row};
  }
};

namespace border {
inline int64_t counted(int64_t n) {
  if (n < 0) check(topkey_last_status());
  return n;
}
inline std::vector<PrefillChunk> chunks_of(const topkey_plan_step_args& args) {
  std::vector<PrefillChunk> chunks(static_cast<size_t>(counted(topkey_prefill_chunks(&args, nullptr, 0))));
  std::vector<topkey_prefill_chunk> twins(chunks.size());
  counted(topkey_prefill_chunks(&args, twins.data(), static_cast<int64_t>(twins.size())));
  for (size_t i = 0; i < twins.size(); ++i) {
    chunks[i] = {twins[i].first_request, twins[i].last_request, twins[i].first_row,
                 twins[i].last_row,      twins[i].total_keys,   twins[i].skip_gather};
  }
  return chunks;
}
}  // namespace border

/// Prefill requests greedily joined while their keys fit gather_rows and rows x keys fit the logits budget; a request
/// that does not fit alone is split on its rows. Chunks without keys are dropped: their rows have nothing to select.
inline std::vector<PrefillChunk> prefill_chunks(const PlanStep& step) {
  return border::chunks_of(border::to_c<topkey_plan_step_args>(step));
}

/// Splits `rows` decode rows so that a slice's bf16 logits (rows * width * 2 bytes) fit `budget`: slices in units of
/// 16 rows, the larger ones first. Empty = no split is needed (or budget 0). budget < 0 or under 16 rows throws.
inline std::vector<Range> decode_chunks(int64_t rows, int64_t width, int64_t budget) {
  std::vector<topkey_range> twins(
      static_cast<size_t>(border::counted(topkey_decode_chunks(rows, width, budget, nullptr, 0))));
  border::counted(topkey_decode_chunks(rows, width, budget, twins.data(), static_cast<int64_t>(twins.size())));
  std::vector<Range> ranges;
  for (const topkey_range& r : twins) ranges.push_back({r.first, r.last});
  return ranges;
}

/// The whole plan of a step. Row shards: contiguous slices of the prefill rows with equal shares of their cost (key
/// rows seen), each at least one row.
inline StepPlan plan_step(const PlanStep& step) {
  const auto args = border::to_c<topkey_plan_step_args>(step);
  std::vector<int64_t> sizes(static_cast<size_t>(step.row_shards > 1 ? step.row_shards : 0));
  topkey_step_plan twin{};
  border::check(topkey_plan_step(&args, &twin, sizes.data()));
  if (!twin.rows_sharded) sizes.clear();
  return {twin.num_decode_requests, twin.num_decode_rows, twin.num_prefill_rows,   twin.max_next_n, twin.decode_uniform,
          twin.max_decode_len,      twin.max_prefill_len, border::chunks_of(args), std::move(sizes)};
}

}  // namespace topkey
