// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// CASES chapter 7, visible windows and coordinates: which column is column 0, what unit a length has, which position
// a row of a context-parallel rank stands at.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tests/cases/requests.h"
#include "tests/cases/ways.h"

namespace topkey::cases {
namespace {

/// Two requests side by side: 3000 scores of +100, then 0, 1, ..., 4999.
Floats packed_scores() {
  Floats scores(3000, 100.F);
  for (int i = 0; i < 5000; ++i) scores.push_back(static_cast<float>(i));
  return scores;
}

// sglang PR #12582 (#11629), vllm PR #56749: a row's start is ignored. Row 1 finds B's last 2048 positions, counted
// from B's first.
TEST_P(Cases, B29_positions_count_from_the_rows_own_start) {
  const Asked two{{packed_scores(), packed_scores()}, 2048, Order::position, {0, 3000}, {3000, 8000}};
  each_way(two, exec(), [](const Picked& p) {
    EXPECT_EQ(p.indices[0], progression(0, 2048));
    EXPECT_EQ(p.indices[1], progression(2952, 2048));
  });
  const Asked tail{{packed_scores()}, 2048, Order::position, {3000}, {8000}};  // a batch of one row is no decode step
  each_way(tail, exec(), [](const Picked& p) { EXPECT_EQ(p.indices[0], progression(2952, 2048)); });
}

// The same with both rows over one key matrix: relative positions, absolute ones on request, and slots of the row's
// own request.
TEST_P(Cases, B29_packed_keys_of_two_requests) {
  const way::Keys k = way::keys_of({{packed_scores()}, 1});
  const Array start = Array::of({0, 3000}), end = Array::of({3000, 8000}), base = Array::of({0, 3000});
  const Array table = ints({progression(500, 79), progression(900, 79)});  // A's pages of 64, B's pages
  MqaTopk a{};
  a.q.values = tensor(k.q.view().data, DType::f8_e4m3fn, {2, way::kHeads, way::kDim}, {0, way::kDim, 1});
  a.q.weights = tensor(k.weights.view().data, DType::f32, {2, way::kHeads}, {0, 1});
  a.keys = {k.values.view(), k.scales.view(), KeyFormat::fp8};
  a.rows.count = 2, a.rows.start = start.view(), a.rows.end = end.view();
  a.topk = 2048;
  a.out.slot_map = {table.view(), false, 64};
  const Picked relative = pick(a, exec());
  EXPECT_EQ(relative.indices, (std::vector<Ints>{progression(0, 2048), progression(2952, 2048)}));
  a.out.index_base = base.view();
  const Picked absolute = pick(a, exec());
  EXPECT_EQ(absolute.indices, (std::vector<Ints>{progression(0, 2048), progression(5952, 2048)}));
  for (const Picked* p : {&relative, &absolute}) {
    EXPECT_EQ(p->slots, (std::vector<Ints>{progression(500 * 64, 2048), progression(900 * 64 + 2952, 2048)}));
  }
  const Array indices = ints(relative.indices);
  const Guarded slots(DType::i32, 2, 2048);
  ToSlots translate{};
  translate.indices = indices.view(), translate.block_table = table.view(), translate.page_size = 64;
  translate.slots = slots.view();
  support::run(translate, exec());
  EXPECT_EQ(row_of<int32_t>(slots.view(), 1), progression(900 * 64 + 2952, 2048));
}

// ---- B31: lengths count key rows
// ---------------------------------------------------------------------------------------------

/// Rows that see `lens` keys, with 1e30 in the first column that they may not see; every operation must stop before it.
void expect_stops_at(const Ints& lens, const Exec& exec) {
  Random random(131);
  std::vector<Floats> scores;
  for (int32_t length : lens) {
    scores.emplace_back(1024);
    for (float& score : scores.back()) score = random.normal();
    scores.back()[static_cast<size_t>(length)] = 1e30F;
  }
  for (int32_t topk : {100, 2048}) {  // one must choose, the other takes all
    each_way({scores, topk, Order::position, {}, lens}, exec, [&](const Picked& p) {
      for (size_t r = 0; r < lens.size(); ++r) {
        EXPECT_EQ(p.counts[r], std::min(topk, lens[r])) << "row " << r;
        EXPECT_EQ(invalid(p.indices[r], p.counts[r], 0, lens[r]), "") << "row " << r;
      }
    });
  }
}

// ROCm/aiter PR #4661, flashinfer PR #5288: row ends in the wrong unit. (seq - next_n + t + 1) / ratio, divided once
// and used as given.
TEST_P(Cases, B31_lengths_under_compression_are_divided_once) {
  struct Step {
    int32_t seq, next_n, ratio;
    Ints lens;
  };
  for (const Step& s : {Step{1000, 2, 4, {249, 250}}, Step{1000, 2, 2, {499, 500}}, Step{1000, 2, 1, {999, 1000}},
                        Step{3, 1, 4, {0}}, Step{4, 1, 4, {1}}}) {
    const Ints lens = expanded_lens({0, s.next_n}, {s.seq}, s.ratio, exec());
    EXPECT_EQ(lens, s.lens);
    expect_stops_at(lens, exec());
  }
}

// The same on computed scores: the rows of a compressed request see what they see in a request of that many keys.
TEST_P(Cases, B31_explicit_ends_are_used_as_given) {
  for (bool exact : {false, true}) {
    ProblemSpec spec;
    spec.exact = exact, spec.seed = 132;
    const Picked p = expect_right(requests_of(spec, {250}, {0, 0}, {249, 250}), 250, exec());
    EXPECT_EQ(p.counts, (Ints{249, 250}));
  }
}

// ---- B32: prefill context parallel
// -----------------------------------------------------------------------------------------

/// One request of 37 tokens, a row each.
Problem prefill_of_37(bool exact) {
  ProblemSpec spec;
  spec.exact = exact, spec.seed = 133;
  return requests_of(spec, {37}, Ints(37, 0), progression(1, 37));
}

/// mqa_logits' paged twin, then topk on its scores.
Picked in_two_steps(const Problem& p, int32_t topk, const Exec& exec) {
  const Array logits = logits_of(p, exec);
  Topk a{};
  a.scores = logits.view(), a.rows = p.rows(), a.topk = topk;
  return pick_exactly(a, exec);
}

// sglang PR #27276: round-robin ranks take their rows for contiguous ones. Put together they equal the single rank,
// row by row.
TEST_P(Cases, B32_round_robin_ranks_reassemble) {
  for (bool exact : {false, true}) {
    const Problem whole = prefill_of_37(exact);
    const Picked want = expect_right(whole, 8, exec());
    for (int64_t rank = 0; rank < 4; ++rank) {
      std::vector<int64_t> own;
      for (int64_t r = rank; r < 37; r += 4) own.push_back(r);
      ASSERT_EQ(own.size(), rank == 0 ? 10U : 9U);
      const Problem part = support::rows_of(whole, own);
      const Picked fused = expect_right(part, 8, exec()), steps = in_two_steps(part, 8, exec());
      for (size_t i = 0; i < own.size(); ++i) {
        const auto r = static_cast<size_t>(own[i]);
        EXPECT_EQ(fused.indices[i], want.indices[r]) << "rank " << rank << ", row " << r;
        EXPECT_EQ(steps.indices[i], want.indices[r]) << "rank " << rank << ", row " << r;
      }
    }
  }
}

// sglang PR #20531: the table holds this rank's three requests, the lengths all five. Refused by shape; by request
// id, fill only beyond the table, counted; under strict an error.
TEST_P(Cases, B32_table_of_three_requests_lengths_of_five) {
  ProblemSpec spec;
  spec.exact = true, spec.seed = 134;
  Problem p = requests_of(spec, {30, 20, 40, 35, 25}, {0, 1, 2, 3, 4}, {30, 20, 40, 35, 25});
  const Picked all = expect_right(p, 8, exec());
  const std::vector<Ints> lines = {row_of<int32_t>(p.block_table.view(), 0), row_of<int32_t>(p.block_table.view(), 2),
                                   row_of<int32_t>(p.block_table.view(), 3)};
  p.block_table = ints(lines);
  const topkey::testing::Outputs out(5, 8, {});
  PagedMqaTopk a = p.paged_search(8, out.selection());
  const Array indptr = Array::of({0, 1, 2, 3, 4, 5});
  for (bool by_indptr : {false, true}) {
    a.rows.request = {};
    a.rows.q_indptr = by_indptr ? indptr.view() : Tensor{};
    EXPECT_FALSE(ran([&] { support::run(a, exec()); })) << "five requests, a table of three";
    EXPECT_TRUE(out.untouched());
  }
  const Array ids = Array::of({0, -1, 1, 2, 4});  // as filtered: request 1 is another rank's; the last was forgotten
  a.rows.q_indptr = {}, a.rows.request = ids.view(), a.out = {};
  const Picked filtered = pick(a, exec());
  for (size_t r : {size_t{0}, size_t{2}, size_t{3}}) EXPECT_EQ(filtered.indices[r], all.indices[r]) << "row " << r;
  for (size_t r : {size_t{1}, size_t{4}}) EXPECT_EQ(filtered.indices[r], Ints(8, -1)) << "row " << r;
  EXPECT_EQ(filtered.stats[kSkippedPages], 1U);
  Exec strict = exec();
  strict.strict = true;
  a.out = out.selection();
  EXPECT_FALSE(ran([&] { support::run(a, strict); }));
  EXPECT_TRUE(out.untouched());
}

TOPKEY_CASES();

}  // namespace
}  // namespace topkey::cases
