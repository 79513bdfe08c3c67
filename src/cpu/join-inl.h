// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See join.h. Vectors along the channels; the tokens are read twice, once for the largest score and once for the sums.
#if defined(TOPKEY_CPU_JOIN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TOPKEY_CPU_JOIN_INL_H_
#undef TOPKEY_CPU_JOIN_INL_H_
#else
#define TOPKEY_CPU_JOIN_INL_H_
#endif

#include "cpu/join.h"
#include "cpu/round-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace topkey::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D>
HWY_INLINE hn::Vec<D> LoadReal(D d, DType dtype, const void* from, int64_t i) {
  switch (dtype) {
    case DType::bf16: return LoadBf16()(d, from, i);
    case DType::f16: return LoadF16()(d, from, i);
    default: return LoadF32()(d, from, i);
  }
}

template <class D>
HWY_INLINE hn::Vec<D> ScoreOf(D d, const JoinToken& token, int64_t i) {
  const auto score = LoadReal(d, token.score_dtype, token.score, i);
  return token.ape == nullptr ? score : hn::Add(score, hn::LoadU(d, token.ape + i));
}

/// exp(x) for x <= 0 (NaN stays NaN): x = n ln 2 + r with |r| <= ln 2 / 2, Taylor's series of exp(r) to r^7 (what is
/// left out is below 2^-27 of it), then times 2^n in two steps, of which only the second may round (subnormals). Within
/// 2 ulp. No FMA: one rounding an operation on every ISA.
template <class D>
HWY_INLINE hn::Vec<D> ExpOfNegative(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  const auto lowest = hn::Set(d, -104.0f);  // exp(-104) < 2^-150, which rounds to 0
  x = hn::IfThenElse(hn::Lt(x, lowest), lowest, x);
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
  const auto shifted = hn::Add(hn::Mul(x, hn::Set(d, 1.44269504f)), hn::Set(d, 12582912.0f));
  const auto n = hn::Sub(shifted, hn::Set(d, 12582912.0f));
  // ln 2 in two parts; the first has 10 bits, so that its products with n are exact.
  const auto high = hn::Sub(x, hn::Mul(n, hn::Set(d, 0.693359375f)));
  const auto r = hn::Sub(high, hn::Mul(n, hn::Set(d, -2.12194440e-4f)));
  auto y = hn::Set(d, 1.0f / 5040.0f);
  y = hn::Add(hn::Mul(y, r), hn::Set(d, 1.0f / 720.0f));
  y = hn::Add(hn::Mul(y, r), hn::Set(d, 1.0f / 120.0f));
  y = hn::Add(hn::Mul(y, r), hn::Set(d, 1.0f / 24.0f));
  y = hn::Add(hn::Mul(y, r), hn::Set(d, 1.0f / 6.0f));
  y = hn::Add(hn::Mul(y, r), hn::Set(d, 0.5f));
  y = hn::Add(hn::Mul(hn::Mul(y, r), r), r);
  y = hn::Add(y, hn::Set(d, 1.0f));
  const auto exponent = hn::Sub(hn::BitCast(di, shifted), Constant(d, 0x4B400000u));
  const auto half = hn::ShiftRight<1>(exponent);
  const auto power = [&](auto e) HWY_ATTR { return hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(e, Constant(d, 127)))); };
  return hn::Mul(hn::Mul(y, power(half)), power(hn::Sub(exponent, half)));
}

void Join(const JoinToken* tokens, int64_t count, int64_t dim, float* x) {
  ForLanes(dim, [&](auto d, int64_t i) HWY_ATTR {
    auto most = ScoreOf(d, tokens[0], i);
    for (int64_t t = 1; t < count; ++t) {
      const auto score = ScoreOf(d, tokens[t], i);
      most = hn::IfThenElse(hn::Gt(score, most), score, most);
    }
    auto sum = hn::Zero(d), weights = hn::Zero(d);
    for (int64_t t = 0; t < count; ++t) {
      const auto p = ExpOfNegative(d, hn::Sub(ScoreOf(d, tokens[t], i), most));
      sum = hn::Add(sum, hn::Mul(LoadReal(d, tokens[t].value_dtype, tokens[t].value, i), p));
      weights = hn::Add(weights, p);
    }
    hn::StoreU(hn::Div(sum, weights), d, x + i);
  });
}

void WidenToken(const JoinToken& token, int64_t dim, float* value, float* score) {
  ForLanes(dim, [&](auto d, int64_t i) HWY_ATTR {
    hn::StoreU(LoadReal(d, token.value_dtype, token.value, i), d, value + i);
    hn::StoreU(ScoreOf(d, token, i), d, score + i);
  });
}

void NarrowToBf16(const float* x, int64_t dim, uint16_t* to) {
  ForLanes(dim, [&](auto d, int64_t i) HWY_ATTR { StoreBf16()(d, hn::LoadU(d, x + i), to, i); });
}

}  // namespace HWY_NAMESPACE
}  // namespace topkey::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
