// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Test vectors: drawn, quantised, bent into a pattern. A pattern is about *scores*, so keys are arranged by the score
// that the first row of their request gives them; the request's other rows are variations of that row.
#include "support/coded_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "support/exact.h"

namespace topkey::support {
namespace {

using Rows2 = std::vector<CodedRow>;

int64_t group_of(KeyFormat format) { return format == KeyFormat::mxfp4 || format == KeyFormat::q8_0 ? 32 : 0; }

float largest(const float* values, int64_t count) {
  float amax = 0;
  for (int64_t i = 0; i < count; ++i) amax = std::max(amax, std::abs(values[i]));
  return amax;
}

/// Scale of `count` values: the largest becomes the format's largest code.
float scale_of(KeyFormat format, ScaleRule rule, const float* values, int64_t count) {
  const float amax = std::max(largest(values, count), 1e-4F);
  switch (format) {
    case KeyFormat::fp8: return rule == ScaleRule::f32 ? amax / 448 : exp2_int(ceil_log2(amax / 448));
    case KeyFormat::fp8_fnuz: return rule == ScaleRule::f32 ? amax / 224 : exp2_int(ceil_log2(amax / 224));
    case KeyFormat::mxfp4: return exp2_int(ceil_log2(amax / 6));
    default: return f16_to_float(float_to_f16(amax / 127));
  }
}

std::vector<float> draw(const ProblemSpec& spec, Random& random) {
  std::vector<float> values(static_cast<size_t>(spec.head_dim));
  for (float& x : values) x = spec.exact ? exact_code(random) : round_to_bf16(random.normal());
  return values;
}

CodedRow coded(const ProblemSpec& spec, const std::vector<float>& values, Random& random) {
  if (spec.exact) return coded_as(spec.format, values, exact_scale(random));
  return quantised(spec.format, spec.scale, values);
}

double dot(const CodedRow& q, const CodedRow& k, int64_t group) {
  double sum = 0;
  for (size_t d = 0; d < k.code.size(); ++d) {
    double term = static_cast<double>(q.code[d]) * static_cast<double>(k.code[d]);
    if (group > 0) term *= static_cast<double>(k.scale[d / static_cast<size_t>(group)]);
    sum += term;
  }
  return sum;
}

/// Roughly what row `row` gives a key: enough to arrange keys by. (An mxfp4 q's own block scales are left out.)
double score_by(const CodedProblem& p, const ProblemSpec& spec, int64_t row, const CodedRow& key) {
  double sum = 0;
  for (int64_t h = 0; h < spec.heads; ++h) {
    const size_t i = static_cast<size_t>(row * spec.heads + h);
    sum += static_cast<double>(p.weights[i]) * std::max(0.0, dot(p.q[i], key, group_of(spec.format)));
  }
  return is_fp8(spec.format) ? sum * static_cast<double>(key.scale[0]) : sum;
}

/// order[i] = rank from the bottom that position i shall have.
std::vector<int64_t> ranks_of(Pattern pattern, int64_t n, Random& random) {
  std::vector<int64_t> ranks(static_cast<size_t>(n));
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  if (pattern == Pattern::descending) std::reverse(ranks.begin(), ranks.end());
  if (pattern == Pattern::bit_reversed) ranks = bit_reversed_order(n);
  if (pattern == Pattern::decoy) ranks = decoy_order(n, random);
  return ranks;
}

std::vector<size_t> sorted_by_score(const CodedProblem& p, const ProblemSpec& spec, int64_t row, const Rows2& keys) {
  std::vector<double> score;
  for (const CodedRow& key : keys) score.push_back(score_by(p, spec, row, key));
  std::vector<size_t> order(keys.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return score[a] < score[b]; });
  return order;
}

bool arranges(Pattern pattern) {
  return pattern == Pattern::ascending || pattern == Pattern::descending || pattern == Pattern::bit_reversed ||
         pattern == Pattern::decoy;
}

/// Keys rearranged so that row `row` sees the pattern.
void arrange(const CodedProblem& p, const ProblemSpec& spec, int64_t row, Rows2& keys, Random& random) {
  const std::vector<size_t> order = sorted_by_score(p, spec, row, keys);
  const std::vector<int64_t> ranks = ranks_of(spec.pattern, static_cast<int64_t>(keys.size()), random);
  Rows2 arranged(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) arranged[i] = keys[order[static_cast<size_t>(ranks[i])]];
  keys = std::move(arranged);
}

/// An eighth of the keys stay as winners; half of all become copies of the best of the rest.
void tie_at_cut(const CodedProblem& p, const ProblemSpec& spec, int64_t row, Rows2& keys, Random& random) {
  const std::vector<size_t> order = sorted_by_score(p, spec, row, keys);
  const size_t n = keys.size(), winners = n / 8;
  if (n == 0) return;
  const CodedRow tied = keys[order[n - 1 - winners]];
  for (size_t i = 0; i < n / 2; ++i) keys[order[n - 1 - winners - std::min(i, n - 1 - winners)]] = tied;
  random.shuffle(keys);
}

void set_sign(CodedRow& row, float sign) {
  for (float& x : row.code) x = std::copysign(x == 0 ? 1.F : x, sign);
}

float nan_of(Random& random) {
  return float_of(static_cast<uint32_t>(random.below(2)) << 31 | 0x7FC00000u |
                  static_cast<uint32_t>(random.below(0x400000)));
}

/// Puts a value that no finite arithmetic gives into a key's scale, or into a code where the format has no scale (or
/// by chance).
void poke(CodedRow& key, KeyFormat format, float value, bool into_code, Random& random) {
  const bool code_can = format != KeyFormat::mxfp4 && format != KeyFormat::q8_0;
  if (key.scale.empty() || (into_code && code_can)) {
    key.code[random.below(key.code.size())] = value;
  } else {
    key.scale[random.below(key.scale.size())] = value;
  }
}

void make_tiny(CodedRow& key, KeyFormat format) {
  if (format == KeyFormat::f16) {
    for (float& x : key.code) x *= 0x1p-18F;
  } else if (format == KeyFormat::q8_0) {
    for (float& s : key.scale) s *= 0x1p-18F;
  } else if (key.scale.empty()) {
    for (float& x : key.code) x *= 0x1p-130F;
  } else {
    for (float& s : key.scale) s *= format == KeyFormat::mxfp4 ? 0x1p-100F : 0x1p-140F;
  }
}

void bend_key(const ProblemSpec& spec, const CodedRow& base, CodedRow& key, Random& random) {
  const float inf = std::numeric_limits<float>::infinity();
  switch (spec.pattern) {
    case Pattern::relu_plateau: set_sign(key, random.chance(0.9) ? -1.F : 1.F); break;
    case Pattern::all_equal: key = base; break;
    case Pattern::plus_minus_zero:
      for (float& x : key.code) x = random.chance(0.5) ? 0.F : -0.F;
      break;
    case Pattern::plus_minus_inf:
      if (spec.format != KeyFormat::mxfp4 && random.chance(0.4)) {
        poke(key, spec.format, random.chance(0.5) ? inf : -inf, false, random);
      }
      break;
    case Pattern::nans:
      if (random.chance(0.4)) poke(key, spec.format, nan_of(random), random.chance(0.5), random);
      break;
    case Pattern::denormals: make_tiny(key, spec.format); break;
    case Pattern::few_mantissa_bits: {
      const size_t at = random.below(base.code.size());
      const float other = key.code[at];
      key = base;
      key.code[at] = other;
      break;
    }
    default: break;
  }
}

/// Rows after the first of a request: the first one with every eighth element its own, so that an arranged pattern
/// stays one.
void vary_queries(const ProblemSpec& spec, const std::vector<int32_t>& row_request, CodedProblem& p) {
  for (size_t r = 0; r < row_request.size(); ++r) {
    const size_t first =
        static_cast<size_t>(std::find(row_request.begin(), row_request.end(), row_request[r]) - row_request.begin());
    if (first == r) continue;
    for (int64_t h = 0; h < spec.heads; ++h) {
      const size_t to = r * spec.heads + h, from = first * spec.heads + h;
      for (size_t d = 0; d < p.q[to].code.size(); ++d) {
        if ((d + r) % 8 != 0) p.q[to].code[d] = p.q[from].code[d];
      }
      p.weights[to] = p.weights[from];
      p.q[to].scale = p.q[from].scale;
    }
  }
}

void draw_queries(const ProblemSpec& spec, size_t rows, CodedProblem& p, Random& random) {
  for (size_t i = 0; i < rows * spec.heads; ++i) {
    const std::vector<float> values = draw(spec, random);
    float weight = spec.exact ? exact_scale(random) : random.normal();
    if (spec.weights_dtype == DType::bf16) weight = round_to_bf16(weight);
    CodedRow row{values, {}};
    float folded = weight;
    if (is_fp8(spec.format) || spec.format == KeyFormat::mxfp4) {
      row = spec.exact ? coded_as(spec.format, values, 1.F) : quantised(spec.format, ScaleRule::ue8m0, values);
      if (is_fp8(spec.format)) folded *= row.scale[0];
    }
    if (!spec.exact) p.q_truth.push_back(values);
    p.weights_truth.push_back(weight);
    p.weights.push_back(folded);
    p.q.push_back(std::move(row));
  }
}

void bend_queries(const ProblemSpec& spec, size_t rows, CodedProblem& p, Random& random) {
  for (size_t r = 0; r < rows; ++r) {
    const size_t pick = r * spec.heads + random.below(static_cast<uint64_t>(spec.heads));
    if (spec.pattern == Pattern::relu_plateau) {
      for (int64_t h = 0; h < spec.heads; ++h) set_sign(p.q[r * spec.heads + h], 1.F);
    } else if (spec.pattern == Pattern::nans && r % 8 == 3 && spec.format != KeyFormat::mxfp4) {
      p.q[pick].code[random.below(p.q[pick].code.size())] = nan_of(random);
    } else if (spec.pattern == Pattern::nans && r % 8 == 6) {
      p.weights[pick] = nan_of(random);
    }
  }
}

}  // namespace

