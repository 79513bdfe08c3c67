// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `merge` of parts as a selection writes them, ascending by position, and of parts that are nearly so: any number
// and length of parts, empty ones, every pattern of scores, keys forced at both ends.
#include <algorithm>
#include <limits>

#include "tests/draw.h"

namespace topkey::testing {
namespace {

struct Shape {
  int64_t parts, width;
  int32_t topk;
};
enum class Deal { turns, stretches, uneven, some_empty };

int64_t part_of(Deal deal, int64_t key, int64_t keys, int64_t parts) {
  switch (deal) {
    case Deal::turns: return key / 64 % parts;
    case Deal::stretches: return key * parts / keys;
    case Deal::uneven: return key % 97 == 0 ? key / 97 % parts : 0;
    case Deal::some_empty: return parts < 2 ? 0 : 1 + key % (parts / 2);
  }
  return 0;
}

/// Parts [W, R, K] of rows of R x N scores, each the best of its keys in ascending order, unused entries behind them.
struct Parts {
  Array scores, indices;
};
Parts deal(const Array& whole, const Shape& shape, Deal how) {
  const int64_t rows = whole.view().shape[0], keys = whole.view().shape[1];
  Parts parts{Array(DType::f32, {shape.parts, rows, shape.width}), Array(DType::i32, {shape.parts, rows, shape.width})};
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<std::vector<Key>> of_part(static_cast<size_t>(shape.parts));
    for (int64_t n = 0; n < keys; ++n) {
      const int64_t part = part_of(how, n, keys, shape.parts);
      of_part[static_cast<size_t>(part)].push_back({n, whole.as<float>()[r * keys + n]});
    }
    for (int64_t w = 0; w < shape.parts; ++w) {
      std::vector<Key>& own = of_part[static_cast<size_t>(w)];
      std::sort(own.begin(), own.end(),
                [](const Key& a, const Key& b) { return comes_before(a.score, a.position, b.score, b.position); });
      own.resize(std::min(own.size(), static_cast<size_t>(shape.width)));
      std::sort(own.begin(), own.end(), [](const Key& a, const Key& b) { return a.position < b.position; });
      for (int64_t i = 0; i < shape.width; ++i) {
        const bool used = i < static_cast<int64_t>(own.size());
        const int64_t at = (w * rows + r) * shape.width + i;
        parts.indices.as<int32_t>()[at] = used ? static_cast<int32_t>(own[static_cast<size_t>(i)].position) : -1;
        parts.scores.as<float>()[at] = used ? own[static_cast<size_t>(i)].score : canonical_nan();
      }
    }
  }
  return parts;
}

Array drawn(Pattern pattern, int64_t rows, int64_t keys, int64_t topk) {
  Array whole(DType::f32, {rows, keys});
  for (int64_t r = 0; r < rows; ++r) {
    fill_scores(pattern, whole.as<float>() + r * keys, keys, topk, static_cast<uint64_t>(7 * r + 1));
  }
  return whole;
}

/// Of a matrix whose rows lie side by side or apart.
std::vector<uint32_t> words_of(const Tensor& t) {
  std::vector<uint32_t> all;
  for (int64_t r = 0; r < t.shape[0]; ++r) {
    const auto* row = static_cast<const uint32_t*>(t.data) + r * t.stride[0];
    all.insert(all.end(), row, row + t.shape[1]);
  }
  return all;
}

/// The same without counts, and without scores: what asks for less may go another way.
void expect_less(const std::string& backend, MergeTopk args, const Outputs& all) {
  for (const bool scores : {true, false}) {
    Want want;
    want.scores = scores;
    const Outputs some(args.rows.count, args.topk, want);
    args.out = some.selection();
    run(args, on(backend));
    EXPECT_TRUE(inside(some));
    EXPECT_EQ(words_of(some.selection().indices), words_of(all.selection().indices)) << "scores " << scores;
    if (!scores) continue;
    EXPECT_EQ(words_of(some.selection().scores), words_of(all.selection().scores));
  }
}

/// Runs a merge of these parts and holds it against a full sort; `change` may set more of its arguments.
template <class Change>
void check(const std::string& backend, const Parts& parts, int32_t topk, Tally& tally, const Change& change) {
  const int64_t rows = parts.scores.view().shape[1];
  Want want;
  want.scores = want.counts = true;
  const Outputs outputs(rows, topk, want);
  MergeTopk args{};
  args.scores = parts.scores.view(), args.indices = parts.indices.view(), args.topk = topk;
  args.rows.count = rows, args.out = outputs.selection();
  change(args);
  if (!tally.runs(args, on(backend), backend)) return;
  uint64_t stats[kNumStats] = {};
  run(args, on(backend, stats));
  EXPECT_TRUE(good(compare_selection(args, stats)));
  EXPECT_TRUE(inside(outputs));
  expect_less(backend, args, outputs);
}
constexpr auto kUnchanged = [](const MergeTopk&) {};

TEST(MergeParts, AnyNumberAndLengthOfParts) {
  Tally tally("merge_topk, ascending parts");
  const Shape shapes[] = {{1, 1, 1},       {1, 2048, 512},  {2, 2048, 2048}, {2, 33, 64},     {3, 500, 512},
                          {3, 1365, 1},    {4, 2048, 2048}, {5, 100, 8192},  {8, 2048, 2048}, {8, 1, 1},
                          {8, 31, 9},      {2, 8192, 8192}, {3, 5461, 5000}, {64, 32, 512},   {65, 8, 100},
                          {8, 2049, 2048}, {7, 1111, 1025}};
  for (const std::string& backend : every_backend()) {
    for (const Shape& shape : shapes) {
      for (const Deal how : {Deal::turns, Deal::stretches, Deal::uneven, Deal::some_empty}) {
        const int64_t keys = shape.parts * shape.width;
        const Parts parts = deal(drawn(Pattern::normal, 2, keys, shape.topk), shape, how);
        SCOPED_TRACE(std::to_string(shape.parts) + " parts of " + std::to_string(shape.width) + ", topk " +
                     std::to_string(shape.topk) + ", deal " + std::to_string(static_cast<int>(how)));
        check(backend, parts, shape.topk, tally, kUnchanged);
      }
    }
  }
}

TEST(MergeParts, EveryPattern) {
  Tally tally("merge_topk, ascending parts, patterns");
  for (const std::string& backend : every_backend()) {
    for (const Shape& shape : {Shape{2, 2048, 2048}, {8, 2048, 2048}, {3, 700, 600}}) {
      for (const Pattern pattern : all_patterns()) {
        const Array whole = drawn(pattern, 2, shape.parts * shape.width * 5 / 4, shape.topk);
        SCOPED_TRACE(std::string(pattern_name(pattern)) + ", " + std::to_string(shape.parts) + " parts");
        check(backend, deal(whole, shape, Deal::turns), shape.topk, tally, kUnchanged);
      }
    }
  }
}

/// One score far from all others, and scores of which more are equal than a thread block ranks one by one.
TEST(MergeParts, FarAndEqualScores) {
  Tally tally("merge_topk, far and equal scores");
  constexpr Shape kShape{2, 2048, 2048};
  for (const std::string& backend : every_backend()) {
    for (const float far : {1e30F, -1e30F, 3e-40F, std::numeric_limits<float>::infinity()}) {
      const Array whole = drawn(Pattern::normal, 1, 4096, 2048);
      whole.as<float>()[1000] = far;
      check(backend, deal(whole, kShape, Deal::turns), 2048, tally, kUnchanged);
    }
    for (const int64_t equal : {127, 128, 129, 130, 1000, 3000}) {
      const Array whole = drawn(Pattern::normal, 2, 4096, 2048);
      for (int64_t i = 0; i < equal; ++i) whole.as<float>()[i * 4096 / equal] = 0.01F;
      // The second row's equals stand close together, at the end of what a position can be.
      for (int64_t i = 0; i < equal; ++i) whole.as<float>()[4096 + 4095 - i] = 0.01F;
      const Parts parts = deal(whole, kShape, Deal::turns);
      int32_t* indices = parts.indices.as<int32_t>();
      for (int64_t i = 0; i < 2 * 2 * 2048; ++i) {
        if (i / 2048 % 2 == 1) indices[i] += std::numeric_limits<int32_t>::max() - 4096;
      }
      SCOPED_TRACE(std::to_string(equal) + " equal");
      check(backend, parts, 2048, tally, kUnchanged);
    }
  }
}

/// Rows whose parts are ascending, between such as have two entries the wrong way round, or a gap.
TEST(MergeParts, NotQuiteAscending) {
  Tally tally("merge_topk, parts that are not ascending");
  for (const std::string& backend : every_backend()) {
    for (const Shape& shape : {Shape{2, 2048, 2048}, {8, 2048, 2048}, {4, 600, 512}, {2, 100, 64}}) {
      for (const int64_t at : {int64_t{0}, int64_t{30}, int64_t{31}, shape.width / 2 - 1, shape.width - 2}) {
        const Parts parts =
            deal(drawn(Pattern::few_mantissa_bits, 5, shape.parts * shape.width, shape.topk), shape, Deal::turns);
        const auto first_of = [&](int64_t part, int64_t row) { return (part * 5 + row) * shape.width; };
        const int64_t swapped = first_of(shape.parts - 1, 1) + at, gap = first_of(0, 3) + at;
        std::swap(parts.indices.as<int32_t>()[swapped], parts.indices.as<int32_t>()[swapped + 1]);
        std::swap(parts.scores.as<float>()[swapped], parts.scores.as<float>()[swapped + 1]);
        parts.indices.as<int32_t>()[gap] = std::numeric_limits<int32_t>::min();
        SCOPED_TRACE(std::to_string(shape.parts) + " parts of " + std::to_string(shape.width) + ", at " +
                     std::to_string(at));
        check(backend, parts, shape.topk, tally, kUnchanged);
      }
    }
  }
}

TEST(MergeParts, ForcedAtBothEnds) {
  Tally tally("merge_topk, ascending parts, forced keys");
  const Array starts = Array::of({0, 5, 0, 0}), ends = Array::of({4096, 4096, 10, 4000}),
              requests = Array::of({0, 0, 0, -1});
  for (const std::string& backend : every_backend()) {
    for (const Pattern pattern : {Pattern::normal, Pattern::nans, Pattern::all_equal}) {
      for (const int32_t first : {0, 1, 40, 3000}) {
        const Parts parts = deal(drawn(pattern, 4, 4096, 2048), {2, 2048, 2048}, Deal::turns);
        for (int64_t i = 0; i < 2 * 4 * 2048; ++i) parts.indices.as<int32_t>()[i] += i / 2048 % 4 == 1 ? 5 : 0;
        SCOPED_TRACE(std::string(pattern_name(pattern)) + ", force_first " + std::to_string(first));
        check(backend, parts, 2048, tally, [&](MergeTopk& args) {
          args.rows.request = requests.view(), args.rows.start = starts.view(), args.rows.end = ends.view();
          args.force_first = first, args.force_last = 64;
        });
      }
    }
  }
}

/// Positions that two parts have brought stand twice, whatever else is asked for.
TEST(MergeParts, PositionsThatCameTwice) {
  Tally tally("merge_topk, positions that came twice");
  for (const std::string& backend : every_backend()) {
    for (const int32_t topk : {100, 2048, 4096}) {
      const Parts parts = deal(drawn(Pattern::normal, 3, 4096, topk), {2, 2048, 2048}, Deal::turns);
      for (int64_t i = 2048 * 2; i < 2048 * 3; ++i) {  // the last row: those of the first part in the second part too
        parts.indices.as<int32_t>()[i + 3 * 2048] = parts.indices.as<int32_t>()[i];
      }
      const Outputs outputs(3, topk, Want{}), wanted(3, topk, Want{});
      MergeTopk args{};
      args.scores = parts.scores.view(), args.indices = parts.indices.view(), args.topk = topk;
      args.rows.count = 3, args.out = wanted.selection();
      if (!tally.runs(args, on(backend), backend)) continue;
      run(args, on("ref"));
      args.out = outputs.selection();
      run(args, on(backend));
      EXPECT_EQ(words_of(args.out.indices), words_of(wanted.selection().indices)) << backend << ", topk " << topk;
    }
  }
}

}  // namespace
}  // namespace topkey::testing
