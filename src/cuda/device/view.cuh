// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Elements of borrowed tensors on the device, whatever their dtype and strides; and numbers by bits, the device twins of
// include/topkey/number.h (whose functions are host code), with the same results for every input.
#pragma once
#include <cstdint>

#include "topkey/format.h"

namespace topkey::cuda {

constexpr uint32_t kCanonicalNan = 0x7FC00000u;

/// is_fp8 of format.h, which is host code.
__host__ __device__ __forceinline__ bool is_e4m3(KeyFormat format) {
  return format == KeyFormat::fp8 || format == KeyFormat::fp8_fnuz;
}

template <class T>
__device__ __forceinline__ T* element(const Tensor& t, int64_t i, int64_t j = 0, int64_t k = 0) {
  return static_cast<T*>(t.data) + i * t.stride[0] + (t.ndim > 1 ? j * t.stride[1] : 0) +
         (t.ndim > 2 ? k * t.stride[2] : 0);
}
/// Bytes of the scales of row i (and head j): f32, i32, or u8 and e8m0.
__device__ __forceinline__ uint8_t* scale_at(const Tensor& t, int64_t i, int64_t j = 0) {
  if (t.data == nullptr) return nullptr;
  return t.dtype == DType::f32 || t.dtype == DType::i32 ? reinterpret_cast<uint8_t*>(element<int32_t>(t, i, j))
                                                        : element<uint8_t>(t, i, j);
}
/// i32 or i64.
__device__ __forceinline__ int64_t integer(const Tensor& t, int64_t i, int64_t j = 0, int64_t k = 0) {
  return t.dtype == DType::i64 ? *element<int64_t>(t, i, j, k) : *element<int32_t>(t, i, j, k);
}
__device__ __forceinline__ void put_integer(const Tensor& t, int64_t i, int64_t value) {
  if (t.dtype == DType::i64) {
    *element<int64_t>(t, i) = value;
  } else {
    *element<int32_t>(t, i) = static_cast<int32_t>(value);
  }
}

__device__ __forceinline__ bool is_nan(float x) { return (__float_as_uint(x) & 0x7FFFFFFFu) > 0x7F800000u; }
__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7F800000u) != 0x7F800000u; }
__device__ __forceinline__ float one_nan(float x) { return is_nan(x) ? __uint_as_float(kCanonicalNan) : x; }
/// -0 as +0, every NaN as one.
__device__ __forceinline__ float canonical(float x) { return x == 0.0f ? 0.0f : one_nan(x); }

/// 2^exponent for -149 <= exponent <= 127.
__device__ __forceinline__ float exp2_int(int exponent) {
  return exponent >= -126 ? __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23)
                          : __uint_as_float(1u << (exponent + 149));
}
__device__ __forceinline__ float bf16_to_float(uint16_t b) { return __uint_as_float(static_cast<uint32_t>(b) << 16); }
__device__ __forceinline__ uint16_t float_to_bf16(float x) {
  const uint32_t u = __float_as_uint(x);
  if (is_nan(x)) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}
__device__ __forceinline__ float round_to_bf16(float x) { return bf16_to_float(float_to_bf16(x)); }

/// Magnitude bits of a finite f32 rounded to nearest even to `mantissa` fraction bits and exponent bias `bias`.
__device__ inline uint32_t round_magnitude(float x, int mantissa, int bias) {
  const uint32_t u = __float_as_uint(x) & 0x7FFFFFFFu;
  const int exponent = static_cast<int>(u >> 23) - 127, smallest = 1 - bias;
  const int shift = 23 - mantissa + (exponent < smallest ? smallest - exponent : 0);
  if (shift > 25) return 0;
  const uint32_t significand = (u >> 23) == 0 ? (u & 0x7FFFFFu) : ((u & 0x7FFFFFu) | 0x800000u);
  const uint32_t rest = significand & ((1u << shift) - 1), half = 1u << (shift - 1);
  uint32_t kept = significand >> shift;
  if (rest > half || (rest == half && (kept & 1u))) ++kept;
  const int biased = exponent < smallest ? 0 : exponent + bias - 1;
  return kept + (static_cast<uint32_t>(biased) << mantissa);
}
__device__ inline float magnitude_value(uint32_t magnitude, int mantissa, int bias) {
  const int exponent = static_cast<int>(magnitude >> mantissa);
  const uint32_t fraction = magnitude & ((1u << mantissa) - 1);
  const uint32_t significand = exponent == 0 ? fraction : fraction | (1u << mantissa);
  return static_cast<float>(significand) * exp2_int((exponent == 0 ? 1 : exponent) - bias - mantissa);
}

