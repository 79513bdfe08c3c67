// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Compares scores with a row's threshold. After the first few thousand keys almost none passes, so a vector compare
// and a test of its mask is the common case; the few that pass are listed one by one.
#if defined(TOPKEY_CPU_GATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TOPKEY_CPU_GATE_INL_H_
#undef TOPKEY_CPU_GATE_INL_H_
#else
#define TOPKEY_CPU_GATE_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace topkey::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

int64_t Gate(const float* scores, int64_t n, float gate, int32_t* accepted) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto threshold = hn::Set(d, gate);
  int64_t found = 0, i = 0;
  for (; i + lanes <= n; i += lanes) {
    if (hn::AllFalse(d, hn::Ge(hn::LoadU(d, scores + i), threshold))) continue;
    for (int64_t j = i; j < i + lanes; ++j) {
      accepted[found] = static_cast<int32_t>(j);
      found += scores[j] >= gate;
    }
  }
  for (; i < n; ++i) {
    accepted[found] = static_cast<int32_t>(i);
    found += scores[i] >= gate;
  }
  return found;
}

}  // namespace HWY_NAMESPACE
}  // namespace topkey::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggle
