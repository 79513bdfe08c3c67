// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Search of many query rows that share keys, on Hopper (prefill_sm90.cu says how). In the arithmetic fp8mma; what it does
// not take, the general kernels do with the same bits.
#pragma once
#include "cuda/key_boxes.h"
#include "cuda/search_parts.h"

namespace topkey::cuda {

/// True if this call, layout and outputs included, is one for prefill(); then *boxes is set.
bool prefill_suits(const Shape& shape, const KeySource& keys, const Rows& rows, const Admit& admit,
                   const Selection& out, KeyBoxes* boxes);
/// look: rows, keys, topk, stats; emission: where answers go. Two launches for each 8,192 rows; where blocks are published
/// three or four for each 5 million of them.
void prefill(const Shape& shape, const LookParams& look, const Query& q, const KeyBoxes& boxes,
             const Emission& emission, void* workspace, const Launch& launch);

}  // namespace topkey::cuda
