// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Number formats in vectors, for the producers: f32, bf16, f16, e4m3, e4m3fnuz and e2m1 by the same bits as topkey/number.h, which
// the tests compare them with value by value. Rounding adds a power of two whose ulp is the target's step, so that
// the adder rounds to nearest even, subnormals included; only the bits of the sum are used. NaN payloads are not
// kept: what is stored is the one NaN of docs/numerics.md.
#if defined(TOPKEY_CPU_ROUND_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TOPKEY_CPU_ROUND_INL_H_
#undef TOPKEY_CPU_ROUND_INL_H_
#else
#define TOPKEY_CPU_ROUND_INL_H_
#endif

#include "hwy/highway.h"
#include "topkey/number.h"

HWY_BEFORE_NAMESPACE();
namespace topkey::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Vectors of the producers. Their lanes divide 32, so scratch that is padded to 32 floats is whole vectors.
using ProducerTag = hn::CappedTag<float, 32>;

/// f(d, i) over whole vectors, then lane by lane: nothing at or beyond n is touched.
template <class F>
HWY_INLINE void ForLanes(int64_t n, const F& f) {
  const ProducerTag d;
  const hn::CappedTag<float, 1> one;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) f(d, i);
  for (; i < n; ++i) f(one, i);
}

template <class D>
using IntOf = hn::Vec<hn::RebindToSigned<D>>;

template <class D>
HWY_INLINE IntOf<D> Constant(D, uint32_t bits) {
  return hn::Set(hn::RebindToSigned<D>(), static_cast<int32_t>(bits));
}
/// Bits of |x| as i32: they order as the magnitudes do, infinities and then NaN above all numbers.
template <class D>
HWY_INLINE IntOf<D> MagnitudeBits(D d, hn::Vec<D> x) {
  return hn::And(hn::BitCast(hn::RebindToSigned<D>(), x), Constant(d, 0x7FFFFFFFu));
}

// ---- loads
// -----------------------------------------------------------------------------------------------------------------

struct LoadF32 {
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, const void* from, int64_t i) const {
    return hn::LoadU(d, static_cast<const float*>(from) + i);
  }
};

struct LoadBf16 {
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, const void* from, int64_t i) const {
    const hn::Rebind<uint16_t, D> du16;
    const hn::Rebind<uint32_t, D> du32;
    const auto half = hn::LoadU(du16, static_cast<const uint16_t*>(from) + i);
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du32, half)));
  }
};

struct LoadF16 {
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, const void* from, int64_t i) const {
#if HWY_TARGET == HWY_SCALAR  // Highway 1.0.3 reads infinities and NaN as numbers there
    return hn::Set(d, f16_to_float(static_cast<const uint16_t*>(from)[i]));
#else
    const hn::Rebind<uint16_t, D> du16;
    const hn::Rebind<hwy::float16_t, D> df16;
    return hn::PromoteTo(d, hn::BitCast(df16, hn::LoadU(du16, static_cast<const uint16_t*>(from) + i)));
#endif
  }
};

// ---- rounding
// --------------------------------------------------------------------------------------------------------------

/// 2^(e + 23 - kMantissa) for magnitudes of exponent e, not below the smallest normal's: its ulp is the step of the
/// format there.
template <int kMantissa, int kBias, class D>
HWY_INLINE IntOf<D> StepUnit(D d, IntOf<D> magnitude) {
  const auto normal = hn::Max(magnitude, Constant(d, uint32_t{128 - kBias} << 23));
  return hn::Add(hn::And(normal, Constant(d, 0x7F800000u)), Constant(d, uint32_t{23 - kMantissa} << 23));
}

/// Code of a magnitude without its sign. It must not exceed the format's largest number, or the power of two above it.
template <int kMantissa, int kBias, class D>
HWY_INLINE IntOf<D> RoundToCode(D d, IntOf<D> magnitude) {
  const hn::RebindToSigned<D> di;
  const auto unit = StepUnit<kMantissa, kBias>(d, magnitude);
  const auto sum = hn::BitCast(di, hn::Add(hn::BitCast(d, magnitude), hn::BitCast(d, unit)));
  // sum - unit counts steps, the hidden bit included, so that a carry runs into the exponent.
  const auto steps = hn::Sub(sum, unit);
  constexpr uint32_t kUnbias = uint32_t{128 - kBias + 23 - kMantissa} << kMantissa;
  return hn::Add(steps, hn::Sub(hn::ShiftRight<23 - kMantissa>(unit), Constant(d, kUnbias)));
}

struct RoundToF32 {
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D, hn::Vec<D> x) const {
    return x;
  }
};

struct RoundToBf16 {
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, hn::Vec<D> x) const {
    const hn::RebindToSigned<D> di;
    const auto bits = hn::BitCast(di, x);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), Constant(d, 1));
    const auto up = hn::Add(bits, hn::Add(odd, Constant(d, 0x7FFF)));
    return hn::IfThenElse(hn::IsNaN(x), x, hn::BitCast(d, hn::And(up, Constant(d, 0xFFFF0000u))));
  }
};

