// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Key bytes to panels. Keys are taken in groups of 8: 16 bytes of each are transposed by interleaving (the same three
// stages for bytes, halves and words), so that the 8 keys of one d lie side by side, then converted exactly to f32.
// One conversion per format; done once per tile for all rows and heads.
#if defined(TOPKEY_CPU_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TOPKEY_CPU_DECODE_INL_H_
#undef TOPKEY_CPU_DECODE_INL_H_
#else
#define TOPKEY_CPU_DECODE_INL_H_
#endif

#include <cstring>

#include "cpu/dot-inl.h"
#include "cpu/kernels.h"
#include "hwy/highway.h"
#include "topkey/format.h"

HWY_BEFORE_NAMESPACE();
namespace topkey::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// 8 keys x 16 bytes, transposed: out[16 / sizeof(T)][8] of T. True if one of the bytes is an e4m3 NaN code (asked
/// for with kFindNan).
template <class T, bool kFindNan>
HWY_INLINE bool Transpose8(const uint8_t* const* rows, int64_t offset, uint8_t* HWY_RESTRICT out) {
#if HWY_TARGET == HWY_SCALAR
  bool nan = false;
  for (int64_t key = 0; key < 8; ++key) {
    for (int64_t i = 0; i < static_cast<int64_t>(16 / sizeof(T)); ++i) {
      std::memcpy(out + (i * 8 + key) * static_cast<int64_t>(sizeof(T)),
                  rows[key] + offset + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    }
    for (int64_t i = 0; kFindNan && i < 16; ++i) nan = nan || (rows[key][offset + i] & 0x7F) == 0x7F;
  }
  return nan;
#else
  const hn::CappedTag<uint8_t, 16> d8;
  const hn::Repartition<T, decltype(d8)> d;
  using V = hn::Vec<decltype(d)>;
  const auto load = [&](int64_t key) HWY_ATTR { return hn::BitCast(d, hn::LoadU(d8, rows[key] + offset)); };
  const V k0 = load(0), k1 = load(1), k2 = load(2), k3 = load(3), k4 = load(4), k5 = load(5), k6 = load(6),
          k7 = load(7);
  bool nan = false;
  if (kFindNan) {
    // Doubling drops the sign: a NaN code, and nothing else, becomes 0xFE.
    const auto twice = [&](V v) HWY_ATTR { return hn::Add(hn::BitCast(d8, v), hn::BitCast(d8, v)); };
    const auto m0 = hn::Max(hn::Max(twice(k0), twice(k1)), hn::Max(twice(k2), twice(k3)));
    const auto m1 = hn::Max(hn::Max(twice(k4), twice(k5)), hn::Max(twice(k6), twice(k7)));
    nan = !hn::AllFalse(d8, hn::Eq(hn::Max(m0, m1), hn::Set(d8, uint8_t{0xFE})));
  }
  const auto quarter = [&](V a0, V a1, V a2, V a3, uint8_t* to) HWY_ATTR {
    const V even_low = hn::InterleaveLower(d, a0, a2), odd_low = hn::InterleaveLower(d, a1, a3);
    const V even_high = hn::InterleaveUpper(d, a0, a2), odd_high = hn::InterleaveUpper(d, a1, a3);
    hn::StoreU(hn::BitCast(d8, hn::InterleaveLower(d, even_low, odd_low)), d8, to);
    hn::StoreU(hn::BitCast(d8, hn::InterleaveUpper(d, even_low, odd_low)), d8, to + 16);
    hn::StoreU(hn::BitCast(d8, hn::InterleaveLower(d, even_high, odd_high)), d8, to + 32);
    hn::StoreU(hn::BitCast(d8, hn::InterleaveUpper(d, even_high, odd_high)), d8, to + 48);
  };
  quarter(hn::InterleaveLower(d, k0, k4), hn::InterleaveLower(d, k1, k5), hn::InterleaveLower(d, k2, k6),
          hn::InterleaveLower(d, k3, k7), out);
  quarter(hn::InterleaveUpper(d, k0, k4), hn::InterleaveUpper(d, k1, k5), hn::InterleaveUpper(d, k2, k6),
          hn::InterleaveUpper(d, k3, k7), out + 64);
  return nan;
#endif
}

/// Converts [count][8] transposed elements to f32 at panel + i * stride. Each functor below is one key format.
/// Vectors of 16 floats take two d at a
/// time: half the widening shuffles, which are what limits this (port 5 of Intel's cores).
template <class Convert>
HWY_INLINE void Convert8(const uint8_t* HWY_RESTRICT from, int64_t count, int64_t bytes, const Convert& convert,
                         float* HWY_RESTRICT panel, int64_t stride) {
  const hn::CappedTag<float, 8> d;
  int64_t i = 0;
#if HWY_TARGET == HWY_AVX3
  const hn::CappedTag<float, 16> pair;
  for (; i + 2 <= count && Convert::kPairs; i += 2) {
    const auto both = convert(pair, from + i * 8 * bytes, 0);
    hn::Store(hn::LowerHalf(d, both), d, panel + i * stride);
    hn::Store(hn::UpperHalf(d, both), d, panel + (i + 1) * stride);
  }
#endif
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (; i < count; ++i) {
    for (int64_t j = 0; j < 8; j += lanes) {
      hn::Store(convert(d, from + (i * 8 + j) * bytes, j), d, panel + i * stride + j);
    }
  }
}

/// Codes of a sign, four exponent bits and three fraction bits to f16: shifted to f16's fields an e4m3 code is its value
/// times 2^-8 (e4m3fnuz: 2^-7), subnormals included. NaN codes are mended afterwards. A step of its own, by whole vectors:
/// the conversion that follows then widens as it loads.
HWY_INLINE void HalvesOfBytes(const uint8_t* HWY_RESTRICT codes, int64_t count, uint8_t* HWY_RESTRICT halves) {
  const hn::CappedTag<int16_t, 16> d16;  // 16 codes: what one store of the transposition wrote can be forwarded
  const hn::Rebind<int8_t, decltype(d16)> d8;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d16));
  for (int64_t i = 0; i < count; i += lanes) {
    const auto wide = hn::PromoteTo(d16, hn::LoadU(d8, reinterpret_cast<const int8_t*>(codes + i)));
    const auto half = hn::And(hn::ShiftLeft<7>(wide), hn::Set(d16, static_cast<int16_t>(0xBF80)));
    hn::StoreU(half, d16, reinterpret_cast<int16_t*>(halves + 2 * i));
  }
}
struct FromE4m3 {
  static constexpr bool kPairs = true;
  static constexpr bool kHalves = true;  // takes what HalvesOfBytes made
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, const uint8_t* from, int64_t) const {
    const hn::Rebind<uint16_t, D> du16;
    const hn::Rebind<hwy::float16_t, D> df16;
    const auto half = hn::LoadU(du16, reinterpret_cast<const uint16_t*>(from));
    return hn::Mul(hn::PromoteTo(d, hn::BitCast(df16, half)), hn::Set(d, 256.0f));
  }
};

