// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The best candidate blocks of rows whose scores are there, by clusters of thread blocks (pick_blocks_sm90.cu says how).
#pragma once
#include "cuda/device/block_maxima.cuh"
#include "cuda/device/look.cuh"
#include "cuda/device/plain_decode.cuh"
#include "cuda/launch.h"
#include "cuda/pick_sm90.h"

namespace topkey::cuda {

/// Where the blocks go: i32 [R, C]; each of `size` keys.
struct BlocksOut {
  Tensor ids;
  int32_t size;
};
/// Rows of a call of which facts are kept, [first, first + count).
struct FactRows {
  const RowFact* facts;
  int64_t first, count;
};

/// From given scores. All four: false, and nothing done, where the device or the shape is not for it.
bool pick_blocks(const LookParams& look, const Tensor& scores, const BlocksOut& out, const Launch& launch);
/// From kept rows with all their keys, kNotLiveScore where one is not live; not cut over ranks. keys: most of a row.
bool pick_blocks(const KeptRows& kept, int64_t keys, const BlocksOut& out, const Launch& launch);
/// From maxima of plain rows.
bool pick_blocks(const PlainDecode& plain, const BlockMaxima& maxima, const BlocksOut& out, const Launch& launch);
/// From maxima of rows that begin at position 0 and see so many keys at most.
bool pick_blocks(const FactRows& rows, int64_t keys, const BlockMaxima& maxima, const BlocksOut& out,
                 const Launch& launch);
/// Whether all but the first do it, for rows of so many keys.
bool pick_blocks_suits(int64_t keys, const BlocksOut& out, const Launch& launch);

}  // namespace topkey::cuda
