// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `score`: mqa_logits and paged_mqa_logits of every usable backend against the oracle (support/oracle.h):
// within the backend's bound on random inputs, bit for bit on exact ones; which cells are written; which bytes must
// not matter.
#include <array>
#include <cmath>
#include <cstring>
#include <tuple>

#include "tests/draw.h"

namespace topkey::testing {
namespace {

/// "ref" (bit for bit) for exact inputs, the backend's own arithmetic otherwise.
std::string judge_of(const std::string& backend, const ProblemSpec& spec) {
  if (spec.exact) return "ref";
  const char* name = arithmetic(backend.c_str(), spec.format, query_dtype(spec));
  return name != nullptr ? name : "none";
}

double calc_limit(const ProblemSpec& spec) { return spec.pattern == Pattern::denormals ? 0 : 5e-6; }

Report judge(const MqaLogits& args, const Problem& p, const std::string& backend) {
  return compare_scores(args, truth_of(args.q, args.keys, args.rows, false), judge_of(backend, p.spec),
                        calc_limit(p.spec));
}
Report judge(const PagedMqaLogits& args, const Problem& p, const std::string& backend) {
  return compare_scores(args, truth_of(args.q, args.keys, args.rows, false), judge_of(backend, p.spec),
                        calc_limit(p.spec));
}

/// Without `clean` only cells inside [start, end) are written; fill-only rows not at all.
std::string written_outside_windows(const Logits& logits, const Problem& p, int64_t tables) {
  const Rows rows = p.rows();
  for (int64_t r = 0; r < rows.count; ++r) {
    const RowRange range = row_range(rows, r, p.spec.paged ? 0 : p.spec.keys, tables);
    for (int64_t n = 0; n < logits.view().shape[1]; ++n) {
      const bool visible = range.visible() > 0 && n >= range.start && n < range.end;
      if (!visible && !logits.memory.poisoned(r, n)) {
        return "row " + std::to_string(r) + ", column " + std::to_string(n) + " is outside the window and was written";
      }
    }
  }
  return {};
}

/// A call's statistics from its result: every visible cell is scored, hidden by the mask, or counted as skipped.
template <class Args>
std::string wrong_stats(const Args& args, const Truth& truth, const Tensor& mask, int64_t tables, int64_t default_end,
                        const uint64_t* stats) {
  uint64_t scored = 0, skipped = 0, nans = 0;
  for (int64_t r = 0; r < truth.rows; ++r) {
    const RowRange range = row_range(args.rows, r, default_end, tables);
    skipped += static_cast<uint64_t>(range.visible()) + (range.wild_request ? 1 : 0);
    for (int64_t n = 0; n < truth.width; ++n) {
      if (!truth.live(r, n)) continue;
      --skipped;
      if (mask.data != nullptr && (mask.dtype == DType::b8 ? int_at(mask, r, n) == 0 : float_at(mask, r, n) < -1e38F))
        continue;
      ++scored;
      nans += std::isnan(float_at(args.logits, r, n)) ? 1 : 0;
    }
  }
  const uint64_t want[] = {static_cast<uint64_t>(truth.rows), scored, skipped, nans};
  const Stat words[] = {kRows, kScoredKeys, kSkippedPages, kNanScores};
  for (int i = 0; i < 4; ++i) {
    if (stats[words[i]] != want[i]) {
      return "statistics word " + std::to_string(words[i]) + " is " + std::to_string(stats[words[i]]) + ", expected " +
             std::to_string(want[i]);
    }
  }
  return {};
}

template <class Args>
void check_call(const Args& args, const Tensor& mask, const Problem& p, const Logits& logits,
                const std::string& backend, Tally& tally) {
  RC_LOG() << p.text();
  uint64_t stats[kNumStats] = {};
  if (!tally.runs(args, on(backend), label_of(backend, p.spec))) return;
  run(args, on(backend, stats));
  const Truth truth = truth_of(args.q, args.keys, args.rows, false);
  require(compare_scores(args, truth, judge_of(backend, p.spec), calc_limit(p.spec)));
  RC_ASSERT(logits.memory.touched_outside() == "");
  const int64_t tables = p.spec.paged && !p.spec.table_per_row ? p.spec.requests : -1;
  if (!args.clean) RC_ASSERT(written_outside_windows(logits, p, tables) == "");
  RC_ASSERT(wrong_stats(args, truth, mask, tables, p.spec.paged ? 0 : p.spec.keys, stats) == "");
}

TEST(Score, DenseEqualsTheOracle) {
  Tally tally("mqa_logits, drawn");
  for (const std::string& backend : every_backend()) {
    property("mqa_logits equals the oracle", 1200, [&] {
      const Problem p = make_problem(draw_spec(false));
      const Logits logits(draw_of({DType::f32, DType::f32, DType::bf16}), p.count(), p.width());
      MqaLogits args = p.dense_logits(logits.view(), draw_flag());
      Borrowed borrowed;
      Random random(p.spec.seed);
      args.mask = draw_admit(borrowed, random, p.count(), p.spec.keys, true).mask;
      check_call(args, args.mask, p, logits, backend, tally);
    });
  }
}

TEST(Score, PagedEqualsTheOracle) {
  Tally tally("paged_mqa_logits, drawn");
  for (const std::string& backend : every_backend()) {
    property("paged_mqa_logits equals the oracle", 1200, [&] {
      const ProblemSpec spec = draw_spec(true);
      const Problem p = make_problem(spec);
      const Logits logits(draw_of({DType::f32, DType::f32, DType::bf16}), p.count(), p.width());
      const PagedMqaLogits args = p.paged_logits(logits.view(), draw_flag());
      check_call(args, Tensor{}, p, logits, backend, tally);
    });
  }
}

/// Head counts and dims of production and around it, every pairing.
TEST(Score, Geometries) {
  Tally tally("mqa_logits, geometries");
  for (const std::string& backend : every_backend()) {
    for (const Pairing& pairing : all_pairings()) {
      for (const int32_t heads : {1, 3, 4, 32, 64}) {
        for (const int32_t dim : {32, 64, 128, 80}) {
          if (dim % dim_multiple(pairing.format) != 0) continue;
          for (const bool exact : {false, true}) {
            ProblemSpec spec;
            spec.format = pairing.format, spec.q_dtype = pairing.q, spec.heads = heads, spec.head_dim = dim;
            spec.rows = 2, spec.keys = 21, spec.exact = exact, spec.seed = static_cast<uint64_t>(heads * 1000 + dim);
            const Problem p = make_problem(spec);
            const Logits logits(DType::f32, p.count(), p.width());
            const MqaLogits args = p.dense_logits(logits.view());
            if (!tally.runs(args, on(backend), label_of(backend, spec))) continue;
            run(args, on(backend));
            EXPECT_TRUE(good(judge(args, p, backend))) << p.text();
          }
        }
      }
    }
  }
}

struct Paging {
  int32_t page_size;
  int64_t stride;  // 0 = tight
};

/// Page sizes and strides, tight, padded and unaligned to 16, non-zero storage offset, both layouts: scores of the
/// gathered keys.
TEST(Score, PagesOfAnySizeAndStride) {
  Tally tally("paged_mqa_logits, pages");
  const Paging fp8_128[] = {{1, 132}, {1, 136}, {2, 268}, {64, 8448},  {64, 8452},
                            {16, 0},  {48, 0},  {256, 0}, {64, 100000}};
  for (const std::string& backend : every_backend()) {
    for (const Paging& paging : fp8_128) {
      for (const Layout layout : {Layout::planar, Layout::interleaved}) {
        for (const bool exact : {false, true}) {
          ProblemSpec spec;
          spec.head_dim = 128, spec.paged = true, spec.requests = 3, spec.rows = 4, spec.keys = 130, spec.exact = exact;
          spec.page_size = paging.page_size, spec.page_stride = paging.stride, spec.layout = layout,
          spec.storage_offset = 36;
          const Problem p = make_problem(spec);
          const Logits logits(DType::f32, p.count(), p.width());
          const PagedMqaLogits args = p.paged_logits(logits.view());
          if (!tally.runs(args, on(backend), label_of(backend, spec))) continue;
          run(args, on(backend));
          EXPECT_TRUE(good(judge(args, p, backend))) << p.text();
          EXPECT_EQ(logits.memory.touched_outside(), "");
        }
      }
    }
  }
}

/// Dims far from production's: one, odd, and larger than any tile of keys that a backend decodes at once.
TEST(Score, OddAndLargeDims) {
  Tally tally("mqa_logits, dims");
  for (const std::string& backend : host_backends()) {
    for (const Pairing& pairing : all_pairings()) {
      for (const int32_t dim : {1, 3, 17, 576, 1000, 4096, 8192}) {
        if (dim % dim_multiple(pairing.format) != 0) continue;
        ProblemSpec spec;
        spec.format = pairing.format, spec.q_dtype = pairing.q, spec.heads = 2, spec.head_dim = dim;
        spec.rows = 2, spec.keys = 9, spec.paged = true, spec.page_size = 4;
        const Problem p = make_problem(spec);
        const Logits logits(DType::f32, p.count(), p.width());
        const PagedMqaLogits args = p.paged_logits(logits.view());
        if (!tally.runs(args, on(backend), label_of(backend, spec))) continue;
        run(args, on(backend));
        EXPECT_TRUE(good(judge(args, p, backend))) << p.text();
      }
    }
  }
}

/// Bits of two logits matrices in the live cells of rows `a_rows[i]` and `b_rows[i]`.
void expect_same_rows(const Tensor& a, const std::vector<int64_t>& a_rows, const Tensor& b,
                      const std::vector<int64_t>& b_rows, const std::string& what) {
  const int64_t width = std::min(a.shape[1], b.shape[1]);
  for (size_t i = 0; i < a_rows.size(); ++i) {
    for (int64_t n = 0; n < width; ++n) {
      const float x = float_at(a, a_rows[i], n), y = float_at(b, b_rows[i], n);
      ASSERT_EQ(bits_of(x), bits_of(y)) << what << ", row " << a_rows[i] << ", column " << n << ": " << x << " and "
                                        << y;
    }
  }
}

std::vector<Problem> sample_problems(bool paged) {
  std::vector<Problem> problems;
  for (const Pairing& pairing : all_pairings()) {
    for (const int32_t heads : {1, 3, 8}) {
      ProblemSpec spec;
      spec.format = pairing.format, spec.q_dtype = pairing.q, spec.heads = heads, spec.head_dim = 64;
      spec.rows = 6, spec.keys = 70, spec.paged = paged, spec.requests = 3, spec.windows = Windows::causal;
      spec.seed = static_cast<uint64_t>(heads);
      problems.push_back(make_problem(spec));
    }
  }
  return problems;
}

TEST(Score, HeadsOfWeightZeroChangeNoBit) {
  Tally tally("mqa_logits, zero heads");
  for (const std::string& backend : every_backend()) {
    for (const Problem& p : sample_problems(false)) {
      const Logits plain(DType::f32, p.count(), p.width());
      const MqaLogits args = p.dense_logits(plain.view());
      if (!tally.runs(args, on(backend), label_of(backend, p.spec))) continue;
      run(args, on(backend));
      for (const int32_t extra : {1, 5, 24}) {
        const Problem more = with_zero_heads(p, extra);
        const Logits padded(DType::f32, p.count(), p.width());
        run(more.dense_logits(padded.view()), on(backend));
        expect_same_rows(plain.view(), {0, 1, 2, 3, 4, 5}, padded.view(), {0, 1, 2, 3, 4, 5}, p.text());
      }
    }
  }
}

/// A row alone, a row among others, a row of the same keys in a matrix instead of pages: same bits.
TEST(Score, NeitherBatchNorPagingChangesABit) {
  Tally tally("paged_mqa_logits, batch invariance");
  for (const std::string& backend : every_backend()) {
    for (const Problem& p : sample_problems(true)) {
      const Logits batch(DType::f32, p.count(), p.width());
      const PagedMqaLogits args = p.paged_logits(batch.view());
      if (!tally.runs(args, on(backend), label_of(backend, p.spec))) continue;
      run(args, on(backend));
      for (int64_t r = 0; r < p.count(); ++r) {
        const Problem one = rows_of(p, {r});
        const Logits alone(DType::f32, 1, one.width());
        run(one.paged_logits(alone.view()), on(backend));
        expect_same_rows(batch.view(), {r}, alone.view(), {0}, p.text());
      }
      for (int32_t b = 0; b < p.spec.requests; ++b) {
        std::vector<int64_t> rows, own;
        const Problem dense = dense_of(p, b, &rows);
        for (size_t i = 0; i < rows.size(); ++i) own.push_back(static_cast<int64_t>(i));
        const Logits matrix(DType::f32, dense.count(), dense.width());
        run(dense.dense_logits(matrix.view()), on(backend));
        expect_same_rows(batch.view(), rows, matrix.view(), own, p.text());
      }
    }
  }
}

/// Strided q, weights, keys and scales give the bits of contiguous ones.
TEST(Score, StridesChangeNoBit) {
  Tally tally("mqa_logits, strides");
  for (const std::string& backend : every_backend()) {
    for (const Problem& p : sample_problems(false)) {
      if (p.spec.format == KeyFormat::mxfp4)
        continue;  // its q scales have a stride of their own, tested with the format
      const Logits plain(DType::f32, p.count(), p.width()), strided(DType::f32, p.count(), p.width());
      MqaLogits args = p.dense_logits(plain.view());
      if (!tally.runs(args, on(backend), label_of(backend, p.spec))) continue;
      run(args, on(backend));
      // Copies with three spare elements behind each row, and rows apart by one more vector.
      std::vector<Array> kept;
      const auto spread = [&](Tensor& t) {
        const int64_t inner = t.shape[t.ndim - 1] + 3, outer = t.ndim == 3 ? inner * (t.shape[1] + 1) : inner;
        kept.emplace_back(t.dtype, std::initializer_list<int64_t>{t.shape[0] * outer});
        std::memset(kept.back().as<uint8_t>(), 0xFF, kept.back().bytes());
        Tensor to = t;
        to.data = kept.back().as<uint8_t>();
        to.stride[0] = outer;
        if (t.ndim == 3) to.stride[1] = inner;
        const auto bytes = static_cast<size_t>(t.shape[t.ndim - 1]) * dtype_bytes(t.dtype);
        for (int64_t i = 0; i < t.shape[0]; ++i) {
          for (int64_t j = 0; j < (t.ndim == 3 ? t.shape[1] : 1); ++j)
            std::memcpy(element(to, i, j), element(t, i, j), bytes);
        }
        t = to;
      };
      spread(args.q.values), spread(args.q.weights), spread(args.keys.values);
      args.logits = strided.view();
      run(args, on(backend));
      expect_same_rows(plain.view(), {0, 1, 2, 3, 4, 5}, strided.view(), {0, 1, 2, 3, 4, 5}, p.text());
    }
  }
}

/// S by hand: ReLU before the head sum, negative weights, the outer scale, -0 as +0.
TEST(Score, ByHand) {
  Tally tally("mqa_logits, by hand");
  const float one = 1;
  const uint8_t k[3][2] = {{float_to_e4m3(3), float_to_e4m3(-5)}, {float_to_e4m3(1), float_to_e4m3(1)}, {0x7F, 0}};
  const float kscale[3] = {2, one, one};
  const uint8_t q[1][2][2] = {{{float_to_e4m3(1), 0}, {0, float_to_e4m3(1)}}};
  for (const std::string& backend : every_backend()) {
    for (const auto& [w, first, second] :
         {std::tuple<std::array<float, 2>, float, float>{{1, 1}, 6, 2}, {{-1, 1}, -6, 0}}) {
      const Logits logits(DType::f32, 1, 3);
      MqaLogits args{};
      args.q.values = tensor(q, DType::f8_e4m3fn, {1, 2, 2}), args.q.weights = tensor(w.data(), DType::f32, {1, 2});
      args.keys = {tensor(k, DType::f8_e4m3fn, {3, 2}), tensor(kscale, DType::f32, {3}), KeyFormat::fp8};
      args.rows.count = 1, args.logits = logits.view();
      if (!tally.runs(args, on(backend), backend)) continue;
      run(args, on(backend));
      EXPECT_EQ(bits_of(float_at(args.logits, 0, 0)), bits_of(first));
      EXPECT_EQ(bits_of(float_at(args.logits, 0, 1)), bits_of(second));
      EXPECT_EQ(bits_of(float_at(args.logits, 0, 2)), bits_of(canonical_nan())) << "ReLU must keep NaN";
    }
  }
}

/// d and h ascend, each from +0: 2^60 - 2^60 + 1 is 1 in that order and 0 in the other. Tensor cores add groups in
/// their own order.
TEST(Score, DimsAndHeadsAddInOrder) {
  Tally tally("mqa_logits, order of sums");
  const float big = 0x1p60F;
  const float terms[3] = {big, -big, 1}, ones[3] = {1, 1, 1}, unit[9] = {1, 0, 0, 1, 0, 0, 1, 0, 0};
  for (const std::string& backend : every_backend()) {
    const char* known = arithmetic(backend.c_str(), KeyFormat::f32, DType::f32);
    const std::string name = known != nullptr ? known : "none";
    if (name != "ref" && name != "f32" && name != "bf16dp") continue;
    for (const bool over_heads : {false, true}) {
      const Logits logits(DType::f32, 1, 1);
      MqaLogits args{};
      args.q.values = over_heads ? tensor(unit, DType::f32, {1, 3, 3}) : tensor(terms, DType::f32, {1, 1, 3});
      args.q.weights = over_heads ? tensor(terms, DType::f32, {1, 3}) : tensor(ones, DType::f32, {1, 1});
      args.keys = {tensor(ones, DType::f32, {1, 3}), {}, KeyFormat::f32};
      args.rows.count = 1, args.logits = logits.view();
      if (!tally.runs(args, on(backend), backend)) continue;
      run(args, on(backend));
      EXPECT_EQ(float_at(args.logits, 0, 0), 1.F) << backend << (over_heads ? ", heads" : ", dims");
    }
  }
}

/// The oracle against itself: doubles in one order, long doubles in the other.
TEST(Oracle, TwoFormulationsAgree) {
  property("S_ref is the rounded sum", 200, [] {
    ProblemSpec spec = draw_spec(false);
    spec.windows = Windows::full;
    const Problem p = make_problem(spec);
    const Truth t = truth_of(p.query(), p.dense_keys(), p.rows(), false);
    const Scorer scorer(p.query(), spec.format, spec.head_dim);
    for (int64_t i = 0; i < t.rows * t.width; ++i) {
      const double ref = static_cast<double>(t.ref.as<float>()[i]), a = t.a[static_cast<size_t>(i)];
      const auto wide = static_cast<double>(scorer.score_wide(i / t.width, *key_at(p.dense_keys(), i % t.width)));
      if (a < 0 || std::isinf(a)) continue;  // not live; or an infinite scale on a sum of no certain sign
      if (!std::isfinite(wide) || !std::isfinite(ref)) {
        RC_LOG() << p.text() << " cell " << i << " ref " << ref << " long double " << wide << " A " << a;
        RC_ASSERT(std::isnan(ref) == std::isnan(wide));
        continue;
      }
      RC_ASSERT(std::abs(ref - wide) <= std::abs(wide) * 0x1p-24 + a * 0x1p-44 + 0x1p-150);
    }
  });
}

}  // namespace
}  // namespace topkey::testing
