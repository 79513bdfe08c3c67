// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `quantize`: each query head and each key through producer.h, into dense codes.
#include "ref/quantize.h"

#include <cmath>

#include "ref/producer.h"
#include "ref/rows.h"

namespace topkey::ref {
namespace {

float one_if_zero(float scale) { return scale == 0.0f ? 1.0f : scale; }

/// weights_out of one head: f32 products in the rule's order. q_scale is 1 for formats that keep their scales.
float scaled_weight(float w, float q_scale, bool has_q_scale, bool joined, const QuantizeQ& a) {
  const float softmax = one_if_zero(a.softmax_scale), head = one_if_zero(a.head_scale);
  const float ws = has_q_scale ? w * q_scale : w;
  const float result = joined ? ws * (softmax * head) : (ws * softmax) * head;
  return std::isnan(result) ? canonical_nan() : result;
}

}  // namespace

void quantize_q(const QuantizeQ& a, const Exec& exec) {
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], dim = a.q.shape[2];
  const bool fp8 = is_fp8(a.format), fp4 = a.format == KeyFormat::mxfp4;
  Counts counts;
  count_wild_positions(a.rope, rows, counts, [](int64_t) { return false; });
  counts.raise_if_strict("quantize_q", exec);
  const RuleFacts rule = facts_of(a.rule, true, ScaleRule::ue8m0);
  const Transform t{nullptr, &a.rope, a.hadamard, a.q.dtype, fp4 || (fp8 && rule.roped_bf16)};
  std::vector<float> x(static_cast<size_t>(dim));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t d = 0; d < dim; ++d) x[static_cast<size_t>(d)] = real(a.q, r, h, d);
      transform(t, r, x);
      float q_scale = 1.0f;
      if (fp8) {
        q_scale = quantize_fp8(a.format, rule, ScaleRule::ue8m0, x, element<uint8_t>(a.q_out, r, h));
      } else if (fp4) {
        quantize_mxfp4(false, x, element<uint8_t>(a.q_out, r, h), scale_at(a.q_scales_out, r, h));
      } else {
        for (int64_t d = 0; d < dim; ++d) put_real(a.q_out, one_nan(x[static_cast<size_t>(d)]), r, h, d);
      }
      *element<float>(a.weights_out, r, h) =
          scaled_weight(real(a.weights, r, h), q_scale, fp8, fp8 && rule.joined_scales, a);
    }
  }
  counts.add(kRows, rows);
  counts.publish(exec);
}

void quantize_k(const QuantizeK& a, const Exec& exec) {
  const int64_t rows = a.k.shape[0], dim = a.k.shape[1];
  const Transform t{&a.norm, &a.rope, a.hadamard, a.k.dtype, false};
  Counts counts;
  count_wild_positions(a.rope, rows, counts, [](int64_t) { return false; });
  counts.raise_if_strict("quantize_k", exec);
  const int64_t element_bytes = a.out.format == KeyFormat::f32                                      ? 4
                                : a.out.format == KeyFormat::bf16 || a.out.format == KeyFormat::f16 ? 2
                                                                                                    : 1;
  std::vector<float> x(static_cast<size_t>(dim));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t d = 0; d < dim; ++d) x[static_cast<size_t>(d)] = real(a.k, r, d);
    transform(t, r, x);
    uint8_t* values = static_cast<uint8_t*>(a.out.values.data) + r * a.out.values.stride[0] * element_bytes;
    quantize_row(a.out.format, a.rule, a.scale, x, values, scale_at(a.out.scales, r));
  }
  counts.add(kRows, rows);
  counts.publish(exec);
}

}  // namespace topkey::ref
