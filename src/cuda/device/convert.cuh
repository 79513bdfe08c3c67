// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Codes to the tensor core's 16-bit operands, exactly: four consecutive elements of a row at a time. A new format is one
// more struct here (its scales inside the operand where they are powers of two) and a line in score.cu.
#pragma once
#include "cuda/device/ptx.cuh"
#include "cuda/device/view.cuh"

namespace topkey::cuda {

/// Elements d .. d+1 and d+2 .. d+3 as two pairs.
struct Four {
  uint32_t low, high;
};

/// 4 bytes at any address.
__device__ __forceinline__ uint32_t load_word(const uint8_t* at, bool words) {
  if (words) return *reinterpret_cast<const uint32_t*>(at);
  return at[0] | static_cast<uint32_t>(at[1]) << 8 | static_cast<uint32_t>(at[2]) << 16 |
         static_cast<uint32_t>(at[3]) << 24;
}

/// e4m3fn, or e4m3fnuz of AMD caches: bias 8, one NaN (0x80).
template <bool kFnuz>
struct E4m3Codes {
  static constexpr bool kHalf = false, kOuterScale = true, kBlockScales = false;
  static constexpr int kBytes = 1;  ///< of a tensor's element
  /// Bytes before element d.
  __host__ __device__ static constexpr int offset(int d) { return d; }
  /// bf16 has e4m3's fraction and a wider exponent: the code's bits, shifted, are its value times 2^-120 (fnuz: 2^-119),
  /// subnormals included; one exact product puts that right. NaN codes would come out as numbers: has_nan finds them.
  __device__ static Four convert(uint32_t word) {
    constexpr uint32_t kPower = kFnuz ? 0x7B007B00u : 0x7B807B80u;
    const uint32_t low = __byte_perm(word, 0, 0x1404), high = __byte_perm(word, 0, 0x3424);
    return {mul_bf16x2(((low >> 4) & 0x07F007F0u) | (low & 0x80008000u), kPower),
            mul_bf16x2(((high >> 4) & 0x07F007F0u) | (high & 0x80008000u), kPower)};
  }
  __device__ static bool has_nan(uint32_t word) {
    if (!kFnuz) return (((word & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u) != 0;
    const uint32_t zero_at_nan = word ^ 0x80808080u;
    return ((zero_at_nan - 0x01010101u) & ~zero_at_nan & 0x80808080u) != 0;
  }
  __device__ static bool is_nan_code(uint8_t code) { return kFnuz ? code == 0x80 : (code & 0x7F) == 0x7F; }
  /// What four elements are in memory, 4-byte aligned; and what that is as an operand. Apart, so that many reads are
  /// under way before the first is looked at.
  __device__ static Four read(const uint8_t* row, int d) {
    return {__ldg(reinterpret_cast<const uint32_t*>(row + d)), 0};
  }
  __device__ static Four operand(Four f, bool& nan) {
    nan |= has_nan(f.low);
    return convert(f.low);
  }
  /// The same where the row may end within the four: `left` elements from d on.
  __device__ static Four load_part(const uint8_t* row, int d, int left, bool& nan) {
    uint32_t word = 0;
    for (int i = 0; i < left && i < 4; ++i) word |= static_cast<uint32_t>(row[d + i]) << (8 * i);
    nan |= has_nan(word);
    return convert(word);
  }
};

using Fp8Codes = E4m3Codes<false>;
using FnuzCodes = E4m3Codes<true>;

/// Four elements of a query from d on, as an operand; NaN codes as NaN. Elements past `left` are 0.
template <class Codes>
__device__ __forceinline__ Four query_operand(const uint8_t* row, int d, int left) {
  bool nan = false;
  const uint8_t* at = row + Codes::kBytes * d;
  const bool words = left >= 4 && reinterpret_cast<uint64_t>(at) % 4 == 0;
  const Four f = words ? Codes::operand(Codes::read(row, d), nan) : Codes::load_part(row, d, left, nan);
  if constexpr (Codes::kOuterScale) {
    if (!nan) return f;
    uint32_t h[4];
    for (int i = 0; i < 4; ++i) {
      const bool own = i < left && Codes::is_nan_code(at[i]);
      h[i] = own ? 0x7FC0u : ((i < 2 ? f.low : f.high) >> (16 * (i & 1)) & 0xFFFFu);
    }
    return {h[0] | h[1] << 16, h[2] | h[3] << 16};
  }
  return f;
}

/// bf16 or f16 as they are.
template <bool kF16>
struct PlainCodes {
  static constexpr bool kHalf = kF16, kOuterScale = false, kBlockScales = false;
  static constexpr int kBytes = 2;
  __host__ __device__ static constexpr int offset(int d) { return 2 * d; }
  __device__ static Four read(const uint8_t* row, int d) {
    const uint32_t* at = reinterpret_cast<const uint32_t*>(row + 2 * d);
    return {__ldg(at), __ldg(at + 1)};
  }
  __device__ static Four operand(Four f, bool&) { return f; }
  __device__ static Four load_part(const uint8_t* row, int d, int left, bool&) {
    uint32_t h[2] = {0, 0};
    for (int i = 0; i < 2 * left && i < 8; ++i) h[i / 4] |= static_cast<uint32_t>(row[2 * d + i]) << (8 * (i % 4));
    return {h[0], h[1]};
  }
};

/// e2m1 codes, and a ue8m0 byte for each 32 of them inside the operand. 6 * 2^127 is no bf16, so an element is held as a
/// quarter of itself, 2^-130 to 1.5 * 2^127: exact for every byte, subnormals included; a score is put right by kUp.
struct Mxfp4Codes {
  static constexpr bool kHalf = false, kOuterScale = false, kBlockScales = true;
  static constexpr int kBytes = 1;
  static constexpr float kUp = 16.0f;
  __host__ __device__ static constexpr int offset(int d) { return d / 2; }
  /// Four codes, 2-byte aligned.
  __device__ static Four read(const uint8_t* row, int d) {
    return {__ldg(reinterpret_cast<const uint16_t*>(row + d / 2)), 0};
  }
  /// The same at any address. A row never ends within the four: D is a multiple of 32.
  __device__ static Four read_bytes(const uint8_t* row, int d) {
    return {row[d / 2] | static_cast<uint32_t>(row[d / 2 + 1]) << 8, 0};
  }
  /// 2^(byte - 127) as bf16, twice; 255 is NaN.
  __device__ static uint32_t scale_pair(uint32_t byte) {
    const uint32_t scale = byte == 255 ? 0x7FC0u : byte == 0 ? 0x0040u : byte << 7;
    return scale | scale << 16;
  }
  /// Quarters of four codes (bits 0 to 15). Their magnitudes pick the bytes of 0, 1/8, 1/4, 3/8, 1/2, 3/4, 1 and 3/2 as
  /// bf16; bit 3 of each code is the sign.
  __device__ static Four quarters(uint32_t codes) {
    const uint32_t pick = codes & 0x7777u;
    const uint32_t high = __byte_perm(0x3E3E3E00u, 0x3F3F3F3Fu, pick),
                   low = __byte_perm(0xC0800000u, 0xC0804000u, pick);
    return {__byte_perm(low, high, 0x5140) | (codes << 12 & 0x8000u) | (codes << 24 & 0x80000000u),
            __byte_perm(low, high, 0x7362) | (codes << 4 & 0x8000u) | (codes << 16 & 0x80000000u)};
  }
  /// NaN where the scale is: with it every product, and so the score.
  __device__ static Four operand(Four f, uint32_t scale) {
    const Four q = quarters(f.low);
    return {mul_bf16x2(q.low, scale), mul_bf16x2(q.high, scale)};
  }
};

}  // namespace topkey::cuda