/// e4m3fnuz likewise. Its NaN is the code of a negative zero.
struct FromE4m3fnuz {
  static constexpr bool kPairs = true;
  static constexpr bool kHalves = true;
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, const uint8_t* from, int64_t) const {
    const hn::Rebind<uint16_t, D> du16;
    const hn::Rebind<hwy::float16_t, D> df16;
    const hn::RebindToUnsigned<D> du;
    const auto half = hn::LoadU(du16, reinterpret_cast<const uint16_t*>(from));
    const auto value = hn::Mul(hn::PromoteTo(d, hn::BitCast(df16, half)), hn::Set(d, 128.0f));
    const auto is_nan = hn::RebindMask(d, hn::Eq(hn::BitCast(du, value), hn::Set(du, 0x80000000u)));
    return hn::IfThenElse(is_nan, hn::BitCast(d, hn::Set(du, 0x7FC00000u)), value);
  }
};

/// Bytes that SplitPairs has made of e2m1 codes, as halves, times their block's scale, one a key. A byte shifted to
/// f16's fields is a quarter of the code's value (kMxfp4Down); no code is a NaN, but a scale may be.
struct FromE2m1 {
  static constexpr bool kPairs = true;
  static constexpr bool kHalves = true;
  const float* scales;  // [16]: of 8 keys, twice
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, const uint8_t* from, int64_t key) const {
    const hn::Rebind<uint16_t, D> du16;
    const hn::Rebind<hwy::float16_t, D> df16;
    const auto half = hn::LoadU(du16, reinterpret_cast<const uint16_t*>(from));
    return hn::Mul(hn::PromoteTo(d, hn::BitCast(df16, half)), hn::LoadU(d, scales + key));
  }
};

struct FromBf16 {
  static constexpr bool kPairs = true;
  static constexpr bool kHalves = false;
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, const uint8_t* from, int64_t) const {
    const hn::Rebind<uint16_t, D> du16;
    const hn::Rebind<uint32_t, D> du32;
    const auto half = hn::LoadU(du16, reinterpret_cast<const uint16_t*>(from));
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du32, half)));
  }
};

