// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A search for few query rows in the form that engines call most: e4m3 keys of D = 128 in pages of whole units, one row a
// request, positions alone wanted. It has kernels of its own, which are shorter than the general one.
#pragma once
#include "cuda/device/emit.cuh"
#include "cuda/device/key_boxes.cuh"
#include "cuda/device/look.cuh"
#include "cuda/device/plain_decode.cuh"
#include "cuda/launch.h"
#include "topkey/score.h"

namespace topkey::cuda {

/// Whether a call is of that form; then what a kernel is told of it.
bool plain_decode(const LookParams& look, const Query& q, const Emission& emission, PlainDecode* plain,
                  KeyBoxes* boxes);
/// Up to 128 rows, any context. False where not; else it is launched, with the workspace of decode().
bool decode_quickly(const PlainDecode& plain, const KeyBoxes& boxes, void* workspace, const Launch& launch);
/// Contexts of at most 8,192 keys: a cluster of thread blocks a row. False where that is not so; else it is launched.
bool decode_shortly(PlainDecode job, const KeyBoxes& boxes, const Launch& launch);

}  // namespace topkey::cuda
