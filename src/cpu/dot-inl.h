// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The product: dots of kHeadBlock heads with three vectors of keys at a time, ReLU, weights, head sum. Arithmetic
// `f32`: one FMA chain per (key, head), d ascending; then one FMA chain per key, heads ascending; kscale last. Never
// split d or heads: the order is the contract. Accumulators are named variables: arrays of vectors do not compile on
// SVE.
#if defined(TOPKEY_CPU_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TOPKEY_CPU_DOT_INL_H_
#undef TOPKEY_CPU_DOT_INL_H_
#else
#define TOPKEY_CPU_DOT_INL_H_
#endif

#include <cmath>

#include "cpu/kernels.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

// 16 vector registers hold 4 heads x 3 vectors of sums, 3 of keys and a broadcast; 32 registers hold 8 heads x 3.
#undef TOPKEY_HEADS
#undef TOPKEY_HEAD_BLOCK
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
#define TOPKEY_HEAD_BLOCK 4
#define TOPKEY_HEADS(X) X(0) X(1) X(2) X(3)
#else
#define TOPKEY_HEAD_BLOCK 8
#define TOPKEY_HEADS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#endif

HWY_BEFORE_NAMESPACE();
namespace topkey::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kHeadBlock = TOPKEY_HEAD_BLOCK;

/// One rounding on every target: Highway's MulAdd rounds twice where the target has no FMA.
template <class V>
HWY_INLINE V Fma(V a, V b, V c) {
#if HWY_TARGET == HWY_SCALAR
  return V(std::fma(a.raw, b.raw, c.raw));
#else
  return hn::MulAdd(a, b, c);
#endif
}

/// x <= 0 ? 0 : x, so that NaN stays NaN (Max would lose it).
template <class V>
HWY_INLINE V Relu(V x) {
  const hn::DFromV<V> d;
  return hn::IfThenZeroElse(hn::Le(x, hn::Zero(d)), x);
}

/// Three vectors of keys make a chunk; a panel is whole chunks and a multiple of 8 keys.
HWY_INLINE int64_t ChunkKeys() { return 3 * static_cast<int64_t>(hn::Lanes(hn::ScalableTag<float>())); }
HWY_INLINE int64_t PanelKeys() { return ChunkKeys() < 24 ? 24 : ChunkKeys(); }

/// Adds `heads` of a block's kHeadBlock heads to out[3N]. keys: column of the panel, stride floats from d to d + 1; q
/// [dim][kHeadBlock]. Heads that only pad the last block must not be added: their zero times an infinite key is NaN.
HWY_INLINE void AddHeads(const float* HWY_RESTRICT keys, int64_t stride, int64_t dim, const float* HWY_RESTRICT q,
                         const float* HWY_RESTRICT weights, int64_t heads, float* HWY_RESTRICT out) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const int64_t n = static_cast<int64_t>(hn::Lanes(d));
#define TOPKEY_X(h) V x##h = hn::Zero(d), y##h = hn::Zero(d), z##h = hn::Zero(d);
  TOPKEY_HEADS(TOPKEY_X)
#undef TOPKEY_X
  for (int64_t i = 0; i < dim; ++i) {
    const V k0 = hn::Load(d, keys), k1 = hn::Load(d, keys + n), k2 = hn::Load(d, keys + 2 * n);
#define TOPKEY_X(h)               \
  {                               \
    const V b = hn::Set(d, q[h]); \
    x##h = Fma(b, k0, x##h);      \
    y##h = Fma(b, k1, y##h);      \
    z##h = Fma(b, k2, z##h);      \
  }
    TOPKEY_HEADS(TOPKEY_X)
#undef TOPKEY_X
    keys += stride;
    q += kHeadBlock;
  }
  V s0 = hn::Load(d, out), s1 = hn::Load(d, out + n), s2 = hn::Load(d, out + 2 * n);
#define TOPKEY_X(h)                     \
  if (h < heads) {                      \
    const V b = hn::Set(d, weights[h]); \
    s0 = Fma(b, Relu(x##h), s0);        \
    s1 = Fma(b, Relu(y##h), s1);        \
    s2 = Fma(b, Relu(z##h), s2);        \
  }
  TOPKEY_HEADS(TOPKEY_X)
#undef TOPKEY_X
  hn::Store(s0, d, out);
  hn::Store(s1, d, out + n);
  hn::Store(s2, d, out + 2 * n);
}

/// Deals the wishes of `ahead` evenly to `steps` steps.
class Wishes {
 public:
  Wishes(const Ahead& ahead, int64_t steps) : ahead_(ahead), steps_(steps) {}
  HWY_INLINE void Step() {
    for (due_ += ahead_.count; due_ >= steps_; due_ -= steps_, ++next_) {
      const uint8_t* row = ahead_.rows[next_];
      for (int64_t at = 0; at < ahead_.bytes; at += 64) hwy::Prefetch(row + at);
      hwy::Prefetch(row + ahead_.bytes - 1);  // rows need not begin with a line
      if (ahead_.scales != nullptr) hwy::Prefetch(ahead_.scales[next_]);
    }
  }

 private:
  const Ahead& ahead_;
  int64_t steps_, due_ = 0, next_ = 0;
};

void Score(const ScoreJob& job) {
  const hn::ScalableTag<float> d;
  const int64_t n = static_cast<int64_t>(hn::Lanes(d)), panel = PanelKeys(), chunk = ChunkKeys();
  const float* panels = job.panels;
  float* out = job.out;
  Wishes wishes(job.ahead, job.count * (panel / chunk) * ((job.heads + kHeadBlock - 1) / kHeadBlock));
  for (int64_t p = 0; p < job.count; ++p, panels += job.dim * panel, out += panel) {
    for (int64_t i = 0; i < panel; i += n) hn::Store(hn::Zero(d), d, out + i);
    for (int64_t column = 0; column < panel; column += chunk) {
      for (int64_t h = 0; h < job.heads; h += kHeadBlock) {
        wishes.Step();
        AddHeads(panels + column, panel, job.dim, job.q + h * job.dim, job.weights + h, job.heads - h, out + column);
      }
    }
    if (job.kscale == nullptr) continue;
    for (int64_t i = 0; i < panel; i += n) {
      hn::Store(hn::Mul(hn::Load(d, out + i), hn::Load(d, job.kscale + p * panel + i)), d, out + i);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace topkey::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