CodedRow quantised(KeyFormat format, ScaleRule rule, const std::vector<float>& values) {
  CodedRow row{values, {}};
  const auto count = static_cast<int64_t>(values.size());
  const int64_t group = is_fp8(format) ? count : group_of(format);
  if (group == 0) return row;
  for (int64_t at = 0; at < count; at += group) {
    const float scale = scale_of(format, rule, &values[static_cast<size_t>(at)], group);
    row.scale.push_back(scale);
    for (int64_t d = at; d < at + group; ++d) {
      float& x = row.code[static_cast<size_t>(d)];
      x = format == KeyFormat::q8_0 ? std::nearbyint(x / scale) : x / scale;
    }
  }
  return row;
}

CodedRow coded_as(KeyFormat format, const std::vector<float>& codes, float outer) {
  CodedRow row{codes, {}};
  if (is_fp8(format)) row.scale.assign(1, outer);
  if (group_of(format) > 0) row.scale.assign(codes.size() / 32, 1.F);
  return row;
}

namespace {

void pack_float(DType dtype, float x, uint8_t* to) {
  const uint16_t half = dtype == DType::f16 ? float_to_f16(x) : float_to_bf16(x);
  if (dtype == DType::f32) {
    std::memcpy(to, &x, sizeof x);
  } else {
    std::memcpy(to, &half, sizeof half);
  }
}

/// e2m1 pairs, and a ue8m0 byte for each 32.
void pack_mxfp4(const CodedRow& row, uint8_t* values, uint8_t* scales) {
  std::memset(values, 0, row.code.size() / 2);
  for (size_t d = 0; d < row.code.size(); ++d)
    values[d / 2] = static_cast<uint8_t>(values[d / 2] | float_to_e2m1(row.code[d]) << (d % 2 * 4));
  for (size_t b = 0; b < row.scale.size(); ++b) {
    const float s = row.scale[b];
    scales[b] = std::isnan(s) ? uint8_t{255} : static_cast<uint8_t>(std::clamp(std::ilogb(s) + 127, 0, 254));
  }
}

void pack_q8_0(const CodedRow& row, uint8_t* values) {
  for (size_t b = 0; b < row.scale.size(); ++b) {
    const uint16_t d = float_to_f16(row.scale[b]);
    std::memcpy(values + 34 * b, &d, sizeof d);
    for (size_t i = 0; i < 32; ++i) {
      values[34 * b + 2 + i] =
          static_cast<uint8_t>(static_cast<int8_t>(std::clamp(row.code[32 * b + i], -127.F, 127.F)));
    }
  }
}

}  // namespace

