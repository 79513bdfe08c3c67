// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `quantize`, what goes in and what comes out: the ramp of REFERENCE A.1, plain formats, q8_0 blocks, NaN and
// infinity, input dtypes, strides on both sides, weights. The bytes of each rule are in quantize_golden_test.cpp, the
// steps before it in quantize_steps_test.cpp.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
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
using topkey::QuantizeQ;
using topkey::support::Array;
using topkey::support::Guarded;
using topkey::support::Random;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr uint32_t kNan = 0x7FC00000;

/// `values` rounded to dtype, as [rows, columns].
Array array_of(const std::vector<float>& values, DType dtype, int64_t rows) {
  Array a(dtype, {rows, static_cast<int64_t>(values.size()) / rows});
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::f32) a.as<float>()[i] = values[i];
    if (dtype == DType::bf16) a.as<uint16_t>()[i] = topkey::float_to_bf16(values[i]);
    if (dtype == DType::f16) a.as<uint16_t>()[i] = topkey::float_to_f16(values[i]);
  }
  return a;
}
std::vector<float> ramp() {
  std::vector<float> x;
  for (int i = 0; i < 128; ++i) x.push_back(static_cast<float>(i - 64) / 16);
  return x;
}
std::vector<float> normal(size_t n, uint64_t seed, float scale = 1) {
  Random random(seed);
  std::vector<float> x;
  for (size_t i = 0; i < n; ++i) x.push_back(random.normal() * scale);
  return x;
}
std::string hex(const uint8_t* bytes, int64_t n) {
  std::string text;
  for (int64_t i = 0; i < n; ++i) {
    for (int half : {bytes[i] >> 4, bytes[i] & 15}) text += "0123456789abcdef"[half];
  }
  return text;
}
DType value_dtype(KeyFormat format) {
  return format == KeyFormat::bf16  ? DType::bf16
         : format == KeyFormat::f16 ? DType::f16
         : format == KeyFormat::f32 ? DType::f32
                                    : DType::u8;
}

/// Dense output rows in guards.
struct Coded {
  Coded(KeyFormat f, int64_t rows, int64_t dim) : format(f), values(value_dtype(f), rows, elements(f, dim), 5) {
    if (f == KeyFormat::fp8) scales = Guarded(DType::f32, rows, -1);
  }
  static int64_t elements(KeyFormat f, int64_t dim) { return f == KeyFormat::q8_0 ? dim / 32 * 34 : dim; }
  topkey::DenseKeys view() const { return {values.view(true), scales.view(), format}; }
  const uint8_t* row(int64_t r) const { return topkey::support::element(values.view(), r); }
  uint32_t scale_bits(int64_t r) const { return topkey::bits_of(topkey::support::float_at(scales.view(), r)); }
  KeyFormat format;
  Guarded values, scales;
};

class QuantizeTest : public topkey::testing::BackendTest {
 protected:
  Coded quantize(const topkey::Tensor& k, KeyFormat format, const QuantizeK& options = {}) {
    const int64_t dim = k.shape[1];
    Coded out(format, k.shape[0], dim);
    QuantizeK a = options;
    a.k = k;
    a.out = out.view();
    a.out.values.shape[1] = Coded::elements(format, dim);
    topkey::support::run(a, exec());
    EXPECT_EQ(out.values.touched_outside(), "");
    if (out.scales) {
      EXPECT_EQ(out.scales.touched_outside(), "");
    }
    return out;
  }
};

const char* const kRampCodes =
    "f8f8f8f7f7f7f6f6f6f6f6f5f5f5f4f4f4f4f4f3f3f3f2f2f2f2f2f1f1f1f0f0"
    "f0f0efeeeeeeedecececebeaeaeae9e8e8e7e6e5e4e3e2e1e0dedcdad8d4d0c8"
    "00485054585a5c5e60616263646566676868696a6a6a6b6c6c6c6d6e6e6e6f70"
    "7070707171717272727272737373747474747475757576767676767777777878";

TEST_P(QuantizeTest, RampOfReferenceA1) {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {  // every value of the ramp exists in all three
    const Array k = array_of(ramp(), dtype, 1);
    const Coded out = quantize(k.view(), KeyFormat::fp8);
    EXPECT_EQ(hex(out.row(0), 128), kRampCodes);
    EXPECT_EQ(out.scale_bits(0), 0x3C800000u);
  }
  const Coded zero = quantize(array_of(std::vector<float>(128), DType::f32, 1).view(), KeyFormat::fp8);
  EXPECT_EQ(hex(zero.row(0), 128), std::string(256, '0'));
  EXPECT_EQ(zero.scale_bits(0), 0x34800000u);
}

