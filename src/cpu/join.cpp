// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See join.h. Compiles join-inl.h once per ISA and picks one table at the first use.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/join.cpp"
#include "cpu/join.h"

#include "hwy/foreach_target.h"  // must come before highway.h
#include "hwy/highway.h"

// It uses highway.h, so it comes after it.
#include "cpu/join-inl.h"

HWY_BEFORE_NAMESPACE();
namespace topkey::cpu {
namespace HWY_NAMESPACE {

JoinKernels MakeJoinKernels() { return {hwy::TargetName(HWY_TARGET), Join, NarrowToBf16, WidenToken}; }

}  // namespace HWY_NAMESPACE
}  // namespace topkey::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "cpu/isa.h"

namespace topkey::cpu {

HWY_EXPORT(MakeJoinKernels);

const JoinKernels& join_kernels() {
  static const JoinKernels table = [] {
    choose_isa();
    return HWY_DYNAMIC_DISPATCH(MakeJoinKernels)();
  }();
  return table;
}

}  // namespace topkey::cpu
#endif