__device__ inline float f16_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, magnitude = h & 0x7FFFu;
  if (magnitude >= 0x7C00u) return __uint_as_float(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
  return __uint_as_float(sign | __float_as_uint(magnitude_value(magnitude, 10, 15)));
}
__device__ inline uint16_t float_to_f16(float x) {
  const uint32_t sign = (__float_as_uint(x) >> 16) & 0x8000u;
  if (is_nan(x)) return static_cast<uint16_t>(sign | 0x7E00u);
  const uint32_t magnitude = is_finite(x) ? round_magnitude(x, 10, 15) : 0x7C00u;
  return static_cast<uint16_t>(sign | (magnitude > 0x7C00u ? 0x7C00u : magnitude));
}
__device__ inline float e4m3_to_float(uint8_t code) {
  const uint32_t magnitude = code & 0x7Fu;
  if (magnitude == 0x7Fu) return __uint_as_float(kCanonicalNan);
  return __uint_as_float(static_cast<uint32_t>(code & 0x80u) << 24 | __float_as_uint(magnitude_value(magnitude, 3, 7)));
}
/// Nearest even, saturating to +-448; NaN gives 0x7F.
__device__ inline uint8_t float_to_e4m3(float x) {
  if (is_nan(x)) return 0x7F;
  const uint32_t sign = (__float_as_uint(x) >> 24) & 0x80u;
  const uint32_t magnitude = is_finite(x) ? round_magnitude(x, 3, 7) : 0x7Eu;
  return static_cast<uint8_t>(sign | (magnitude > 0x7Eu ? 0x7Eu : magnitude));
}
/// Nearest even, saturating to +-6; the sign of zero stays.
__device__ inline uint8_t float_to_e2m1(float x) {
  const uint32_t sign = (__float_as_uint(x) >> 28) & 8u;
  const uint32_t magnitude = is_finite(x) ? round_magnitude(x, 1, 1) : 7u;
  return static_cast<uint8_t>(sign | (magnitude > 7u ? 7u : magnitude));
}
/// Nearest even, saturating to +-240; NaN gives 0x80, zero is 0.
__device__ inline uint8_t float_to_e4m3fnuz(float x) {
  if (is_nan(x)) return 0x80;
  const uint32_t magnitude = is_finite(x) ? round_magnitude(x, 3, 8) : 0x7Fu;
  if (magnitude == 0) return 0;
  const uint32_t sign = (__float_as_uint(x) >> 24) & 0x80u;
  return static_cast<uint8_t>(sign | (magnitude > 0x7Fu ? 0x7Fu : magnitude));
}
/// e = ceil(log2 s), exactly, of a positive finite f32.
__device__ inline int ceil_log2(float s) {
  const uint32_t u = __float_as_uint(s) & 0x7FFFFFFFu;
  if (u >= 0x00800000u) return static_cast<int>(u >> 23) - 127 + ((u & 0x7FFFFFu) != 0 ? 1 : 0);
  const int top = 31 - __clz(static_cast<int>(u));
  return top - 149 + ((u & (u - 1)) != 0 ? 1 : 0);
}

/// a / b of a >= 0, b > 0. Not inlined: its code is long, and most numbers are short.
static __device__ __noinline__ int64_t quotient(int64_t a, int64_t b) {
  return (a | b) >> 32 == 0 ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b;
}

/// f32, bf16, f16 or e4m3 (u8 holds e4m3 codes), widened exactly.
__device__ inline float real(const Tensor& t, int64_t i, int64_t j = 0, int64_t k = 0) {
  switch (t.dtype) {
    case DType::f32: return *element<float>(t, i, j, k);
    case DType::bf16: return bf16_to_float(*element<uint16_t>(t, i, j, k));
    case DType::f16: return f16_to_float(*element<uint16_t>(t, i, j, k));
    default: return e4m3_to_float(*element<uint8_t>(t, i, j, k));
  }
}
__device__ inline void put_real(const Tensor& t, float value, int64_t i, int64_t j = 0, int64_t k = 0) {
  switch (t.dtype) {
    case DType::bf16: *element<uint16_t>(t, i, j, k) = float_to_bf16(value); break;
    case DType::f16: *element<uint16_t>(t, i, j, k) = float_to_f16(value); break;
    default: *element<float>(t, i, j, k) = value;
  }
}

/// Adds to a word of exec.stats, if there are any.
__device__ __forceinline__ void count(uint64_t* stats, Stat stat, uint64_t n) {
  if (stats != nullptr && n != 0) atomicAdd(reinterpret_cast<unsigned long long*>(stats) + stat, n);
}

}  // namespace topkey::cuda
