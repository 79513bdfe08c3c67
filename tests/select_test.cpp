// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `select`: topk and select_blocks against a full sort (support/oracle.h), on every pattern, with every option
// of windows, admission, order, fill and outputs, drawn by RapidCheck; then the fixed promises: prefixes, large topk,
// nothing to do.
#include <algorithm>
#include <limits>

#include "tests/draw.h"

namespace topkey::testing {
namespace {

constexpr int32_t kMaxI32 = std::numeric_limits<int32_t>::max();

/// Scores [rows, columns] of `pattern`, each row from its own seed, in `dtype`, with `pad` more columns between rows.
Array scores_of(Pattern pattern, DType dtype, int64_t rows, int64_t columns, int64_t topk, uint64_t seed,
                int64_t pad = 0) {
  const Array wide(dtype, {rows, columns + pad});
  std::vector<float> row(static_cast<size_t>(columns));
  for (int64_t r = 0; r < rows; ++r) {
    fill_scores(pattern, row.data(), columns, topk, seed * 1000 + static_cast<uint64_t>(r));
    for (int64_t n = 0; n < columns; ++n) {
      const float x = row[static_cast<size_t>(n)];
      if (dtype == DType::f32) wide.as<float>()[r * (columns + pad) + n] = x;
      if (dtype == DType::bf16) wide.as<uint16_t>()[r * (columns + pad) + n] = float_to_bf16(x);
      if (dtype == DType::f16) wide.as<uint16_t>()[r * (columns + pad) + n] = float_to_f16(x);
    }
  }
  return wide.seen_as(tensor(wide.as<uint8_t>(), dtype, {rows, columns}, {columns + pad, 1}));
}

/// A topk call with all it borrows.
struct Case {
  Array scores, start, end, length, request, row_topk;
  Borrowed borrowed;
  Topk args{};
  std::vector<Outputs> outputs;
  std::string text;
};

void draw_windows(Case& c, Random& random, int64_t columns, int64_t next_n) {
  Rows& rows = c.args.rows;
  const int64_t count = rows.count;
  if (next_n > 1) {
    rows.next_n = static_cast<int32_t>(next_n);
    c.end = wild_ints(random, draw_flag() ? count / next_n : count, columns);
  } else if (draw_flag()) {
    c.length = wild_ints(random, count, columns);
  } else if (draw_flag(3)) {
    c.end = wild_ints(random, count, columns);
  }
  if (draw_flag()) {
    c.start = wild_ints(random, count, columns);
    // A row has at most 2^31-1 keys.
    for (int64_t r = 0; r < count; ++r) c.start.as<int32_t>()[r] = std::max(c.start.as<int32_t>()[r], -1000);
    for (int64_t i = 0; i < c.end.size(); ++i)
      c.end.as<int32_t>()[i] = std::min(c.end.as<int32_t>()[i], kMaxI32 - 1000);
  }
  if (next_n == 1 && draw_flag(3)) {
    c.request = Array(DType::i32, {count});
    for (int64_t r = 0; r < count; ++r) c.request.as<int32_t>()[r] = static_cast<int32_t>(random.between(-1, 2));
  }
  if (draw_flag(4)) rows.max_len = draw(1, columns + 10);
  rows.end = c.end.view(), rows.length = c.length.view(), rows.start = c.start.view(), rows.request = c.request.view();
}

/// `long_rows`: thousands of columns, past every buffer that a backend keeps winners in before it must throw some away.
Case draw_case(bool long_rows) {
  Case c;
  const auto pattern = static_cast<Pattern>(draw(0, kNumPatterns - 1));
  const auto seed = static_cast<uint64_t>(draw(1, 1000000));
  Random random(seed);
  const int64_t next_n = draw_flag(3) ? draw(2, 4) : 1;
  const int64_t rows = draw(0, long_rows ? 2 : 5) * next_n;
  const int64_t columns = long_rows ? draw(2000, draw_flag(6) ? 90000 : 9000) : draw(0, draw_flag(4) ? 700 : 60);
  const DType dtype = draw_of({DType::f32, DType::f32, DType::bf16, DType::f16});
  c.args.topk = static_cast<int32_t>(draw(1, long_rows ? draw_of({5, 500, 3000}) : draw_flag(4) ? 600 : 40));
  c.args.rows.count = rows;
  c.scores = scores_of(pattern, dtype, rows, columns, c.args.topk, seed, draw(0, 4));
  c.args.scores = c.scores.view();
  if (draw_flag(4)) {
    c.row_topk = Array(DType::i32, {rows});
    for (int64_t r = 0; r < rows; ++r) c.row_topk.as<int32_t>()[r] = wild_int(random, c.args.topk);
    c.args.row_topk = c.row_topk.view();
  }
  draw_windows(c, random, columns, next_n);
  c.args.admit = draw_admit(c.borrowed, random, rows, columns, true);
  const int64_t requests = std::max<int64_t>(3, c.request ? 0 : rows);  // lines for every request that may be named
  c.outputs.emplace_back(rows, c.args.topk, draw_want(c.borrowed, random, rows, columns, requests));
  c.args.out = c.outputs[0].selection();
  c.text = std::string(pattern_name(pattern)) + " seed " + std::to_string(seed) + " " + dtype_name(dtype) + " [" +
           std::to_string(rows) + ", " + std::to_string(columns) + "] topk " + std::to_string(c.args.topk);
  return c;
}

void check_drawn(const std::string& backend, bool long_rows, Tally& tally) {
  const Case c = draw_case(long_rows);
  RC_LOG() << c.text;
  uint64_t stats[kNumStats] = {};
  Exec exec = on(backend, stats);
  exec.threads = static_cast<int32_t>(draw(0, 3));
  if (!tally.runs(c.args, exec, backend)) return;
  run(c.args, exec);
  require(compare_selection(c.args, stats));
  require_inside(c.outputs[0]);
}

TEST(Select, EqualsAFullSortWithEveryOption) {
  Tally tally("topk, drawn");
  for (const std::string& backend : every_backend()) {
    property("topk equals a full sort", 4000, [&] { check_drawn(backend, false, tally); });
  }
}

TEST(Select, LongRowsEqualAFullSort) {
  Tally tally("topk, long rows");
  for (const std::string& backend : every_backend()) {
    property("topk of long rows equals a full sort", backend == "ref" ? 50 : 400,
             [&] { check_drawn(backend, true, tally); });
  }
}

/// More rows than any backend looks at together.
TEST(Select, ManyRows) {
  Tally tally("topk, many rows");
  constexpr int64_t kManyRows = 9001;
  const Array scores = scores_of(Pattern::normal, DType::f32, kManyRows, 12, 3, 4);
  for (const std::string& backend : every_backend()) {
    Want want;
    want.scores = want.counts = true;
    const Outputs outputs(kManyRows, 3, want);
    Topk args{};
    args.scores = scores.view(), args.rows.count = kManyRows, args.topk = 3, args.out = outputs.selection();
    uint64_t stats[kNumStats] = {};
    if (!tally.runs(args, on(backend), backend)) continue;
    run(args, on(backend, stats));
    EXPECT_TRUE(good(compare_selection(args, stats)));
    EXPECT_TRUE(inside(outputs));
  }
}

/// Every pattern in every dtype, at a size where the cut falls among many keys.
TEST(Select, EqualsAFullSortOnEveryPattern) {
  Tally tally("topk, patterns");
  for (const std::string& backend : every_backend()) {
    for (const Pattern pattern : all_patterns()) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        for (const auto& [columns, topk] :
             {std::pair<int64_t, int32_t>{5000, 2048}, {1030, 1}, {257, 256}, {64, 2048}}) {
          const int64_t rows = 2;
          const Array scores = scores_of(pattern, dtype, rows, columns, topk, 77);
          Want want;
          want.scores = want.counts = true;
          want.order = Order::score;
          Outputs outputs(rows, topk, want);
          Topk args{};
          args.scores = scores.view(), args.rows.count = rows, args.topk = topk, args.out = outputs.selection();
          uint64_t stats[kNumStats] = {};
          if (!tally.runs(args, on(backend), backend)) continue;
          run(args, on(backend, stats));
          EXPECT_TRUE(good(compare_selection(args, stats)))
              << pattern_name(pattern) << " " << dtype_name(dtype) << " " << columns;
          EXPECT_TRUE(inside(outputs));
        }
      }
    }
  }
}