TEST_P(QuantizeTest, RampAsAQuery) {
  const Array q = array_of(ramp(), DType::bf16, 1), w = array_of({3.0f}, DType::bf16, 1);
  const Guarded codes(DType::f8_e4m3fn, 1, 128), weights(DType::f32, 1, 1);
  QuantizeQ a{};
  a.q = topkey::tensor(q.view().data, DType::bf16, {1, 1, 128});
  a.weights = w.view();
  a.q_out = topkey::tensor(codes.view().data, DType::f8_e4m3fn, {1, 1, 128});
  a.weights_out = weights.view();
  topkey::support::run(a, exec());
  EXPECT_EQ(hex(static_cast<uint8_t*>(codes.view().data), 128), kRampCodes);
  EXPECT_EQ(topkey::support::float_at(weights.view(), 0, 0), 3.0f / 64) << "0 means 1 for softmax_scale and head_scale";
  EXPECT_EQ(codes.touched_outside() + weights.touched_outside(), "");
}

TEST_P(QuantizeTest, PlainFormatsRoundToNearestEven) {
  std::vector<float> x = normal(4 * 48, 1);
  x[0] = 1.00390625f, x[1] = 1.01171875f, x[2] = 65520.0f, x[3] = -1e30f, x[4] = 0x1p-25f, x[5] = -0.0f, x[6] = kInf,
  x[7] = std::nanf("");
  const Array k = array_of(x, DType::f32, 4);
  const Coded f32 = quantize(k.view(), KeyFormat::f32), bf16 = quantize(k.view(), KeyFormat::bf16),
              f16 = quantize(k.view(), KeyFormat::f16);
  for (int64_t i = 0; i < 4 * 48; ++i) {
    const float v = x[static_cast<size_t>(i)];
    uint16_t half;
    std::memcpy(&half, bf16.row(i / 48) + 2 * (i % 48), 2);
    ASSERT_EQ(half, topkey::float_to_bf16(v)) << i;
    std::memcpy(&half, f16.row(i / 48) + 2 * (i % 48), 2);
    ASSERT_EQ(half, topkey::float_to_f16(v)) << i;
    ASSERT_EQ(std::memcmp(f32.row(i / 48) + 4 * (i % 48), &v, 4), 0) << i;
  }
}

TEST_P(QuantizeTest, Q8BlockByHand) {
  // amax 127 makes d = 1: halves round away from zero, and each block stands alone.
  std::vector<float> x(64);
  const std::vector<float> first = {127, 0.5f, -0.5f, 1.5f, -1.5f, 2.5f, 0.49999997f, -126.5f, -0.0f};
  std::copy(first.begin(), first.end(), x.begin());
  x[32] = kInf;
  x[33] = 5;
  const Coded out = quantize(array_of(x, DType::f32, 1).view(), KeyFormat::q8_0);
  EXPECT_EQ(hex(out.row(0), 2 + 9), "003c7f01ff02fe03008100");
  EXPECT_EQ(hex(out.row(0) + 34, 34), std::string("007e").append(64, '0')) << "an infinity spoils its own block";
  const Coded zero = quantize(array_of(std::vector<float>(32), DType::f16, 1).view(), KeyFormat::q8_0);
  EXPECT_EQ(hex(zero.row(0), 34), std::string(68, '0'));
}

TEST_P(QuantizeTest, NonFiniteVectorsAreNanAlone) {
  for (float bad : {kInf, -kInf, std::nanf(""), -std::nanf("")}) {
    for (size_t at : {0u, 64u, 127u}) {
      for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        std::vector<float> x = normal(3 * 128, 5);
        const Coded good = quantize(array_of(x, dtype, 3).view(), KeyFormat::fp8);
        x[128 + at] = bad;
        const Coded out = quantize(array_of(x, dtype, 3).view(), KeyFormat::fp8);
        EXPECT_EQ(hex(out.row(1), 128), hex(std::vector<uint8_t>(128, 0x7F).data(), 128));
        EXPECT_EQ(out.scale_bits(1), kNan);
        for (int64_t other : {0, 2}) {
          EXPECT_EQ(hex(out.row(other), 128), hex(good.row(other), 128));
          EXPECT_EQ(out.scale_bits(other), good.scale_bits(other));
        }
      }
    }
  }
}

