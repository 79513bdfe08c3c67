// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `quantize`, the steps before the rule: norm, rope (both styles, both ends; CASES B46 (d)), Hadamard, each
// alone and seen through f32 keys, which keep every bit. The judge is a second formulation in this file: the same
// order of roundings, other code.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "support/array.h"
#include "support/patterns.h"
#include "support/run.h"
#include "tests/backend_test.h"
#include "topkey/topkey.h"

namespace {

using topkey::DType;
using topkey::KeyFormat;
using topkey::QuantizeK;
using topkey::support::Array;
using topkey::support::Random;
using Floats = std::vector<float>;

float rounded(float x, DType dtype) {
  return dtype == DType::bf16  ? topkey::round_to_bf16(x)
         : dtype == DType::f16 ? topkey::f16_to_float(topkey::float_to_f16(x))
                               : x;
}
Array array_of(const Floats& values, DType dtype, int64_t rows) {
  Array a(dtype, {rows, static_cast<int64_t>(values.size()) / rows});
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::f32) a.as<float>()[i] = values[i];
    if (dtype == DType::bf16) a.as<uint16_t>()[i] = topkey::float_to_bf16(values[i]);
    if (dtype == DType::f16) a.as<uint16_t>()[i] = topkey::float_to_f16(values[i]);
  }
  return a;
}
Array vector_of(const Floats& values, DType dtype) {
  const Array a = array_of(values, dtype, 1);
  return a.seen_as(topkey::tensor(a.view().data, dtype, {static_cast<int64_t>(values.size())}));
}
Floats floats_of(const Array& a) {
  Floats out;
  for (int64_t r = 0; r < a.view().shape[0]; ++r) {
    for (int64_t d = 0; d < a.view().shape[1]; ++d) out.push_back(topkey::support::float_at(a.view(), r, d));
  }
  return out;
}
Floats normal(size_t n, uint64_t seed, float scale = 1, float shift = 0) {
  Random random(seed);
  Floats x;
  for (size_t i = 0; i < n; ++i) x.push_back(random.normal() * scale + shift);
  return x;
}
constexpr DType kInputs[] = {DType::f32, DType::bf16, DType::f16};

class StepsTest : public topkey::testing::BackendTest {
 protected:
  /// The vectors after norm, rope and Hadamard, as f32 keys.
  Floats after(const Array& k, const QuantizeK& options) {
    const Array out(DType::f32, {k.view().shape[0], k.view().shape[1]});
    QuantizeK a = options;
    a.k = k.view();
    a.out = {out.view(), {}, KeyFormat::f32};
    topkey::support::run(a, exec());
    return floats_of(out);
  }
};

// ---- norm ----
/// Lane l sums d = l, l + 32, ...; then the lanes fold in halves.
float folded(const Floats& v) {
  Floats lanes(32, 0.0f);
  for (size_t lane = 0; lane < 32; ++lane) {
    for (size_t d = lane; d < v.size(); d += 32) lanes[lane] += v[d];
  }
  while (lanes.size() > 1) {
    Floats half(lanes.begin(), lanes.begin() + static_cast<int64_t>(lanes.size() / 2));
    for (size_t i = 0; i < half.size(); ++i) half[i] += lanes[half.size() + i];
    lanes = half;
  }
  return lanes[0];
}
Floats normed(Floats x, bool layer, const Floats& weight, const Floats& bias, float eps, DType input) {
  const auto n = static_cast<float>(x.size());
  if (layer) {
    const float mean = folded(x) / n;
    for (float& v : x) v -= mean;
  }
  Floats squares = x;
  for (float& v : squares) v *= v;
  const float root = std::sqrt(folded(squares) / n + eps), r = 1.0f / root;
  for (size_t d = 0; d < x.size(); ++d) {
    x[d] *= r;
    if (!weight.empty()) x[d] *= weight[d];
    if (!bias.empty()) x[d] += bias[d];
    x[d] = rounded(x[d], input);
  }
  return x;
}

