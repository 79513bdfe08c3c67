// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `merge`: for any partition of the keys, with ties, NaNs, infinities and empty parts, merging the parts'
// selections equals selecting on the whole, in every order, fill and output.
#include <algorithm>
#include <cstring>
#include <limits>

#include "tests/draw.h"

namespace topkey::testing {
namespace {

/// Parts [W, R, K] of rows of scores: key n of row r belongs to a random part (or, `runs`, to a stretch of keys).
struct Parts {
  Array whole;            // f32 [R, N]
  Array scores, indices;  // [W, R, K]
};

/// The best `width` keys of each part, ascending or (some parts of some rows) in score order, unused entries -1 with
/// rubbish scores.
void put_part(const Parts& parts, int64_t w, int64_t row, std::vector<Key> keys, bool ascending, Random& random) {
  const int64_t rows = parts.scores.view().shape[1], width = parts.scores.view().shape[2];
  std::sort(keys.begin(), keys.end(),
            [](const Key& a, const Key& b) { return comes_before(a.score, a.position, b.score, b.position); });
  keys.resize(std::min(keys.size(), static_cast<size_t>(width)));
  if (ascending || random.chance(0.5)) {
    std::sort(keys.begin(), keys.end(), [](const Key& a, const Key& b) { return a.position < b.position; });
  }
  for (int64_t i = 0; i < width; ++i) {
    const bool used = i < static_cast<int64_t>(keys.size());
    const int64_t at = (w * rows + row) * width + i;
    parts.indices.as<int32_t>()[at] = used ? static_cast<int32_t>(keys[static_cast<size_t>(i)].position) : -1;
    parts.scores.as<float>()[at] = used                 ? keys[static_cast<size_t>(i)].score
                                   : random.chance(0.5) ? canonical_nan()
                                                        : 1e30F;
  }
}

Parts split(Pattern pattern, int64_t rows, int64_t keys, int64_t world, int64_t width, bool runs, Random& random) {
  Parts parts{Array(DType::f32, {rows, keys}), Array(DType::f32, {world, rows, width}),
              Array(DType::i32, {world, rows, width})};
  for (int64_t r = 0; r < rows; ++r) {
    float* row = parts.whole.as<float>() + r * keys;
    fill_scores(pattern, row, keys, width, random.next());
    std::vector<std::vector<Key>> of_part(static_cast<size_t>(world));
    for (int64_t n = 0; n < keys; ++n) {
      const auto part = runs ? static_cast<uint64_t>(n * world / keys) : random.below(static_cast<uint64_t>(world));
      of_part[part].push_back({n, row[n]});
    }
    const bool ascending = random.chance(0.6);
    for (int64_t w = 0; w < world; ++w) put_part(parts, w, r, of_part[static_cast<size_t>(w)], ascending, random);
  }
  return parts;
}

struct Sizes {
  int64_t rows, keys;
  int32_t topk;
};

void check_drawn(const std::string& backend, const Sizes& sizes, Tally& tally) {
  const auto pattern = static_cast<Pattern>(draw(0, kNumPatterns - 1));
  Random random(static_cast<uint64_t>(draw(1, 1000000)));
  const int64_t rows = draw(0, sizes.rows), keys = draw(0, sizes.keys), world = draw(1, 8);
  const auto topk = static_cast<int32_t>(draw(1, sizes.topk));
  const Parts parts = split(pattern, rows, keys, world, topk + draw(0, 3), draw_flag(), random);
  Borrowed borrowed;
  Want want = draw_want(borrowed, random, rows, keys, rows);
  want.blocks = 0, want.block_size = 0;
  const Outputs merged(rows, topk, want), direct(rows, topk, want);
  MergeTopk args{};
  args.scores = parts.scores.view(), args.indices = parts.indices.view(), args.topk = topk;
  args.rows.count = rows, args.out = merged.selection();
  RC_LOG() << pattern_name(pattern) << " rows " << rows << " keys " << keys << " world " << world << " topk " << topk;
  uint64_t stats[kNumStats] = {};
  Exec exec = on(backend, stats);
  exec.threads = static_cast<int32_t>(draw(0, 3));
  if (!tally.runs(args, exec, backend)) return;
  run(args, exec);
  require(compare_selection(args, stats));
  require_inside(merged);
  // Not only right for the parts: the same as a selection that never saw them.
  Topk select{};
  select.scores = parts.whole.view(), select.rows.count = rows, select.topk = topk, select.out = direct.selection();
  run(select, on(backend));
  RC_ASSERT(same_outputs(merged.selection(), direct.selection(), rows, topk));
}

TEST(Merge, AnyPartitionEqualsTheWhole) {
  Tally tally("merge_topk, drawn");
  for (const std::string& backend : every_backend()) {
    property("merge_topk equals a full sort of the whole", 3000, [&] { check_drawn(backend, {4, 120, 60}, tally); });
    property("merge_topk of long lists equals a full sort", 60, [&] { check_drawn(backend, {3, 9000, 3000}, tally); });
  }
}

/// Chunks of columns selected by `topk` itself, with index_base, then merged.
TEST(Merge, ChunksOfColumns) {
  Tally tally("topk by chunks, merge_topk");
  constexpr int64_t kRowCount = 3, kColumns = 1000;
  constexpr int32_t kTopk = 64;
  for (const std::string& backend : every_backend()) {
    for (const Pattern pattern : all_patterns()) {
      const Array scores(DType::f32, {kRowCount, kColumns});
      for (int64_t r = 0; r < kRowCount; ++r) {
        fill_scores(pattern, scores.as<float>() + r * kColumns, kColumns, kTopk, static_cast<uint64_t>(r + 1));
      }
      Want want;
      want.scores = want.counts = true, want.order = Order::score;
      const Outputs whole(kRowCount, kTopk, want), merged(kRowCount, kTopk, want);
      Topk select{};
      select.scores = scores.view(), select.rows.count = kRowCount, select.topk = kTopk, select.out = whole.selection();
      if (!tally.runs(select, on(backend), backend)) continue;
      run(select, on(backend));
      const std::vector<int32_t> cuts = {0, 1, 60, 500, 500, 999, 1000};
      const auto world = static_cast<int64_t>(cuts.size()) - 1;
      const Array part_scores(DType::f32, {world, kRowCount, kTopk}),
          part_indices(DType::i32, {world, kRowCount, kTopk});
      for (int64_t w = 0; w < world; ++w) {
        const std::vector<int32_t> begin(kRowCount, cuts[static_cast<size_t>(w)]),
            end(kRowCount, cuts[static_cast<size_t>(w) + 1]);
        const Array start = Array::of(begin), stop = Array::of(end);
        select.rows.start = start.view(), select.rows.end = stop.view();
        select.out = {};
        select.out.index_base = start.view();
        select.out.indices = tensor(element(part_indices.view(), w), DType::i32, {kRowCount, kTopk});
        select.out.scores = tensor(element(part_scores.view(), w), DType::f32, {kRowCount, kTopk});
        run(select, on(backend));
      }
      MergeTopk merge{};
      merge.scores = part_scores.view(), merge.indices = part_indices.view(), merge.topk = kTopk;
      merge.rows.count = kRowCount, merge.out = merged.selection();
      run(merge, on(backend));
      EXPECT_TRUE(same_outputs(whole.selection(), merged.selection(), kRowCount, kTopk)) << pattern_name(pattern);
      EXPECT_TRUE(inside(merged));
    }
  }
}

/// A padding row gets fill, whatever the parts hold; rows say so by their request.
TEST(Merge, PaddingRowsGetFill) {
  Tally tally("merge_topk, padding rows");
  Random random(3);
  const Parts parts = split(Pattern::normal, 4, 50, 3, 10, false, random);
  const Array requests = Array::of({0, -1, 0, -5});
  for (const std::string& backend : every_backend()) {
    Want want;
    want.scores = want.counts = true, want.fill = Fill::value, want.fill_value = 77;
    const Outputs outputs(4, 10, want);
    MergeTopk args{};
    args.scores = parts.scores.view(), args.indices = parts.indices.view(), args.topk = 10,
    args.out = outputs.selection();
    args.rows.count = 4, args.rows.request = requests.view();
    if (!tally.runs(args, on(backend), backend)) continue;
    uint64_t stats[kNumStats] = {};
    run(args, on(backend, stats));
    EXPECT_TRUE(good(compare_selection(args, stats)));
    EXPECT_EQ(int_at(args.out.indices, 1, 0), 77);
    EXPECT_EQ(int_at(args.out.counts, 3), 0);
  }
}

/// NaN scores rank below -inf in a merge too, and a part with none of them may bring keys that displace them.
TEST(Merge, NanRanksLast) {
  Tally tally("merge_topk, NaN");
  const float inf = std::numeric_limits<float>::infinity();
  const Array scores(DType::f32, {2, 1, 2}), indices(DType::i32, {2, 1, 2});
  const float score[] = {float_of(0xFFC00001u), 1.F, -inf, float_of(0x7F800001u)};
  const int32_t index[] = {0, 5, 7, 3}, expected[] = {5, 7, 0, 3, -1};
  std::copy(score, score + 4, scores.as<float>());
  std::copy(index, index + 4, indices.as<int32_t>());
  for (const std::string& backend : every_backend()) {
    Want want;
    want.scores = true, want.order = Order::score;
    const Outputs outputs(1, 5, want);
    MergeTopk args{};
    args.scores = scores.view(), args.indices = indices.view(), args.topk = 5, args.rows.count = 1,
    args.out = outputs.selection();
    if (!tally.runs(args, on(backend), backend)) continue;
    run(args, on(backend));
    for (int64_t i = 0; i < 5; ++i) EXPECT_EQ(int_at(args.out.indices, 0, i), expected[i]) << i;
    EXPECT_EQ(bits_of(float_at(args.out.scores, 0, 2)), bits_of(canonical_nan()));
    EXPECT_EQ(float_at(args.out.scores, 0, 4), -inf);
  }
}

}  // namespace
}  // namespace topkey::testing
