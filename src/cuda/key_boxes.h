// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Boxes of 64 keys' codes, as Hopper's bulk copies take them: how they lie is told to the driver once a call.
#pragma once
#include "cuda/device/keys.cuh"

namespace topkey::cuda {

/// A tensor map of the driver's: [pages, keys of a page, 128 bytes], swizzled as the tensor core reads them.
struct alignas(64) KeyBoxes {
  uint64_t opaque[16];
};

/// False where the layout does not allow them (D = 128, units of 64 keys inside a page, 16-byte aligned scales side by
/// side), or the driver does not know them.
bool make_boxes(const KeySource& keys, KeyBoxes* boxes);

}  // namespace topkey::cuda
