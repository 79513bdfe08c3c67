// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Which vectors can stay in a warp's registers (device/vector.cuh), and tensors as its kernels take them.
#pragma once
#include "cuda/device/vector.cuh"

namespace topkey::cuda {

inline int64_t number_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }
/// Of numbers with unit stride in the last dimension; lines along the first. False: not so, or numbers of another dtype.
inline bool lines_of(const Tensor& t, Lines* lines) {
  const bool known = t.dtype == DType::f32 || t.dtype == DType::bf16 || t.dtype == DType::f16;
  const int last = t.ndim - 1;
  if (!known || last < 0 || (t.stride[last] != 1 && t.shape[last] > 1)) return false;
  const int64_t bytes = number_bytes(t.dtype);
  *lines = {static_cast<const uint8_t*>(t.data), last > 0 ? t.stride[0] * bytes : 0, t.dtype, false};
  lines->fours = (reinterpret_cast<uintptr_t>(t.data) | static_cast<uintptr_t>(lines->step)) % (4 * bytes) == 0;
  return true;
}
inline Whole whole_of(const Tensor& t) { return {static_cast<const uint8_t*>(t.data), t.dtype == DType::i64}; }

/// Lines [first, first + count).
inline Tensor lines_from(Tensor t, int64_t first, int64_t count) {
  const int64_t bytes = t.dtype == DType::i64                             ? 8
                        : t.dtype == DType::f32 || t.dtype == DType::i32  ? 4
                        : t.dtype == DType::bf16 || t.dtype == DType::f16 ? 2
                                                                          : 1;
  t.data = static_cast<uint8_t*>(t.data) + first * t.stride[0] * bytes;
  t.shape[0] = count;
  return t;
}

inline bool vector_recipe_of(const Recipe& r, VectorRecipe* v) {
  const int dim = r.head_dim, base = r.rope.trailing ? dim - r.rope.dim : 0;
  if ((dim != 64 && dim != 128) || (!is_e4m3(r.format) && r.format != KeyFormat::mxfp4)) return false;
  if (r.norm.kind != NormKind::none) {
    v->weighted = r.norm.weight.data != nullptr, v->biased = r.norm.bias.data != nullptr;
    if (v->weighted && !lines_of(r.norm.weight, &v->weight)) return false;
    if (v->biased && !lines_of(r.norm.bias, &v->bias)) return false;
  }
  if (r.rope.dim > 0) {
    // Pairs of numbers in one lane, or in neighbours.
    if (r.rope.dim % (r.rope.interleaved ? 32 : 64) != 0 || base % 32 != 0) return false;
    const Tensor& positions = r.rope.positions;  // absent where a kernel has them from elsewhere
    if ((positions.data != nullptr && positions.stride[0] != 1) || !lines_of(r.rope.cos_sin, &v->cos_sin)) return false;
    v->positions = whole_of(positions), v->rope_rows = r.rope.cos_sin.shape[0];
  }
  v->eps = r.norm.eps, v->hadamard_scale = r.hadamard_scale, v->rope_dim = r.rope.dim, v->rope_base = base;
  v->norm = r.norm.kind, v->input = r.input, v->rule = r.rule, v->scale = r.scale, v->format = r.format;
  v->interleaved = r.rope.interleaved, v->hadamard = r.hadamard;
  return true;
}

}  // namespace topkey::cuda
