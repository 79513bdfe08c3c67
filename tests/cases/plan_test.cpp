// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Cases of several chapters as a step meets them: plans of empty batches, row slices by cost, and graph-padded rows in the
// layer's shared buffer.
#include <gtest/gtest.h>

#include <vector>

#include "support/on_device.h"
#include "tests/cases/requests.h"

namespace topkey::cases {
namespace {

using Lens = std::vector<int64_t>;

StepPlan plan_of(const Lens& query_lens, const Lens& seq_lens, PlanStep step) {
  step.num_requests = static_cast<int64_t>(query_lens.size());
  step.query_lens = query_lens.data(), step.seq_lens = seq_lens.data();
  return plan_step(step);
}

// DeepGEMM PR #354, TensorRT-LLM PR #14940: every context empty, or one token under ratio 4. The plan has the rows and no
// key.
TEST(PlanCases, B26_the_plan_of_a_batch_with_no_keys) {
  for (size_t requests : {1U, 32U, 128U, 1024U}) {
    for (int64_t next_n : {1, 2}) {
      PlanStep step{};
      step.decode_threshold = 2, step.row_shards = 8, step.gather_rows = 16, step.logits_bytes = 1024;
      const StepPlan decode = plan_of(Lens(requests, next_n), Lens(requests, 0), step);
      EXPECT_EQ(decode.num_decode_rows, static_cast<int64_t>(requests) * next_n);
      EXPECT_EQ(decode.max_decode_len, 0);
      EXPECT_TRUE(decode.chunks.empty());
      EXPECT_TRUE(decode.row_shard_sizes.empty());
    }
    PlanStep step{};
    step.ratio = 4, step.gather_rows = 16;
    const std::vector<uint8_t> prefilling(requests, 1);
    step.prefilling = prefilling.data(), step.extends_prefill = true;
    const StepPlan prefill = plan_of(Lens(requests, 1), Lens(requests, 1), step);
    EXPECT_EQ(prefill.num_prefill_rows, static_cast<int64_t>(requests));
    EXPECT_EQ(prefill.max_prefill_len, 0);
    EXPECT_TRUE(prefill.chunks.empty());
  }
}

/// A step of a layer over the rows of `p`, whose index buffer is `buffer`.
void forward(const Problem& p, int32_t topk, const Tensor& buffer, int64_t decode_rows, bool cleared,
             const Exec& exec) {
  IndexerConfig config{};
  config.heads = static_cast<int32_t>(p.spec.heads), config.head_dim = static_cast<int32_t>(p.spec.head_dim);
  config.topk = topk, config.format = p.spec.format;
  const SparseAttnIndexer layer(config);
  IndexerStep step{};
  step.q = p.query(), step.keys = p.paged_keys(), step.rows = p.rows();
  step.num_decode_rows = decode_rows, step.cleared = cleared;
  step.out.indices = buffer;
  IndexerLimits limits{};
  limits.max_rows = p.count(), limits.max_requests = p.spec.requests, limits.max_next_n = 1;
  limits.max_len = step.keys.block_table.shape[1] * p.spec.page_size;
  Exec sized = exec;
  sized.workspace_bytes = layer.workspace_bytes(limits, exec);
  const auto workspace = support::aligned_bytes(sized.workspace_bytes + 1);
  sized.workspace = workspace.get();
  support::forward_on_device(layer, step, sized);
}

// vllm PR #32175, #39542: a graph of six decode rows, four of them real, on a buffer whose rows 6..8 hold prefill
// results. Padded rows hold -1, rows after the step's are not touched.
TEST_P(Cases, B27_graph_padded_rows_in_the_layers_buffer) {
  constexpr int32_t kTopk = 24;
  for (bool exact : {false, true}) {
    for (bool cleared : {false, true}) {
      ProblemSpec spec;
      spec.exact = exact, spec.seed = 131;
      const Problem p = requests_of(spec, {40, 61, 9}, {0, 1, 1, 2, -1, -1}, {40, 60, 61, 9, 0, 0});
      const Picked want = pick(p.paged_search(kTopk, {}), exec());
      const Guarded buffer(DType::i32, 9, kTopk);
      for (int64_t r = 0; r < 9; ++r) {
        const int32_t left = r < 6 && cleared ? -1 : 777;
        for (int32_t j = 0; j < kTopk; ++j) std::memcpy(support::element(buffer.view(), r, j), &left, sizeof left);
      }
      forward(p, kTopk, buffer.view(), 6, cleared, exec());
      for (int64_t r = 0; r < 9; ++r) {
        const Ints expected = r < 4 ? want.indices[static_cast<size_t>(r)] : r < 6 ? Ints(kTopk, -1) : Ints(kTopk, 777);
        EXPECT_EQ(row_of<int32_t>(buffer.view(), r), expected) << "row " << r;
      }
    }
  }
}

// vllm issue #53691, PR #54394: 1000 rows of four prompts over eight ranks. Every row of every chunk has exactly one
// writer, shares of the cost are equal, and a rank may own no row of a chunk that it gathers.
TEST(PlanCases, B42_every_row_of_a_chunk_has_one_writer) {
  PlanStep step{};
  step.row_shards = 8, step.logits_bytes = 300LL * 9000 * 4;
  const Lens rows(4, 250), context(4, 9000);
  const StepPlan plan = plan_of(rows, context, step);
  ASSERT_EQ(plan.row_shard_sizes.size(), 8U);
  ASSERT_GT(plan.chunks.size(), 3U);
  int empty = 0;
  std::vector<int> writers(1000, 0);
  for (int32_t rank = 0; rank < 8; ++rank) {
    const RowShard own = RowShard::of(plan, rank);
    EXPECT_NEAR(static_cast<double>(own.last_row - own.first_row), 125, 2);
    for (const PrefillChunk& chunk : plan.chunks) {
      const Range mine = own.narrow(chunk);
      empty += mine.first == mine.last;
      for (int64_t r = mine.first; r < mine.last; ++r) ++writers[static_cast<size_t>(r)];
    }
  }
  EXPECT_EQ(writers, std::vector<int>(1000, 1));
  EXPECT_GT(empty, 0);
}

TOPKEY_CASES_OF_GENERAL_BACKENDS();

}  // namespace
}  // namespace topkey::cases
