// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// CASES chapter 2, threshold buckets and exactness: many keys so alike that a coarse first pass cannot tell them
// apart, and ties that must be settled by position. Each is asked of topk, mqa_topk and paged_mqa_topk.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/cases/ways.h"

namespace topkey::cases {
namespace {

constexpr int32_t kManyKeys = 65536;

int32_t mixed(int32_t i) { return static_cast<int32_t>(int64_t{i} * 40503 % kManyKeys); }

/// Scores that all differ, in low mantissa bits only.
Floats near_equal() {
  Floats scores;
  for (int32_t i = 0; i < kManyKeys; ++i) scores.push_back(float_of(0x3F800000U + static_cast<uint32_t>(mixed(i))));
  return scores;
}

Ints winners_of_near_equal() {
  Ints winners;
  for (int32_t i = 0; i < kManyKeys; ++i) {
    if (mixed(i) >= kManyKeys - 2048) winners.push_back(i);
  }
  return winners;
}

// sgl-project/sglang #36807, #35257, flashinfer #2604: distinct scores in one coarse bucket. Exactly the 2048 best
// are chosen.
TEST_P(Cases, B06_near_equal_scores_overflow_a_candidate_buffer) {
  const Ints want = winners_of_near_equal();
  each_way({{near_equal()}, 2048}, exec(), [&](const Picked& p) { EXPECT_EQ(p.indices[0], want); });
}

// The same over a batch: every row gets the same answer.
TEST_P(Cases, B06_near_equal_scores_in_every_row_of_a_batch) {
  constexpr int64_t kRows = 64;
  const Array one = floats({near_equal()});
  Topk a{};
  a.scores = tensor(one.view().data, DType::f32, {kRows, kManyKeys}, {0, 1});
  a.rows.count = kRows;
  a.topk = 2048;
  const Picked p = pick_exactly(a, exec(), false);
  EXPECT_EQ(p.indices, std::vector<Ints>(kRows, winners_of_near_equal()));
}

// flashinfer #2604 / PR #2605: in bf16 the same scores are heavy ties. Value-exact, and ties go to the lowest
// positions.
TEST_P(Cases, B06_near_equal_scores_as_bf16_ties) {
  const Floats wide = near_equal();
  std::vector<uint16_t> scores;
  for (float score : wide) scores.push_back(float_to_bf16(score));
  const Array narrow = matrix<uint16_t>(DType::bf16, {scores});
  Topk a{};
  a.scores = narrow.view();
  a.rows.count = 1;
  a.topk = 2048;
  a.out.order = Order::score;
  const Picked p = pick_exactly(a, exec());
  EXPECT_EQ(invalid(p.indices[0], 2048, 0, kManyKeys), "");
  std::sort(scores.begin(), scores.end(), std::greater<>());
  for (size_t i = 0; i < 2048; ++i) ASSERT_EQ(float_to_bf16(p.scores[0][i]), scores[i]) << i;
}

// sglang PR #30645, #30512: ReLU zeros share the cut. No hole and no -1; all winners, then the lowest-numbered zeros.
TEST_P(Cases, B07_exact_ties_leave_no_holes) {
  Floats scores(8320, 0.F);
  Ints want = progression(0, 100, 83);
  for (int32_t j = 0; j < 100; ++j) scores[static_cast<size_t>(83 * j)] = static_cast<float>(1 + j);
  for (int32_t i = 0; want.size() < 2048; ++i) {
    if (scores[static_cast<size_t>(i)] == 0) want.push_back(i);
  }
  std::sort(want.begin(), want.end());
  each_way({{scores}, 2048}, exec(), [&](const Picked& p) {
    EXPECT_EQ(invalid(p.indices[0], 2048, 0, 8320), "");
    EXPECT_EQ(p.indices[0], want);
  });
}

// The same with every score equal: the first 2048 positions.
TEST_P(Cases, B07_all_scores_equal) {
  each_way({{Floats(20000, 0.5F)}, 2048}, exec(),
           [](const Picked& p) { EXPECT_EQ(p.indices[0], progression(0, 2048)); });
}

// The same with more infinities than topk: 2048 distinct positions of +inf, the lowest.
TEST_P(Cases, B07_more_infinities_than_topk) {
  Floats scores(4096, -1.F);
  Ints where = progression(0, 4096), want;
  Random(7).shuffle(where);
  where.resize(3000);
  for (int32_t i : where) scores[static_cast<size_t>(i)] = std::numeric_limits<float>::infinity();
  std::sort(where.begin(), where.end());
  want.assign(where.begin(), where.begin() + 2048);
  each_way({{scores}, 2048}, exec(), [&](const Picked& p) { EXPECT_EQ(p.indices[0], want); });
}

// vllm PR #27568 (#26554), tilelang #1351: only the ten lowest mantissa bits differ. Value-exact, guards untouched.
TEST_P(Cases, B09_low_mantissa_bits_decide) {
  Random random(9);
  std::vector<Floats> scores(16);
  for (Floats& row : scores) {
    for (int i = 0; i < 8192; ++i) row.push_back(float_of(0x3F900000U | static_cast<uint32_t>(random.below(1024))));
  }
  each_way({scores, 2048}, exec(), [&](const Picked& p) {
    for (size_t r = 0; r < scores.size(); ++r) {
      EXPECT_EQ(invalid(p.indices[r], 2048, 0, 8192), "");
      Floats all = scores[r], chosen = p.scores[r];
      std::sort(all.begin(), all.end(), std::greater<>());
      std::sort(chosen.begin(), chosen.end(), std::greater<>());
      all.resize(2048);
      EXPECT_EQ(chosen, all) << "row " << r;
    }
  });
}

// The same with one bit: exactly 3000 keys are the better ones, so all 2048 come from them.
TEST_P(Cases, B09_one_mantissa_bit_decides) {
  Floats scores(8192, float_of(0x3F900000U));
  Ints where = progression(0, 8192);
  Random(11).shuffle(where);
  for (size_t i = 0; i < 3000; ++i) scores[static_cast<size_t>(where[i])] = float_of(0x3F900001U);
  each_way({{scores}, 2048}, exec(), [&](const Picked& p) {
    EXPECT_EQ(invalid(p.indices[0], 2048, 0, 8192), "");
    for (int32_t i : p.indices[0]) ASSERT_EQ(bits_of(scores[static_cast<size_t>(i)]), 0x3F900001U);
  });
}

// FlagGems-vllm #831 (adjacent): uniform scores in [10, 10.2). Value-exact.
TEST_P(Cases, B09_a_narrow_range_of_scores) {
  Random random(13);
  Floats scores;
  for (int i = 0; i < 32768; ++i) scores.push_back(10.F + 0.2F * static_cast<float>(random.uniform()));
  each_way({{scores}, 512}, exec(), [&](const Picked& p) {
    Floats all = scores, chosen = p.scores[0];
    std::sort(all.begin(), all.end(), std::greater<>());
    std::sort(chosen.begin(), chosen.end(), std::greater<>());
    all.resize(512);
    EXPECT_EQ(chosen, all);
  });
}

TOPKEY_CASES();

}  // namespace
}  // namespace topkey::cases
