// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Selection from given scores by clusters of thread blocks (pick_sm90.cu says how).
#pragma once
#include "cuda/device/emit.cuh"
#include "cuda/device/look.cuh"
#include "cuda/launch.h"

namespace topkey::cuda {

/// False, and nothing done, where the device, the shape or what is asked for is not for it.
bool pick_in_clusters(const LookParams& look, const Tensor& scores, const Emission& emission, const Launch& launch);

}  // namespace topkey::cuda
