// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See producer.h. Every float expression below is one rounding an operation: the sources are compiled without
// contraction.
#include "ref/producer.h"

#include <algorithm>
#include <cmath>

namespace topkey::ref {
namespace {

float round_to(DType dtype, float x) {
  return dtype == DType::bf16 ? round_to_bf16(x) : dtype == DType::f16 ? f16_to_float(float_to_f16(x)) : x;
}

/// Partial sums by d mod 32, d ascending, then halves: the order that a warp with 32 lanes has.
float sum_of(const std::vector<float>& x) {
  float lanes[32] = {};
  for (size_t d = 0; d < x.size(); ++d) lanes[d % 32] = lanes[d % 32] + x[d];
  for (int half = 16; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
  }
  return lanes[0];
}

void apply_norm(const Norm& norm, DType input, std::vector<float>& x) {
  const float count = static_cast<float>(x.size());
  const float mean = norm.kind == NormKind::layer ? sum_of(x) / count : 0.0f;
  std::vector<float> squares(x.size());
  for (size_t d = 0; d < x.size(); ++d) {
    if (norm.kind == NormKind::layer) x[d] = x[d] - mean;
    squares[d] = x[d] * x[d];
  }
  const float variance = sum_of(squares) / count;
  const float scale = 1.0f / std::sqrt(variance + norm.eps);
  for (size_t d = 0; d < x.size(); ++d) {
    const int64_t i = static_cast<int64_t>(d);
    float y = x[d] * scale;
    if (norm.weight.data != nullptr) y = y * real(norm.weight, i);
    if (norm.bias.data != nullptr) y = y + real(norm.bias, i);
    x[d] = round_to(input, y);
  }
}

void apply_rope(const Rope& rope, const Transform& t, int64_t row, std::vector<float>& x) {
  const int64_t position = integer(rope.positions, row);
  if (position < 0 || position >= rope.cos_sin.shape[0]) {
    x.assign(x.size(), canonical_nan());
    return;
  }
  const int64_t half = rope.dim / 2;
  const int64_t base = rope.trailing ? static_cast<int64_t>(x.size()) - rope.dim : 0;
  for (int64_t i = 0; i < half; ++i) {
    float& first = x[static_cast<size_t>(base + (rope.interleaved ? 2 * i : i))];
    float& second = x[static_cast<size_t>(base + (rope.interleaved ? 2 * i + 1 : i + half))];
    const float c = real(rope.cos_sin, position, i), s = real(rope.cos_sin, position, half + i);
    const float a = first, b = second;
    const float ac = a * c, bs = b * s, bc = b * c, as = a * s;
    first = round_to(t.input, ac - bs);
    second = round_to(t.input, bc + as);
    if (t.roped_bf16) {
      first = round_to_bf16(first);
      second = round_to_bf16(second);
    }
  }
}

/// Natural (Sylvester) order: butterflies at strides 1, 2, 4, ..., then D^-0.5.
void apply_hadamard(std::vector<float>& x) {
  for (size_t stride = 1; stride < x.size(); stride *= 2) {
    for (size_t i = 0; i < x.size(); ++i) {
      if (i & stride) continue;
      const float a = x[i], b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }
  const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(x.size())));
  for (float& v : x) v = v * scale;
}

/// max |x|, or NaN where any value is inf or NaN.
float amax_of(const float* x, size_t n) {
  float a = 0.0f;
  for (size_t d = 0; d < n; ++d) {
    if (!is_finite_bits(bits_of(x[d]))) return canonical_nan();
    a = std::fabs(x[d]) > a ? std::fabs(x[d]) : a;
  }
  return a;
}

}  // namespace

RuleFacts facts_of(QuantRule rule, bool query, ScaleRule scale) {
  if (rule == QuantRule::automatic) rule = query ? QuantRule::v32_query : QuantRule::v32_key;
  switch (rule) {
    case QuantRule::v32_query: return {true, false, 1e-10f, true, RuleFacts::divide, false};
    case QuantRule::v4_query: return {true, false, 1e-4f, false, RuleFacts::divide, false};
    case QuantRule::v4_key: return {false, true, 1e-4f, false, RuleFacts::exponent, false};
    case QuantRule::kpool_query: return {false, true, 1e-4f, true, RuleFacts::divide, true};
    case QuantRule::kpool_key: return {false, true, 1e-4f, scale == ScaleRule::ue8m0, RuleFacts::divide, false};
    case QuantRule::cpu_query: return {false, false, 1e-4f, false, RuleFacts::reciprocal, false};
    default: return {false, false, 1e-4f, false, RuleFacts::divide, false};  // v32_key
  }
}

