// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// CASES chapter 8, page lookup and block tables: positions against columns, lengths that reach past the table, tables
// narrower than the score row, gather destinations smaller than the plan.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/cases/requests.h"
#include "tests/cases/ways.h"

namespace topkey::cases {
namespace {

using support::float_at;

/// Exactly `columns` columns of the table; what the memory holds after them is page 10^9.
void narrow_table(Problem& p, int64_t columns) {
  const Tensor& t = p.block_table.view();
  p.block_table = p.block_table.seen_as(tensor(t.data, DType::i32, {t.shape[0], columns}, {t.stride[0], 1}));
}

/// Room for `rows` flat keys of p's format, NaN until written.
struct Workspace {
  Array values, scales;
  Workspace(int64_t rows, int64_t dim) : values(DType::f8_e4m3fn, {rows, dim}), scales(DType::f32, {rows}) {
    std::memset(values.as<uint8_t>(), 0xFF, values.bytes());
    std::memset(scales.as<uint8_t>(), 0xFF, scales.bytes());
  }
  DenseKeys keys() const { return {values.view(), scales.view(), KeyFormat::fp8}; }
  bool untouched() const {
    const auto is_nan = [](uint8_t byte) { return byte == 0xFF; };
    return std::all_of(values.as<uint8_t>(), values.as<uint8_t>() + values.bytes(), is_nan) &&
           std::all_of(scales.as<uint8_t>(), scales.as<uint8_t>() + scales.bytes(), is_nan);
  }
};

/// gather_k of request `b` of p, `rows` of its keys, into the front of `out`.
GatherK gather_of(const Problem& p, int64_t b, const Array& indptr, int64_t total, const Workspace& out) {
  GatherK a{};
  a.keys = p.paged_keys();
  a.keys.block_table.data = support::element(a.keys.block_table, b);
  a.keys.block_table.shape[0] = 1;
  a.indptr = indptr.view();
  a.total = total;
  a.out = out.keys();
  return a;
}

/// Logits of p's rows over flat keys, as wide as `keys`, -inf outside the windows.
Array dense_logits_over(const Problem& p, const DenseKeys& keys, const Exec& exec) {
  const Array logits(DType::f32, {p.count(), keys.values.shape[0]});
  MqaLogits a{};
  a.q = p.query(), a.keys = keys, a.clean = true, a.logits = logits.view();
  a.rows.count = p.count(), a.rows.end = p.end.view();
  support::run(a, exec);
  return logits;
}

// ROCm/aiter PR #5591, #5600, #5614: the token position is used as the table's column. 6000 scores in 94 permuted
// pages equal the reference and the dense scores of the gathered keys.
TEST_P(Cases, B33_positions_are_not_columns_of_the_table) {
  for (bool exact : {false, true}) {
    ProblemSpec spec;
    spec.page_size = 64, spec.scale = ScaleRule::f32, spec.exact = exact, spec.seed = 133;
    Problem p = requests_of(spec, {6000}, {0}, {6000});
    narrow_table(p, 94);
    expect_right(p, 512, exec());
    const Workspace flat(6000, spec.head_dim);
    const Array indptr = Array::of({0, 6000});
    support::run(gather_of(p, 0, indptr, 6000, flat), exec());
    const Array paged = logits_of(p, exec()), dense = dense_logits_over(p, flat.keys(), exec());
    for (int64_t n = 0; n < 6000; ++n) {
      ASSERT_EQ(bits_of(float_at(paged.view(), 0, n)), bits_of(float_at(dense.view(), 0, n))) << n;
    }
  }
}

// ---- B35: lengths past the table
// -------------------------------------------------------------------------------------------

/// A request of columns * 128 keys that says it has `length`; every true score is below 0, so an invented 0 would
/// win. The table ends there, or (`wild_column`) has one more column, of a page that is not in the cache.
Problem longer_than_its_table(int32_t columns, int32_t length, bool exact, bool wild_column = false) {
  ProblemSpec spec;
  spec.page_size = 128, spec.exact = exact, spec.seed = 135;
  Problem p = requests_of(spec, {columns * 128}, {0}, {length});
  narrow_table(p, wild_column ? columns + 1 : columns);
  for (int64_t i = 0; i < p.weights.size(); ++i) p.weights.as<float>()[i] = -std::abs(p.weights.as<float>()[i]);
  for (int64_t i = 0; i < p.q.size(); ++i) p.q.as<uint8_t>()[i] &= 0x7F;  // no negative dot, so no ReLU zero
  for (int64_t t = 0; t < p.lens[0]; ++t) {
    for (int64_t d = 0; d < spec.head_dim; ++d) p.values_at(0, t)[d] &= 0x7F;
    p.scales_at(0, t)[3] &= 0x7F;  // the scale's sign
  }
  return p;
}

void expect_only_the_tables_keys(int32_t columns, int32_t length, const Problem& p, const Exec& exec) {
  const Picked chosen = expect_right(p, 2048, exec);
  EXPECT_EQ(invalid(chosen.indices[0], 2048, 0, columns * 128), "");
  for (float score : chosen.scores[0]) ASSERT_LT(score, 0.F);
  EXPECT_EQ(chosen.stats[kSkippedPages], static_cast<uint64_t>(length - columns * 128));
  Problem cut = p;
  cut.end = Array::of({columns * 128});
  const Picked same = pick(cut.paged_search(2048, {}), exec);
  EXPECT_EQ(chosen.indices, same.indices);
  EXPECT_EQ(chosen.scores, same.scores);
  const topkey::testing::Logits logits(DType::f32, 1, p.width());
  support::run(p.paged_logits(logits.view(), false), exec);
  EXPECT_EQ(logits.memory.touched_outside(), "");
}

// vllm-ascend #9098, PR #9139: a draft step's length is one past the table. The key is not live, and counted.
TEST_P(Cases, B35_length_one_past_the_table) {
  for (bool exact : {false, true}) {
    for (bool wild_column : {false, true}) {
      const Problem p = longer_than_its_table(625, 80001, exact, wild_column);
      expect_only_the_tables_keys(625, 80001, p, exec());
    }
  }
}

// vllm #56380: 410 columns reach 52480 keys, the length says 160640. Never a score of 0 presented as a result.
TEST_P(Cases, B35_table_covers_a_third_of_the_length) {
  for (bool exact : {false, true}) {
    for (bool wild_column : {false, true}) {
      const Problem p = longer_than_its_table(410, 160640, exact, wild_column);
      expect_only_the_tables_keys(410, 160640, p, exec());
    }
  }
}

// The same under strict: an error, nothing written.
TEST_P(Cases, B35_strict_refuses_lengths_past_the_table) {
  const Problem p = longer_than_its_table(10, 1281, true);
  const topkey::testing::Outputs out(1, 64, {});
  const topkey::testing::Logits logits(DType::f32, 1, p.width());
  Exec strict = exec();
  strict.strict = true;
  EXPECT_FALSE(ran([&] { support::run(p.paged_search(64, out.selection()), strict); }));
  EXPECT_FALSE(ran([&] { support::run(p.paged_logits(logits.view()), strict); }));
  EXPECT_TRUE(out.untouched());
  EXPECT_TRUE(logits.memory.untouched());
}

// The same for gather_k: what cannot be read becomes a NaN key, never zeros, and is counted.
TEST_P(Cases, B35_gathered_keys_past_the_table_are_nan) {
  const Problem p = longer_than_its_table(10, 1281, true);
  const Workspace flat(1281, p.spec.head_dim);
  std::memset(flat.values.as<uint8_t>(), 0, flat.values.bytes());
  std::memset(flat.scales.as<uint8_t>(), 0, flat.scales.bytes());
  const Array indptr = Array::of({0, 1281});
  uint64_t stats[kNumStats] = {};
  Exec counted = exec();
  counted.stats = stats;
  support::run(gather_of(p, 0, indptr, 1281, flat), counted);
  EXPECT_EQ(stats[kSkippedPages], 1U);
  const Array logits = dense_logits_over(p, flat.keys(), exec());
  EXPECT_TRUE(std::isnan(float_at(logits.view(), 0, 1280)));
  EXPECT_FALSE(std::isnan(float_at(logits.view(), 0, 1279)));
}

// ---- B38: tables and rows narrower than topk or the score width
// ----------------------------------------------------------

// flashinfer #2486: the page table is indexed by the score width. Slots of 4096 keys come from a table of 4096 columns.
TEST_P(Cases, B38_page_table_narrower_than_the_score_row) {
  Random random(138);
  const Array scores(DType::f32, {8, 131072}), table(DType::i32, {8, 4096}), lens = Array::of(Ints(8, 4096));
  std::generate_n(scores.as<float>(), scores.size(), [&] { return random.normal(); });
  std::generate_n(table.as<int32_t>(), table.size(), [&] { return static_cast<int32_t>(random.below(1 << 20)); });
  Topk a{};
  a.scores = scores.view(), a.rows.count = 8, a.rows.length = lens.view(), a.topk = 2048;
  a.out.slot_map = {table.view(), false, 1};
  const Picked p = pick_exactly(a, exec());
  for (size_t r = 0; r < 8; ++r) {
    EXPECT_EQ(invalid(p.indices[r], 2048, 0, 4096), "");
    for (size_t i = 0; i < 2048; ++i) {
      ASSERT_EQ(p.slots[r][i], table.as<int32_t>()[static_cast<int64_t>(r) * 4096 + p.indices[r][i]]) << r << ", " << i;
    }
  }
}

// The same where the length goes past the slot table: positions are right, slots beyond the table are -1 and counted.
TEST_P(Cases, B38_positions_past_the_slot_table_have_no_slot) {
  const Array scores = floats({Floats(5000, 1.F)}), table = ints({progression(7, 10)});
  Topk a{};
  a.scores = scores.view(), a.rows.count = 1, a.topk = 200;
  a.out.slot_map = {table.view(), false, 16};
  const Picked p = pick_exactly(a, exec());
  EXPECT_EQ(p.indices[0], progression(0, 200));
  Ints want = progression(7 * 16, 160);
  want.resize(200, -1);
  EXPECT_EQ(p.slots[0], want);
  EXPECT_EQ(p.stats[kSkippedSlots], 40U);
}

// flashinfer PR #5185, #5187: topk 2048 over a buffer 64 wide. 64 positions, then -1, in every operation that selects.
TEST_P(Cases, B38_topk_larger_than_the_row) {
  Random random(139);
  std::vector<Floats> scores(4, Floats(64));
  for (Floats& row : scores) {
    for (float& score : row) score = random.normal();
  }
  each_way({scores, 2048}, exec(), [](const Picked& p) {
    Ints want = progression(0, 64);
    want.resize(2048, -1);
    EXPECT_EQ(p.indices, std::vector<Ints>(4, want));
    EXPECT_EQ(p.counts, Ints(4, 64));
  });
}

// The same behind pages: a table of 64 columns under a bound of 131072 keys.
TEST_P(Cases, B38_block_table_narrower_than_max_len) {
  for (bool exact : {false, true}) {
    ProblemSpec spec;
    spec.exact = exact, spec.page_size = 64, spec.max_len = 131072, spec.seed = 140;
    Problem p = requests_of(spec, {4096, 4096}, {0, 1}, {4096, 4096});
    narrow_table(p, 64);
    const Picked chosen = expect_right(p, 2048, exec());
    EXPECT_EQ(chosen.stats[kSkippedPages], 0U);
  }
}

// ---- B39: gather destinations
// ------------------------------------------------------------------------------------------------

// vllm PR #51252: gathered rows that do not fit are skipped, and old memory is scored. Raises, with nothing written.
TEST_P(Cases, B39_gather_larger_than_its_destination_raises) {
  const Problem p = requests_of({}, {10000, 10000}, {0, 1}, {10000, 10000});
  const Workspace workspace(16384, p.spec.head_dim);
  const Array indptr = Array::of({0, 10000, 20000});
  GatherK a{};
  a.keys = p.paged_keys(), a.indptr = indptr.view(), a.total = 20000, a.out = workspace.keys();
  EXPECT_FALSE(ran([&] { support::run(a, exec()); }));
  EXPECT_TRUE(workspace.untouched());
  // A total that fits, and an indptr that does not keep to it: rows past the total are not written, and counted.
  a.total = 16384;
  uint64_t stats[kNumStats] = {};
  Exec counted = exec();
  counted.stats = stats;
  support::run(a, counted);
  EXPECT_EQ(stats[kSkippedPages], 20000U - 16384U);
}

// The same plan done right: one request of 10000 rows a chunk, the workspace NaN before each. No NaN in a visible
// score.
TEST_P(Cases, B39_chunks_of_one_request_over_a_dirty_workspace) {
  for (bool exact : {false, true}) {
    ProblemSpec spec;
    spec.exact = exact, spec.seed = 139;
    const Problem p = requests_of(spec, {10000, 10000, 10000}, {0, 1, 2}, {10000, 10000, 10000});
    const Array paged = logits_of(p, exec()), indptr = Array::of({0, 10000});
    for (int64_t b = 0; b < 3; ++b) {
      const Workspace workspace(16384, spec.head_dim);
      support::run(gather_of(p, b, indptr, 10000, workspace), exec());
      const Array dense = dense_logits_over(support::rows_of(p, {b}), workspace.keys(), exec());
      for (int64_t n = 0; n < 10000; ++n) {
        const float score = float_at(dense.view(), 0, n);
        ASSERT_FALSE(std::isnan(score)) << n;
        ASSERT_EQ(bits_of(score), bits_of(float_at(paged.view(), b, n))) << "request " << b << ", key " << n;
      }
    }
  }
}

TOPKEY_CASES();

}  // namespace
}  // namespace topkey::cases