TEST_P(StepsTest, NormInTheDocumentedOrder) {
  for (DType input : kInputs) {
    for (size_t dim : {1u, 5u, 32u, 48u, 128u, 130u}) {
      for (bool layer : {true, false}) {
        for (int parts = 0; parts < 3; ++parts) {  // nothing, weight, weight and bias
          if (parts == 2 && !layer) continue;
          const DType wtype = parts == 1 ? DType::bf16 : DType::f32;
          const Array k = array_of(normal(2 * dim, 20 + dim, 3, 0.5f), input, 2);
          const Array weight = vector_of(normal(dim, 21), wtype), bias = vector_of(normal(dim, 22), DType::f32);
          QuantizeK a{};
          a.norm = {layer ? topkey::NormKind::layer : topkey::NormKind::rms, {}, {}, 1e-5f};
          if (parts > 0) a.norm.weight = weight.view();
          if (parts > 1) a.norm.bias = bias.view();
          const Floats got = after(k, a), in = floats_of(k);
          Floats w, b;
          for (size_t d = 0; d < dim && parts > 0; ++d)
            w.push_back(topkey::support::float_at(weight.view(), static_cast<int64_t>(d)));
          for (size_t d = 0; d < dim && parts > 1; ++d)
            b.push_back(topkey::support::float_at(bias.view(), static_cast<int64_t>(d)));
          for (size_t r = 0; r < 2; ++r) {
            const Floats row(in.begin() + static_cast<int64_t>(r * dim),
                             in.begin() + static_cast<int64_t>((r + 1) * dim));
            const Floats want = normed(row, layer, w, b, 1e-5f, input);
            ASSERT_EQ(
                Floats(got.begin() + static_cast<int64_t>(r * dim), got.begin() + static_cast<int64_t>((r + 1) * dim)),
                want)
                << dim << (layer ? " layer" : " rms") << " input " << topkey::support::dtype_name(input) << " parts "
                << parts;
          }
        }
      }
    }
  }
}

TEST_P(StepsTest, NormMeansWhatItSays) {
  const Array k = array_of(normal(128, 23, 5, 7), DType::f32, 1);
  QuantizeK a{};
  a.norm = {topkey::NormKind::layer, {}, {}, 0};
  double sum = 0, squares = 0;
  for (float v : after(k, a)) sum += v, squares += double{v} * v;
  EXPECT_NEAR(sum, 0, 1e-3);
  EXPECT_NEAR(squares / 128, 1, 1e-5);
  a.norm.kind = topkey::NormKind::rms;
  squares = 0;
  for (float v : after(k, a)) squares += double{v} * v;
  EXPECT_NEAR(squares / 128, 1, 1e-5);
}

// ---- rope ----
TEST_P(StepsTest, RopeStylesOfCaseB46) {
  const Array k = array_of({1, 0, 0, 0}, DType::f32, 1), table = array_of({0, 1, 1, 0}, DType::f32, 1),
              at = Array::of({0});
  QuantizeK a{};  // cos 0, 1 and sin 1, 0: a quarter turn on pair 0, none on pair 1
  a.rope = {at.view(), table.view(), 4, false, false};
  EXPECT_EQ(after(k, a), (Floats{0, 0, 1, 0}));
  a.rope.interleaved = true;
  EXPECT_EQ(after(k, a), (Floats{0, 1, 0, 0}));
}

TEST_P(StepsTest, RopeLeavesTheOtherDimsAlone) {
  const Array k = array_of({5, 6, 1, 2, 3, 4, 7}, DType::f32, 1), table = array_of({0, 0, 1, 1}, DType::f32, 1),
              at = Array::of({0});
  const auto turned = [&](bool interleaved, bool trailing) {
    QuantizeK a{};
    a.rope = {at.view(), table.view(), 4, interleaved, trailing};
    return after(k, a);
  };
  EXPECT_EQ(turned(false, false), (Floats{-1, -2, 5, 6, 3, 4, 7}));
  EXPECT_EQ(turned(true, false), (Floats{-6, 5, -2, 1, 3, 4, 7}));
  EXPECT_EQ(turned(false, true), (Floats{5, 6, 1, -4, -7, 2, 3}));
  EXPECT_EQ(turned(true, true), (Floats{5, 6, 1, -3, 2, -7, 4}));
}

