// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// number.h, exhaustively: every code of e4m3, e2m1, bf16 and f16 both ways. The judge knows nothing of bits: it
// decodes with ldexp in double and encodes by searching the sorted list of values for the nearest one, ties to the
// even code. f32 inputs are every value, every midpoint between neighbours, both neighbours of each of these, and
// random bit patterns.
#include "topkey/number.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

/// Magnitudes of a binary format with `mantissa` fraction bits and subnormals, ascending; index = code.
std::vector<double> magnitudes(int count, int mantissa, int bias) {
  std::vector<double> values;
  for (int code = 0; code < count; ++code) {
    const int exponent = code >> mantissa, fraction = code % (1 << mantissa), unit = 1 << mantissa;
    values.push_back(exponent == 0 ? std::ldexp(fraction, 1 - bias - mantissa)
                                   : std::ldexp(unit + fraction, exponent - bias - mantissa));
  }
  return values;
}

/// Index of the value nearest to |x|, ties to the even index; beyond the last value the last one.
uint32_t nearest(const std::vector<double>& values, double x) {
  const double a = std::fabs(x);
  const auto above = std::lower_bound(values.begin(), values.end(), a);
  if (above == values.end()) return static_cast<uint32_t>(values.size() - 1);
  const auto code = static_cast<uint32_t>(above - values.begin());
  if (*above == a || code == 0) return code;
  const double up = *above - a, down = a - values[code - 1];
  return up < down || (up == down && code % 2 == 0) ? code : code - 1;
}

/// f32 inputs that decide a rounding: values, midpoints, and the f32 on both sides of each.
std::vector<float> decisive(const std::vector<double>& values) {
  std::vector<float> inputs;
  const auto add = [&](double v) {
    if (v > static_cast<double>(std::numeric_limits<float>::max())) return;
    const float x = static_cast<float>(v);
    EXPECT_EQ(static_cast<double>(x), v);
    for (float y : {x, std::nextafter(x, 0.0f), std::nextafter(x, std::numeric_limits<float>::infinity())}) {
      if (std::isfinite(y)) inputs.push_back(y);
    }
  };
  for (size_t i = 0; i < values.size(); ++i) {
    add(values[i]);
    if (i > 0) add((values[i] + values[i - 1]) / 2);
  }
  return inputs;
}

std::vector<float> random_finite(int count) {
  std::mt19937 random(7);
  std::vector<float> inputs;
  while (static_cast<int>(inputs.size()) < count) {
    const float x = topkey::float_of(random());
    if (std::isfinite(x)) inputs.push_back(x);
  }
  return inputs;
}

/// encode(+-x) must be the nearest code with the sign of x, for decisive and random x.
template <class Encode>
void check_rounding(const std::vector<double>& values, uint32_t sign_bit, Encode encode) {
  int failures = 0;
  auto inputs = decisive(values);
  for (float x : random_finite(200000)) inputs.push_back(x);
  for (float x : inputs) {
    for (float y : {x, -x}) {
      const uint32_t want = nearest(values, y) | (std::signbit(y) ? sign_bit : 0);
      if (encode(y) != want && ++failures <= 5) {
        ADD_FAILURE() << "f32 " << std::hexfloat << y << " gives code " << std::hex << +encode(y)
                      << ", nearest even is " << want;
      }
    }
  }
  EXPECT_EQ(failures, 0) << "of " << 2 * inputs.size();
}

/// decode(code) and decode(code with sign) must be +-values[code], and encode must give the code back.
template <class Decode, class Encode>
void check_codes(const std::vector<double>& values, uint32_t sign_bit, Decode decode, Encode encode) {
  for (uint32_t code = 0; code < values.size(); ++code) {
    const float up = decode(code), down = decode(code | sign_bit);
    ASSERT_EQ(static_cast<double>(up), values[code]) << std::hex << code;
    ASSERT_EQ(topkey::bits_of(down), topkey::bits_of(up) | 0x80000000u) << std::hex << code;
    ASSERT_EQ(encode(up), code);
    ASSERT_EQ(encode(down), code | sign_bit);
  }
}

const float kInf = std::numeric_limits<float>::infinity();

TEST(Number, BitsAndPowers) {
  EXPECT_EQ(topkey::bits_of(1.0f), 0x3F800000u);
  EXPECT_EQ(topkey::float_of(0xC0000000u), -2.0f);
  EXPECT_EQ(topkey::bits_of(topkey::canonical_nan()), 0x7FC00000u);
  for (int e = -149; e <= 127; ++e) EXPECT_EQ(static_cast<double>(topkey::exp2_int(e)), std::ldexp(1.0, e)) << e;
  std::mt19937 random(3);
  for (int i = 0; i < 100000; ++i) {
    const uint32_t bits = random();
    const float x = topkey::float_of(bits);
    ASSERT_EQ(topkey::is_nan_bits(bits), std::isnan(x));
    ASSERT_EQ(topkey::is_finite_bits(bits), std::isfinite(x));
  }
}