TEST_P(QuantizeTest, NonFiniteQueryHeadsAndWeights) {
  std::vector<float> x = normal(2 * 3 * 32, 6), w = normal(2 * 3, 7);
  x[32 * 4 + 9] = -kInf;                // row 1, head 1
  w[2] = topkey::float_of(0xFFD50000);  // row 0, head 2: a negative NaN with a payload
  w[3] = kInf;                          // row 1, head 0
  const Array q = array_of(x, DType::f32, 6), weights = array_of(w, DType::f32, 2);
  const Guarded codes(DType::u8, 6, 32, 0), out(DType::f32, 2, 3);
  QuantizeQ a{};
  a.q = topkey::tensor(q.view().data, DType::f32, {2, 3, 32});
  a.weights = weights.view();
  a.softmax_scale = 0.5f;
  a.head_scale = 0.25f;
  a.q_out = topkey::tensor(codes.view().data, DType::u8, {2, 3, 32});
  a.weights_out = out.view();
  topkey::support::run(a, exec());
  const auto bits = [&](int64_t r, int64_t h) { return topkey::bits_of(topkey::support::float_at(out.view(), r, h)); };
  EXPECT_EQ(bits(1, 1), kNan);
  EXPECT_EQ(bits(0, 2), kNan);
  EXPECT_EQ(bits(1, 0), 0x7F800000u);
  EXPECT_TRUE(topkey::is_finite_bits(bits(0, 0)) && topkey::is_finite_bits(bits(0, 1)) &&
              topkey::is_finite_bits(bits(1, 2)));
  EXPECT_EQ(hex(static_cast<uint8_t*>(codes.view().data) + 4 * 32, 32), hex(std::vector<uint8_t>(32, 0x7F).data(), 32));
  EXPECT_EQ(codes.touched_outside() + out.touched_outside(), "");
}

/// Keys of other formats are met by plain queries: rounded once, the weights scaled, nothing folded in.
TEST_P(QuantizeTest, PlainQueries) {
  for (KeyFormat format : {KeyFormat::bf16, KeyFormat::f16, KeyFormat::f32, KeyFormat::q8_0}) {
    for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      std::vector<float> x = normal(2 * 3 * 64, 8), w = normal(6, 9);
      x[5] = kInf, x[6] = topkey::canonical_nan();  // carried element by element
      const Array q = array_of(x, DType::f32, 6), weights = array_of(w, DType::f32, 2);
      const Guarded codes(dtype, 6, 64, 0), out(DType::f32, 2, 3);
      QuantizeQ a{};
      a.q = topkey::tensor(q.view().data, DType::f32, {2, 3, 64});
      a.weights = weights.view();
      a.softmax_scale = 0.3f;
      a.head_scale = 0.7f;
      a.format = format;
      a.q_out = topkey::tensor(codes.view().data, dtype, {2, 3, 64});
      a.weights_out = out.view();
      topkey::support::run(a, exec());
      const Array want = array_of(x, dtype, 6);
      EXPECT_EQ(std::memcmp(codes.view().data, want.view().data, want.bytes()), 0);
      for (size_t i = 0; i < 6; ++i) {
        const float first = w[i] * 0.3f;
        EXPECT_EQ(topkey::support::float_at(out.view(), static_cast<int64_t>(i / 3), static_cast<int64_t>(i % 3)),
                  first * 0.7f);
      }
      EXPECT_EQ(codes.touched_outside() + out.touched_outside(), "");
    }
  }
}

TEST_P(QuantizeTest, StridedKeys) {
  const std::vector<float> x = normal(6 * 96, 10);
  for (KeyFormat format : {KeyFormat::fp8, KeyFormat::q8_0, KeyFormat::f16}) {
    const Array wide = array_of(x, DType::f32, 6);
    // Columns 16..79 of every second row, against the same values packed.
    const auto view = topkey::tensor(wide.as<float>() + 16, DType::f32, {3, 64}, {192, 1});
    std::vector<float> packed;
    for (size_t r = 0; r < 6; r += 2)
      packed.insert(packed.end(), x.begin() + static_cast<int64_t>(r * 96 + 16),
                    x.begin() + static_cast<int64_t>(r * 96 + 80));
    const Coded got = quantize(view, format), want = quantize(array_of(packed, DType::f32, 3).view(), format);
    // One row, seen three times (an expanded view).
    const Coded same = quantize(topkey::tensor(wide.as<float>() + 16, DType::f32, {3, 64}, {0, 1}), format);
    const auto bytes = topkey::value_bytes(format, 64);
    for (int64_t r = 0; r < 3; ++r) {
      EXPECT_EQ(hex(got.row(r), bytes), hex(want.row(r), bytes));
      EXPECT_EQ(hex(same.row(r), bytes), hex(want.row(0), bytes));
      if (format == KeyFormat::fp8) {
        EXPECT_EQ(got.scale_bits(r), want.scale_bits(r));
        EXPECT_EQ(same.scale_bits(r), want.scale_bits(0));
      }
    }
  }
}

