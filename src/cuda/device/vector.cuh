// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The steps of producer.cuh for a vector of 64 or 128 numbers in a warp's registers: lane l has numbers l, l + 32, ... so
// that each of its sums is one of the partial sums that the order of docs/formats.md names. Every step rounds as there.
#pragma once
#include "cuda/device/producer.cuh"
#include "cuda/device/ptx.cuh"

namespace topkey::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 890
__device__ __forceinline__ uint32_t e4m3_of(float x) { return float_to_e4m3(x); }
#endif

// Conversions that take few instructions: a launch of few rows waits for its code as long as for its data. Of NaNs only
// that they are some is kept.
__device__ __forceinline__ float to_bf16(float x) { return __uint_as_float(bf16_bits(x) << 16); }
/// Both roundings are computed and one is taken: no branch for each number.
__device__ __forceinline__ float to_input(DType dtype, float x) {
  const float bf16 = to_bf16(x), f16 = f16_number(f16_bits(x));
  return dtype == DType::bf16 ? bf16 : dtype == DType::f16 ? f16 : x;
}
/// float_to_e2m1 of a number that is no NaN: nearest, ties to the even code.
__device__ __forceinline__ uint32_t e2m1_of(float x) {
  const float a = fabsf(x);
  const uint32_t magnitude =
      (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return magnitude | (__float_as_uint(x) >> 28 & 8u);
}
static __device__ __noinline__ uint32_t fnuz_of(float x) { return float_to_e4m3fnuz(x); }

/// What a kernel needs of a tensor whose last stride is 1.
struct Lines {
  const uint8_t* data;
  int64_t step;  ///< bytes from one line to the next
  DType dtype;   ///< f32, bf16 or f16
};
/// Integers side by side.
struct Whole {
  const uint8_t* data;
  bool wide;  ///< i64, else i32
  __device__ __forceinline__ int64_t operator[](int64_t i) const {
    return wide ? reinterpret_cast<const int64_t*>(data)[i] : reinterpret_cast<const int32_t*>(data)[i];
  }
};

/// Recipe without its tensors.
struct VectorRecipe {
  Lines weight, bias, cos_sin;  ///< null = absent
  Whole positions;
  int64_t rope_rows;
  float eps, hadamard_scale;
  int32_t rope_dim, rope_base;
  NormKind norm;
  DType input;
  RuleFacts rule;
  ScaleRule scale;
  KeyFormat format;
  bool interleaved, hadamard;
};

/// What most calls ask, known when the code is compiled: bf16 in, fp8 out, the first 64 numbers rotated in two halves,
/// Hadamard. Fewer instructions, fewer of which wait for memory.
__host__ __device__ inline bool is_usual(const VectorRecipe& p) {
  return p.input == DType::bf16 && p.rope_dim == 64 && p.rope_base == 0 && !p.interleaved && p.hadamard &&
         p.format == KeyFormat::fp8 && !p.rule.whole_bf16 && p.rule.code == RuleFacts::divide;
}
template <bool kUsual>
__device__ __forceinline__ VectorRecipe told(VectorRecipe p) {
  if (!kUsual) return p;
  p.input = DType::bf16, p.rope_dim = 64, p.rope_base = 0, p.interleaved = false, p.hadamard = true;
  p.format = KeyFormat::fp8, p.rule.whole_bf16 = false, p.rule.code = RuleFacts::divide;
  return p;
}

/// Numbers as they are in memory: many reads may be under way before the first is looked at.
template <int kEach>
struct RawLine {
  uint32_t bits[kEach];

  __device__ __forceinline__ void read(const Lines& t, int64_t line) {
    const uint8_t* at = t.data + line * t.step;
    if (t.dtype == DType::f32) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) bits[j] = reinterpret_cast<const uint32_t*>(at)[lane_id() + 32 * j];
    } else {
#pragma unroll
      for (int j = 0; j < kEach; ++j) bits[j] = reinterpret_cast<const uint16_t*>(at)[lane_id() + 32 * j];
    }
  }
  __device__ __forceinline__ float value(DType dtype, int j) const {
    const float f16 = f16_number(bits[j]), other = __uint_as_float(bits[j] << (dtype == DType::f32 ? 0 : 16));
    return dtype == DType::f16 ? f16 : other;
  }
};

/// Sum over the lanes, in every lane: the tree of add_lanes (a sum of two does not depend on their order).
__device__ __forceinline__ float add_all_lanes(float sum) {
#pragma unroll
  for (int half = 16; half > 0; half /= 2) sum = sum + __shfl_xor_sync(kWarp, sum, half);
  return sum;
}