TEST(Select, AnyTopk) {
  Tally tally("topk, any k");
  for (const std::string& backend : every_backend()) {
    for (const int32_t topk : {1, 2047, 2048, 2049, 4096, 4097, 9999, 20000, 30000}) {
      const Array scores = scores_of(Pattern::ties_at_cut, DType::f32, 1, 20000, topk, 5);
      Outputs outputs(1, topk, Want{});
      Topk args{};
      args.scores = scores.view(), args.rows.count = 1, args.topk = topk, args.out = outputs.selection();
      if (!tally.runs(args, on(backend), backend)) continue;
      run(args, on(backend));
      EXPECT_TRUE(good(compare_selection(args))) << topk;
      EXPECT_TRUE(inside(outputs)) << topk;
    }
  }
}

/// Order `score`: the answer for a smaller topk is a prefix of that for a larger one, forced keys included.
TEST(Select, ScoreOrderGivesPrefixes) {
  Tally tally("topk, prefixes");
  for (const std::string& backend : every_backend()) {
    for (const Pattern pattern : all_patterns()) {
      const Array scores = scores_of(pattern, DType::f32, 2, 300, 40, 9);
      Want want;
      want.order = Order::score;
      Outputs all(2, 300, want);
      Topk args{};
      args.scores = scores.view(), args.rows.count = 2, args.topk = 300, args.out = all.selection();
      args.admit.force_first = 3, args.admit.force_last = 2;
      if (!tally.runs(args, on(backend), backend)) continue;
      run(args, on(backend));
      for (const int32_t topk : {1, 2, 4, 5, 6, 41, 100, 299}) {
        Outputs some(2, topk, want);
        args.topk = topk, args.out = some.selection();
        run(args, on(backend));
        EXPECT_TRUE(same_outputs(some.selection(), all.selection(), 2, topk)) << pattern_name(pattern) << " " << topk;
      }
    }
  }
}