TEST_P(QuantizeTest, StridedQueries) {
  // q as a transpose [H,R,D] -> [R,H,D], weights as a slice of wider rows, both outputs with free outer strides.
  const std::vector<float> x = normal(3 * 2 * 32, 11), w = normal(2 * 8, 12);
  const Array q = array_of(x, DType::f32, 6), weights = array_of(w, DType::f32, 2);
  const Array codes(DType::u8, {3, 2, 40}), out(DType::f32, {2, 7}), packed_codes(DType::u8, {6, 32}),
      packed_out(DType::f32, {2, 3});
  QuantizeQ a{};
  a.q = topkey::tensor(q.view().data, DType::f32, {2, 3, 32}, {32, 64, 1});
  a.weights = topkey::tensor(weights.as<float>() + 4, DType::f32, {2, 3}, {8, 1});
  a.q_out = topkey::tensor(codes.view().data, DType::u8, {2, 3, 32}, {40, 80, 1});
  a.weights_out = topkey::tensor(out.as<float>() + 2, DType::f32, {2, 3}, {7, 1});
  topkey::support::run(a, exec());
  std::vector<float> dense_q, dense_w;
  for (size_t r = 0; r < 2; ++r) {
    for (size_t h = 0; h < 3; ++h) {
      for (size_t d = 0; d < 32; ++d) dense_q.push_back(x[(h * 2 + r) * 32 + d]);
      dense_w.push_back(w[r * 8 + 4 + h]);
    }
  }
  const Array q2 = array_of(dense_q, DType::f32, 6), w2 = array_of(dense_w, DType::f32, 2);
  QuantizeQ b{};
  b.q = topkey::tensor(q2.view().data, DType::f32, {2, 3, 32});
  b.weights = w2.view();
  b.q_out = topkey::tensor(packed_codes.view().data, DType::u8, {2, 3, 32});
  b.weights_out = packed_out.view();
  topkey::support::run(b, exec());
  for (int64_t r = 0; r < 2; ++r) {
    for (int64_t h = 0; h < 3; ++h) {
      EXPECT_EQ(hex(codes.as<uint8_t>() + h * 80 + r * 40, 32), hex(packed_codes.as<uint8_t>() + (r * 3 + h) * 32, 32));
      EXPECT_EQ(hex(codes.as<uint8_t>() + h * 80 + r * 40 + 32, 8), std::string(16, '0')) << "between the vectors";
      EXPECT_EQ(out.as<float>()[r * 7 + 2 + h], packed_out.as<float>()[r * 3 + h]);
    }
  }
}

TEST_P(QuantizeTest, OddDimensionsAndNoRows) {
  for (int64_t dim : {1, 3, 33, 100}) {
    const Coded out =
        quantize(array_of(normal(static_cast<size_t>(2 * dim), 13), DType::f32, 2).view(), KeyFormat::fp8);
    EXPECT_NE(out.scale_bits(1), kNan);
  }
  for (KeyFormat format : {KeyFormat::fp8, KeyFormat::q8_0, KeyFormat::bf16}) {
    quantize(topkey::tensor(nullptr, DType::f32, {0, 32}), format);  // an empty tensor may have no address
  }
}

TEST_P(QuantizeTest, StatisticsAreAddedTo) {
  uint64_t stats[topkey::kNumStats] = {100, 1, 2, 3, 4, 5, 6, 7};
  const Array k = array_of(normal(3 * 32, 14), DType::f32, 3), values(DType::bf16, {3, 32});
  QuantizeK a{};
  a.k = k.view();
  a.out = {values.view(), {}, KeyFormat::bf16};
  topkey::Exec e = exec();
  e.stats = stats;
  topkey::support::run(a, e);
  EXPECT_EQ(std::vector<uint64_t>(stats, stats + 8), (std::vector<uint64_t>{103, 1, 2, 3, 4, 5, 6, 7}));
}

TOPKEY_ON_EVERY_BACKEND(QuantizeTest);

}  // namespace
