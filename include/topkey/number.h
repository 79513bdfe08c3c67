// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Scalar number formats, one value at a time, by bits: what e4m3fn, e4m3fnuz, bf16, f16, ue8m0 and e2m1 mean and how f32 is
// rounded to them (nearest even). Shared by every backend, by tools and by callers who decode a cache by hand;
// kernels have faster forms of their own, checked against these. docs/formats.md has the tables.
#pragma once
#include <cstdint>
#include <cstring>

namespace topkey {

inline uint32_t bits_of(float x) noexcept {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}
inline float float_of(uint32_t bits) noexcept {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
/// The one NaN that TopKey writes (docs/numerics.md).
inline float canonical_nan() noexcept { return float_of(0x7FC00000u); }
inline bool is_nan_bits(uint32_t bits) noexcept { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }
inline bool is_finite_bits(uint32_t bits) noexcept { return (bits & 0x7F800000u) != 0x7F800000u; }

/// 2^exponent for -149 <= exponent <= 127, exact.
inline float exp2_int(int exponent) noexcept {
  return exponent >= -126 ? float_of(static_cast<uint32_t>(exponent + 127) << 23)
                          : float_of(uint32_t{1} << (exponent + 149));
}

inline float bf16_to_float(uint16_t b) noexcept { return float_of(static_cast<uint32_t>(b) << 16); }
inline uint16_t float_to_bf16(float x) noexcept {
  const uint32_t u = bits_of(x);
  if (is_nan_bits(u)) return static_cast<uint16_t>((u >> 16) | 0x40u);  // quiet, sign and top payload bits kept
  return static_cast<uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}
inline float round_to_bf16(float x) noexcept { return bf16_to_float(float_to_bf16(x)); }

namespace number {
/// Magnitude bits of an f32 rounded to nearest even to a format with `mantissa` fraction bits, exponent bias `bias` and
/// subnormals; not saturated: the caller compares with its largest code. x must be finite.
inline uint32_t round_magnitude(float x, int mantissa, int bias) noexcept {
  const uint32_t u = bits_of(x) & 0x7FFFFFFFu;
  const int exponent = static_cast<int>(u >> 23) - 127;
  const int smallest = 1 - bias;  // exponent of the smallest normal
  // Below it the format's step stays that of the smallest normal: shift more bits out.
  const int shift = 23 - mantissa + (exponent < smallest ? smallest - exponent : 0);
  if (shift > 25) return 0;  // under half of the smallest subnormal
  const uint32_t significand = (u >> 23) == 0 ? (u & 0x7FFFFFu) : ((u & 0x7FFFFFu) | 0x800000u);
  uint32_t kept = significand >> shift;
  const uint32_t rest = significand & ((uint32_t{1} << shift) - 1);
  const uint32_t half = uint32_t{1} << (shift - 1);
  if (rest > half || (rest == half && (kept & 1u))) ++kept;
  // A normal keeps its hidden bit in `kept`; adding (biased exponent - 1) << mantissa makes a carry run into the
  // exponent.
  const int biased = exponent < smallest ? 0 : exponent + bias - 1;
  return kept + (static_cast<uint32_t>(biased) << mantissa);
}
/// Value of `magnitude` bits in the same kind of format, without infinities or NaN.
inline float magnitude_value(uint32_t magnitude, int mantissa, int bias) noexcept {
  const int exponent = static_cast<int>(magnitude >> mantissa);
  const uint32_t fraction = magnitude & ((uint32_t{1} << mantissa) - 1);
  const uint32_t significand = exponent == 0 ? fraction : fraction | (uint32_t{1} << mantissa);
  return static_cast<float>(significand) * exp2_int((exponent == 0 ? 1 : exponent) - bias - mantissa);
}
}  // namespace number

inline float f16_to_float(uint16_t h) noexcept {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7FFFu;
  if (magnitude >= 0x7C00u) return float_of(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
  return float_of(sign | bits_of(number::magnitude_value(magnitude, 10, 15)));
}
inline uint16_t float_to_f16(float x) noexcept {
  const uint32_t u = bits_of(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  if (is_nan_bits(u)) return static_cast<uint16_t>(sign | 0x7E00u);
  if (!is_finite_bits(u)) return static_cast<uint16_t>(sign | 0x7C00u);
  const uint32_t magnitude = number::round_magnitude(x, 10, 15);
  return static_cast<uint16_t>(sign | (magnitude > 0x7C00u ? 0x7C00u : magnitude));
}

/// e4m3fn: 1-4-3, bias 7, largest 448 (0x7E), NaN 0x7F and 0xFF, no infinity.
inline float e4m3_to_float(uint8_t code) noexcept {
  const uint32_t magnitude = code & 0x7Fu;
  if (magnitude == 0x7Fu) return canonical_nan();
  return float_of(static_cast<uint32_t>(code & 0x80u) << 24 | bits_of(number::magnitude_value(magnitude, 3, 7)));
}
/// Nearest even, saturating to +-448 (infinities too); NaN gives 0x7F with the sign kept out.
inline uint8_t float_to_e4m3(float x) noexcept {
  const uint32_t u = bits_of(x);
  if (is_nan_bits(u)) return 0x7F;
  const uint32_t sign = (u >> 24) & 0x80u;
  const uint32_t magnitude = is_finite_bits(u) ? number::round_magnitude(x, 3, 7) : 0x7Eu;
  return static_cast<uint8_t>(sign | (magnitude > 0x7Eu ? 0x7Eu : magnitude));
}

/// e4m3fnuz: 1-4-3, bias 8, largest 240 (0x7F), NaN 0x80, no infinity and no -0.
inline float e4m3fnuz_to_float(uint8_t code) noexcept {
  if (code == 0x80u) return canonical_nan();
  const float magnitude = number::magnitude_value(code & 0x7Fu, 3, 8);
  return float_of(static_cast<uint32_t>(code & 0x80u) << 24 | bits_of(magnitude));
}
/// Nearest even, saturating to +-240 (infinities too); NaN gives 0x80, -0 gives 0x00.
inline uint8_t float_to_e4m3fnuz(float x) noexcept {
  const uint32_t u = bits_of(x);
  if (is_nan_bits(u)) return 0x80;
  const uint32_t magnitude = is_finite_bits(u) ? number::round_magnitude(x, 3, 8) : 0x7Fu;
  const uint32_t sign = magnitude == 0 ? 0 : (u >> 24) & 0x80u;
  return static_cast<uint8_t>(sign | (magnitude > 0x7Fu ? 0x7Fu : magnitude));
}

/// ue8m0: byte b = 2^(b - 127); 255 is NaN, 0 is 2^-127.
inline float e8m0_to_float(uint8_t byte) noexcept {
  return byte == 255 ? canonical_nan() : exp2_int(static_cast<int>(byte) - 127);
}

/// e2m1: codes 0..7 = 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign. Nearest even on the code, saturating; sign of
/// zero kept.
inline float e2m1_to_float(uint8_t code) noexcept {
  return float_of(static_cast<uint32_t>(code & 8u) << 28 | bits_of(number::magnitude_value(code & 7u, 1, 1)));
}
inline uint8_t float_to_e2m1(float x) noexcept {
  const uint32_t u = bits_of(x);
  const uint32_t magnitude = is_finite_bits(u) ? number::round_magnitude(x, 1, 1) : 7u;
  return static_cast<uint8_t>(((u >> 28) & 8u) | (magnitude > 7u ? 7u : magnitude));
}

/// e = ceil(log2 s), exactly, from the bits of a positive finite f32 (subnormals too): the ue8m0 scale of s is 2^e.
inline int ceil_log2(float s) noexcept {
  const uint32_t u = bits_of(s) & 0x7FFFFFFFu;
  if (u >= 0x00800000u) return static_cast<int>(u >> 23) - 127 + ((u & 0x7FFFFFu) != 0 ? 1 : 0);
  int top = 0;  // subnormal: index of the highest set bit, weight 2^(top - 149)
  for (uint32_t rest = u; rest > 1; rest >>= 1) ++top;
  return top - 149 + ((u & (u - 1)) != 0 ? 1 : 0);
}

}  // namespace topkey