/// Rows, columns, windows of nothing: fill only, or nothing written at all.
TEST(Select, NothingToSelectFrom) {
  Tally tally("topk, empty");
  for (const std::string& backend : every_backend()) {
    for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{0, 10}, {0, 0}, {3, 0}}) {
      const Array scores(DType::f32, {rows, columns});
      Want want;
      want.scores = want.counts = true;
      want.blocks = 2, want.block_size = 4;
      Outputs outputs(rows, 5, want);
      Topk args{};
      args.scores = scores.view(), args.rows.count = rows, args.topk = 5, args.out = outputs.selection();
      uint64_t stats[kNumStats] = {};
      if (!tally.runs(args, on(backend), backend)) continue;
      run(args, on(backend, stats));
      EXPECT_TRUE(good(compare_selection(args, stats))) << rows << " x " << columns;
      EXPECT_TRUE(inside(outputs));
    }
  }
}

/// Rows beyond rows.count exist in every tensor and are neither read nor written.
TEST(Select, RowsBeyondCountAreNotTouched) {
  Tally tally("topk, rows beyond count");
  for (const std::string& backend : every_backend()) {
    const Array scores = scores_of(Pattern::nans, DType::f32, 5, 50, 8, 3);
    const Array ends = Array::of({50, 20, 3, kMaxI32, kMaxI32});
    Want want;
    want.scores = want.counts = true;
    Outputs outputs(5, 8, want);
    Topk args{};
    args.scores = scores.view(), args.rows.count = 3, args.topk = 8, args.out = outputs.selection();
    args.rows.length = ends.view();
    if (!tally.runs(args, on(backend), backend)) continue;
    run(args, on(backend));
    EXPECT_TRUE(good(compare_selection(args)));
    EXPECT_EQ(outputs.indices.touched_outside(3, 8), "");
    EXPECT_EQ(outputs.scores.touched_outside(3, 8), "");
    EXPECT_EQ(outputs.counts.touched_outside(3, 1), "");
  }
}

TEST(SelectBlocks, EqualsAFullSort) {
  Tally tally("select_blocks, drawn");
  for (const std::string& backend : every_backend()) {
    property("select_blocks equals a full sort", 1000, [&] {
      Case c;
      const auto pattern = static_cast<Pattern>(draw(0, kNumPatterns - 1));
      Random random(static_cast<uint64_t>(draw(1, 1000000)));
      const int64_t next_n = draw_flag(3) ? 2 : 1, rows = draw(0, 5) * next_n, columns = draw(0, 200);
      c.args.rows.count = rows;
      c.scores = scores_of(pattern, draw_of({DType::f32, DType::bf16, DType::f16}), rows, columns, 20, 7, draw(0, 2));
      draw_windows(c, random, columns, next_n);
      const Guarded blocks(DType::i32, rows, draw(1, 30));
      SelectBlocks args{};
      args.scores = c.scores.view(), args.rows = c.args.rows, args.blocks = blocks.view();
      args.block_size = static_cast<int32_t>(draw(1, 40));
      uint64_t stats[kNumStats] = {};
      if (!tally.runs(args, on(backend, stats), backend)) return;
      run(args, on(backend, stats));
      require(compare_selection(args, stats));
      RC_ASSERT(blocks.touched_outside() == "");
    });
  }
}

/// B14: ties go to the lower position, whatever topk and batch.
TEST(Select, TiesGoToTheLowerPosition) {
  Tally tally("topk, ties");
  for (const std::string& backend : every_backend()) {
    const Array scores(DType::f32, {1, 5});
    const float values[] = {1, 2, 5, 4, 5};
    std::copy(values, values + 5, scores.as<float>());
    const int32_t expected[] = {2, 4, 3, 1, 0};
    for (int32_t topk = 1; topk <= 5; ++topk) {
      Want want;
      want.order = Order::score;
      Outputs outputs(1, topk, want);
      Topk args{};
      args.scores = scores.view(), args.rows.count = 1, args.topk = topk, args.out = outputs.selection();
      if (!tally.runs(args, on(backend), backend)) continue;
      run(args, on(backend));
      for (int32_t i = 0; i < topk; ++i) EXPECT_EQ(int_at(args.out.indices, 0, i), expected[i]) << topk;
    }
  }
}

}  // namespace
}  // namespace topkey::testing
