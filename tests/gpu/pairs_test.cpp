// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The same (query, key) pairs by every way that a backend has: dense and paged, prefill and decode, every next_n from 1 to
// 8, page sizes, odd strides and offsets, logits and searches. The bits of a score depend on the pair alone.
#include "tests/backend_test.h"

namespace topkey::testing {
namespace {

struct Shape {
  KeyFormat format;
  int32_t heads, head_dim;
};
// What a backend takes of them it must answer with the same bits; the first is for all.
constexpr Shape kShapes[] = {{KeyFormat::fp8, 64, 128},  {KeyFormat::fp8, 32, 128},  {KeyFormat::fp8, 64, 64},
                             {KeyFormat::fp8, 20, 128},  {KeyFormat::fp8, 3, 144},   {KeyFormat::mxfp4, 64, 128},
                             {KeyFormat::mxfp4, 20, 64}, {KeyFormat::bf16, 32, 128}, {KeyFormat::f16, 20, 64},
                             {KeyFormat::q8_0, 5, 64},   {KeyFormat::f32, 7, 40}};
constexpr int64_t kQueries = 8;
constexpr int32_t kTopk = 130;

class Pairs : public ::testing::TestWithParam<std::string> {
 protected:
  void check_shape(const Shape& shape, int64_t keys, const std::vector<int32_t>& page_sizes);
  void check(const Problem& p);
  Problem paged(const ProblemSpec& spec) const;

  Problem base_;
  Array scores_;  ///< [kQueries, keys]
  int64_t checked_ = 0;
};

/// A paged problem whose row r has query r % kQueries, and whose keys are those of base_, in each request.
Problem Pairs::paged(const ProblemSpec& spec) const {
  Problem p = make_problem(spec);
  const auto copy_rows = [&](const Array& from, const Array& to) {
    if (!from) return;
    const size_t size = from.bytes() / kQueries;
    for (int64_t r = 0; r < p.count(); ++r) {
      std::memcpy(to.as<uint8_t>() + static_cast<size_t>(r) * size,
                  from.as<uint8_t>() + static_cast<size_t>(r % kQueries) * size, size);
    }
  };
  copy_rows(base_.q, p.q), copy_rows(base_.q_scales, p.q_scales), copy_rows(base_.weights, p.weights);
  std::vector<uint8_t> values(4096), scales(4096);
  for (size_t b = 0; b < p.lens.size(); ++b) {
    for (int64_t n = 0; n < p.lens[b]; ++n) {
      base_.read_key(0, n, values.data(), scales.data());
      p.write_key(static_cast<int64_t>(b), n, values.data(), scales.data());
    }
  }
  return p;
}

/// Logits and a search; each score against that of its pair.
void Pairs::check(const Problem& p) {
  const Array logits(DType::f32, {p.count(), p.width()});
  Want want;
  want.scores = want.counts = true;
  const Outputs out(p.count(), kTopk, want);
  if (p.spec.paged) {
    run(p.paged_logits(logits.view(), false), on(GetParam()));
    run(p.paged_search(kTopk, out.selection()), on(GetParam()));
  } else {
    run(p.dense_logits(logits.view(), false), on(GetParam()));
    run(p.dense_search(kTopk, out.selection()), on(GetParam()));
  }
  const Selection s = out.selection();
  for (int64_t r = 0; r < p.count(); ++r) {
    const int64_t count = int_at(s.counts, r);
    checked_ += count;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t n = int_at(s.indices, r, i);
      const float want_score = float_at(scores_.view(), r % kQueries, n);
      ASSERT_EQ(bits_of(float_at(logits.view(), r, n)), bits_of(want_score)) << p.text() << " " << r << " " << n;
      const float canonical = want_score + 0.0F;  // -0 comes back as +0
      ASSERT_EQ(bits_of(float_at(s.scores, r, i)), bits_of(canonical)) << p.text() << " " << r << " " << n;
    }
  }
  EXPECT_TRUE(inside(out));
}

void Pairs::check_shape(const Shape& shape, int64_t keys, const std::vector<int32_t>& page_sizes) {
  ProblemSpec spec;
  spec.format = shape.format, spec.heads = shape.heads, spec.head_dim = shape.head_dim;
  spec.rows = kQueries, spec.keys = keys, spec.seed = 5;
  base_ = make_problem(spec);
  scores_ = Array(DType::f32, {kQueries, keys});
  run(base_.dense_logits(scores_.view()), on(GetParam()));
  check(base_);
  spec.paged = true;
  for (const int32_t page_size : page_sizes) {
    const int64_t bytes = page_size * row_bytes(shape.format, shape.head_dim);
    for (const int64_t extra : {0, 4, 20, 64}) {
      spec.page_size = page_size, spec.page_stride = (bytes + 3) / 4 * 4 + extra, spec.storage_offset = extra % 48;
      spec.addressing = Addressing::request, spec.windows = Windows::causal;
      spec.rows = 40, spec.requests = 1;  // prefill
      check(paged(spec));
      if (HasFatalFailure()) return;
      spec.rows = kQueries, spec.requests = kQueries;  // decode
      check(paged(spec));
      if (HasFatalFailure()) return;
    }
    spec.addressing = Addressing::next_n, spec.requests = 5;
    for (int32_t next_n = 1; next_n <= 8; ++next_n) {
      spec.next_n = next_n;
      check(paged(spec));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Pairs, BitsDependOnThePairAlone) {
  Tally tally("the same pairs everywhere");
  for (const Shape& shape : kShapes) {
    ProblemSpec spec;
    spec.format = shape.format, spec.heads = shape.heads, spec.head_dim = shape.head_dim;
    const Problem small = make_problem(spec);
    const Array logits(DType::f32, {small.count(), small.width()});
    const std::string label =
        label_of(GetParam(), spec) + "/" + std::to_string(shape.heads) + "x" + std::to_string(shape.head_dim);
    if (!tally.runs(small.dense_logits(logits.view()), on(GetParam()), label)) continue;
    checked_ = 0;
    check_shape(shape, 700, {1, 16, 48, 64, 256});
    if (HasFailure()) return;
    // Long enough for what is done about long rows alone.
    if (shape.format == KeyFormat::fp8 && shape.heads >= 32) check_shape(shape, 9000, {64});
    if (HasFailure()) return;
    EXPECT_GT(checked_, 100000) << label;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Pairs, ::testing::ValuesIn(gpu_backends()), backend_label);

}  // namespace
}  // namespace topkey::testing
