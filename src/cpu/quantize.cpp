// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `quantize`: each query head and each key through producer.h, into dense codes. Vectors are independent, so
// members take equal runs of them.
#include "cpu/quantize.h"

#include <cmath>
#include <cstring>

#include "cpu/producer.h"
#include "cpu/share.h"
#include "cpu/view.h"

namespace topkey::cpu {
namespace {

/// weights_out of one head: f32 products in the rule's order. Formats whose queries keep their scale have no factor
/// q_scale.
struct WeightScale {
  bool folds_q_scale, joined;
  float softmax, head;

  explicit WeightScale(const QuantizeQ& a)
      : folds_q_scale(is_fp8(a.format)),
        joined(folds_q_scale && a.rule == QuantRule::kpool_query),
        softmax(a.softmax_scale == 0.0f ? 1.0f : a.softmax_scale),
        head(a.head_scale == 0.0f ? 1.0f : a.head_scale) {}
  float operator()(float w, float q_scale) const {
    const float ws = folds_q_scale ? w * q_scale : w;
    const float result = joined ? ws * (softmax * head) : (ws * softmax) * head;
    return std::isnan(result) ? canonical_nan() : result;
  }
};

Recipe query_recipe(const QuantizeQ& a) {
  Recipe recipe = make_recipe(a.q.shape[2], a.q.dtype, Norm{}, a.rope, a.hadamard);
  if (is_fp8(a.format) || a.format == KeyFormat::mxfp4) {
    set_query_rule(recipe, a.format, a.rule);
  } else {
    recipe.codes = a.q_out.dtype == DType::bf16 ? Codes::bf16 : a.q_out.dtype == DType::f16 ? Codes::f16 : Codes::f32;
  }
  return recipe;
}

float weight_at(const Tensor& weights, int64_t row, int64_t head) {
  const int64_t at = row * weights.stride[0] + head * weights.stride[1];
  return weights.dtype == DType::f32 ? static_cast<const float*>(weights.data)[at]
                                     : bf16_to_float(static_cast<const uint16_t*>(weights.data)[at]);
}

}  // namespace

void quantize_q(const QuantizeQ& a, const Exec& exec) {
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1];
  if (exec.strict) raise_if_wild(exec, "quantize_q", positions_outside(a.rope, rows));
  const Recipe recipe = query_recipe(a);
  const WeightScale scaled(a);
  const int64_t in_bytes = float_bytes(a.q.dtype),
                out_bytes =
                    a.q_out.dtype == DType::u8 || a.q_out.dtype == DType::f8_e4m3fn ? 1 : float_bytes(a.q_out.dtype);
  const auto work = [&](const Share& share, Counts& counts) {
    Producer::Stack stack;
    const Producer produce(recipe, Norm{}, a.rope, stack, exec, share.rank);
    int64_t i = share.first(rows * heads), row = i / heads, head = i % heads;
    for (const int64_t end = share.last(rows * heads); i < end; ++i) {
      const float q_scale = produce(row_at(a.q, row, in_bytes) + head * a.q.stride[1] * in_bytes, row,
                                    row_at(a.q_out, row, out_bytes) + head * a.q_out.stride[1] * out_bytes,
                                    scale_bytes_at(a.q_scales_out, row, head));
      static_cast<float*>(a.weights_out.data)[row * a.weights_out.stride[0] + head * a.weights_out.stride[1]] =
          scaled(weight_at(a.weights, row, head), q_scale);
      if (head == 0) counts.add(kSkippedPages, position_outside(a.rope, row));
      if (++head == heads) {
        head = 0;
        ++row;
      }
    }
  };
  run_shared(exec, producer_members(recipe, rows * heads), rows, work);
}

void quantize_k(const QuantizeK& a, const Exec& exec) {
  const int64_t rows = a.k.shape[0], dim = a.k.shape[1];
  if (exec.strict) raise_if_wild(exec, "quantize_k", positions_outside(a.rope, rows));
  Recipe recipe = make_recipe(dim, a.k.dtype, a.norm, a.rope, a.hadamard);
  set_key_rule(recipe, a.out.format, a.rule, a.scale);
  const int64_t in_bytes = float_bytes(a.k.dtype);
  const int64_t out_bytes = value_bytes(a.out.format, dim) / a.out.values.shape[1];  // of an element of out.values
  const auto work = [&](const Share& share, Counts& counts) {
    Producer::Stack stack;
    const Producer produce(recipe, a.norm, a.rope, stack, exec, share.rank);
    for (int64_t r = share.first(rows), end = share.last(rows); r < end; ++r) {
      const int64_t ahead = r + kPrefetchRows;
      if (ahead < rows) prefetch_vector(row_at(a.k, ahead, in_bytes), dim * in_bytes);
      uint8_t* const scales = scale_bytes_at(a.out.scales, r);
      const float scale = produce(row_at(a.k, r, in_bytes), r, row_at(a.out.values, r, out_bytes), scales);
      if (is_fp8(a.out.format)) std::memcpy(scales, &scale, sizeof scale);
      counts.add(kSkippedPages, position_outside(a.rope, r));
    }
  };
  run_shared(exec, producer_members(recipe, rows), rows, work);
}

}  // namespace topkey::cpu