void pack_query(KeyFormat format, DType dtype, const CodedRow& row, uint8_t* values, uint8_t* scales) {
  if (format == KeyFormat::mxfp4) return pack_mxfp4(row, values, scales);
  for (size_t d = 0; d < row.code.size(); ++d) {
    const float x = row.code[d];
    switch (format) {
      case KeyFormat::fp8: values[d] = std::isnan(x) && std::signbit(x) ? uint8_t{0xFF} : float_to_e4m3(x); break;
      case KeyFormat::fp8_fnuz: values[d] = float_to_e4m3fnuz(x); break;
      default: pack_float(dtype, x, values + d * dtype_bytes(dtype));
    }
  }
}

void pack_key(KeyFormat format, const CodedRow& row, uint8_t* values, uint8_t* scales) {
  switch (format) {
    case KeyFormat::bf16: return pack_query(format, DType::bf16, row, values, scales);
    case KeyFormat::f16: return pack_query(format, DType::f16, row, values, scales);
    case KeyFormat::f32: return pack_query(format, DType::f32, row, values, scales);
    case KeyFormat::q8_0: return pack_q8_0(row, values);
    default: pack_query(format, DType::none, row, values, scales);
  }
  if (format != KeyFormat::mxfp4) std::memcpy(scales, row.scale.data(), sizeof(float));
}

