// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Selection from scores, given or kept, by clusters of thread blocks (pick_sm90.cu says how).
#pragma once
#include "cuda/device/emit.cuh"
#include "cuda/device/look.cuh"
#include "cuda/launch.h"

namespace topkey::cuda {

/// Rows of a search, all of whose keys are live: [count, chunk] scores, a row's first where its `low` is.
struct KeptRows {
  const RowFact* facts;  ///< null: scores are given
  const float* scores;
  int64_t chunk, first_row, count;
};

/// False, and nothing done, where the device, the shape or what is asked for is not for it.
bool pick_in_clusters(const LookParams& look, const Tensor& scores, const Emission& emission, const Launch& launch);
/// The same for kept rows.
bool pick_in_clusters(const LookParams& look, const KeptRows& kept, const Emission& emission, const Launch& launch);

}  // namespace topkey::cuda