TEST(Number, E4m3) {
  const auto values = magnitudes(127, 3, 7);
  ASSERT_EQ(values.back(), 448);
  const auto decode = [](uint32_t code) { return topkey::e4m3_to_float(static_cast<uint8_t>(code)); };
  const auto encode = [](float x) -> uint32_t { return topkey::float_to_e4m3(x); };
  check_codes(values, 0x80, decode, encode);
  check_rounding(values, 0x80, encode);
  EXPECT_EQ(topkey::bits_of(decode(0x7F)), 0x7FC00000u);
  EXPECT_EQ(topkey::bits_of(decode(0xFF)), 0x7FC00000u);
  EXPECT_EQ(encode(kInf), 0x7Eu);
  EXPECT_EQ(encode(-kInf), 0xFEu);
  for (uint32_t nan : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0xFFFFFFFFu})
    EXPECT_EQ(encode(topkey::float_of(nan)), 0x7Fu);
}

TEST(Number, E4m3fnuz) {
  const auto values = magnitudes(128, 3, 8);
  ASSERT_EQ(values.back(), 240);
  const auto decode = [](uint32_t code) { return topkey::e4m3fnuz_to_float(static_cast<uint8_t>(code)); };
  const auto encode = [](float x) -> uint32_t { return topkey::float_to_e4m3fnuz(x); };
  EXPECT_EQ(topkey::bits_of(decode(0)), 0u);
  EXPECT_EQ(topkey::bits_of(decode(0x80)), 0x7FC00000u) << "there is no negative zero";
  for (uint32_t code = 1; code < values.size(); ++code) {
    ASSERT_EQ(static_cast<double>(decode(code)), values[code]);
    ASSERT_EQ(decode(code | 0x80), -decode(code));
    ASSERT_EQ(encode(decode(code)), code);
    ASSERT_EQ(encode(-decode(code)), code | 0x80);
  }
  auto inputs = decisive(values);
  for (float x : random_finite(200000)) inputs.push_back(x);
  for (float x : inputs) {
    for (float y : {x, -x}) {
      const uint32_t magnitude = nearest(values, y);
      ASSERT_EQ(encode(y), magnitude == 0 ? 0 : magnitude | (std::signbit(y) ? 0x80u : 0)) << std::hexfloat << y;
    }
  }
  EXPECT_EQ(encode(kInf), 0x7Fu);
  EXPECT_EQ(encode(-kInf), 0xFFu);
  for (uint32_t nan : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0xFFFFFFFFu})
    EXPECT_EQ(encode(topkey::float_of(nan)), 0x80u);
}

TEST(Number, E4m3OfReferenceA2) {
  const float up = std::nextafter(std::ldexp(1.0f, -10), 1.0f);
  const std::vector<std::pair<float, int>> golden = {{1.0f, 0x38},   {-1.0f, 0xB8},  {17.0f, 0x58},  {19.0f, 0x5A},
                                                     {448.0f, 0x7E}, {464.0f, 0x7E}, {500.0f, 0x7E}, {0x1p-6f, 8},
                                                     {0x1p-9f, 1},   {0x1p-10f, 0},  {up, 1},        {-0.0f, 0x80}};
  for (const auto& [x, code] : golden) EXPECT_EQ(topkey::float_to_e4m3(x), code) << x;
}

TEST(Number, E2m1) {
  const auto values = magnitudes(8, 1, 1);
  ASSERT_EQ(values, (std::vector<double>{0, 0.5, 1, 1.5, 2, 3, 4, 6}));
  const auto decode = [](uint32_t code) { return topkey::e2m1_to_float(static_cast<uint8_t>(code)); };
  const auto encode = [](float x) -> uint32_t { return topkey::float_to_e2m1(x); };
  check_codes(values, 8, decode, encode);
  check_rounding(values, 8, encode);
  EXPECT_EQ(encode(kInf), 7u);
  EXPECT_EQ(encode(-kInf), 15u);
  // REFERENCE 2: 0.25->0, 0.75->1, 1.25->1, 1.75->2, 2.5->2, 3.5->4, 5->4, above 5 saturates to 6.
  const std::vector<std::pair<float, float>> ties = {{0.25f, 0}, {0.75f, 1}, {1.25f, 1}, {1.75f, 2},
                                                     {2.5f, 2},  {3.5f, 4},  {5.0f, 4}};
  for (const auto& [x, y] : ties) {
    EXPECT_EQ(decode(encode(x)), y) << x;
    EXPECT_EQ(decode(encode(-x)), -y) << x;
  }
  EXPECT_EQ(decode(encode(std::nextafter(5.0f, 6.0f))), 6);
  EXPECT_EQ(encode(-0.0f), 8u);
}