CodedProblem coded_problem(const ProblemSpec& spec, const std::vector<int64_t>& lens,
                           const std::vector<int32_t>& row_request) {
  Random random(spec.seed);
  CodedProblem p;
  draw_queries(spec, row_request.size(), p, random);
  if (arranges(spec.pattern) || spec.pattern == Pattern::ties_at_cut) vary_queries(spec, row_request, p);
  bend_queries(spec, row_request.size(), p, random);
  for (size_t b = 0; b < lens.size(); ++b) {
    Rows2 keys;
    const CodedRow base = coded(spec, draw(spec, random), random);
    for (int64_t t = 0; t < lens[b]; ++t) {
      const std::vector<float> values = draw(spec, random);
      if (!spec.exact) p.keys_truth.push_back(values);
      keys.push_back(coded(spec, values, random));
      bend_key(spec, base, keys.back(), random);
    }
    const auto found = std::find(row_request.begin(), row_request.end(), static_cast<int32_t>(b));
    const int64_t row = found == row_request.end() ? 0 : found - row_request.begin();
    if (!row_request.empty() && arranges(spec.pattern)) arrange(p, spec, row, keys, random);
    if (!row_request.empty() && spec.pattern == Pattern::ties_at_cut) tie_at_cut(p, spec, row, keys, random);
    p.keys.push_back(std::move(keys));
  }
  if (spec.pattern != Pattern::normal) p.keys_truth.clear(), p.q_truth.clear();
  return p;
}

}  // namespace topkey::support
