// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Boxes of 64 keys' codes, as Hopper's bulk copies take them: how they lie is told to the driver in each call.
#pragma once
#include "cuda/device/key_boxes.cuh"
#include "cuda/device/keys.cuh"

namespace topkey::cuda {

/// False where the layout does not allow them (D = 128, units of 64 keys inside a page, 16-byte aligned scales side by
/// side), or the driver does not know them.
bool make_boxes(const KeySource& keys, KeyBoxes* boxes);

}  // namespace topkey::cuda
