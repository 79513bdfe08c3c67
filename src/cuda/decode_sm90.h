// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Search of few query rows on Hopper, score and select in one launch (decode_sm90.cu says how). In the arithmetic fp8mma;
// what it does not take, the general kernels do with the same bits.
#pragma once
#include "cuda/search_parts.h"

namespace topkey::cuda {

/// True if this call, layout and outputs included, is one for decode().
bool decode_suits(const Shape& shape, const KeySource& keys, const Query& q, const Admit& admit, const Selection& out);
/// look: rows, keys, topk, needs_scores, stats; emission: where answers go.
void decode(const LookParams& look, const Query& q, const Emission& emission, void* workspace, const Launch& launch);

}  // namespace topkey::cuda
