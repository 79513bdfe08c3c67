// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `plan`, run: chunks of a plan on bounds 1, 1.5 and 8 times the truth, through gather_k and mqa_topk with the
// true lengths, give the bits of one paged_mqa_topk. The plans themselves are in plan_test.cpp.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "tests/testing.h"

namespace topkey::testing {
namespace {

Tensor from_row(Tensor t, int64_t first, int64_t count) {
  t.data = element(t, first);
  t.shape[0] = count;
  return t;
}

/// Gathers the keys of a chunk, unless they are still there, and answers its rows; every number of the device is the
/// true one.
void run_chunk(const Problem& p, const PrefillChunk& c, const DenseKeys& gathered, int32_t topk, const Selection& out,
               const Exec& exec) {
  std::vector<int32_t> indptr{0}, starts, ends;
  for (int64_t b = c.first_request; b < c.last_request; ++b) {
    indptr.push_back(indptr.back() + static_cast<int32_t>(p.lens[static_cast<size_t>(b)]));
  }
  const Array prefix = Array::of(indptr);
  GatherK gather{};
  gather.keys = p.paged_keys();
  gather.keys.block_table = from_row(gather.keys.block_table, c.first_request, c.last_request - c.first_request);
  gather.indptr = prefix.view(), gather.total = c.total_keys, gather.out = gathered;
  if (!c.skip_gather) run(gather, exec);
  for (int64_t r = c.first_row; r < c.last_row; ++r) {
    const int64_t b = p.row_request[static_cast<size_t>(r)] - c.first_request;
    starts.push_back(indptr[static_cast<size_t>(b)]);
    ends.push_back(starts.back() + static_cast<int32_t>(row_range(p.rows(), r, 0, -1).end));
  }
  const Array start = Array::of(starts), end = Array::of(ends);
  MqaTopk search{};
  const int64_t rows = c.last_row - c.first_row;
  search.q.values = from_row(p.q.view(), c.first_row, rows);
  search.q.weights = from_row(p.weights.view(), c.first_row, rows);
  search.keys = gathered, search.topk = topk;
  search.rows.count = rows, search.rows.start = start.view(), search.rows.end = end.view();
  search.out.indices = from_row(out.indices, c.first_row, rows);
  search.out.scores = from_row(out.scores, c.first_row, rows);
  run(search, exec);
}

/// fp8 requests of up to 120 keys whose last rows are asked, the first requests' one by one.
Problem drawn_step() {
  ProblemSpec spec;
  spec.paged = true, spec.requests = static_cast<int32_t>(draw(1, 5)), spec.rows = draw(1, 25),
  spec.keys = draw(1, 120);
  spec.windows = Windows::causal, spec.addressing = Addressing::q_indptr;
  spec.seed = static_cast<uint64_t>(draw(1, 1000000));
  return make_problem(spec);
}

TEST(Plan, BoundsTooHighChangeNoAnswer) {
  Tally tally("chunked gather_k and mqa_topk");
  for (const std::string& backend : every_backend()) {
    property("plans on bounds 1, 1.5 and 8 times the truth", 60, [&] {
      const Problem p = drawn_step();
      const auto topk = static_cast<int32_t>(draw(1, 20));
      Want want;
      want.scores = true;
      const Outputs whole(p.count(), topk, want);
      Outputs parts(p.count(), topk, want);
      run(p.paged_search(topk, whole.selection()), on(backend));
      std::vector<int64_t> query_lens, seq_lens;
      for (size_t b = 0; b < p.lens.size(); ++b) {
        query_lens.push_back(std::count(p.row_request.begin(), p.row_request.end(), static_cast<int32_t>(b)));
      }
      for (const double times : {1.0, 1.5, 8.0}) {
        seq_lens.clear();
        for (int64_t len : p.lens)
          seq_lens.push_back(static_cast<int64_t>(std::ceil(times * static_cast<double>(len))));
        PlanStep step{};
        step.num_requests = static_cast<int64_t>(query_lens.size());
        step.query_lens = query_lens.data(), step.seq_lens = seq_lens.data();
        step.gather_rows = draw(960, 3000), step.logits_bytes = draw(1, 20000);
        const StepPlan plan = plan_step(step);
        parts.reset();
        // Memory that old keys would show in: NaN bytes.
        const Array values(DType::f8_e4m3fn, {step.gather_rows, p.spec.head_dim}),
            scales(DType::f32, {step.gather_rows});
        std::memset(values.as<uint8_t>(), 0xFF, values.bytes());
        std::memset(scales.as<uint8_t>(), 0xFF, scales.bytes());
        const DenseKeys gathered{values.view(), scales.view(), p.spec.format};
        for (const PrefillChunk& c : plan.chunks) run_chunk(p, c, gathered, topk, parts.selection(), on(backend));
        for (const PrefillChunk& c : plan.chunks) {
          Selection a = whole.selection(), d = parts.selection();
          for (Tensor* t : {&a.indices, &a.scores, &d.indices, &d.scores})
            *t = from_row(*t, c.first_row, c.last_row - c.first_row);
          RC_ASSERT(same_outputs(a, d, c.last_row - c.first_row, topk));
          tally.ran(backend);
        }
        // What no chunk answers has nothing to select.
        for (int64_t r = plan.num_decode_rows; r < p.count(); ++r) {
          const int64_t first = int_at(whole.selection().indices, r, 0);
          RC_ASSERT(first == -1 || !parts.indices.poisoned(r, 0));
        }
      }
    });
  }
}

}  // namespace
}  // namespace topkey::testing
