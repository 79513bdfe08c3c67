// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The steps of a producer before quantisation: norm, rope, Hadamard, in place on scratch x[dim], vectors along d. No
// FMA anywhere: each operation rounds once, in the order of docs/formats.md. x is padded with zeros to 32 floats,
// which change no sum and no maximum; a step that makes them something else clears them.
#if defined(TOPKEY_CPU_TRANSFORM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TOPKEY_CPU_TRANSFORM_INL_H_
#undef TOPKEY_CPU_TRANSFORM_INL_H_
#else
#define TOPKEY_CPU_TRANSFORM_INL_H_
#endif

#include <cmath>

#include "cpu/producer.h"
#include "cpu/round-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace topkey::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

HWY_INLINE void ClearPadding(float* x, int64_t dim) {
  for (int64_t i = dim; i < padded_dim(dim); ++i) x[i] = 0.0f;
}

// ---- norm
// ------------------------------------------------------------------------------------------------------------------

template <int kHalf>
HWY_INLINE void AddHalves(float* lanes) {
  const hn::CappedTag<float, kHalf> d;
  for (int64_t i = 0; i < kHalf; i += static_cast<int64_t>(hn::Lanes(d))) {
    hn::Store(hn::Add(hn::Load(d, lanes + i), hn::LoadU(d, lanes + i + kHalf)), d, lanes + i);
  }
}

/// Sum of x or of its squares: partial sums by d mod 32, d ascending, then halves. n is a multiple of 32; the zeros
/// of the padding change nothing, since a sum that starts at +0 is never -0.
template <bool kSquares>
HWY_INLINE float Sum32(const float* HWY_RESTRICT x, int64_t n) {
  const ProducerTag d;
  const int64_t step = static_cast<int64_t>(hn::Lanes(d));
  alignas(128) float lanes[32];
  for (int64_t j = 0; j < 32; j += step) {
    auto sum = hn::Zero(d);
    for (int64_t i = j; i < n; i += 32) {
      const auto v = hn::Load(d, x + i);
      sum = hn::Add(sum, kSquares ? hn::Mul(v, v) : v);
    }
    hn::Store(sum, d, lanes + j);
  }
  AddHalves<16>(lanes);
  AddHalves<8>(lanes);
  AddHalves<4>(lanes);
  AddHalves<2>(lanes);
  return lanes[0] + lanes[1];
}

template <class Round>
HWY_INLINE void ScaleRows(const Round& round, float scale, const float* weight, const float* bias, int64_t n,
                          float* x) {
  const ProducerTag d;
  const int64_t step = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < n; i += step) {
    auto y = hn::Mul(hn::Load(d, x + i), hn::Set(d, scale));
    if (weight != nullptr) y = hn::Mul(y, hn::Load(d, weight + i));
    if (bias != nullptr) y = hn::Add(y, hn::Load(d, bias + i));
    hn::Store(round(d, y), d, x + i);
  }
}

HWY_INLINE void ApplyNorm(const Recipe& r, const float* weight, const float* bias, float* x) {
  const ProducerTag d;
  const int64_t n = padded_dim(r.dim), step = static_cast<int64_t>(hn::Lanes(d));
  const float count = static_cast<float>(r.dim);
  if (r.norm == NormKind::layer) {
    const float mean = Sum32<false>(x, n) / count;
    for (int64_t i = 0; i < n; i += step) {
      hn::Store(hn::Sub(hn::Load(d, x + i), hn::Set(d, mean)), d, x + i);
    }
    ClearPadding(x, r.dim);
  }
  const float variance = Sum32<true>(x, n) / count;
  const float scale = 1.0f / std::sqrt(variance + r.eps);
  switch (r.input) {
    case DType::bf16: ScaleRows(RoundToBf16(), scale, weight, bias, n, x); break;
    case DType::f16: ScaleRows(RoundToF16(), scale, weight, bias, n, x); break;
    default: ScaleRows(RoundToF32(), scale, weight, bias, n, x);
  }
  ClearPadding(x, r.dim);
}

// ---- rope
// ------------------------------------------------------------------------------------------------------------------

