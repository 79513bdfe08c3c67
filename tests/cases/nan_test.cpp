// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// CASES chapter 4, NaN, infinity, sentinels. The policy (docs/numerics.md): every NaN ranks alike, below -inf,
// whatever its sign and payload, and is chosen only when fewer than topk other live keys exist; -inf is a score;
// neither ever becomes an index.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/cases/ways.h"

namespace topkey::cases {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = float_of(0x7FC00000U), kNegativeNan = float_of(0xFFC00000U);

/// NaNs of both signs and many payloads.
float any_nan(Random& random) {
  return float_of(0x7F800001U + static_cast<uint32_t>(random.below(0x7FFFFE)) +
                  (random.chance(0.5) ? 0x80000000U : 0U));
}

/// Positions of the numbers by score, then those of the NaNs.
Ints by_policy(const Floats& scores, size_t topk) {
  Ints order = progression(0, static_cast<int32_t>(scores.size()));
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const float x = scores[static_cast<size_t>(a)], y = scores[static_cast<size_t>(b)];
    return std::isnan(y) ? !std::isnan(x) : x > y;
  });
  order.resize(std::min(topk, order.size()));
  return order;
}

void expect_policy(const std::vector<Floats>& scores, int32_t topk, const Exec& exec) {
  each_way({scores, topk, Order::score}, exec, [&](const Picked& p) {
    for (size_t r = 0; r < scores.size(); ++r) {
      const auto width = static_cast<int64_t>(scores[r].size());
      EXPECT_EQ(invalid(p.indices[r], std::min<int64_t>(topk, width), 0, width), "") << "row " << r;
      EXPECT_EQ(p.indices[r], by_policy(scores[r], static_cast<size_t>(topk))) << "row " << r;
    }
  });
}

// vllm #49896: NaN scores let memory garbage out as indices. Rows of NaN, mostly NaN, one number, no NaN: all valid.
TEST_P(Cases, B16_rows_of_nan_give_positions_not_garbage) {
  Random random(116);
  std::vector<Floats> scores(4);
  for (int i = 0; i < 5000; ++i) {
    scores[0].push_back(any_nan(random));
    scores[1].push_back(random.chance(0.9) ? any_nan(random) : random.normal());
    scores[2].push_back(i == 3777 ? -4.F : any_nan(random));
    scores[3].push_back(random.normal());
  }
  expect_policy(scores, 512, exec());
}

/// The same problem with zero bytes where no key is.
Problem without_rubbish(const Problem& p) {
  Problem clean = p;
  const Array pages(DType::u8, {p.pages.view().shape[0], p.pages.view().shape[1]});
  clean.pages = pages;
  const auto values = static_cast<size_t>(value_bytes(p.spec.format, p.spec.head_dim));
  for (size_t b = 0; b < p.lens.size(); ++b) {
    for (int64_t t = 0; t < p.lens[b]; ++t) {
      const auto request = static_cast<int64_t>(b);
      std::memcpy(clean.values_at(request, t), p.values_at(request, t), values);
      std::memcpy(clean.scales_at(request, t), p.scales_at(request, t), sizeof(float));
    }
  }
  return clean;
}

// The same source: keys past the context's end in its last page are NaN bytes with NaN scales. Visible scores are
// what they are without them, and finite: hiding is not multiplying by zero.
TEST_P(Cases, B16_nan_bytes_behind_the_last_key) {
  for (bool exact : {false, true}) {
    ProblemSpec spec;
    spec.rows = 3, spec.keys = 1000, spec.paged = true, spec.page_size = 64, spec.exact = exact, spec.seed = 117;
    const Problem p = support::make_problem(spec);
    const Array with = logits_of(p, exec()), without = logits_of(without_rubbish(p), exec());
    ASSERT_EQ(with.bytes(), without.bytes());
    EXPECT_EQ(std::memcmp(with.as<float>(), without.as<float>(), with.bytes()), 0);
    for (int64_t n = 0; n < 1000; ++n) ASSERT_TRUE(std::isfinite(support::float_at(with.view(), 0, n))) << n;
    const Picked a = expect_right(p, 1020, exec()), b = expect_right(without_rubbish(p), 1020, exec());
    EXPECT_EQ(a.indices, b.indices);
    EXPECT_EQ(a.stats, b.stats);
    EXPECT_EQ(a.stats[kNanScores], 0U);
  }
}

