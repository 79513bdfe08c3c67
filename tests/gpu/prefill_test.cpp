// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Searches of so many rows that Hopper's prefill kernel takes them: every number of heads, windows that rows share, half
// share and do not share, requests that change within a tile, and data that breaks what a sample promises. Each answer
// against the logits of the same backend.
#include <cstring>
#include <numeric>

#include "support/call.h"
#include "support/compare.h"
#include "tests/backend_test.h"

namespace topkey::testing {
namespace {

class PrefillRows : public ::testing::TestWithParam<std::string> {
 protected:
  /// The stats of the call.
  std::vector<uint64_t> check(const Problem& p, int32_t topk, Tally& tally, int32_t sms = 0, bool slots = false);
};

std::vector<uint64_t> PrefillRows::check(const Problem& p, int32_t topk, Tally& tally, int32_t sms, bool slots) {
  std::vector<uint64_t> stats(kNumStats, 0);
  const Array logits(DType::f32, {p.count(), p.width()}), indices(DType::i32, {p.count(), topk}),
      counts(DType::i32, {p.count()}), places(DType::i32, {p.count(), topk});
  Selection out{};
  out.indices = indices.view(), out.counts = counts.view();
  if (slots && p.spec.paged) {
    out.slots = places.view();
    out.slot_map.block_table = p.block_table.view(), out.slot_map.page_size = p.spec.page_size;
  }
  Exec exec = on(GetParam(), stats.data());
  exec.max_sms = sms;
  const std::string label = label_of(GetParam(), p.spec);
  const auto judge = [&](const auto& args, const auto& logit_args) {
    if (!tally.runs(args, exec, label)) return;
    run(logit_args, on(GetParam()));
    std::memset(indices.as<uint8_t>(), 0xA5, indices.bytes());
    run(args, exec);
    EXPECT_TRUE(good(compare_selection(args, logits.view(), stats.data())))
        << p.text() << " topk " << topk << " SMs " << sms;
    const std::vector<uint8_t> first(indices.as<uint8_t>(), indices.as<uint8_t>() + indices.bytes());
    std::memset(indices.as<uint8_t>(), 0xA5, indices.bytes());
    run(args, on(GetParam()));
    EXPECT_EQ(std::memcmp(first.data(), indices.as<uint8_t>(), first.size()), 0) << "again: " << p.text();
  };
  if (p.spec.paged) {
    judge(p.paged_search(topk, out), p.paged_logits(logits.view()));
  } else {
    judge(p.dense_search(topk, out), p.dense_logits(logits.view()));
  }
  return stats;
}

ProblemSpec spec_of(int32_t heads, int64_t rows, int64_t keys, Pattern pattern) {
  ProblemSpec spec;
  spec.heads = heads, spec.head_dim = 128, spec.rows = rows, spec.keys = keys, spec.pattern = pattern;
  spec.exact = pattern != Pattern::normal, spec.windows = Windows::causal;
  return spec;
}

TEST_P(PrefillRows, EveryNumberOfHeads) {
  Tally tally("prefill, heads");
  for (const int32_t heads : {1, 8, 32, 40, 64, 72, 96, 128})
    check(make_problem(spec_of(heads, 300, 6001, Pattern::normal)), 700, tally);
}

TEST_P(PrefillRows, EveryPattern) {
  Tally tally("prefill, patterns");
  int32_t heads = 32;
  for (const Pattern pattern : all_patterns()) {
    check(make_problem(spec_of(64, 260, 9100, pattern)), 2048, tally);
    check(make_problem(spec_of(heads, 260, 5000, pattern)), 900, tally);
    heads = heads == 32 ? 128 : 32;
  }
}

TEST_P(PrefillRows, LengthsAboutTheSample) {
  Tally tally("prefill, lengths");
  for (const int64_t keys : {600, 2100, 4032, 4100, 4160, 4300}) {
    for (const int32_t topk : {1, 257, 2048})
      check(make_problem(spec_of(16, 261, keys, Pattern::normal)), topk, tally, topk == 257 ? 3 : 0);
  }
  check(make_problem(spec_of(16, 257, 70001, Pattern::normal)), 2048, tally);
  check(make_problem(spec_of(40, 257, 40000, Pattern::ties_at_cut)), 2048, tally);
}

/// Few heads, of which thread blocks take sixteen rows, and so many keys that the lists would fill up under the sample's
/// threshold: halfway there is a better one. Of equal scores it drops none; at the last shape lists are full just then.
TEST_P(PrefillRows, ThresholdHalfway) {
  Tally tally("prefill, threshold halfway");
  for (const Pattern pattern : {Pattern::normal, Pattern::ties_at_cut})
    check(make_problem(spec_of(8, 257, 120000, pattern)), 2048, tally);
  check(make_problem(spec_of(8, 257, 127600, Pattern::all_equal)), 2048, tally);
}

/// So many rows that each thread block has little room for lists; and more than are looked at in one go.
TEST_P(PrefillRows, ManyRows) {
  Tally tally("prefill, many rows");
  for (const Pattern pattern : {Pattern::normal, Pattern::ties_at_cut}) {
    ProblemSpec spec = spec_of(8, 2200, 3900, pattern);
    spec.windows = Windows::full;
    check(make_problem(spec), 2048, tally);
  }
  check(make_problem(spec_of(72, 8300, 2500, Pattern::all_equal)), 300, tally);
}

TEST_P(PrefillRows, EveryWindow) {
  Tally tally("prefill, windows");
  for (const Windows windows : {Windows::full, Windows::causal, Windows::random, Windows::wild}) {
    for (const int32_t heads : {32, 64}) {
      ProblemSpec spec = spec_of(heads, 290, 5000, Pattern::normal);
      spec.windows = windows;
      check(make_problem(spec), 300, tally);
      spec.length_not_end = true, spec.pattern = Pattern::ties_at_cut, spec.exact = true;
      check(make_problem(spec), 300, tally, 1);
    }
  }
}

TEST_P(PrefillRows, PagesAndRequests) {
  Tally tally("prefill, pages");
  for (const Addressing addressing : {Addressing::request, Addressing::q_indptr}) {
    for (const int32_t page_size : {64, 192, 48}) {
      ProblemSpec spec = spec_of(64, 307, 5000, Pattern::normal);
      spec.paged = true, spec.requests = 5, spec.page_size = page_size, spec.addressing = addressing;
      check(make_problem(spec), 600, tally, 0, true);
      spec.windows = Windows::wild;
      const Problem p = make_problem(spec);
      // Pages that do not exist.
      for (int64_t b = 0; b < 5; ++b) *(p.block_table.as<int32_t>() + b * p.block_table.view().stride[0] + 3) = -7;
      check(p, 600, tally, 0, true);
    }
  }
}

/// The first units that the kernel looks at, of `units`.
std::vector<int64_t> sampled_units(int64_t units) {
  int64_t stride = static_cast<int64_t>(static_cast<float>(units) * 0.618034F);
  while (std::gcd(stride, units) != 1) ++stride;
  std::vector<int64_t> sampled;
  for (int64_t i = 0; i < 32; ++i) sampled.push_back(i * stride % units);
  return sampled;
}

/// Rows of which the sample holds the best keys find too few behind its threshold, those of which it holds the worst
/// find too many: both are answered, by the exact way out. (Where a row's weights are negative, best is worst.)
TEST_P(PrefillRows, SamplesThatMislead) {
  Tally tally("prefill, samples");
  for (const float sampled : {4.0F, 0.25F}) {
    for (const int32_t heads : {32, 64, 128}) {
      ProblemSpec spec = spec_of(heads, 264, 24000, Pattern::all_equal);
      const Problem p = make_problem(spec);
      const int64_t units = (spec.keys + 63) / 64;
      float* scales = p.key_scales.as<float>();
      for (int64_t n = 0; n < spec.keys; ++n) scales[n] = 1.0F + static_cast<float>(n * 7919 % 4096) / 4096.0F;
      for (const int64_t unit : sampled_units(units)) {
        for (int64_t n = unit * 64; n < std::min(spec.keys, unit * 64 + 64); ++n) scales[n] *= sampled;
      }
      const std::vector<uint64_t> stats = check(p, 2000, tally);
      if (GetParam() == "cuda.sm90") {
        EXPECT_GT(stats[kRescans], 50U) << heads << " " << sampled;
      }
    }
  }
}

/// Lists that fill up with scores that are just the threshold: those of the lowest positions stay, equal ones behind them
/// are listed no more, equal ones before them are.
TEST_P(PrefillRows, FullListsOfEqualScores) {
  Tally tally("prefill, equal scores");
  check(make_problem(spec_of(64, 258, 20000, Pattern::all_equal)), 2048, tally);
  check(make_problem(spec_of(32, 258, 20000, Pattern::relu_plateau)), 2048, tally);
  check(make_problem(spec_of(128, 258, 14000, Pattern::nans)), 2048, tally);
}

/// The best keys are all one thread's: its column of the list fills up alone, with fewer entries than are wanted.
TEST_P(PrefillRows, ColumnsThatFillAlone) {
  Tally tally("prefill, columns");
  for (const int32_t heads : {32, 64, 128}) {
    ProblemSpec spec = spec_of(heads, 264, 20000, Pattern::all_equal);
    const Problem p = make_problem(spec);
    float* scales = p.key_scales.as<float>();
    for (int64_t n = 0; n < spec.keys; ++n)
      scales[n] = (n % 64 == 1 || n % 64 == 9 ? 4.0F : 1.0F) * (1.0F + static_cast<float>(n * 7919 % 4096) / 4096.0F);
    check(p, 2000, tally);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, PrefillRows, ::testing::ValuesIn(gpu_backends()), backend_label);

}  // namespace
}  // namespace topkey::testing
