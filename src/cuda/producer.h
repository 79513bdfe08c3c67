// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What each named rule does (docs/formats.md), and how many warps with a vector each a thread block has.
#pragma once
#include <cmath>

#include "cuda/device/producer.cuh"

namespace topkey::cuda {

inline RuleFacts facts_of(QuantRule rule, bool query, ScaleRule scale) {
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

/// Of keys: nothing is rounded for its rope alone, and mxfp4 has one rule.
inline RuleFacts key_facts(QuantRule rule, ScaleRule scale, KeyFormat format) {
  RuleFacts facts = facts_of(rule, false, scale);
  facts.roped_bf16 = false;
  facts.whole_bf16 = facts.whole_bf16 || format == KeyFormat::mxfp4;
  return facts;
}

inline float hadamard_scale(int64_t head_dim) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
}

/// Vectors must fit shared memory, one a warp.
constexpr int64_t kMaxProducerDim = 16384;
inline int warps_for(int64_t head_dim) {
  const int64_t fit = 48 * 1024 / (4 * (head_dim > 0 ? head_dim : 1));
  return static_cast<int>(fit < 1 ? 1 : fit > 4 ? 4 : fit);
}
inline size_t shared_for(int64_t head_dim) {
  return static_cast<size_t>(warps_for(head_dim)) * static_cast<size_t>(head_dim) * 4;
}
/// Bytes beside each warp's vector in which it makes a row of tiled pages.
inline int64_t scratch_for(const PageLayout& layout) {
  return layout.tile > 0 ? (layout.value + layout.scale + 7) / 8 * 8 : 0;
}
/// Most that shared_for and scratch_for ask for together: fp8 rows are the longest that are tiled.
constexpr int kMostProducerShared = static_cast<int>(kMaxProducerDim) * 5 + 8;

}  // namespace topkey::cuda
