// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// CASES chapters 5 and 6, lengths and padding: lengths that are negative, zero, missing or more than there are rows;
// padded rows that must not reach their neighbours in a shared buffer.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/cases/requests.h"

namespace topkey::cases {
namespace {

Ints first_then_fill(int64_t length, int32_t topk) {
  Ints row = progression(0, static_cast<int32_t>(std::clamp<int64_t>(length, 0, topk)));
  row.resize(static_cast<size_t>(topk), -1);
  return row;
}

// vllm #51593, sglang PR #30378, #31123: padded drafts have length -1, read as 4.29e9. They are empty rows; the call
// returns.
TEST_P(Cases, B21_negative_lengths_are_empty_rows) {
  constexpr int64_t kWidth = 1048576;
  const Sparse scores(8 * kWidth * 4);
  TOPKEY_NEEDS(scores);
  std::fill_n(scores.as<float>(), 8 * kWidth, 1.F);
  const Array lens = Array::of({10, 7, 12, 0});
  Topk a{};
  a.scores = tensor(scores.data(), DType::f32, {8, kWidth});
  a.rows.count = 8, a.rows.next_n = 2, a.rows.end = lens.view();
  a.topk = 512;
  const Deadline within(5);
  const Picked p = pick_exactly(a, exec());
  const Ints lengths = {9, 10, 6, 7, 11, 12, -1, 0};
  for (size_t r = 0; r < 8; ++r) EXPECT_EQ(p.indices[r], first_then_fill(lengths[r], 512)) << "row " << r;
  EXPECT_EQ(p.counts, (Ints{9, 10, 6, 7, 11, 12, 0, 0}));
}

// The same as lengths, as ends and as six draft tokens of a request of one token: only the last row sees a key.
TEST_P(Cases, B21_lengths_from_minus_four_to_one) {
  const Array scores = floats(std::vector<Floats>(6, Floats(4096, 1.F)));
  const Array six = Array::of({-4, -3, -2, -1, 0, 1}), one = Array::of({1});
  for (int form = 0; form < 3; ++form) {
    Topk a{};
    a.scores = scores.view();
    a.rows.count = 6;
    a.topk = 512;
    if (form == 0) a.rows.length = six.view();
    if (form == 1) a.rows.end = six.view();
    if (form == 2) a.rows.end = one.view(), a.rows.next_n = 6;
    const Deadline within(5);
    const Picked p = pick_exactly(a, exec());
    for (size_t r = 0; r < 6; ++r)
      EXPECT_EQ(p.indices[r], first_then_fill(r == 5 ? 1 : 0, 512)) << form << ", row " << r;
  }
}

// The same where keys are read: no score is written for the padded request, no index chosen.
TEST_P(Cases, B21_negative_lengths_in_the_paged_operations) {
  for (bool exact : {false, true}) {
    ProblemSpec spec;
    spec.exact = exact, spec.seed = 121;
    const Problem p = drafts_of(spec, {10, 7, 12, 0}, 2);
    const Picked chosen = expect_right(p, 512, exec());
    EXPECT_EQ(chosen.counts, (Ints{9, 10, 6, 7, 11, 12, 0, 0}));
    const topkey::testing::Logits logits(DType::f32, 8, p.width());
    support::run(p.paged_logits(logits.view(), false), exec());
    EXPECT_EQ(logits.memory.touched_outside(6, p.width()), "") << "a score of the padded request";
  }
}

// The same where lengths are made: clamped at 0.
TEST_P(Cases, B21_expanded_lengths_are_never_negative) {
  EXPECT_EQ(expanded_lens({0, 2, 4, 6, 8}, {10, 7, 12, 0}, 1, exec()), (Ints{9, 10, 6, 7, 11, 12, 0, 0}));
  EXPECT_EQ(expanded_lens({0, 6}, {1}, 1, exec()), (Ints{0, 0, 0, 0, 0, 1}));
}

void expect_nothing(const Picked& p, int32_t topk) {
  for (size_t r = 0; r < p.indices.size(); ++r) ASSERT_EQ(p.indices[r], Ints(static_cast<size_t>(topk), -1)) << r;
  EXPECT_EQ(p.counts, Ints(p.indices.size(), 0));
  EXPECT_EQ(p.stats[kScoredKeys], 0U);
}

// DeepGEMM PR #354, TensorRT-LLM PR #14940: every context empty. Nothing is read, every index is -1.
TEST_P(Cases, B26_a_batch_with_no_keys_at_all) {
  for (int32_t requests : {1, 32, 128, 1024}) {
    for (int32_t next_n : {1, 2}) {
      const Ints empty(static_cast<size_t>(requests), 0);
      const Problem p = drafts_of({}, empty, next_n);
      expect_nothing(pick(p.paged_search(16, {}), exec()), 16);
      const topkey::testing::Logits logits(DType::f32, p.count(), p.width());
      support::run(p.paged_logits(logits.view(), false), exec());
      EXPECT_TRUE(logits.memory.untouched());
      const Array scores(DType::f32, {p.count(), 64});
      Topk a{};
      a.scores = scores.view(), a.rows = p.rows(), a.topk = 16;
      expect_nothing(pick(a, exec()), 16);
      const Ints starts = progression(0, requests + 1, next_n);
      EXPECT_EQ(expanded_lens(starts, empty, 1, exec()), Ints(static_cast<size_t>(requests * next_n), 0));
    }
  }
}

// The same where one token under ratio 4 makes no key row yet.
TEST_P(Cases, B26_one_token_under_ratio_four_sees_nothing) {
  const Ints lens = expanded_lens({0, 1}, {1}, 4, exec());
  EXPECT_EQ(lens, Ints{0});
  const Problem p = requests_of({}, {0}, {0}, lens);
  expect_nothing(pick(p.paged_search(16, {}), exec()), 16);
}

// The same with one request of one key among 31 empty ones, wherever it stands.
TEST_P(Cases, B26_one_key_among_empty_requests) {
  for (size_t place : {size_t{0}, size_t{15}, size_t{31}}) {
    for (bool exact : {false, true}) {
      Ints lens(32, 0);
      lens[place] = 1;
      ProblemSpec spec;
      spec.exact = exact, spec.seed = 126;
      const Picked p = expect_right(drafts_of(spec, lens, 2), 16, exec());
      for (size_t r = 0; r < 64; ++r) {
        EXPECT_EQ(p.indices[r], first_then_fill(r == 2 * place + 1 ? 1 : 0, 16)) << "row " << r;
      }
    }
  }
}

// The same for the other operations: no rows, no keys, no parts, no slots.
TEST_P(Cases, B26_other_operations_with_no_work) {
  ProblemSpec spec;
  spec.rows = 3, spec.keys = 0;
  const Problem p = support::make_problem(spec);  // dense, not one key
  expect_nothing(pick(p.dense_search(8, {}), exec()), 8);
  const Array parts(DType::f32, {2, 3, 8}), none(DType::i32, {2, 3, 8});
  std::fill_n(none.as<int32_t>(), none.size(), -1);
  MergeTopk merge{};
  merge.scores = parts.view(), merge.indices = none.view(), merge.topk = 8, merge.rows.count = 3;
  expect_nothing(pick(merge, exec()), 8);
  const Array scores(DType::f32, {3, 32}), zero = Array::of({0, 0, 0});
  const Guarded blocks(DType::i32, 3, 4), slots(DType::i32, 3, 8);
  SelectBlocks select{};
  select.scores = scores.view(), select.block_size = 8, select.blocks = blocks.view();
  select.rows.count = 3, select.rows.end = zero.view();
  support::run(select, exec());
  const Array table = ints({{1}, {2}, {3}});
  ToSlots translate{};
  translate.indices = tensor(none.view().data, DType::i32, {3, 8}), translate.block_table = table.view();
  translate.page_size = 16, translate.slots = slots.view();
  support::run(translate, exec());
  for (int64_t r = 0; r < 3; ++r) {
    EXPECT_EQ(row_of<int32_t>(blocks.view(), r), Ints(4, -1));
    EXPECT_EQ(row_of<int32_t>(slots.view(), r), Ints(8, -1));
  }
  EXPECT_EQ(blocks.touched_outside() + slots.touched_outside(), "");
}

// ---- B27: padded rows beside prefill rows
// ---------------------------------------------------------------------------------

// vllm PR #32175, #39542: six padded decode rows in a buffer whose rows 4..8 hold prefill results. Only rows 0..3 are
// written.
TEST_P(Cases, B27_decode_rows_leave_the_prefill_rows_alone) {
  constexpr int32_t kTopk = 24;
  for (bool exact : {false, true}) {
    ProblemSpec spec;
    spec.exact = exact, spec.seed = 127;
    const Problem decode = ragged_of(spec, {40, 61, 9}, {1, 2, 1});
    spec.seed = 128, spec.rows = 5, spec.keys = 50, spec.windows = support::Windows::causal;
    const Problem prefill = support::make_problem(spec);
    const Picked want = expect_right(decode, kTopk, exec()), before = expect_right(prefill, kTopk, exec());
    const Guarded buffer(DType::i32, 9, kTopk);
    Tensor tail = buffer.view();
    tail.data = support::element(tail, 4), tail.shape[0] = 5;
    MqaTopk second = prefill.dense_search(kTopk, {});
    second.out.indices = tail;
    support::run(second, exec());
    PagedMqaTopk first = decode.paged_search(kTopk, {});
    first.out.indices = buffer.view();
    support::run(first, exec());
    EXPECT_EQ(buffer.touched_outside(), "");
    for (int64_t r = 0; r < 9; ++r) {
      const auto i = static_cast<size_t>(r);
      EXPECT_EQ(row_of<int32_t>(buffer.view(), r), r < 4 ? want.indices[i] : before.indices[i - 4]) << "row " << r;
    }
  }
}

// vllm PR #52500: eight tokens over six requests do not divide evenly. Each row equals the row asked alone.
TEST_P(Cases, B27_ragged_decode_rows) {
  for (bool exact : {false, true}) {
    ProblemSpec spec;
    spec.exact = exact, spec.seed = 129;
    const Problem p = ragged_of(spec, {40, 61, 9, 17, 2, 33}, {1, 1, 1, 1, 2, 2});
    const Picked all = expect_right(p, 24, exec());
    for (int64_t r = 0; r < 8; ++r) {
      const Picked alone = expect_right(support::rows_of(p, {r}), 24, exec());
      EXPECT_EQ(alone.indices[0], all.indices[static_cast<size_t>(r)]) << "row " << r;
    }
  }
}

// A comment on vllm PR #53906: 128 padded lengths, 118 requests. Right, or refused with nothing written.
TEST_P(Cases, B27_more_lengths_than_requests) {
  ProblemSpec spec;
  spec.exact = true, spec.seed = 130;
  Ints lens;
  for (int32_t b = 0; b < 118; ++b) lens.push_back(b % 40);
  const Problem p = drafts_of(spec, lens, 1);
  const Picked want = expect_right(p, 8, exec());
  Ints padded = lens;
  padded.resize(128, 1000);
  const Array longer = Array::of(padded);
  for (bool by_length : {false, true}) {
    const topkey::testing::Outputs out(118, 8, {});
    PagedMqaTopk a = p.paged_search(8, out.selection());
    a.rows.end = {};
    (by_length ? a.rows.length : a.rows.end) = longer.view();
    if (!ran([&] { support::run(a, exec()); })) {
      EXPECT_TRUE(out.untouched());
      continue;
    }
    EXPECT_TRUE(topkey::testing::inside(out));
    for (int64_t r = 0; r < 118; ++r) {
      EXPECT_EQ(row_of<int32_t>(out.indices.view(), r), want.indices[static_cast<size_t>(r)]) << "row " << r;
    }
  }
}

TOPKEY_CASES();

}  // namespace
}  // namespace topkey::cases
