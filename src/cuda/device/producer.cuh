// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// One vector through norm, rope, Hadamard, amax and quantisation by one warp, in shared memory: what quantize_q, quantize_k
// and store_k share. f32, each step rounded once, in the order of docs/formats.md: the same bytes as every backend.
#pragma once
#include "cuda/device/pages.cuh"
#include "cuda/device/rows.cuh"
#include "topkey/quantize.h"

namespace topkey::cuda {

/// What one named rule does (docs/formats.md).
struct RuleFacts {
  bool roped_bf16, whole_bf16;                      ///< rounded to bf16 before amax
  float floor;                                      ///< of amax
  bool by_reciprocal;                               ///< s = a * f32(1/448), else a / 448
  enum Code { divide, exponent, reciprocal } code;  ///< x / s; x * 2^-e; x * (1 / s)
  bool joined_scales;  ///< weights: (w * s) * (softmax * head), else ((w * s) * softmax) * head
};
struct Recipe {
  Norm norm;
  Rope rope;
  bool hadamard;
  float hadamard_scale;  ///< D^-0.5
  DType input;           ///< norm results and roped dims are rounded to it
  RuleFacts rule;
  ScaleRule scale;
  KeyFormat format;
  int32_t head_dim;
};

constexpr unsigned kWarp = ~0u;
__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }

__device__ inline float round_to(DType dtype, float x) {
  return dtype == DType::bf16 ? round_to_bf16(x) : dtype == DType::f16 ? f16_to_float(float_to_f16(x)) : x;
}

/// Lanes hold partial sums by d mod 32; halves are added: 16, 8, 4, 2, 1.
__device__ inline float add_lanes(float sum) {
#pragma unroll
  for (int half = 16; half > 0; half /= 2) sum = sum + __shfl_down_sync(kWarp, sum, half);
  return __shfl_sync(kWarp, sum, 0);
}

__device__ inline void apply_norm(const Recipe& p, float* x) {
  const float count = static_cast<float>(p.head_dim);
  float mean = 0.0f, squares = 0.0f;
  if (p.norm.kind == NormKind::layer) {
    float sum = 0.0f;
    for (int d = lane_id(); d < p.head_dim; d += 32) sum = sum + x[d];
    mean = add_lanes(sum) / count;
  }
  for (int d = lane_id(); d < p.head_dim; d += 32) {
    if (p.norm.kind == NormKind::layer) x[d] = x[d] - mean;
    squares = squares + x[d] * x[d];
  }
  const float variance = add_lanes(squares) / count;
  const float scale = 1.0f / sqrtf(variance + p.norm.eps);
  for (int d = lane_id(); d < p.head_dim; d += 32) {
    float y = x[d] * scale;
    if (p.norm.weight.data != nullptr) y = y * real(p.norm.weight, d);
    if (p.norm.bias.data != nullptr) y = y + real(p.norm.bias, d);
    x[d] = round_to(p.input, y);
  }
  __syncwarp();
}

/// A position outside the table makes the whole vector NaN; true if it did.
__device__ inline bool apply_rope(const Recipe& p, int64_t position, float* x) {
  const Rope& rope = p.rope;
  if (position < 0 || position >= rope.cos_sin.shape[0]) {
    for (int d = lane_id(); d < p.head_dim; d += 32) x[d] = __uint_as_float(kCanonicalNan);
    __syncwarp();
    return true;
  }
  const int half = rope.dim / 2, base = rope.trailing ? p.head_dim - rope.dim : 0;
  for (int i = lane_id(); i < half; i += 32) {
    float& first = x[base + (rope.interleaved ? 2 * i : i)];
    float& second = x[base + (rope.interleaved ? 2 * i + 1 : i + half)];
    const float c = real(rope.cos_sin, position, i), s = real(rope.cos_sin, position, half + i);
    const float a = first, b = second;
    first = round_to(p.input, a * c - b * s);
    second = round_to(p.input, b * c + a * s);
    if (p.rule.roped_bf16) first = round_to_bf16(first), second = round_to_bf16(second);
  }
  __syncwarp();
  return false;
}