/// Pairs (a, b) -> (a*cos - b*sin, b*cos + a*sin), each product and sum rounded.
template <class Round>
HWY_INLINE void Rotate(const Round& round, const Recipe& r, const float* cos_sin, float* x) {
  const int64_t half = r.rope_dim / 2;
  float* const base = x + r.rope_base;
  const auto rotate = [&](auto d, int64_t i) HWY_ATTR {
    using V = hn::Vec<decltype(d)>;
    V a, b;
    if (r.rope_interleaved) {
      hn::LoadInterleaved2(d, base + 2 * i, a, b);
    } else {
      a = hn::LoadU(d, base + i);
      b = hn::LoadU(d, base + half + i);
    }
    const V c = hn::LoadU(d, cos_sin + i), s = hn::LoadU(d, cos_sin + half + i);
    const V first = round(d, hn::Sub(hn::Mul(a, c), hn::Mul(b, s)));
    const V second = round(d, hn::Add(hn::Mul(b, c), hn::Mul(a, s)));
    if (r.rope_interleaved) {
      hn::StoreInterleaved2(first, second, d, base + 2 * i);
    } else {
      hn::StoreU(first, d, base + i);
      hn::StoreU(second, d, base + half + i);
    }
  };
  ForLanes(half, rotate);
}

HWY_INLINE void ApplyRope(const Recipe& r, const float* cos_sin, float* x) {
  if (cos_sin == nullptr) {
    for (int64_t i = 0; i < r.dim; ++i) x[i] = canonical_nan();
  } else if (r.input == DType::f16) {
    r.roped_bf16 ? Rotate(RoundToF16ThenBf16(), r, cos_sin, x) : Rotate(RoundToF16(), r, cos_sin, x);
  } else if (r.input == DType::bf16 || r.roped_bf16) {
    Rotate(RoundToBf16(), r, cos_sin, x);
  } else {
    Rotate(RoundToF32(), r, cos_sin, x);
  }
}

// ---- Hadamard
// --------------------------------------------------------------------------------------------------------------

/// Butterflies at one stride; the lanes of `d` must not exceed it.
template <class D>
HWY_INLINE void Butterflies(D d, float* x, int64_t n, int64_t stride) {
  const int64_t step = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < n; i += 2 * stride) {
    for (int64_t j = i; j < i + stride; j += step) {
      const auto a = hn::Load(d, x + j), b = hn::Load(d, x + j + stride);
      hn::Store(hn::Add(a, b), d, x + j);
      hn::Store(hn::Sub(a, b), d, x + j + stride);
    }
  }
}

#if HWY_TARGET != HWY_SCALAR
/// Strides 1 and 2, inside blocks of four lanes. In the lane of b, (lane of a) - b.
HWY_INLINE void FirstButterflies(float* x, int64_t n) {
  const ProducerTag d;
  const hn::RepartitionToWide<hn::RebindToUnsigned<ProducerTag>> pairs;
  const int64_t step = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < n; i += step) {
    auto v = hn::Load(d, x + i);
    auto other = hn::Shuffle2301(v);
    v = hn::OddEven(hn::Sub(other, v), hn::Add(v, other));
    other = hn::Shuffle1032(v);
    v = hn::BitCast(d, hn::OddEven(hn::BitCast(pairs, hn::Sub(other, v)), hn::BitCast(pairs, hn::Add(v, other))));
    hn::Store(v, d, x + i);
  }
}
#endif

/// Natural order: strides 1, 2, 4, ..., then D^-0.5. dim is a power of two; below 32 one lane at a time will do.
HWY_INLINE void ApplyHadamard(const Recipe& r, float* x) {
  const ProducerTag d;
  const int64_t n = r.dim, step = static_cast<int64_t>(hn::Lanes(d));
  int64_t stride = 1;
#if HWY_TARGET != HWY_SCALAR
  if (n >= 32) {
    FirstButterflies(x, n);
    Butterflies(hn::CappedTag<float, 4>(), x, n, 4);
    Butterflies(hn::CappedTag<float, 8>(), x, n, 8);
    Butterflies(hn::CappedTag<float, 16>(), x, n, 16);
    stride = 32;
  }
#endif
  for (; stride < n && stride < 32; stride *= 2) Butterflies(hn::CappedTag<float, 1>(), x, n, stride);
  for (; stride < n; stride *= 2) Butterflies(d, x, n, stride);
  for (int64_t i = 0; i < padded_dim(n); i += step) {
    hn::Store(hn::Mul(hn::Load(d, x + i), hn::Set(d, r.hadamard_scale)), d, x + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace topkey::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
