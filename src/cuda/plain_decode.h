// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A search for few query rows in the form that engines call most: e4m3 keys of D = 128 in pages of whole units, a
// request's rows side by side, positions and perhaps their scores wanted, of one rank's keys or of all. It has kernels of
// its own, which are shorter than the general one.
#pragma once
#include "cuda/device/block_maxima.cuh"
#include "cuda/device/emit.cuh"
#include "cuda/device/key_boxes.cuh"
#include "cuda/device/look.cuh"
#include "cuda/device/plain_decode.cuh"
#include "cuda/launch.h"
#include "topkey/score.h"

namespace topkey::cuda {

constexpr int64_t kMaxBlocks = 160;  ///< SMs of any GPU of compute capability 9.0

/// Workspace of decode_quickly, for so many rows of a call.
size_t plain_decode_bytes(int64_t rows);
/// Rows [first, first + count) of a call; first begins a request.
inline PlainDecode rows_of(const PlainDecode& plain, int32_t first, int32_t count) {
  PlainDecode p = plain;
  p.rows = count;
  p.q += first * p.q_row, p.weights += first * p.w_row, p.out += first * p.out_row;
  if (p.scores != nullptr) p.scores += first * p.scores_row;
  if (p.whole_ends != nullptr) p.whole_ends += first;
  p.ends += first / p.ends_n;
  if (p.requests != nullptr) {
    p.requests += first;
  } else {
    p.table += first / p.table_n * p.table_row;
  }
  return p;
}
/// Whether a call is of that form; then what a kernel is told of it.
bool plain_decode(const LookParams& look, const Query& q, const Emission& emission, PlainDecode* plain,
                  KeyBoxes* boxes);
/// Any number of rows, 128 at a time, any context for which lists fit. False where not; else it is launched, with the workspace of decode().
bool decode_quickly(const PlainDecode& plain, const KeyBoxes& boxes, void* workspace, const Launch& launch,
                    const BlockMaxima& maxima = {});
/// Positions alone, of all keys, contexts of at most 8,192 of them: a cluster of thread blocks a row. False where that is not so; else it is launched.
bool decode_shortly(PlainDecode job, const KeyBoxes& boxes, const Launch& launch);

}  // namespace topkey::cuda