struct FromF16 {
  static constexpr bool kPairs = true;
  static constexpr bool kHalves = false;
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, const uint8_t* from, int64_t) const {
#if HWY_TARGET == HWY_SCALAR
    // Highway's scalar conversion takes inf and NaN for numbers.
    uint16_t half;
    std::memcpy(&half, from, sizeof half);
    return hn::Set(d, f16_to_float(half));
#else
    const hn::Rebind<uint16_t, D> du16;
    const hn::Rebind<hwy::float16_t, D> df16;
    return hn::PromoteTo(d, hn::BitCast(df16, hn::LoadU(du16, reinterpret_cast<const uint16_t*>(from))));
#endif
  }
};

struct FromF32 {
  static constexpr bool kPairs = true;
  static constexpr bool kHalves = false;
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, const uint8_t* from, int64_t) const {
    return hn::LoadU(d, reinterpret_cast<const float*>(from));
  }
};

/// int8 times the block's own scale, one scale a key.
struct FromInt8 {
  static constexpr bool kPairs = false;  // one scale a key, for 8 keys
  static constexpr bool kHalves = false;
  const float* scales;  // [8]
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, const uint8_t* from, int64_t key) const {
    const hn::Rebind<int8_t, D> di8;
    const hn::Rebind<int32_t, D> di32;
    const auto wide = hn::PromoteTo(di32, hn::LoadU(di8, reinterpret_cast<const int8_t*>(from)));
    return hn::Mul(hn::ConvertTo(d, wide), hn::LoadU(d, scales + key));
  }
};

/// `count` transposed elements of 8 rows to a panel.
template <class T, class Convert>
HWY_INLINE void ConvertStep(const uint8_t* HWY_RESTRICT transposed, int64_t count, const Convert& convert, float* panel,
                            int64_t stride) {
  if (Convert::kHalves) {
    HWY_ALIGN uint8_t halves[256];
    HalvesOfBytes(transposed, 128, halves);
    Convert8(halves, count, 2, convert, panel, stride);
  } else {
    Convert8(transposed, count, sizeof(T), convert, panel, stride);
  }
}

/// `bytes` bytes of 8 rows from `offset` on, 16 at a time; a tail shorter than 16 goes through a padded copy.
template <class T, bool kFindNan, class Convert>
HWY_INLINE bool Decode8(const uint8_t* const* rows, int64_t offset, int64_t bytes, const Convert& convert, float* panel,
                        int64_t stride) {
  HWY_ALIGN uint8_t transposed[128];
  constexpr int64_t kStep = 16 / static_cast<int64_t>(sizeof(T));
  bool nan = false;
  int64_t at = 0;
  for (; at + 16 <= bytes; at += 16, panel += kStep * stride) {
    nan |= Transpose8<T, kFindNan>(rows, offset + at, transposed);
    ConvertStep<T>(transposed, kStep, convert, panel, stride);
  }
  if (at < bytes) {
    uint8_t padded[8][16] = {};
    const uint8_t* tails[8];
    for (int key = 0; key < 8; ++key) {
      std::memcpy(padded[key], rows[key] + offset + at, static_cast<size_t>(bytes - at));
      tails[key] = padded[key];
    }
    nan |= Transpose8<T, kFindNan>(tails, 0, transposed);
    ConvertStep<T>(transposed, (bytes - at) / static_cast<int64_t>(sizeof(T)), convert, panel, stride);
  }
  return nan;
}

/// e4m3 NaN codes of 8 keys, which FromE4m3 reads as 480.
HWY_NOINLINE void MendNan(const uint8_t* const* rows, int64_t dim, float* panel, int64_t stride) {
  for (int64_t key = 0; key < 8; ++key) {
    for (int64_t i = 0; i < dim; ++i) {
      if ((rows[key][i] & 0x7F) == 0x7F) panel[i * stride + key] = canonical_nan();
    }
  }
}

HWY_INLINE void DecodeQ80(const uint8_t* const* rows, int64_t dim, float* panel, int64_t stride) {
  for (int64_t block = 0; block < dim / 32; ++block) {
    HWY_ALIGN float scales[8];
    for (int key = 0; key < 8; ++key) {
      uint16_t half;
      std::memcpy(&half, rows[key] + block * 34, sizeof half);
      scales[key] = f16_to_float(half);
    }
    Decode8<uint8_t, false>(rows, block * 34 + 2, 32, FromInt8{scales}, panel + block * 32 * stride, stride);
  }
}

