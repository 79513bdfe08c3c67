// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Cases where a key row stands for several tokens: blocks across compression ratios (B55), plans that count compressed
// rows (B39), pools whose rows are told apart by request and not by their place in the batch (B31, in its own way: the
// unit of a length).
#include "support/on_device.h"
#include "tests/cases/requests.h"
#include "tests/pools.h"

namespace topkey::cases {
namespace {

// ---- B55: candidate blocks across compression ratios
// -----------------------------------------------------------------

/// The consumer's answer: `tokens` visible, only these blocks of a source with this ratio.
Ints consumed(int32_t tokens, const Ints& blocks, int32_t source_ratio, const Exec& given) {
  ProblemSpec spec;
  spec.exact = true, spec.page_size = 8, spec.seed = 156;
  const Problem p = requests_of(spec, {64}, {0}, {tokens});
  IndexerConfig config{};
  config.heads = p.spec.heads, config.head_dim = p.spec.head_dim, config.topk = 24, config.format = p.spec.format;
  config.role = CandidateRole::consumer, config.candidate_block_size = 8, config.candidate_ratio = source_ratio;
  config.candidate_topk_blocks = static_cast<int32_t>(blocks.size());
  const Array candidates = ints({blocks}), indices(DType::i32, {1, 24});
  IndexerStep step{};
  step.q = p.query(), step.keys = p.paged_keys(), step.candidates = candidates.view();
  step.rows = p.paged_search(8, {}).rows;
  step.out.indices = indices.view();
  const SparseAttnIndexer indexer(config);
  Exec exec = given;
  const size_t bytes = indexer.workspace_bytes({0, 1, 1, 64, 1}, exec);
  const auto room = support::aligned_bytes(bytes);
  exec.workspace = room.get(), exec.workspace_bytes = bytes;
  support::forward_on_device(indexer, step, exec);
  Ints found;
  for (const int32_t position : row_of<int32_t>(indices.view(), 0)) {
    if (position >= 0) found.push_back(position);
  }
  return found;
}

// sglang PR #38848: block 2 of a source at ratio 2 (8 entries a block) is tokens 32..47 to a consumer at ratio 1, of
// which 37 visible ones leave 32..36. Twice the ratio, not once, and cut at the consumer's own window.
TEST_P(Cases, B55_blocks_of_a_source_count_in_the_consumers_keys) {
  EXPECT_EQ(consumed(37, {2}, 2, exec()), (Ints{32, 33, 34, 35, 36}));
  EXPECT_EQ(consumed(37, {1}, 2, exec()), progression(16, 16));
  EXPECT_EQ(consumed(21, {2}, 1, exec()), (Ints{16, 17, 18, 19, 20}));
  EXPECT_EQ(consumed(21, {2}, 0, exec()), (Ints{16, 17, 18, 19, 20}));
}

// The same source: a block that is no whole number of the consumer's key rows has no meaning there.
TEST_P(Cases, B55_ratios_that_do_not_divide_are_refused) {
  const auto make = [](int32_t source, int32_t block, int32_t own) {
    IndexerConfig c{};
    c.heads = 1, c.head_dim = 32, c.topk = 8, c.ratio = own, c.role = CandidateRole::consumer;
    c.candidate_block_size = block, c.candidate_topk_blocks = 4, c.candidate_ratio = source;
    return SparseAttnIndexer(c);
  };
  EXPECT_TRUE(ran([&] { make(2, 8, 1); }));
  EXPECT_TRUE(ran([&] { make(1, 8, 2); }));
  EXPECT_TRUE(ran([&] { make(2, 6, 4); }));
  EXPECT_FALSE(ran([&] { make(1, 3, 2); }));
  EXPECT_FALSE(ran([&] { make(2, 1, 4); }));
}

// ---- B39: plans in compressed rows
// -----------------------------------------------------------------------------------

// vllm PR #51252: three requests of 40,000 tokens at ratio 4 are 10,000 rows each; a workspace of 16,384 rows holds
// one of them at a time, and the plan says so.
TEST_P(Cases, B39_chunks_count_compressed_rows) {
  const std::vector<int64_t> lens(3, 40000), rows(3, 100);
  PlanStep step{};
  step.num_requests = 3, step.query_lens = rows.data(), step.seq_lens = lens.data();
  step.ratio = 4, step.gather_rows = 16384;
  const std::vector<PrefillChunk> chunks = prefill_chunks(step);
  ASSERT_EQ(chunks.size(), 3U);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(chunks[i].first_request, static_cast<int64_t>(i));
    EXPECT_EQ(chunks[i].last_request, static_cast<int64_t>(i) + 1);
    EXPECT_EQ(chunks[i].total_keys, 10000);
  }
}

// ---- B31: what a key row stands for
// ----------------------------------------------------------------------------------

// The unit again (ROCm/aiter PR #4661), for pools: two requests side by side in a batch, the second one starting in the
// middle of a pool. Its first pool's other tokens are in the tail, not in the rows before it, which are a stranger's.
TEST_P(Cases, B31_a_pool_is_made_of_its_own_request) {
  support::Random random(31);
  const Array k = topkey::testing::normals(DType::bf16, {8, 32}, random),
              gate = topkey::testing::normals(DType::bf16, {8, 32}, random),
              ape = topkey::testing::normals(DType::f32, {4, 32}, random), tail(DType::bf16, {2, 2, 4, 32});
  // Alone, in two calls: tokens 0 and 1 of the second request, then 2 and 3.
  Array apart, joined;
  PoolK a{};
  a.ape = ape.view(), a.pool_size = 4, a.tail = tail.view();
  a.cache = topkey::testing::cache_of(apart, KeyFormat::fp8, 4, 32, 2);
  const auto call = [&](int64_t first, const Ints& starts, const std::vector<int64_t>& positions,
                        const std::vector<int64_t>& slots, const std::vector<int64_t>& tails) {
    const Array indptr = Array::of(starts), at = topkey::testing::longs_of(positions),
                to = topkey::testing::longs_of(slots), tail_slots = topkey::testing::longs_of(tails);
    a.k = k.view(), a.gate = gate.view();
    for (Tensor* t : {&a.k, &a.gate}) t->data = support::element(*t, first), t->shape[0] = at.size();
    a.q_indptr = indptr.view(), a.positions = at.view(), a.slot_mapping = to.view(), a.tail_slots = tail_slots.view();
    support::run(a, exec());
  };
  call(4, {0, 2}, {0, 1}, {-1, -1}, {4, 5});
  call(6, {0, 2}, {2, 3}, {-1, 1}, {6, 7});
  // Together: the first request's last rows stand right before the second one's.
  std::memset(tail.as<uint8_t>(), 0, tail.bytes());
  a.cache = topkey::testing::cache_of(joined, KeyFormat::fp8, 4, 32, 2);
  call(4, {0, 2}, {0, 1}, {-1, -1}, {4, 5});
  const Array both_k = k.clone(), both_gate = gate.clone();
  for (const Array* array : {&both_k, &both_gate}) {
    // Rows 4, 5: the stranger's tokens 0 and 1.
    std::memcpy(array->as<uint16_t>() + 4 * 32, array->as<uint16_t>(), 2 * 32 * sizeof(uint16_t));
  }
  const Array indptr = Array::of({0, 2, 4}), at = topkey::testing::longs_of({0, 1, 2, 3}),
              to = topkey::testing::longs_of({-1, -1, -1, 1}), tail_slots = topkey::testing::longs_of({0, 1, 6, 7});
  a.k = both_k.view(), a.gate = both_gate.view();
  for (Tensor* t : {&a.k, &a.gate}) t->data = support::element(*t, 4), t->shape[0] = 4;
  a.q_indptr = indptr.view(), a.positions = at.view(), a.slot_mapping = to.view(), a.tail_slots = tail_slots.view();
  support::run(a, exec());
  EXPECT_TRUE(topkey::testing::same_bytes(joined, apart));
}

TOPKEY_CASES_OF_GENERAL_BACKENDS();

}  // namespace
}  // namespace topkey::cases
