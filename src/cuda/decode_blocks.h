// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Plain decode calls (plain_decode.h) with candidate blocks: those that score only the keys of given blocks, and those that
// publish the best blocks beside their answer. In the arithmetic fp8mma, with the bits of all other kernels.
#pragma once
#include "cuda/plain_decode.h"
#include "cuda/search_parts.h"

namespace topkey::cuda {

/// False, and nothing done, where a call is not one of them.
bool decode_blocks(const Shape& shape, const LookParams& look, const Query& q, const Emission& emission,
                   void* workspace, const Launch& launch);

/// Candidate blocks of a call: i32 [rows, count], ids in any order.
struct AdmittedBlocks {
  const int32_t* ids;
  int64_t step;  ///< from row to row
  int32_t count, size;
};
/// The search over their keys alone: a cluster of thread blocks a row. False where lists are too long. codes: of page 0.
bool decode_admitted(const PlainDecode& plain, const AdmittedBlocks& admitted, const uint8_t* codes,
                     const Launch& launch);

}  // namespace topkey::cuda