TEST_P(StepsTest, RopeInTheDocumentedOrder) {
  constexpr size_t kDim = 24, kRoped = 16, kTable = 9;
  const Floats table = normal(kTable * kRoped, 30);
  for (DType input : kInputs) {
    for (DType ctype : kInputs) {
      for (int style = 0; style < 4; ++style) {
        const bool interleaved = style % 2 != 0, trailing = style / 2 != 0;
        const Array k = array_of(normal(3 * kDim, 31), input, 3), cos_sin = array_of(table, ctype, kTable);
        Array at(DType::i64, {3, 2});  // strided, i64
        const std::vector<int64_t> positions = {8, 0, 3};
        for (int64_t r = 0; r < 3; ++r) at.as<int64_t>()[2 * r] = positions[static_cast<size_t>(r)];
        QuantizeK a{};
        a.rope = {topkey::tensor(at.view().data, DType::i64, {3}, {2}), cos_sin.view(), kRoped, interleaved, trailing};
        const Floats got = after(k, a);
        Floats want = floats_of(k);
        for (size_t r = 0; r < 3; ++r) {
          float* x = want.data() + r * kDim + (trailing ? kDim - kRoped : 0);
          for (size_t i = 0; i < kRoped / 2; ++i) {
            float &first = x[interleaved ? 2 * i : i], &second = x[interleaved ? 2 * i + 1 : i + kRoped / 2];
            const float c = topkey::support::float_at(cos_sin.view(), positions[r], static_cast<int64_t>(i));
            const float s =
                topkey::support::float_at(cos_sin.view(), positions[r], static_cast<int64_t>(i + kRoped / 2));
            const float ac = first * c, bs = second * s, bc = second * c, as = first * s;
            first = rounded(ac - bs, input);
            second = rounded(bc + as, input);
          }
        }
        ASSERT_EQ(got, want) << "input " << topkey::support::dtype_name(input) << ", table "
                             << topkey::support::dtype_name(ctype) << (interleaved ? ", interleaved" : ", half split")
                             << (trailing ? ", trailing" : ", leading");
      }
    }
  }
}

TEST_P(StepsTest, RopePositionOutsideTheTableIsANanKey) {
  const Array k = array_of(normal(4 * 32, 33), DType::f32, 4), table = array_of(normal(5 * 8, 34), DType::f32, 5);
  Array at(DType::i64, {4});
  at.as<int64_t>()[1] = 5;
  at.as<int64_t>()[2] = -1;
  at.as<int64_t>()[3] = int64_t{1} << 40;
  const Array values(DType::u8, {4, 32}), scales(DType::f32, {4});
  QuantizeK a{};
  a.k = k.view();
  a.rope = {at.view(), table.view(), 8, false, false};
  a.out = {values.view(), scales.view(), KeyFormat::fp8};
  uint64_t stats[topkey::kNumStats] = {};
  topkey::Exec counting = exec();
  counting.stats = stats;
  topkey::support::run(a, counting);
  EXPECT_EQ(stats[topkey::kSkippedPages], 3u);
  for (int64_t r = 0; r < 4; ++r) {
    const auto* codes = values.as<uint8_t>() + r * 32;
    const bool all_nan = std::all_of(codes, codes + 32, [](uint8_t c) { return c == 0x7F; });
    EXPECT_EQ(all_nan, r > 0) << r;
    EXPECT_EQ(topkey::bits_of(scales.as<float>()[r]) == 0x7FC00000u, r > 0) << r;
  }
  counting.strict = true;
  if (topkey::quantize_k_unsupported(a, counting) == nullptr) {
    std::fill_n(values.as<uint8_t>(), 128, uint8_t{0xA5});
    EXPECT_THROW(topkey::support::run(a, counting), topkey::Error);
    EXPECT_EQ(std::count(values.as<uint8_t>(), values.as<uint8_t>() + 128, 0xA5), 128)
        << "strict raises before writing";
    EXPECT_EQ(stats[topkey::kSkippedPages], 3u) << "a call that failed counts nothing";
  }
  const Floats f32 = after(k, a);
  for (size_t i = 0; i < f32.size(); ++i) EXPECT_EQ(std::isnan(f32[i]), i >= 32) << i;
}

