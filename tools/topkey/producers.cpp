// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Argument structs of quantize_q, store_k and quantize_k: no norm, no rope (the vectors are those that attention saw),
// default rules.
#include "producers.h"

#include <cmath>

namespace topkey::cli {
namespace {

float inverse_root(int64_t n) { return static_cast<float>(1 / std::sqrt(static_cast<double>(n))); }

/// [B,T,D] as [B*T,D].
Tensor flat(const Tensor& keys) {
  return keys.ndim == 3 ? tensor(keys.data, keys.dtype, {keys.shape[0] * keys.shape[1], keys.shape[2]}) : keys;
}

}  // namespace

QuantizeQ query_producer(const Vectors& vectors, KeyFormat format, const Query& to, const Tensor& ones) {
  const bool raw = vectors.weights.data != nullptr;
  QuantizeQ a{};
  a.q = vectors.q;
  a.weights = raw ? vectors.weights : ones;
  a.softmax_scale = raw ? 1.0F : inverse_root(vectors.q.shape[2]);
  a.head_scale = raw ? 1.0F : inverse_root(vectors.q.shape[1]);
  a.format = format;
  a.q_out = to.values;
  a.q_scales_out = to.scales;
  a.weights_out = to.weights;
  return a;
}

StoreK page_producer(const Vectors& vectors, ScaleRule scale, const std::vector<int64_t>& slots, const KeyCache& to) {
  StoreK a{};
  a.k = flat(vectors.keys);
  a.scale = scale;
  a.slot_mapping = tensor(slots.data(), DType::i64, {static_cast<int64_t>(slots.size())});
  a.cache = to;
  return a;
}

QuantizeK dense_producer(const Vectors& vectors, ScaleRule scale, const DenseKeys& to) {
  QuantizeK a{};
  a.k = flat(vectors.keys);
  a.scale = scale;
  a.out = to;
  return a;
}

}  // namespace topkey::cli
