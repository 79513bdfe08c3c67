// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// CASES chapters 3 and 5, determinism and races: equal input gives equal bits on every thread, in every batch, in
// every call of a long series over one workspace.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cases/case.h"

namespace topkey::cases {
namespace {

bool same_bits(const Picked& a, const Picked& b) {
  if (a.indices != b.indices || a.counts != b.counts || a.scores.size() != b.scores.size()) return false;
  for (size_t r = 0; r < a.scores.size(); ++r) {
    if (std::memcmp(a.scores[r].data(), b.scores[r].data(), a.scores[r].size() * sizeof(float)) != 0) return false;
  }
  return true;
}

/// Eight ranks as threads, each making the same call three times while the others work, each with another thread limit.
template <class Args>
void expect_equal_on_eight_ranks(const Args& args, const Exec& exec) {
  constexpr int kRanks = 8, kCalls = 3;
  std::vector<std::vector<Picked>> results(kRanks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      Exec own = exec;
      own.threads = rank;  // 0 = all
      for (int call = 0; call < kCalls; ++call) results[static_cast<size_t>(rank)].push_back(pick(args, own));
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (size_t rank = 0; rank < kRanks; ++rank) {
    for (const Picked& p : results[rank]) EXPECT_TRUE(same_bits(p, results[0][0])) << "rank " << rank;
  }
}

// sglang PR #24654, ROCm/aiter PR #4415: ranks disagree under ties. Same indices in the same order on all, in 24 calls.
TEST_P(Cases, B12_ranks_that_repeat_the_same_selection) {
  Random random(112);
  Floats scores;
  for (int i = 0; i < 131072; ++i) scores.push_back(round_to_bf16(random.normal()));
  const Array given = floats({scores});
  Topk a{};
  a.scores = given.view();
  a.rows.count = 1;
  a.topk = 2048;
  a.out.order = Order::score;
  EXPECT_EQ(pick_exactly(a, exec()).stats[kTiedCuts], 1U) << "the cut should fall into a tie";
  expect_equal_on_eight_ranks(a, exec());
}

// The same for the fused search, on exact inputs (many ties) and on random ones.
TEST_P(Cases, B12_ranks_that_repeat_the_same_search) {
  for (bool exact : {true, false}) {
    ProblemSpec spec;
    spec.rows = 2, spec.keys = 2000, spec.exact = exact, spec.pattern = support::Pattern::ties_at_cut, spec.seed = 113;
    const Problem p = support::make_problem(spec);
    expect_right(p, 256, exec());
    expect_equal_on_eight_ranks(p.dense_search(256, {}), exec());
  }
}

Ints best_of(const Tensor& scores, int64_t batch, int32_t topk, const Exec& exec) {
  Topk a{};
  a.scores = scores;
  a.rows.count = batch;
  a.topk = topk;
  a.out.order = Order::score;
  const Picked p = pick_exactly(a, exec);
  for (const Ints& row : p.indices) EXPECT_EQ(row, p.indices[0]) << "rows of one batch differ";
  return p.indices[0];
}

Array in_dtype(DType dtype, const Floats& values) {
  if (dtype == DType::f32) return floats({values});
  std::vector<uint16_t> narrow;
  for (float x : values) narrow.push_back(dtype == DType::bf16 ? float_to_bf16(x) : float_to_f16(x));
  return matrix<uint16_t>(dtype, {narrow});
}

// pytorch #27542, #127196, #150012: a tie's answer depends on k, device, batch. Order `score` gives prefixes, always
// the same.
TEST_P(Cases, B14_ties_do_not_depend_on_topk_or_batch) {
  const Ints all = {2, 4, 3, 1, 0};
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const Array five = in_dtype(dtype, {1, 2, 5, 4, 5}), six = in_dtype(dtype, {3, 2, 3, 2, 1, 1});
    for (int64_t batch : {1, 5, 64}) {
      const auto repeated = [&](const Array& row) {
        return tensor(row.view().data, dtype, {batch, row.view().shape[1]}, {0, 1});
      };
      for (int32_t k = 1; k <= 5; ++k) {
        EXPECT_EQ(best_of(repeated(five), batch, k, exec()), Ints(all.begin(), all.begin() + k)) << "topk " << k;
      }
      EXPECT_EQ(best_of(repeated(six), batch, 2, exec()), (Ints{0, 2}));
    }
  }
}

// The same for a search: the rows of a batch answered alone give the same bits, and a smaller topk is a prefix.
TEST_P(Cases, B14_searches_do_not_depend_on_topk_or_batch) {
  ProblemSpec spec;
  spec.rows = 5, spec.keys = 300, spec.exact = true, spec.pattern = support::Pattern::relu_plateau, spec.seed = 114;
  const Problem p = support::make_problem(spec);
  Selection by_score{};
  by_score.order = Order::score;
  const Picked whole = pick(p.dense_search(40, by_score), exec());
  for (int64_t r = 0; r < 5; ++r) {
    const Problem one = support::rows_of(p, {r});
    for (int32_t k : {1, 7, 40}) {
      const Picked alone = pick(one.dense_search(k, by_score), exec());
      const Ints& row = whole.indices[static_cast<size_t>(r)];
      EXPECT_EQ(alone.indices[0], Ints(row.begin(), row.begin() + k)) << "row " << r << ", topk " << k;
    }
  }
}

// flashinfer PR #3615, #4131, DeepGEMM #392: launches hang or differ. Twenty runs of causal logits have the same
// bits, and are right.
TEST_P(Cases, B24_twenty_runs_of_logits_have_the_same_bits) {
  for (const auto& [format, exact] : {std::pair{KeyFormat::fp8, false},
                                      {KeyFormat::fp8, true},
                                      {KeyFormat::mxfp4, false},
                                      {KeyFormat::mxfp4, true}}) {
    for (int32_t heads : full() ? Ints{16, 64} : Ints{4}) {
      ProblemSpec spec;
      spec.format = format;
      spec.heads = heads, spec.head_dim = full() ? 128 : 32, spec.rows = full() ? 128 : 3, spec.keys = 4096;
      spec.windows = support::Windows::causal, spec.exact = exact, spec.seed = 124;
      const Problem p = support::make_problem(spec);
      expect_right(p, 512, exec());
      const Array first = logits_of(p, exec());
      for (int run = 1; run < 20; ++run) {
        const Array again = logits_of(p, exec());
        ASSERT_EQ(std::memcmp(again.as<float>(), first.as<float>(), first.bytes()), 0) << "run " << run;
      }
    }
  }
}

// The same for topk on long rows: back-to-back calls over one workspace that nobody clears all complete and are equal.
TEST_P(Cases, B24_back_to_back_calls_over_one_workspace) {
  const int64_t rows = full() ? 32 : 2, calls = full() ? 10000 : 20;
  constexpr int64_t kColumns = 150000, kTopk = 2048;
  Random random(125);
  const Array scores(DType::f32, {rows, kColumns}), first(DType::i32, {rows, kTopk}), again(DType::i32, {rows, kTopk});
  std::generate_n(scores.as<float>(), scores.size(), [&] { return round_to_bf16(random.normal()); });
  Topk a{};
  a.scores = scores.view();
  a.rows.count = rows;
  a.topk = kTopk;
  a.out.indices = first.view();
  Exec shared = exec();
  shared.workspace_bytes = topk_workspace_bytes(a, shared);
  const auto workspace = support::aligned_bytes(shared.workspace_bytes);
  shared.workspace = workspace.get();
  support::launch(a, shared);
  EXPECT_TRUE(topkey::testing::good(support::compare_selection(a)));
  a.out.indices = again.view();
  for (int64_t call = 1; call < calls; ++call) {
    std::memset(again.as<uint8_t>(), 0xA5, again.bytes());
    support::launch(a, shared);
    ASSERT_EQ(std::memcmp(again.as<uint8_t>(), first.as<uint8_t>(), first.bytes()), 0) << "call " << call;
  }
}

TOPKEY_CASES();

}  // namespace
}  // namespace topkey::cases
