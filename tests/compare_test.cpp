// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The judges judged: every comparison of support/compare.h must fail when its kind of fault is put into right
// outputs; exact inputs must be exact in f32; patterns must be what their names say, the same on every machine.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "support/exact.h"
#include "support/oracle.h"
#include "tests/draw.h"

namespace topkey::testing {
namespace {

/// A dense problem answered by `ref`, ready to be spoilt.
struct Answered {
  Problem p;
  Truth truth;
  Logits logits;
  Outputs outputs;
  MqaLogits score;
  MqaTopk search;
};

Want everything() {
  Want want;
  want.scores = want.counts = true, want.blocks = 3, want.block_size = 8, want.order = Order::score;
  return want;
}

Answered answered(const ProblemSpec& spec, int32_t topk) {
  const Problem p = make_problem(spec);
  Answered a{p,
             truth_of(p.query(), p.dense_keys(), p.rows(), false),
             Logits(DType::f32, p.count(), p.width()),
             Outputs(p.count(), topk, everything()),
             {},
             {}};
  a.score = p.dense_logits(a.logits.view());
  a.search = p.dense_search(topk, a.outputs.selection());
  run(a.score, on("ref"));
  run(a.search, on("ref"));
  return a;
}

ProblemSpec spec_of(bool exact = false) {
  ProblemSpec spec;
  spec.rows = 5, spec.keys = 300, spec.windows = Windows::causal, spec.exact = exact;
  return spec;
}

float& cell(const Tensor& t, int64_t row, int64_t column) { return *reinterpret_cast<float*>(element(t, row, column)); }
int32_t& word(const Tensor& t, int64_t row, int64_t column) {
  return *reinterpret_cast<int32_t*>(element(t, row, column));
}

TEST(CompareScores, FindsAScoreOutsideItsBound) {
  const Answered a = answered(spec_of(), 20);
  EXPECT_TRUE(good(compare_scores(a.score, a.truth, "ref")));
  float& one = cell(a.score.logits, 2, 17);
  const float right = one;
  const double bound = score_bound("f32", a.truth.heads, a.truth.head_dim, a.truth.a[2 * 300 + 17]);
  one = std::nextafter(right, 1e9F);
  EXPECT_FALSE(compare_scores(a.score, a.truth, "ref").ok);
  EXPECT_TRUE(compare_scores(a.score, a.truth, "f32").ok);
  one = right + static_cast<float>(1.5 * bound);
  const Report report = compare_scores(a.score, a.truth, "f32");
  EXPECT_FALSE(report.ok);
  EXPECT_EQ(report.row, 2);
  EXPECT_EQ(report.position, 17);
  EXPECT_EQ(report.differing, 1);
  for (const float wrong :
       {canonical_nan(), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    one = wrong;
    EXPECT_FALSE(compare_scores(a.score, a.truth, "fp8mma").ok) << wrong;
  }
}

TEST(CompareScores, FindsCellsThatShouldBeEmpty) {
  const Answered a = answered(spec_of(), 20);
  cell(a.score.logits, 0, 299) = 1;  // row 0 of 5 sees 296 keys
  EXPECT_FALSE(compare_scores(a.score, a.truth, "ref").ok);
  MqaLogits unclean = a.score;
  unclean.clean = false;
  EXPECT_TRUE(compare_scores(unclean, a.truth, "ref").ok) << "outside the window anything may stand without clean";
}

TEST(CompareScores, JudgesCalcDiff) {
  const Answered a = answered(spec_of(), 20);
  for (int64_t r = 0; r < 5; ++r) {
    for (int64_t n = 0; n < 296; ++n) cell(a.score.logits, r, n) *= n % 2 == 0 ? 1.004F : 0.996F;
  }
  const Report report = compare_scores(a.score, a.truth, "fp8mma");
  EXPECT_EQ(report.differing, 0) << "inside the wide bound of fp8mma: " << report.text();
  EXPECT_FALSE(report.ok) << report.calc_diff;
  EXPECT_THROW(score_bound("float99", 1, 1, 1), std::invalid_argument);
}

TEST(CompareSets, ForgivesOnlyNearTheCut) {
  const Answered a = answered(spec_of(), 20);
  EXPECT_TRUE(good(compare_sets(a.search, a.truth, "f32")));
  // The 20th against the 21st: a real distance, so no bound of f32 excuses it, but that of fp8mma may not either.
  const RowQuestion q = question(a.search, a.truth.ref.view(), 1);
  RowQuestion more = q;
  more.topk = 300;
  const std::vector<Key> sorted = answer(more).chosen;
  word(a.search.out.indices, 1, 19) = static_cast<int32_t>(sorted[20].position);
  const Report tight = compare_sets(a.search, a.truth, "f32");
  EXPECT_FALSE(tight.ok);
  EXPECT_EQ(tight.differing, 1);
  word(a.search.out.indices, 1, 19) = static_cast<int32_t>(sorted.back().position);
  EXPECT_FALSE(compare_sets(a.search, a.truth, "f32").ok) << "the row's worst key";
  word(a.search.out.indices, 1, 19) = word(a.search.out.indices, 1, 18);
  EXPECT_FALSE(compare_sets(a.search, a.truth, "fp8mma").ok) << "a key twice";
  word(a.search.out.indices, 1, 19) = 299;
  EXPECT_FALSE(compare_sets(a.search, a.truth, "fp8mma").ok) << "an invisible key";
}

/// A key of the same score as the cut may change places with it; too many such keys in a row are a fault nevertheless.
TEST(CompareSets, CountsKeysThatDiffer) {
  ProblemSpec spec = spec_of(true);
  spec.pattern = Pattern::all_equal;
  const Answered a = answered(spec, 20);
  for (int64_t i = 0; i < 20; ++i) word(a.search.out.indices, 3, i) = static_cast<int32_t>(100 + i);
  const Report report = compare_sets(a.search, a.truth, "ref");
  EXPECT_EQ(report.differing, 20);
  EXPECT_FALSE(report.ok);
  EXPECT_TRUE(compare_sets(a.search, a.truth, "ref", false).ok) << "only the count is wrong here";
}

TEST(CompareSelection, FindsEveryKindOfFault) {
  struct Spoil {
    const char* name;
    std::function<void(const MqaTopk&)> how;
  };
  const Spoil spoils[] = {
      {"two entries swapped",
       [](const MqaTopk& a) { std::swap(word(a.out.indices, 2, 3), word(a.out.indices, 2, 4)); }},
      {"another key", [](const MqaTopk& a) { word(a.out.indices, 2, 19) ^= 1; }},
      {"a score's last bit", [](const MqaTopk& a) { word(a.out.scores, 4, 7) ^= 1; }},
      {"a count", [](const MqaTopk& a) { word(a.out.counts, 0, 0) -= 1; }},
      {"a block", [](const MqaTopk& a) { word(a.out.blocks, 1, 2) -= 1; }},
      {"a hole", [](const MqaTopk& a) { word(a.out.indices, 0, 10) = -1; }},
  };
  for (const Spoil& spoil : spoils) {
    const Answered a = answered(spec_of(), 20);
    EXPECT_TRUE(good(compare_selection(a.search, a.logits.view())));
    spoil.how(a.search);
    const Report report = compare_selection(a.search, a.logits.view());
    EXPECT_FALSE(report.ok) << spoil.name;
    EXPECT_NE(report.text().find("DIFFERS"), std::string::npos) << report.text();
  }
  const Answered a = answered(spec_of(), 20);
  uint64_t stats[kNumStats] = {5, 5 * 298, 0, 0, 0, 0, 0, 0};
  EXPECT_TRUE(good(compare_selection(a.search, a.logits.view(), stats)));
  stats[kSkippedPages] = 1;
  EXPECT_FALSE(compare_selection(a.search, a.logits.view(), stats).ok);
}

TEST(CompareUnquantised, Fp8IsCloseAndRubbishIsNot) {
  for (const bool paged : {false, true}) {
    ProblemSpec spec = spec_of();
    spec.head_dim = 128, spec.paged = paged, spec.requests = 3, spec.rows = 24, spec.keys = 400;
    const Problem p = make_problem(spec);
    const Truth truth = paged ? truth_of(p.query(), p.paged_keys(), p.rows(), false)
                              : truth_of(p.query(), p.dense_keys(), p.rows(), false);
    Unquantised exact{p.q_truth.view(), p.keys_truth.view(), p.weights_truth.view()};
    const Report report = compare_unquantised(truth, exact, p.rows(), KeyFormat::fp8, true);
    EXPECT_TRUE(good(report));
    EXPECT_GT(report.calc_diff, 1e-6) << "quantisation costs something";
    EXPECT_GT(report.compared, 100);
    for (int64_t i = 0; i < p.q_truth.size(); i += 3) p.q_truth.as<uint16_t>()[i] ^= 0x8000;
    EXPECT_FALSE(compare_unquantised(truth, exact, p.rows(), KeyFormat::fp8, true).ok);
  }
}

TEST(CompareUnquantised, AWrongScaleFailsAndAHandfulIsNotJudged) {
  for (const KeyFormat format : {KeyFormat::fp8, KeyFormat::mxfp4}) {
    for (const int64_t keys : {int64_t{8}, int64_t{400}}) {
      ProblemSpec spec;
      spec.format = format;
      spec.rows = 6, spec.keys = keys, spec.heads = 8, spec.head_dim = 128;
      const Problem p = make_problem(spec);
      const Truth truth = truth_of(p.query(), p.dense_keys(), p.rows(), false);
      Unquantised exact{p.q_truth.view(), p.keys_truth.view(), p.weights_truth.view()};
      EXPECT_TRUE(good(compare_unquantised(truth, exact, p.rows(), format, true)));
      // Key scales that are a tenth (mxfp4: one exponent) too large: the truth's weights are so much smaller.
      for (int64_t i = 0; i < p.weights_truth.size(); ++i) {
        p.weights_truth.as<float>()[i] /= format == KeyFormat::fp8 ? 1.1F : 2.0F;
      }
      const Report report = compare_unquantised(truth, exact, p.rows(), format, true);
      EXPECT_EQ(report.ok, keys == 8) << report.text();
      EXPECT_GT(report.calc_diff, format == KeyFormat::fp8 ? 1e-3 : 0.02) << "printed either way";
    }
  }
}

/// The promise of exact.h: plain f32 arithmetic in another order, fused or not, gives the bits of S_ref, on every
/// pattern and format.
TEST(ExactInputs, AreExactInF32) {
  int64_t compared = 0;
  for (const Pairing& pairing : all_pairings()) {
    for (const Pattern pattern : all_patterns()) {
      ProblemSpec spec;
      spec.format = pairing.format, spec.q_dtype = pairing.q, spec.pattern = pattern, spec.exact = true;
      spec.heads = static_cast<int>(pattern) == 0 ? 128 : 5, spec.head_dim = 128, spec.rows = 2, spec.keys = 24;
      const Problem p = make_problem(spec);
      const Truth truth = truth_of(p.query(), p.dense_keys(), p.rows(), false);
      const Scorer scorer(p.query(), spec.format, spec.head_dim);
      for (int64_t i = 0; i < 2 * 24; ++i) {
        const KeyBytes key = *key_at(p.dense_keys(), i % 24);
        const float got = canonical(scorer.score_f32_descending(i / 24, key)), want = truth.ref.as<float>()[i];
        ASSERT_EQ(bits_of(got), bits_of(want)) << p.text() << " key " << i % 24 << ": " << got << " and " << want;
        ++compared;
      }
    }
  }
  EXPECT_GT(compared, 5000);
  EXPECT_THROW(make_problem([] {
                 ProblemSpec s;
                 s.exact = true, s.heads = 129;
                 return s;
               }()),
               std::invalid_argument);
}

TEST(Patterns, AreWhatTheirNamesSay) {
  std::vector<float> row(4000);
  const auto fill = [&](Pattern pattern) { fill_scores(pattern, row.data(), 4000, 500, 3); };
  fill(Pattern::relu_plateau);
  EXPECT_NEAR(static_cast<double>(std::count(row.begin(), row.end(), 0.F)), 3600, 120);
  fill(Pattern::ascending);
  EXPECT_TRUE(std::is_sorted(row.begin(), row.end()));
  fill(Pattern::ties_at_cut);
  std::vector<float> sorted = row;
  std::sort(sorted.rbegin(), sorted.rend());
  EXPECT_EQ(sorted[499], sorted[500]);
  EXPECT_NE(sorted[0], sorted[499]);
  fill(Pattern::decoy);
  const float worst = *std::max_element(row.begin(), row.end()) / 2;
  for (int64_t i = 0; i < 1024; ++i) EXPECT_LT(row[static_cast<size_t>(i * 4000 / 1024)], worst);
  for (const int64_t n : {0, 1, 7, 1000}) {
    std::vector<int64_t> order = bit_reversed_order(n);
    EXPECT_EQ(std::set<int64_t>(order.begin(), order.end()).size(), static_cast<size_t>(n));
    Random random(1);
    order = decoy_order(n, random);
    EXPECT_EQ(std::set<int64_t>(order.begin(), order.end()).size(), static_cast<size_t>(n));
  }
  for (const Pattern pattern : all_patterns()) {
    Pattern found = Pattern::normal;
    EXPECT_TRUE(pattern_of(pattern_name(pattern), &found));
    EXPECT_EQ(found, pattern);
  }
  Pattern none;
  EXPECT_FALSE(pattern_of("no such pattern", &none));
}

/// The same numbers everywhere: traces and bench rows name a pattern and a seed.
TEST(Patterns, AreTheSameOnEveryMachine) {
  Random random(42);
  EXPECT_EQ(random.next(), 0x15780B2E0C2EC716u);
  uint64_t hash = 14695981039346656037u;
  for (const Pattern pattern : all_patterns()) {
    std::vector<float> row(500);
    fill_scores(pattern, row.data(), 500, 50, 7);
    for (const float x : row) hash = (hash ^ bits_of(x)) * 1099511628211u;
  }
  EXPECT_EQ(hash, 3346384523915189810u);
}

TEST(Guards, SeeEveryByte) {
  const Guarded guard(DType::i32, 3, 4);
  EXPECT_TRUE(guard.untouched());
  *element(guard.view(), 2, 3) = 1;
  EXPECT_EQ(guard.touched_outside(), "");
  EXPECT_FALSE(guard.untouched());
  *element(guard.view(true), 2, 4) = 1;
  EXPECT_NE(guard.touched_outside(), "");
}

}  // namespace
}  // namespace topkey::testing