TEST(Number, E2m1OfReferenceA3) {
  const std::string want =
      "eeeeeeeededdddddddddddddcccccccceeeededdddddccccccbcbbaaaa9a9988"
      "0010112222323344444454555555666644444444545555555555555566666666";
  std::string scales, codes;
  for (int block = 0; block < 4; ++block) {
    float amax = 0;
    for (int i = 32 * block; i < 32 * block + 32; ++i)
      amax = std::max(amax, std::fabs(static_cast<float>(i - 64) / 16));
    const int e = topkey::ceil_log2(amax / 6);
    char text[3];
    std::snprintf(text, sizeof text, "%02x", static_cast<unsigned>(e + 127));
    scales += text;
    for (int i = 32 * block; i < 32 * block + 32; i += 2) {
      const auto code = [&](int d) {
        return topkey::float_to_e2m1(static_cast<float>(d - 64) / 16 * topkey::exp2_int(-e));
      };
      std::snprintf(text, sizeof text, "%02x", static_cast<unsigned>(code(i) | code(i + 1) << 4));
      codes += text;
    }
  }
  EXPECT_EQ(scales, "7f7e7e7f");
  EXPECT_EQ(codes, want);
}

TEST(Number, F16) {
  auto values = magnitudes(0x7C00, 10, 15);
  const auto decode = [](uint32_t code) { return topkey::f16_to_float(static_cast<uint16_t>(code)); };
  const auto encode = [](float x) -> uint32_t { return topkey::float_to_f16(x); };
  check_codes(values, 0x8000, decode, encode);
  values.push_back(65536);  // where infinity begins: halfway, 65520, is a tie with an odd code below and goes up
  check_rounding(values, 0x8000, encode);
  for (uint32_t sign : {0u, 0x8000u}) {
    EXPECT_EQ(decode(sign | 0x7C00u), sign ? -kInf : kInf);
    EXPECT_EQ(encode(sign ? -kInf : kInf), sign | 0x7C00u);
    for (uint32_t code = 0x7C01; code <= 0x7FFF; ++code) {
      ASSERT_TRUE(std::isnan(decode(sign | code)));
      ASSERT_EQ(std::signbit(decode(sign | code)), sign != 0);
      ASSERT_EQ(encode(decode(sign | code)), sign | 0x7E00u);
    }
  }
}

TEST(Number, Bf16) {
  auto values = magnitudes(0x7F80, 7, 127);
  const auto decode = [](uint32_t code) { return topkey::bf16_to_float(static_cast<uint16_t>(code)); };
  const auto encode = [](float x) -> uint32_t { return topkey::float_to_bf16(x); };
  check_codes(values, 0x8000, decode, encode);
  values.push_back(std::ldexp(1.0, 128));
  check_rounding(values, 0x8000, encode);
  EXPECT_EQ(topkey::round_to_bf16(1.00390625f), 1.0f);
  for (uint32_t sign : {0u, 0x8000u}) {
    EXPECT_EQ(decode(sign | 0x7F80u), sign ? -kInf : kInf);
    EXPECT_EQ(encode(sign ? -kInf : kInf), sign | 0x7F80u);
    for (uint32_t code = 0x7F81; code <= 0x7FFF; ++code) {
      ASSERT_TRUE(std::isnan(decode(sign | code)));
      ASSERT_EQ(encode(decode(sign | code)), sign | code | 0x40u);
    }
    // A payload in the low half alone must stay a NaN: cutting it off would leave infinity.
    EXPECT_EQ(encode(topkey::float_of(sign << 16 | 0x7F800001u)), sign | 0x7FC0u);
  }
}

TEST(Number, E8m0) {
  for (int byte = 0; byte < 255; ++byte) {
    EXPECT_EQ(static_cast<double>(topkey::e8m0_to_float(static_cast<uint8_t>(byte))), std::ldexp(1.0, byte - 127))
        << byte;
  }
  EXPECT_EQ(topkey::bits_of(topkey::e8m0_to_float(255)), 0x7FC00000u);
}

TEST(Number, CeilLog2) {
  std::vector<float> inputs;
  for (int e = -149; e <= 127; ++e) {
    const float power = std::ldexp(1.0f, e);
    for (float x : {power, std::nextafter(power, 0.0f), std::nextafter(power, kInf)}) inputs.push_back(x);
  }
  for (int j = -140; j <= 120; ++j) inputs.push_back(std::ldexp(1.75f, j) / 448);
  for (float x : random_finite(200000)) inputs.push_back(std::fabs(x));
  for (float x : inputs) {
    if (x == 0) continue;
    const int e = topkey::ceil_log2(x);
    const double s = x;
    ASSERT_TRUE(std::ldexp(1.0, e) >= s && s > std::ldexp(1.0, e - 1))
        << std::hexfloat << x << " gives " << std::dec << e;
  }
}

TEST(Number, ConstantsOfProducersMeetAtPowersOfTwo) {
  // REFERENCE 2: at a = 1.75 * 2^j both ways to divide by 448 give one exponent, likewise 1.5 * 2^j by 6.
  for (int j = -100; j <= 120; ++j) {
    const float a = std::ldexp(1.75f, j), b = std::ldexp(1.5f, j);
    EXPECT_EQ(topkey::ceil_log2(a / 448.0f), j - 8);
    EXPECT_EQ(topkey::ceil_log2(a * (1.0f / 448.0f)), j - 8);
    EXPECT_EQ(topkey::ceil_log2(b / 6.0f), j - 2);
  }
}

}  // namespace
