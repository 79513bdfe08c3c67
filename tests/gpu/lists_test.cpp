// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Rows that few thread blocks share, of more keys than a block can keep scores of: it lists what may still win, and drops
// the rest when the list is nearly full. topk is close to what a list holds, and many keys stand about the last winner.
#include "support/call.h"
#include "support/compare.h"
#include "tests/backend_test.h"

namespace topkey::testing {
namespace {

class Lists : public ::testing::TestWithParam<std::string> {};

struct Shape {
  int32_t heads, topk;
  int64_t keys;
};

TEST_P(Lists, ThinnedListsLoseNoWinner) {
  Tally tally("thinned lists");
  for (const Shape& shape : {Shape{128, 620, 2600}, {128, 820, 3000}, {128, 900, 4000}, {64, 1850, 6000}}) {
    for (const Pattern pattern : {Pattern::normal, Pattern::ties_at_cut, Pattern::all_equal, Pattern::relu_plateau,
                                  Pattern::few_mantissa_bits, Pattern::nans, Pattern::ascending}) {
      for (const int32_t sms : {1, 3}) {
        ProblemSpec spec;
        spec.heads = shape.heads, spec.head_dim = 128, spec.keys = shape.keys, spec.pattern = pattern;
        spec.rows = 6, spec.exact = pattern != Pattern::normal;
        const Problem p = make_problem(spec);
        const Array logits(DType::f32, {p.count(), p.width()}), indices(DType::i32, {p.count(), shape.topk}),
            counts(DType::i32, {p.count()}), scores(DType::f32, {p.count(), shape.topk});
        Selection out{};
        out.indices = indices.view(), out.counts = counts.view();
        if (sms == 1) out.scores = scores.view();
        uint64_t stats[kNumStats] = {};
        Exec exec = on(GetParam(), stats);
        exec.max_sms = sms;
        const MqaTopk args = p.dense_search(shape.topk, out);
        if (!tally.runs(args, exec, label_of(GetParam(), spec))) continue;
        run(p.dense_logits(logits.view()), on(GetParam()));
        std::memset(indices.as<uint8_t>(), 0xA5, indices.bytes());
        run(args, exec);
        EXPECT_TRUE(good(compare_selection(args, logits.view(), stats)))
            << p.text() << " topk " << shape.topk << " SMs " << sms;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Lists, ::testing::ValuesIn(gpu_backends()), backend_label);

}  // namespace
}  // namespace topkey::testing
