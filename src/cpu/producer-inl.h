// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// One vector, from a model's dtype to codes: widen, transform-inl.h, amax, quantise. Scratch x[dim] is padded with
// zeros to 32 floats.
#if defined(TOPKEY_CPU_PRODUCER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TOPKEY_CPU_PRODUCER_INL_H_
#undef TOPKEY_CPU_PRODUCER_INL_H_
#else
#define TOPKEY_CPU_PRODUCER_INL_H_
#endif

#include <cstring>

#include "cpu/producer.h"
#include "cpu/round-inl.h"
#include "cpu/transform-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace topkey::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class LoadAs>
HWY_INLINE void WidenAs(const LoadAs& load, const void* from, int64_t n, float* to) {
  ForLanes(n, [&](auto d, int64_t i) HWY_ATTR { hn::StoreU(load(d, from, i), d, to + i); });
}

void Widen(DType dtype, const void* from, int64_t n, float* to) {
  switch (dtype) {
    case DType::bf16: WidenAs(LoadBf16(), from, n, to); break;
    case DType::f16: WidenAs(LoadF16(), from, n, to); break;
    default: WidenAs(LoadF32(), from, n, to);
  }
  ClearPadding(to, n);
}

// ---- codes
// -----------------------------------------------------------------------------------------------------------------

/// Bits of max |x|, at or above those of infinity where a value is inf or NaN. With kBf16 x is first rounded to bf16,
/// in place.
template <bool kBf16>
HWY_INLINE uint32_t AmaxBits(float* x, int64_t n) {
  const ProducerTag d;
  const hn::RebindToSigned<ProducerTag> di;
  const int64_t step = static_cast<int64_t>(hn::Lanes(d));
  auto amax = hn::Zero(di);
  for (int64_t i = 0; i < n; i += step) {
    auto v = hn::Load(d, x + i);
    if constexpr (kBf16) {
      v = RoundToBf16()(d, v);
      hn::Store(v, d, x + i);
    }
    amax = hn::Max(amax, MagnitudeBits(d, v));
  }
  return static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(di, amax)));
}

struct ToE4m3 {
  static constexpr float kLargest = 448.0f;
  static constexpr uint8_t kNan = 0x7F;
  template <class D>
  HWY_INLINE hn::Vec<hn::Rebind<uint8_t, D>> operator()(D d, hn::Vec<D> x) const {
    return E4m3Codes(d, x);
  }
};
/// 240 exists, but engines scale to 224.
struct ToE4m3fnuz {
  static constexpr float kLargest = 224.0f;
  static constexpr uint8_t kNan = 0x80;
  template <class D>
  HWY_INLINE hn::Vec<hn::Rebind<uint8_t, D>> operator()(D d, hn::Vec<D> x) const {
    return E4m3fnuzCodes(d, x);
  }
};

template <class To>
HWY_INLINE float QuantizeFp8(const To& to_codes, const Recipe& r, float* x, uint8_t* codes) {
  const int64_t n = padded_dim(r.dim);
  const uint32_t amax = r.whole_bf16 ? AmaxBits<true>(x, n) : AmaxBits<false>(x, n);
  if (!is_finite_bits(amax)) {
    std::memset(codes, To::kNan, static_cast<size_t>(r.dim));
    return canonical_nan();
  }
  const float a = float_of(amax) > r.floor ? float_of(amax) : r.floor;
  const float s = r.by_reciprocal ? a * (1.0f / To::kLargest) : a / To::kLargest;
  if (!r.power_of_two) {
    ForLanes(r.dim, [&](auto d, int64_t i) HWY_ATTR {
      const hn::Rebind<uint8_t, decltype(d)> d8;
      hn::StoreU(to_codes(d, hn::Div(hn::LoadU(d, x + i), hn::Set(d, s))), d8, codes + i);
    });
    return s;
  }
  const int e = ceil_log2(s);
  const float inverse = exp2_int(-e);  // a >= 1e-10, so e is within -42..121 and the inverse is normal
  ForLanes(r.dim, [&](auto d, int64_t i) HWY_ATTR {
    const hn::Rebind<uint8_t, decltype(d)> d8;
    hn::StoreU(to_codes(d, hn::Mul(hn::LoadU(d, x + i), hn::Set(d, inverse))), d8, codes + i);
  });
  return exp2_int(e);
}