void transform(const Transform& t, int64_t row, std::vector<float>& x) {
  if (t.norm != nullptr && t.norm->kind != NormKind::none) apply_norm(*t.norm, t.input, x);
  if (t.rope != nullptr && t.rope->dim > 0) apply_rope(*t.rope, t, row, x);
  if (t.hadamard) apply_hadamard(x);
}

float quantize_fp8(KeyFormat format, const RuleFacts& rule, ScaleRule scale_rule, std::vector<float>& x,
                   uint8_t* codes) {
  const bool fnuz = format == KeyFormat::fp8_fnuz;
  const float largest = fnuz ? 224.0f : 448.0f;  // of e4m3fnuz engines use no code beyond 224, though 240 exists
  if (rule.whole_bf16) {
    for (float& v : x) v = round_to_bf16(v);
  }
  const float amax = amax_of(x.data(), x.size());
  if (std::isnan(amax)) {
    std::memset(codes, fnuz ? 0x80 : 0x7F, x.size());
    return canonical_nan();
  }
  const float a = amax > rule.floor ? amax : rule.floor;
  float s = rule.by_reciprocal ? a * (1.0f / largest) : a / largest;
  int e = 0;
  if (scale_rule == ScaleRule::ue8m0) {
    e = ceil_log2(s);
    s = exp2_int(e);
  }
  const float inverse = 1.0f / s;
  for (size_t d = 0; d < x.size(); ++d) {
    const float y = rule.code == RuleFacts::divide     ? x[d] / s
                    : rule.code == RuleFacts::exponent ? x[d] * exp2_int(-e)
                                                       : x[d] * inverse;
    codes[d] = fnuz ? float_to_e4m3fnuz(y) : float_to_e4m3(y);
  }
  return s;
}

void quantize_mxfp4(bool whole_bf16, std::vector<float>& x, uint8_t* codes, uint8_t* scales) {
  for (float& v : x) v = whole_bf16 ? round_to_bf16(v) : v;
  std::memset(codes, 0, x.size() / 2);
  for (size_t b = 0; b < x.size() / 32; ++b) {
    const float amax = amax_of(x.data() + b * 32, 32);
    if (std::isnan(amax)) {
      scales[b] = 255;
      continue;
    }
    const float floor = 6.0f * 0x1p-126f;
    const int e = std::clamp(ceil_log2((amax > floor ? amax : floor) / 6.0f), -127, 127);
    scales[b] = static_cast<uint8_t>(e + 127);
    for (size_t d = b * 32; d < b * 32 + 32; ++d) {
      const int code = float_to_e2m1(x[d] * exp2_int(-e));
      codes[d / 2] = static_cast<uint8_t>(codes[d / 2] | code << (d % 2 * 4));
    }
  }
}

void quantize_q8_0(const std::vector<float>& x, uint8_t* blocks) {
  for (size_t b = 0; b < x.size() / 32; ++b) {
    uint8_t* block = blocks + b * 34;
    const float amax = amax_of(x.data() + b * 32, 32);
    const float d = amax / 127.0f;
    const float inverse = 1.0f / d;
    const uint16_t stored = std::isnan(amax) ? uint16_t{0x7E00} : float_to_f16(d);
    std::memcpy(block, &stored, 2);
    for (size_t i = 0; i < 32; ++i) {
      // d so small that 1 / d overflows quantises to zeros, like d = 0.
      const bool usable = !std::isnan(amax) && d > 0.0f && is_finite_bits(bits_of(inverse));
      const float code = usable ? std::round(x[b * 32 + i] * inverse) : 0.0f;
      const float held = code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code;
      block[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(held));
    }
  }
}

void quantize_row(KeyFormat format, QuantRule rule, ScaleRule scale_rule, std::vector<float>& x, uint8_t* values,
                  uint8_t* scale) {
  if (format == KeyFormat::q8_0) {
    quantize_q8_0(x, values);
  } else if (format == KeyFormat::mxfp4) {
    quantize_mxfp4(true, x, values, scale);
  } else if (is_fp8(format)) {
    const float s = quantize_fp8(format, facts_of(rule, false, scale_rule), scale_rule, x, values);
    std::memcpy(scale, &s, sizeof s);
  } else {
    for (size_t d = 0; d < x.size(); ++d) {
      const float v = one_nan(x[d]);
      const uint16_t h = format == KeyFormat::bf16 ? float_to_bf16(v) : float_to_f16(v);
      if (format == KeyFormat::f32) {
        std::memcpy(values + 4 * d, &v, 4);
      } else {
        std::memcpy(values + 2 * d, &h, 2);
      }
    }
  }
}

}  // namespace topkey::ref