template <int kEach>
__device__ __forceinline__ void norm_vector(const VectorRecipe& p, float (&x)[kEach]) {
  constexpr float kCount = 32.0f * kEach;
  RawLine<kEach> weight{}, bias{};
  if (p.weight.data != nullptr) weight.read(p.weight, 0);
  if (p.bias.data != nullptr) bias.read(p.bias, 0);
  if (p.norm == NormKind::layer) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kEach; ++j) sum = sum + x[j];
    const float mean = add_all_lanes(sum) / kCount;
#pragma unroll
    for (int j = 0; j < kEach; ++j) x[j] = x[j] - mean;
  }
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kEach; ++j) squares = squares + x[j] * x[j];
  const float variance = add_all_lanes(squares) / kCount;
  const float scale = 1.0f / sqrtf(variance + p.eps);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    float y = x[j] * scale;
    if (p.weight.data != nullptr) y = y * weight.value(p.weight.dtype, j);
    if (p.bias.data != nullptr) y = y + bias.value(p.bias.dtype, j);
    x[j] = to_input(p.input, y);
  }
}

/// What a vector is rotated by, read before it is needed. A pair is half a multiple of 32 apart, or in neighbours.
template <int kEach>
struct Rotation {
  RawLine<kEach> cosine, sine;
  bool wild;

  __device__ __forceinline__ bool turns(const VectorRecipe& p, int j) const {
    return 32 * j >= p.rope_base && 32 * j < p.rope_base + p.rope_dim;
  }
  /// Number i of the table's row of cosines and sines.
  __device__ __forceinline__ int pair(const VectorRecipe& p, int j) const {
    const int d = lane_id() + 32 * j - p.rope_base, half = p.rope_dim / 2;
    return p.interleaved ? d / 2 : d < half ? d : d - half;
  }
  __device__ __forceinline__ void read(const VectorRecipe& p, int64_t position) {
    wild = position < 0 || position >= p.rope_rows;
    if (wild) return;
    const uint8_t* at = p.cos_sin.data + position * p.cos_sin.step;
    const int half = p.rope_dim / 2;
    if (p.cos_sin.dtype == DType::f32) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(at);
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (turns(p, j)) cosine.bits[j] = words[pair(p, j)], sine.bits[j] = words[half + pair(p, j)];
    } else {
      const uint16_t* words = reinterpret_cast<const uint16_t*>(at);
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (turns(p, j)) cosine.bits[j] = words[pair(p, j)], sine.bits[j] = words[half + pair(p, j)];
    }
  }
  __device__ __forceinline__ void turn(const VectorRecipe& p, float (&x)[kEach]) const {
    const int half = p.rope_dim / 2;
    float turned[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const bool second = p.interleaved ? lane_id() % 2 == 1 : 32 * j - p.rope_base >= half;
      const float neighbour = __shfl_xor_sync(kWarp, x[j], 1), apart = half == 32 ? x[j ^ 1] : x[j ^ (kEach / 2)];
      const float own = x[j] * cosine.value(p.cos_sin.dtype, j);
      const float other = (p.interleaved ? neighbour : apart) * sine.value(p.cos_sin.dtype, j);
      float y = to_input(p.input, own + (second ? other : -other));
      if (p.rule.roped_bf16) y = to_bf16(y);
      turned[j] = turns(p, j) ? y : x[j];
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) x[j] = wild ? __uint_as_float(kCanonicalNan) : turned[j];
  }
};

template <int kEach>
__device__ __forceinline__ void hadamard_vector(const VectorRecipe& p, float (&x)[kEach]) {
#pragma unroll
  for (int stride = 1; stride < 32; stride *= 2) {
    const float sign = (lane_id() & stride) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int j = 0; j < kEach; ++j) x[j] = __fmaf_rn(x[j], sign, __shfl_xor_sync(kWarp, x[j], stride));
  }
#pragma unroll
  for (int apart = 1; apart < kEach; apart *= 2) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if ((j & apart) != 0) continue;
      const float a = x[j], b = x[j + apart];
      x[j] = a + b, x[j + apart] = a - b;
    }
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) x[j] = x[j] * p.hadamard_scale;
}

/// Norm, rope and Hadamard, as far as they are asked.
template <int kEach>
__device__ __forceinline__ void transform_vector(const VectorRecipe& p, const Rotation<kEach>& rotation,
                                                 float (&x)[kEach]) {
  if (p.norm != NormKind::none) norm_vector(p, x);
  if (p.rope_dim > 0) rotation.turn(p, x);
  if (p.hadamard) hadamard_vector(p, x);
}

/// max |x| over the warp; NaN where one of them is inf or NaN.
template <int kEach>
__device__ __forceinline__ float amax_of_lanes(const float (&x)[kEach]) {
  uint32_t most = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) most = max(most, __float_as_uint(x[j]) & 0x7FFFFFFFu);
  most = __reduce_max_sync(kWarp, most);
  return most < 0x7F800000u ? __uint_as_float(most) : __uint_as_float(kCanonicalNan);
}

