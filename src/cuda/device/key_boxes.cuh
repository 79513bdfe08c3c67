// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// How bulk copies find 64 keys' codes.
#pragma once
#include <cstdint>

namespace topkey::cuda {

/// A tensor map of the driver's (made by key_boxes.cu): [pages, keys of a page, 128 bytes], swizzled as the tensor core
/// reads them.
struct alignas(64) KeyBoxes {
  uint64_t opaque[16];
};

}  // namespace topkey::cuda