// pytorch #117617, #16762: a NaN with its sign bit set ranks elsewhere. Neither is chosen while four numbers are there.
TEST_P(Cases, B18_negative_nan_ranks_as_nan) {
  const Floats scores = {kNan, kNegativeNan, kInf, 1.F, 0.5F, 0.25F};
  each_way({{scores}, 4}, exec(), [](const Picked& p) { EXPECT_EQ(p.indices[0], (Ints{2, 3, 4, 5})); });
  each_way({{scores}, 6, Order::score}, exec(), [](const Picked& p) {
    EXPECT_EQ(p.indices[0], (Ints{2, 3, 4, 5, 0, 1}));
  });
}

/// 600 rows x 64: three finite scores, the rest `other`.
template <class Other>
std::vector<Floats> three_finite(const Other& other) {
  Random random(118);
  std::vector<Floats> scores(600, Floats(64));
  for (Floats& row : scores) {
    for (float& score : row) score = other(random);
    Ints where = progression(0, 64);
    random.shuffle(where);
    for (size_t i = 0; i < 3; ++i) row[static_cast<size_t>(where[i])] = random.normal();
  }
  return scores;
}

// intel/torch-xpu-ops #4839: placeholders (-inf, -1) leak out of rows that are mostly -inf or NaN. Always eight
// positions.
TEST_P(Cases, B18_placeholders_do_not_leak) {
  expect_policy(three_finite([](Random&) { return -kInf; }), 8, exec());
  expect_policy(three_finite([](Random& random) { return any_nan(random); }), 8, exec());
  expect_policy(three_finite([](Random& random) { return random.chance(0.5) ? any_nan(random) : -kInf; }), 8, exec());
}

// The same in the narrow dtypes that topk reads.
TEST_P(Cases, B18_nan_and_infinity_in_bf16_and_f16) {
  for (DType dtype : {DType::bf16, DType::f16}) {
    const uint16_t inf = dtype == DType::bf16 ? 0x7F80 : 0x7C00, nan = inf | 1, sign = 0x8000;
    const auto of = [&](float x) { return dtype == DType::bf16 ? float_to_bf16(x) : float_to_f16(x); };
    const std::vector<uint16_t> codes = {
        nan, static_cast<uint16_t>(nan | sign), inf, of(1.F), static_cast<uint16_t>(inf | sign), of(-2.F), sign, 0};
    const Array scores = matrix<uint16_t>(dtype, {codes});
    Topk a{};
    a.scores = scores.view();
    a.rows.count = 1;
    a.topk = 8;
    a.out.order = Order::score;
    const Picked p = pick_exactly(a, exec());
    EXPECT_EQ(p.indices[0], (Ints{2, 3, 6, 7, 5, 4, 0, 1})) << support::dtype_name(dtype);
  }
}

// rapidsai/raft #1822, PR #2814, flashinfer #1049: fewer finite scores than k. The finite ones first, then true -inf
// positions.
TEST_P(Cases, B19_fewer_finite_scores_than_topk) {
  for (size_t width : {size_t{64}, size_t{5000}, size_t{200000}}) {
    Floats scores(width, -kInf);
    const Ints finite = {3, 9, 20, 41, 63};
    for (size_t i = 0; i < finite.size(); ++i) scores[static_cast<size_t>(finite[i])] = static_cast<float>(5 - i);
    each_way({{scores}, 16, Order::score}, exec(), [&](const Picked& p) {
      EXPECT_EQ(invalid(p.indices[0], 16, 0, static_cast<int64_t>(width)), "");
      EXPECT_EQ(p.indices[0], (Ints{3, 9, 20, 41, 63, 0, 1, 2, 4, 5, 6, 7, 8, 10, 11, 12})) << "width " << width;
      EXPECT_EQ(p.counts[0], 16);
    });
  }
}

// flashinfer #1049: a row of nothing but -inf must return, within a second.
TEST_P(Cases, B19_a_row_of_minus_infinity_returns) {
  for (int64_t width : {64, 5000, 200000}) {
    const Array scores = floats({Floats(static_cast<size_t>(width), -kInf)});
    Topk a{};
    a.scores = scores.view();
    a.rows.count = 1;
    a.topk = 16;
    const Deadline within(1);
    EXPECT_EQ(pick(a, exec()).indices[0], progression(0, 16)) << "width " << width;
  }
}

TOPKEY_CASES();

}  // namespace
}  // namespace topkey::cases
