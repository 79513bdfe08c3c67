// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Plans: host integers in, plain tuples out; topkey/plan.py names them.
#include "python/src/parts.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "python/src/call.h"
#include "topkey/topkey.h"

namespace topkey::python {
namespace {

using Lens = std::vector<int64_t>;

/// The two lists of lengths, the flags of prefilling requests, and the numbers by name.
PlanStep step_of(const Lens& query_lens, const Lens& seq_lens, const std::optional<std::vector<uint8_t>>& prefilling,
                 const nb::dict& numbers) {
  if (query_lens.size() != seq_lens.size())
    throw nb::value_error(("plan_step: seq_lens must be as long as query_lens, " + std::to_string(query_lens.size()) +
                           ", got " + std::to_string(seq_lens.size()))
                              .c_str());
  if (prefilling && prefilling->size() != query_lens.size())
    throw nb::value_error(("plan_step: prefilling must be as long as query_lens, " + std::to_string(query_lens.size()) +
                           ", got " + std::to_string(prefilling->size()))
                              .c_str());
  PlanStep step{};
  step.num_requests = static_cast<int64_t>(query_lens.size());
  step.query_lens = query_lens.data();
  step.seq_lens = seq_lens.data();
  step.prefilling = prefilling ? prefilling->data() : nullptr;
  step.decode_threshold = nb::cast<int64_t>(numbers["decode_threshold"]);
  step.require_uniform = nb::cast<bool>(numbers["require_uniform"]);
  step.extends_prefill = nb::cast<bool>(numbers["extends_prefill"]);
  step.ratio = nb::cast<int32_t>(numbers["ratio"]);
  step.gather_rows = nb::cast<int64_t>(numbers["gather_rows"]);
  step.logits_bytes = nb::cast<int64_t>(numbers["logits_bytes"]);
  step.row_shards = nb::cast<int32_t>(numbers["row_shards"]);
  step.min_shard_rows = nb::cast<int64_t>(numbers["min_shard_rows"]);
  return step;
}

nb::list chunks_of(const std::vector<PrefillChunk>& chunks) {
  nb::list all;
  for (const PrefillChunk& c : chunks)
    all.append(nb::make_tuple(c.first_request, c.last_request, c.first_row, c.last_row, c.total_keys, c.skip_gather));
  return all;
}

}  // namespace

void bind_plan(nb::module_& m) {
  m.def(
      "plan_step",
      [](const Lens& query_lens, const Lens& seq_lens, const std::optional<std::vector<uint8_t>>& prefilling,
         const nb::dict& numbers) {
        return guarded([&] {
          const StepPlan p = plan_step(step_of(query_lens, seq_lens, prefilling, numbers));
          return nb::make_tuple(p.num_decode_requests, p.num_decode_rows, p.num_prefill_rows, p.max_next_n,
                                p.decode_uniform, p.max_decode_len, p.max_prefill_len, chunks_of(p.chunks),
                                p.row_shard_sizes);
        });
      },
      nb::arg(), nb::arg(), nb::arg().none(), nb::arg());
  m.def(
      "row_shard_sizes",
      [](const Lens& query_lens, const Lens& seq_lens, const std::optional<std::vector<uint8_t>>& prefilling,
         const nb::dict& numbers, int64_t rows_at_once) {
        return guarded(
            [&] { return row_shard_sizes(step_of(query_lens, seq_lens, prefilling, numbers), rows_at_once); });
      },
      nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg());
  m.def(
      "prefill_chunks",
      [](const Lens& query_lens, const Lens& seq_lens, const std::optional<std::vector<uint8_t>>& prefilling,
         const nb::dict& numbers) {
        return guarded([&] { return chunks_of(prefill_chunks(step_of(query_lens, seq_lens, prefilling, numbers))); });
      },
      nb::arg(), nb::arg(), nb::arg().none(), nb::arg());
  m.def("decode_chunks", [](int64_t rows, int64_t width, int64_t budget) {
    return guarded([&] {
      nb::list all;
      for (const Range& r : decode_chunks(rows, width, budget)) all.append(nb::make_tuple(r.first, r.last));
      return all;
    });
  });
}

}  // namespace topkey::python