/// A byte a number to where they belong; of 128 at an aligned address 4 at a time.
template <int kEach>
__device__ __forceinline__ void put_codes(const uint32_t (&byte)[kEach], uint8_t* to) {
  if constexpr (kEach == 4) {
    if (reinterpret_cast<uintptr_t>(to) % 4 == 0) {
      // Lane 4m + t ends up with numbers 32t + 4m .. 32t + 4m + 3.
      const uint32_t own = byte[0] | byte[1] << 8 | byte[2] << 16 | byte[3] << 24;
      const bool odd = (lane_id() & 1) != 0, upper = (lane_id() & 2) != 0;
      const uint32_t got = __shfl_xor_sync(kWarp, own, 1);
      const uint32_t two = odd ? __byte_perm(got, own, 0x7351) : __byte_perm(own, got, 0x6240);
      const uint32_t other = __shfl_xor_sync(kWarp, two, 2);
      const uint32_t word = upper ? __byte_perm(other, two, 0x7632) : __byte_perm(two, other, 0x5410);
      *reinterpret_cast<uint32_t*>(to + 32 * (lane_id() & 3) + (lane_id() & 28)) = word;
      return;
    }
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) to[lane_id() + 32 * j] = static_cast<uint8_t>(byte[j]);
}

/// e4m3 codes; returns the scale.
template <int kEach>
__device__ __forceinline__ float quantize_e4m3(const VectorRecipe& p, float (&x)[kEach], uint8_t* codes) {
#pragma unroll
  for (int j = 0; p.rule.whole_bf16 && j < kEach; ++j) x[j] = to_bf16(x[j]);
  const float amax = amax_of_lanes(x);
  const bool fnuz = p.format == KeyFormat::fp8_fnuz, nan = is_nan(amax);
  const float a = amax > p.rule.floor ? amax : p.rule.floor;
  const float largest = fnuz ? 224.0f : 448.0f;
  const float reciprocal = fnuz ? 1.0f / 224.0f : 1.0f / 448.0f;
  float s = p.rule.by_reciprocal ? a * reciprocal : a / largest;
  // Dividing by a power of two is multiplying by its inverse: exact, or rounded once, both.
  float inverse = 0.0f;
  const bool power = p.scale == ScaleRule::ue8m0;
  if (power) {
    const int e = ceil_log2(s);
    s = exp2_int(e), inverse = exp2_int(-e);
  }
  if (!power && p.rule.code == RuleFacts::reciprocal) inverse = 1.0f / s;
  if (!power && p.rule.code == RuleFacts::divide) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) x[j] = x[j] / s;
  } else if (power || p.rule.code == RuleFacts::reciprocal) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) x[j] = x[j] * inverse;
  }
  uint32_t byte[kEach];
  if (!fnuz) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) byte[j] = nan ? 0x7Fu : e4m3_of(x[j]);
  } else {
#pragma unroll
    for (int j = 0; j < kEach; ++j) byte[j] = nan ? 0x80u : fnuz_of(x[j]);
  }
  put_codes(byte, codes);
  return nan ? amax : s;
}

/// As quantize_mxfp4; codes and scales at any address.
template <int kEach>
__device__ __forceinline__ void quantize_e2m1(const VectorRecipe& p, float (&x)[kEach], uint8_t* codes,
                                              uint8_t* scales) {
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const float value[1] = {p.rule.whole_bf16 ? to_bf16(x[j]) : x[j]};
    const float amax = amax_of_lanes(value);
    const float floor = 6.0f * exp2_int(-126);
    int e = 128;
    uint32_t code = 0;
    if (!is_nan(amax)) {
      e = ceil_log2((amax > floor ? amax : floor) / 6.0f);
      code = e2m1_of(value[0] * exp2_int(-e));
    }
    const uint32_t next = __shfl_down_sync(kWarp, code, 1);
    if (lane_id() % 2 == 0) codes[16 * j + lane_id() / 2] = static_cast<uint8_t>(code | next << 4);
    if (lane_id() == 0) scales[j] = static_cast<uint8_t>(e + 127);
  }
}

/// fp8, fp8_fnuz or mxfp4 to one row; scale at any address.
template <int kEach>
__device__ __forceinline__ void quantize_vector(const VectorRecipe& p, float (&x)[kEach], uint8_t* values,
                                                uint8_t* scale) {
  if (p.format == KeyFormat::mxfp4) {
    quantize_e2m1(p, x, values, scale);
    return;
  }
  const float s = quantize_e4m3(p, x, values);
  if (lane_id() != 0) return;
  if (reinterpret_cast<uintptr_t>(scale) % 4 == 0) {
    *reinterpret_cast<float*>(scale) = s;
  } else {
    store_word(scale, __float_as_uint(s));
  }
}

}  // namespace topkey::cuda