/// Clamped where infinity begins: 65536, one step beyond the largest number.
template <class D>
HWY_INLINE IntOf<D> F16Magnitude(D d, hn::Vec<D> x) {
  return hn::Min(MagnitudeBits(d, x), Constant(d, 0x47800000u));
}

struct RoundToF16 {
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, hn::Vec<D> x) const {
    const auto magnitude = F16Magnitude(d, x);
    const auto unit = hn::BitCast(d, StepUnit<10, 15>(d, magnitude));
    const auto value = hn::Sub(hn::Add(hn::BitCast(d, magnitude), unit), unit);
    const auto infinity = hn::BitCast(d, Constant(d, 0x7F800000u));
    const auto held = hn::IfThenElse(hn::Ge(value, hn::Set(d, 65536.0f)), infinity, value);
    return hn::IfThenElse(hn::IsNaN(x), x, hn::CopySign(held, x));
  }
};

/// Roped dims under a rule that reads them as bf16.
struct RoundToF16ThenBf16 {
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, hn::Vec<D> x) const {
    return RoundToBf16()(d, RoundToF16()(d, x));
  }
};

// ---- codes
// -----------------------------------------------------------------------------------------------------------------

/// e4m3 codes of finite x (infinities too), saturated at 448.
template <class D>
HWY_INLINE hn::Vec<hn::Rebind<uint8_t, D>> E4m3Codes(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  const auto magnitude = hn::Min(MagnitudeBits(d, x), Constant(d, 0x43E00000u));  // 448
  const auto sign = hn::And(hn::ShiftRight<24>(hn::BitCast(di, x)), Constant(d, 0x80));
  return hn::DemoteTo(hn::Rebind<uint8_t, D>(), hn::Or(RoundToCode<3, 7>(d, magnitude), sign));
}

/// e4m3fnuz codes likewise, saturated at 240; there is no negative zero.
template <class D>
HWY_INLINE hn::Vec<hn::Rebind<uint8_t, D>> E4m3fnuzCodes(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  const auto magnitude = hn::Min(MagnitudeBits(d, x), Constant(d, 0x43700000u));  // 240
  const auto code = RoundToCode<3, 8>(d, magnitude);
  const auto sign = hn::And(hn::ShiftRight<24>(hn::BitCast(di, x)), Constant(d, 0x80));
  const auto is_zero = hn::Eq(code, hn::Zero(di));
  return hn::DemoteTo(hn::Rebind<uint8_t, D>(), hn::IfThenZeroElse(is_zero, hn::Or(code, sign)));
}

/// e2m1 codes (0 to 15) of finite x, saturated at 6.
template <class D>
HWY_INLINE hn::Vec<hn::Rebind<uint8_t, D>> E2m1Codes(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  const auto magnitude = hn::Min(MagnitudeBits(d, x), Constant(d, 0x40C00000u));  // 6
  const auto sign = hn::And(hn::ShiftRight<28>(hn::BitCast(di, x)), Constant(d, 8));
  return hn::DemoteTo(hn::Rebind<uint8_t, D>(), hn::Or(RoundToCode<1, 1>(d, magnitude), sign));
}

struct StoreF32 {
  template <class D>
  HWY_INLINE void operator()(D d, hn::Vec<D> x, void* to, int64_t i) const {
    const auto nan = hn::BitCast(d, Constant(d, 0x7FC00000u));
    hn::StoreU(hn::IfThenElse(hn::IsNaN(x), nan, x), d, static_cast<float*>(to) + i);
  }
};

struct StoreBf16 {
  template <class D>
  HWY_INLINE void operator()(D d, hn::Vec<D> x, void* to, int64_t i) const {
    const hn::RebindToSigned<D> di;
    const hn::Rebind<uint16_t, D> du16;
    const auto nan = hn::BitCast(d, Constant(d, 0x7FC00000u));
    const auto rounded = hn::BitCast(di, hn::IfThenElse(hn::IsNaN(x), nan, RoundToBf16()(d, x)));
    const auto code = hn::And(hn::ShiftRight<16>(rounded), Constant(d, 0xFFFF));
    hn::StoreU(hn::DemoteTo(du16, code), du16, static_cast<uint16_t*>(to) + i);
  }
};

struct StoreF16 {
  template <class D>
  HWY_INLINE void operator()(D d, hn::Vec<D> x, void* to, int64_t i) const {
    const hn::RebindToSigned<D> di;
    const hn::Rebind<uint16_t, D> du16;
    const auto sign = hn::And(hn::ShiftRight<16>(hn::BitCast(di, x)), Constant(d, 0x8000));
    const auto number = hn::Or(RoundToCode<10, 15>(d, F16Magnitude(d, x)), sign);
    const auto is_nan = hn::RebindMask(di, hn::IsNaN(x));
    const auto code = hn::IfThenElse(is_nan, Constant(d, 0x7E00), number);
    hn::StoreU(hn::DemoteTo(du16, code), du16, static_cast<uint16_t*>(to) + i);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace topkey::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