/// 32 values to 16 bytes of e2m1 pairs, low nibble first; returns the ue8m0 scale.
template <bool kBf16>
HWY_INLINE uint8_t QuantizeMxfp4(float* x, uint8_t* codes) {
  const uint32_t amax = AmaxBits<kBf16>(x, 32);
  if (!is_finite_bits(amax)) {
    std::memset(codes, 0, 16);
    return 255;
  }
  const float floor = 6.0f * float_of(0x00800000u);  // 6 * 2^-126
  const float a = float_of(amax) > floor ? float_of(amax) : floor;
  const int e = ceil_log2(a / 6.0f);  // within -126..126: a / 6 cannot leave that
  const float inverse = exp2_int(-e);
  uint8_t each[32];
  ForLanes(32, [&](auto d, int64_t i) HWY_ATTR {
    const hn::Rebind<uint8_t, decltype(d)> d8;
    hn::StoreU(E2m1Codes(d, hn::Mul(hn::LoadU(d, x + i), hn::Set(d, inverse))), d8, each + i);
  });
  for (int64_t i = 0; i < 16; ++i) codes[i] = static_cast<uint8_t>(each[2 * i] | each[2 * i + 1] << 4);
  return static_cast<uint8_t>(e + 127);
}

/// 32 values to an f16 scale and 32 int8.
HWY_INLINE void QuantizeBlock(float* x, uint8_t* block) {
  const uint32_t amax = AmaxBits<false>(x, 32);
  const float d = float_of(amax) / 127.0f, inverse = 1.0f / d;
  const uint16_t stored = is_finite_bits(amax) ? float_to_f16(d) : uint16_t{0x7E00};
  std::memcpy(block, &stored, sizeof stored);
  // d so small that 1 / d overflows quantises to zeros, like d = 0.
  if (!is_finite_bits(amax) || !is_finite_bits(bits_of(inverse))) {
    std::memset(block + 2, 0, 32);
    return;
  }
  const ProducerTag df;
  const hn::RebindToSigned<ProducerTag> di;
  const hn::Rebind<int8_t, ProducerTag> d8;
  const int64_t step = static_cast<int64_t>(hn::Lanes(df));
  for (int64_t i = 0; i < 32; i += step) {
    const auto y = hn::Mul(hn::Load(df, x + i), hn::Set(df, inverse));
    // Half away from zero; |y| + 0.5 could round up what is just below a half.
    const auto magnitude = hn::Abs(y), down = hn::Trunc(magnitude);
    const auto half_up = hn::IfThenElseZero(hn::Ge(hn::Sub(magnitude, down), hn::Set(df, 0.5f)), hn::Set(df, 1.0f));
    const auto held = hn::Min(hn::Add(down, half_up), hn::Set(df, 127.0f));
    const auto code = hn::DemoteTo(d8, hn::ConvertTo(di, hn::CopySign(held, y)));
    hn::StoreU(code, d8, reinterpret_cast<int8_t*>(block + 2) + i);
  }
}

template <class StoreAs>
HWY_INLINE void StorePlain(const StoreAs& store, const float* x, int64_t n, void* to) {
  ForLanes(n, [&](auto d, int64_t i) HWY_ATTR { store(d, hn::LoadU(d, x + i), to, i); });
}

float Produce(const Recipe& r, const void* from, const float* cos_sin, const float* weight, const float* bias, float* x,
              const CodesOut& out) {
  void* const to = out.codes;
  Widen(r.input, from, r.dim, x);
  if (r.norm != NormKind::none) ApplyNorm(r, weight, bias, x);
  if (r.rope_dim > 0) ApplyRope(r, cos_sin, x);
  if (r.hadamard_scale != 0.0f) ApplyHadamard(r, x);
  switch (r.codes) {
    case Codes::fp8: return QuantizeFp8(ToE4m3(), r, x, static_cast<uint8_t*>(to));
    case Codes::fp8_fnuz: return QuantizeFp8(ToE4m3fnuz(), r, x, static_cast<uint8_t*>(to));
    case Codes::mxfp4:
      for (int64_t b = 0; b < r.dim / 32; ++b) {
        uint8_t* const codes = static_cast<uint8_t*>(to) + b * 16;
        out.block_scales[b] =
            r.whole_bf16 ? QuantizeMxfp4<true>(x + b * 32, codes) : QuantizeMxfp4<false>(x + b * 32, codes);
      }
      break;
    case Codes::q8_0:
      for (int64_t b = 0; b < r.dim / 32; ++b) QuantizeBlock(x + b * 32, static_cast<uint8_t*>(to) + b * 34);
      break;
    case Codes::bf16: StorePlain(StoreBf16(), x, r.dim, to); break;
    case Codes::f16: StorePlain(StoreF16(), x, r.dim, to); break;
    case Codes::f32: StorePlain(StoreF32(), x, r.dim, to); break;
  }
  return 0.0f;
}

}  // namespace HWY_NAMESPACE
}  // namespace topkey::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
