// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Compiles the -inl files once per ISA and picks one table at the first use.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels.cpp"
#include "cpu/kernels.h"

#include "hwy/foreach_target.h"  // must come before highway.h
#include "hwy/highway.h"

// These use highway.h, so they come after it.
#include "cpu/decode-inl.h"
#include "cpu/dot-inl.h"
#include "cpu/gate-inl.h"

HWY_BEFORE_NAMESPACE();
namespace topkey::cpu {
namespace HWY_NAMESPACE {

Kernels MakeKernels() { return {hwy::TargetName(HWY_TARGET), PanelKeys(), kHeadBlock, Decode, Pack, Score, Gate}; }

}  // namespace HWY_NAMESPACE
}  // namespace topkey::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "cpu/isa.h"

namespace topkey::cpu {

HWY_EXPORT(MakeKernels);

const Kernels& kernels() {
  static const Kernels table = [] {
    choose_isa();
    return HWY_DYNAMIC_DISPATCH(MakeKernels)();
  }();
  return table;
}

}  // namespace topkey::cpu
#endif