/// Natural (Sylvester) order: butterflies at strides 1, 2, 4, ..., then D^-0.5.
__device__ inline void apply_hadamard(const Recipe& p, float* x) {
  for (int stride = 1; stride < p.head_dim; stride *= 2) {
    for (int t = lane_id(); t < p.head_dim / 2; t += 32) {
      const int i = t / stride * 2 * stride + t % stride;
      const float a = x[i], b = x[i + stride];
      x[i] = a + b, x[i + stride] = a - b;
    }
    __syncwarp();
  }
  for (int d = lane_id(); d < p.head_dim; d += 32) x[d] = x[d] * p.hadamard_scale;
  __syncwarp();
}

/// Where the vector of a row is rotated.
__device__ inline int64_t rope_position(const Recipe& p, int64_t row) {
  return p.rope.dim > 0 ? integer(p.rope.positions, row) : 0;
}

/// In place; true if the rope position is wild.
__device__ inline bool transform(const Recipe& p, int64_t position, float* x) {
  bool wild = false;
  if (p.norm.kind != NormKind::none) apply_norm(p, x);
  if (p.rope.dim > 0) wild = apply_rope(p, position, x);
  if (p.hadamard) apply_hadamard(p, x);
  return wild;
}

/// max |x| of the warp's values, NaN where one is inf or NaN.
__device__ inline float amax_of(const float* x, int n) {
  float a = 0.0f;
  bool finite = true;
  for (int d = lane_id(); d < n; d += 32) {
    finite = finite && is_finite(x[d]);
    a = fabsf(x[d]) > a ? fabsf(x[d]) : a;
  }
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    const float other = __shfl_xor_sync(kWarp, a, half);
    a = other > a ? other : a;
  }
  return __all_sync(kWarp, finite) ? a : __uint_as_float(kCanonicalNan);
}

/// Four bytes at any address.
__device__ inline void store_word(uint8_t* to, uint32_t word) {
  for (int i = 0; i < 4; ++i) to[i] = static_cast<uint8_t>(word >> (8 * i));
}

/// fp8 codes; returns the scale.
__device__ inline float quantize_fp8(const Recipe& p, float* x, uint8_t* codes) {
  for (int d = lane_id(); p.rule.whole_bf16 && d < p.head_dim; d += 32) x[d] = round_to_bf16(x[d]);
  const float amax = amax_of(x, p.head_dim);
  const bool fnuz = p.format == KeyFormat::fp8_fnuz;
  if (is_nan(amax)) {
    for (int d = lane_id(); d < p.head_dim; d += 32) codes[d] = fnuz ? 0x80 : 0x7F;
    return amax;
  }
  const float a = amax > p.rule.floor ? amax : p.rule.floor;
  const float largest = fnuz ? 224.0f : 448.0f;  // engines use no e4m3fnuz code beyond 224, though 240 exists
  const float reciprocal = fnuz ? 1.0f / 224.0f : 1.0f / 448.0f;
  float s = p.rule.by_reciprocal ? a * reciprocal : a / largest;
  int e = 0;
  if (p.scale == ScaleRule::ue8m0) e = ceil_log2(s), s = exp2_int(e);
  const float inverse = 1.0f / s;
  for (int d = lane_id(); d < p.head_dim; d += 32) {
    const float y = p.rule.code == RuleFacts::divide     ? x[d] / s
                    : p.rule.code == RuleFacts::exponent ? x[d] * exp2_int(-e)
                                                         : x[d] * inverse;
    codes[d] = fnuz ? float_to_e4m3fnuz(y) : float_to_e4m3(y);
  }
  return s;
}

