// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Selection from given scores by rows that one to sixteen thread blocks share, a thread having one score of them up to 32:
// every length at which that changes, every pattern, windows that begin and end anywhere, and few SMs.
#include <algorithm>
#include <cmath>
#include <limits>

#include "support/compare.h"
#include "tests/backend_test.h"

namespace topkey::testing {
namespace {

class Clusters : public ::testing::TestWithParam<std::string> {};

struct Shape {
  int64_t rows, columns;
  int32_t topk;
  int64_t pad = 0;      ///< columns more from row to row: odd ones move windows off 16 bytes
  int32_t max_sms = 0;  ///< 0 = all
};
enum class Windows { whole, ragged };
constexpr int32_t kFirst[] = {0, 1, 2, 3, 5, 500, 4097};  // where windows begin, by row

struct Call {
  Array scores, start, length;
  Outputs outputs;
  Topk args{};
};

/// Rows of a pattern; the last one holds NaNs and few numbers.
Call make_call(const Shape& shape, Pattern pattern, Windows windows, const Want& want) {
  const int64_t step = shape.columns + shape.pad;
  Call c{Array(DType::f32, {shape.rows, step}), {}, {}, Outputs(shape.rows, shape.topk, want)};
  for (int64_t r = 0; r < shape.rows; ++r)
    fill_scores(pattern, c.scores.as<float>() + r * step, step, shape.topk, 100 + static_cast<uint64_t>(r));
  float* last = c.scores.as<float>() + (shape.rows - 1) * step;
  for (int64_t i = 0; pattern == Pattern::nans && i < step; ++i)
    if (i % 997 != 0) last[i] = std::numeric_limits<float>::quiet_NaN();
  c.args.scores = tensor(c.scores.as<uint8_t>(), DType::f32, {shape.rows, shape.columns}, {step, 1});
  c.args.rows.count = shape.rows, c.args.topk = shape.topk, c.args.out = c.outputs.selection();
  if (windows == Windows::whole) return c;
  c.start = Array(DType::i32, {shape.rows}), c.length = Array(DType::i32, {shape.rows});
  for (int64_t r = 0; r < shape.rows; ++r) {
    const int64_t first = std::min<int64_t>(kFirst[r % 7], shape.columns), all = shape.columns - first;
    const int64_t lengths[] = {all,    std::min<int64_t>(shape.topk + 1, all), all - 3, shape.topk, all / 2 + 1, 0,
                               all + 9};
    c.start.as<int32_t>()[r] = static_cast<int32_t>(first);
    c.length.as<int32_t>()[r] = static_cast<int32_t>(std::max<int64_t>(lengths[r * 3 % 7], 0));
  }
  c.args.rows.start = c.start.view(), c.args.rows.length = c.length.view();
  return c;
}

void check(const std::string& backend, const Shape& shape, Pattern pattern, Windows windows, Tally& tally) {
  for (const bool all_outputs : {false, true}) {
    Want want;
    want.scores = want.counts = all_outputs;
    const Call c = make_call(shape, pattern, windows, want);
    uint64_t stats[kNumStats] = {};
    Exec exec = on(backend, stats);
    exec.max_sms = shape.max_sms;
    if (!tally.runs(c.args, exec, backend)) return;
    run(c.args, exec);
    EXPECT_TRUE(good(compare_selection(c.args, stats)))
        << pattern_name(pattern) << " " << shape.rows << " x " << shape.columns << " topk " << shape.topk << " pad "
        << shape.pad << " SMs " << shape.max_sms << (windows == Windows::ragged ? " ragged" : "");
    EXPECT_TRUE(inside(c.outputs));
  }
}

/// Around the sizes at which a thread gets more scores, and a row more blocks.
TEST_P(Clusters, EveryPattern) {
  Tally tally("clusters, patterns");
  for (const Pattern pattern : all_patterns()) {
    for (const Shape& shape :
         {Shape{1, 2047, 300}, {1, 2049, 2048}, {2, 8192, 2048}, {1, 8195, 2048, 1}, {7, 9000, 64, 3}})
      check(GetParam(), shape, pattern, Windows::whole, tally);
    for (const Shape& shape : {Shape{7, 6000, 300, 1}, {8, 20000, 2048, 3}})
      check(GetParam(), shape, pattern, Windows::ragged, tally);
  }
}

TEST_P(Clusters, LongRows) {
  Tally tally("clusters, long rows");
  for (const Pattern pattern : {Pattern::normal, Pattern::ties_at_cut, Pattern::all_equal, Pattern::ascending,
                                Pattern::relu_plateau, Pattern::nans, Pattern::few_mantissa_bits}) {
    for (const Shape& shape : {Shape{1, 131072, 2048}, {2, 131077, 2048, 2}, {1, 262144, 5000}, {1, 262145, 1}})
      check(GetParam(), shape, pattern, Windows::whole, tally);
    check(GetParam(), {7, 100003, 2048, 2}, pattern, Windows::ragged, tally);
  }
}

/// Fewer blocks, and rows in turns.
TEST_P(Clusters, FewSms) {
  Tally tally("clusters, few SMs");
  for (const int32_t sms : {1, 2, 3, 5}) {
    for (const Pattern pattern : {Pattern::normal, Pattern::all_equal, Pattern::nans, Pattern::few_mantissa_bits}) {
      check(GetParam(), {7, 5000, 2048, 1, sms}, pattern, Windows::whole, tally);
      check(GetParam(), {9, 20000, 2048, 0, sms}, pattern, Windows::ragged, tally);
      check(GetParam(), {3, 70000, 100, 0, sms}, pattern, Windows::whole, tally);
    }
  }
}

/// So many rows for so few SMs that a thread block has a row for itself, and keeps of it what a sample says may win.
TEST_P(Clusters, ManyLongRows) {
  Tally tally("clusters, many long rows");
  for (const Pattern pattern : all_patterns()) {
    check(GetParam(), {32, 16401, 2048, 1, 8}, pattern, Windows::whole, tally);
    check(GetParam(), {33, 20000, 300, 3, 5}, pattern, Windows::ragged, tally);
  }
  check(GetParam(), {32, 131072, 2048, 0, 8}, Pattern::normal, Windows::whole, tally);
  check(GetParam(), {32, 262100, 1000, 1, 3}, Pattern::decoy, Windows::ragged, tally);
}

INSTANTIATE_TEST_SUITE_P(Backends, Clusters, ::testing::ValuesIn(gpu_backends()), backend_label);

}  // namespace
}  // namespace topkey::testing