/// Sign, four exponent bits and three fraction bits of a quarter of each e2m1 code: f16's own bits 14 to 7, below 2.
HWY_ALIGN constexpr uint8_t kQuarterBytes[16] = {0x00, 0x60, 0x68, 0x6C, 0x70, 0x74, 0x78, 0x7C,
                                                 0x80, 0xE0, 0xE8, 0xEC, 0xF0, 0xF4, 0xF8, 0xFC};

/// 16 transposed bytes of 8 keys to 32 codes of 8 keys: low nibbles are the even d.
HWY_INLINE void SplitPairs(const uint8_t* HWY_RESTRICT pairs, uint8_t* HWY_RESTRICT codes) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t i = 0; i < 16; ++i) {
    for (int64_t key = 0; key < 8; ++key) {
      const uint8_t pair = pairs[i * 8 + key];
      codes[i * 16 + key] = kQuarterBytes[pair & 15];
      codes[i * 16 + 8 + key] = kQuarterBytes[pair >> 4];
    }
  }
#else
  const hn::CappedTag<uint8_t, 16> d;
  const hn::Repartition<uint64_t, decltype(d)> d64;  // 8 keys of one d
  const auto table = hn::Load(d, kQuarterBytes);
  for (int64_t i = 0; i < 128; i += 16) {
    const auto pair = hn::Load(d, pairs + i);
    const auto even = hn::BitCast(d64, hn::TableLookupBytes(table, hn::And(pair, hn::Set(d, uint8_t{15}))));
    const auto odd = hn::BitCast(d64, hn::TableLookupBytes(table, hn::ShiftRight<4>(pair)));
    hn::Store(hn::BitCast(d, hn::InterleaveLower(d64, even, odd)), d, codes + 2 * i);
    hn::Store(hn::BitCast(d, hn::InterleaveUpper(d64, even, odd)), d, codes + 2 * i + 16);
  }
#endif
}

HWY_INLINE void DecodeMxfp4(KeyRows rows, int64_t dim, float* panel, int64_t stride) {
  HWY_ALIGN uint8_t pairs[128], codes[256], halves[512];
  HWY_ALIGN float scales[16];
  for (int64_t block = 0; block < dim / 32; ++block) {
    for (int64_t key = 0; key < 8; ++key) scales[key] = scales[key + 8] = e8m0_to_float(rows.scales[key][block]);
    Transpose8<uint8_t, false>(rows.values, block * 16, pairs);
    SplitPairs(pairs, codes);
    HalvesOfBytes(codes, 256, halves);
    Convert8(halves, 32, 2, FromE2m1{scales}, panel + block * 32 * stride, stride);
  }
}

/// One group of 8 rows.
HWY_INLINE void DecodeGroup(KeyFormat format, KeyRows keys, int64_t dim, float* panel, int64_t stride) {
  const uint8_t* const* rows = keys.values;
  switch (format) {
    case KeyFormat::bf16: Decode8<uint16_t, false>(rows, 0, 2 * dim, FromBf16{}, panel, stride); break;
    case KeyFormat::f16: Decode8<uint16_t, false>(rows, 0, 2 * dim, FromF16{}, panel, stride); break;
    case KeyFormat::f32: Decode8<uint32_t, false>(rows, 0, 4 * dim, FromF32{}, panel, stride); break;
    case KeyFormat::q8_0: DecodeQ80(rows, dim, panel, stride); break;
    case KeyFormat::mxfp4: DecodeMxfp4(keys, dim, panel, stride); break;
    case KeyFormat::fp8_fnuz: Decode8<uint8_t, false>(rows, 0, dim, FromE4m3fnuz{}, panel, stride); break;
    default:
      if (Decode8<uint8_t, true>(rows, 0, dim, FromE4m3{}, panel, stride)) MendNan(rows, dim, panel, stride);
  }
}

void Decode(KeyFormat format, KeyRows keys, int64_t count, int64_t dim, float* panels) {
  const int64_t stride = PanelKeys();
  for (int64_t key = 0; key < count; key += 8) {
    DecodeGroup(format, {keys.values + key, keys.scales + key}, dim,
                panels + key / stride * dim * stride + key % stride, stride);
  }
}

void Pack(KeyFormat format, KeyRows heads, int64_t dim, float* scratch, float* out) {
  if (kHeadBlock == 8) {
    DecodeGroup(format, heads, dim, out, 8);
    return;
  }
  DecodeGroup(format, heads, dim, scratch, 8);
  for (int64_t block = 0; block < 8; block += kHeadBlock) {
    for (int64_t i = 0; i < dim; ++i, out += kHeadBlock) {
      std::memcpy(out, scratch + i * 8 + block, static_cast<size_t>(kHeadBlock) * sizeof *out);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace topkey::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