/// Blocks of 34 bytes: d = a / 127 as f16, 32 int8 of x * (1 / d) rounded half away from zero. Lane = element.
__device__ inline void quantize_q8_0(const Recipe& p, const float* x, uint8_t* blocks) {
  for (int b = 0; b < p.head_dim / 32; ++b, x += 32, blocks += 34) {
    const float amax = amax_of(x, 32);
    const float d = amax / 127.0f, inverse = 1.0f / d;
    const uint16_t stored = is_nan(amax) ? uint16_t{0x7E00} : float_to_f16(d);
    const bool usable = !is_nan(amax) && d > 0.0f && is_finite(inverse);
    const float code = usable ? roundf(x[lane_id()] * inverse) : 0.0f;
    const float held = code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code;
    if (lane_id() < 2) blocks[lane_id()] = static_cast<uint8_t>(stored >> (8 * lane_id()));
    blocks[2 + lane_id()] = static_cast<uint8_t>(static_cast<int8_t>(held));
  }
}

/// Pairs of e2m1 codes, low nibble first, and a ue8m0 byte for each block of 32. Lane = element.
__device__ inline void quantize_mxfp4(const Recipe& p, float* x, uint8_t* codes, uint8_t* scales) {
  for (int b = 0; b < p.head_dim / 32; ++b, x += 32, codes += 16) {
    if (p.rule.whole_bf16) x[lane_id()] = round_to_bf16(x[lane_id()]);
    const float amax = amax_of(x, 32);
    const float floor = 6.0f * exp2_int(-126);
    int e = 128;
    uint32_t code = 0;
    if (!is_nan(amax)) {
      e = ceil_log2((amax > floor ? amax : floor) / 6.0f);  // within -126..126: a / 6 cannot leave that
      code = float_to_e2m1(x[lane_id()] * exp2_int(-e));
    }
    const uint32_t next = __shfl_down_sync(kWarp, code, 1);
    if (lane_id() % 2 == 0) codes[lane_id() / 2] = static_cast<uint8_t>(code | next << 4);
    if (lane_id() == 0) scales[b] = static_cast<uint8_t>(e + 127);
  }
}

/// x in p.format to the bytes of one row; scale only where the format has one.
__device__ inline void quantize_row(const Recipe& p, float* x, uint8_t* values, uint8_t* scale) {
  if (p.format == KeyFormat::q8_0) {
    quantize_q8_0(p, x, values);
  } else if (p.format == KeyFormat::mxfp4) {
    quantize_mxfp4(p, x, values, scale);
  } else if (is_e4m3(p.format)) {
    const float s = quantize_fp8(p, x, values);
    if (lane_id() == 0) store_word(scale, __float_as_uint(s));
  } else {
    for (int d = lane_id(); d < p.head_dim; d += 32) {
      const float v = one_nan(x[d]);
      if (p.format == KeyFormat::f32) {
        store_word(values + 4 * d, __float_as_uint(v));
      } else {
        const uint16_t h = p.format == KeyFormat::bf16 ? float_to_bf16(v) : float_to_f16(v);
        values[2 * d] = static_cast<uint8_t>(h), values[2 * d + 1] = static_cast<uint8_t>(h >> 8);
      }
    }
  }
}

/// The same to a row of a page. A tiled row is made whole in `scratch` (layout.value + layout.scale bytes), then cut up.
__device__ inline void quantize_to_page(const Recipe& p, float* x, const PageLayout& l, uint8_t* page, int64_t row,
                                        uint8_t* scratch) {
  uint8_t *values = page + value_start(l, row), *scales = page + scale_start(l, row);
  if (l.tile == 0) {
    quantize_row(p, x, values, scales);
    return;
  }
  quantize_row(p, x, scratch, scratch + l.value);
  __syncwarp();
  for (int64_t j = lane_id(); j < l.value; j += 32) values[value_gap(l.tile, j)] = scratch[j];
  for (int64_t j = lane_id(); j < l.scale; j += 32) scales[scale_gap(l.scale_tile, l.scale, j)] = scratch[l.value + j];
}

}  // namespace topkey::cuda
