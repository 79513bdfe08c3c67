// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Pools as engines ask for them (device/pool_quick.cuh): whether a call is one, and its launches.
#pragma once
#include "cuda/device/pool_quick.cuh"
#include "cuda/launch.h"

namespace topkey::cuda {

/// Rows that one cluster of at most 8 thread blocks takes.
constexpr int64_t kRowsAtOnce = 64;

/// Whether pools are such as engines ask for; then how.
bool quick_of(const Pools& p, QuickPools* q);
/// Few rows of them and their state in one launch; false: not so.
bool run_quick(const QuickPools& job, const Launch& launch);
/// The keys of many; their state is left by another launch.
void make_quickly(const QuickPools& job, const Launch& launch);

}  // namespace topkey::cuda
