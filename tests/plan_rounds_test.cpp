// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// row_shard_sizes: row shards for devices that answer so many rows side by side, against what the slowest rank then takes.
#include <algorithm>
#include <numeric>

#include "tests/testing.h"

namespace topkey::testing {
namespace {

using Longs = std::vector<int64_t>;

/// Prefill requests, their rows and tokens.
struct Prompts {
  Longs query, seq;

  PlanStep step(int32_t shards) const {
    PlanStep s{};
    s.num_requests = static_cast<int64_t>(query.size()), s.query_lens = query.data(), s.seq_lens = seq.data();
    s.decode_threshold = 1, s.row_shards = shards;
    return s;
  }
  /// Keys that each row sees.
  Longs costs() const {
    Longs all;
    for (size_t b = 0; b < query.size(); ++b) {
      for (int64_t j = 0; j < query[b]; ++j) all.push_back(seq[b] - query[b] + 1 + j);
    }
    return all;
  }
};

/// Of the slowest rank: round after round of so many rows, each as long as its dearest row.
int64_t slowest(const Longs& costs, const Longs& sizes, int64_t rows_at_once) {
  int64_t most = 0, first = 0;
  for (const int64_t size : sizes) {
    int64_t time = 0;
    for (int64_t row = first; row < first + size; row += rows_at_once) {
      const int64_t last = std::min(first + size, row + rows_at_once);
      time += *std::max_element(costs.begin() + row, costs.begin() + last);
    }
    first += size, most = std::max(most, time);
  }
  return most;
}

/// By cost the first rank would have 4,233 rows: five rounds of 1,056.
TEST(PlanRounds, SharesEndWhereRoundsDo) {
  const Prompts one{{8192}, {65536}};
  const PlanStep step = one.step(2);
  EXPECT_EQ(row_shard_sizes(step, 1056), (Longs{4224, 3968}));
  EXPECT_EQ(row_shard_sizes(step, 0), plan_step(step).row_shard_sizes);
  EXPECT_GT(plan_step(step).row_shard_sizes[0], 4224);
  EXPECT_TRUE(row_shard_sizes(one.step(1), 1056).empty());
  const Thrown thrown = thrown_by([&] { row_shard_sizes(step, -1); });
  EXPECT_EQ(thrown.sentence, "row_shard_sizes: rows_at_once must be from 0 to 2147483647, got -1");
}

TEST(PlanRounds, NeverLaterThanByCost) {
  property("row shards by rounds", 1500, [] {
    Prompts prompts;
    for (int64_t b = draw(1, 6); b > 0; --b) {
      prompts.query.push_back(draw(2, 60));
      prompts.seq.push_back(prompts.query.back() + draw(0, 500));
    }
    const PlanStep step = prompts.step(static_cast<int32_t>(draw(2, 5)));
    const int64_t at_once = draw(1, 40);
    const Longs costs = prompts.costs(), by_cost = plan_step(step).row_shard_sizes,
                sizes = row_shard_sizes(step, at_once);
    RC_ASSERT(sizes.size() == by_cost.size());
    if (sizes.empty()) return;
    RC_ASSERT(*std::min_element(sizes.begin(), sizes.end()) >= 1);
    RC_ASSERT(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == static_cast<int64_t>(costs.size()));
    RC_ASSERT(slowest(costs, sizes, at_once) <= slowest(costs, by_cost, at_once));
  });
}

/// Of one prompt: about as soon as the best of all cuts in two.
TEST(PlanRounds, OnePromptIsCutWell) {
  property("row shards of a prompt by rounds", 300, [] {
    const int64_t rows = draw(2, 120), at_once = draw(1, 40);
    const Prompts prompt{{rows}, {rows + draw(0, 500)}};
    const Longs costs = prompt.costs();
    int64_t best = INT64_MAX;
    for (int64_t first = 1; first < rows; ++first) {
      best = std::min(best, slowest(costs, {first, rows - first}, at_once));
    }
    const Longs sizes = row_shard_sizes(prompt.step(2), at_once);
    RC_ASSERT(slowest(costs, sizes, at_once) <= best + costs.back() - costs.front());
  });
}

}  // namespace
}  // namespace topkey::testing