TEST_P(StepsTest, RopePositionOutsideTheTableIsANanQuery) {
  const Array q = array_of(normal(2 * 2 * 16, 35), DType::bf16, 4), table = array_of(normal(5 * 8, 36), DType::f32, 5);
  const Array at = Array::of({4, 5}), w = array_of({1, 1, 1, 1}, DType::f32, 2), codes(DType::u8, {2, 2, 16}),
              out(DType::f32, {2, 2});
  topkey::QuantizeQ a{};
  a.q = topkey::tensor(q.view().data, DType::bf16, {2, 2, 16});
  a.weights = w.view();
  a.rope = {at.view(), table.view(), 8, true, true};
  a.q_out = codes.view();
  a.weights_out = out.view();
  uint64_t stats[topkey::kNumStats] = {};
  topkey::Exec counting = exec();
  counting.stats = stats;
  topkey::support::run(a, counting);
  EXPECT_EQ(stats[topkey::kSkippedPages], 1u) << "one row, however many heads";
  for (int64_t h = 0; h < 2; ++h) {
    EXPECT_FALSE(std::isnan(out.as<float>()[h]));
    EXPECT_EQ(topkey::bits_of(out.as<float>()[2 + h]), 0x7FC00000u);
  }
  EXPECT_TRUE(std::all_of(codes.as<uint8_t>() + 32, codes.as<uint8_t>() + 64, [](uint8_t c) { return c == 0x7F; }));
}

// ---- Hadamard ----
/// Entry (i, j) of the natural-order matrix: the parity of the bits that both have.
float sign_of(size_t i, size_t j) {
  int parity = 0;
  for (size_t both = i & j; both != 0; both >>= 1) parity ^= static_cast<int>(both & 1);
  return parity != 0 ? -1.0f : 1.0f;
}

TEST_P(StepsTest, HadamardIsTheNaturalMatrix) {
  QuantizeK a{};
  a.hadamard = true;
  for (size_t dim : {1u, 2u, 4u, 16u, 64u, 128u}) {
    const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(dim)));
    Floats identity(dim * dim), want(dim * dim);
    for (size_t i = 0; i < dim; ++i) {
      identity[i * dim + i] = 1;
      for (size_t j = 0; j < dim; ++j) want[i * dim + j] = sign_of(i, j) * scale;
    }
    EXPECT_EQ(after(array_of(identity, DType::f32, static_cast<int64_t>(dim)), a), want) << dim;
  }
}

TEST_P(StepsTest, HadamardIsItsOwnInverse) {
  QuantizeK a{};
  a.hadamard = true;
  Random random(40);
  for (size_t dim : {4u, 16u, 64u}) {  // D^-0.5 is a power of two and small integers stay exact: every bit returns
    Floats x;
    for (size_t i = 0; i < 2 * dim; ++i) x.push_back(static_cast<float>(random.between(-8, 8)));
    const Floats once = after(array_of(x, DType::f32, 2), a);
    EXPECT_EQ(after(array_of(once, DType::f32, 2), a), x) << dim;
  }
  const Floats x = normal(128, 41);
  const Floats twice = after(array_of(after(array_of(x, DType::f32, 1), a), DType::f32, 1), a);
  for (size_t d = 0; d < 128; ++d) EXPECT_NEAR(twice[d], x[d], 1e-5);
}

TEST_P(StepsTest, HadamardIsNotRoundedToTheInput) {
  const Array k = array_of(normal(128, 42), DType::bf16, 1);
  QuantizeK a{};
  a.hadamard = true;
  const Floats got = after(k, a), in = floats_of(k);
  Floats want = in;
  for (size_t stride = 1; stride < 128; stride *= 2) {
    Floats next(128);
    for (size_t i = 0; i < 128; ++i)
      next[i] = (i & stride) == 0 ? want[i] + want[i + stride] : want[i - stride] - want[i];
    want = next;
  }
  for (float& v : want) v *= static_cast<float>(1 / std::sqrt(128.0));
  EXPECT_EQ(got, want);
}

TEST_P(StepsTest, StepsComeInOrder) {
  // All three at once equal the three one after the other, where every intermediate result is an f32 key.
  const Array k = array_of(normal(2 * 64, 43), DType::f32, 2), table = array_of(normal(4 * 32, 44), DType::f32, 4),
              at = Array::of({3, 1});
  const Array weight = vector_of(normal(64, 45), DType::f32);
  QuantizeK norm{}, rope{}, hadamard{};
  norm.norm = {topkey::NormKind::rms, weight.view(), {}, 1e-6f};
  rope.rope = {at.view(), table.view(), 32, false, true};
  hadamard.hadamard = true;
  QuantizeK all = norm;
  all.rope = rope.rope;
  all.hadamard = true;
  const Array first = array_of(after(k, norm), DType::f32, 2), second = array_of(after(first, rope), DType::f32, 2);
  EXPECT_EQ(after(k, all), after(second, hadamard));
}

TOPKEY_ON_EVERY_BACKEND(StepsTest);

}  // namespace
