// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Which arithmetic a pairing has here, and the kernels of the others than score.cu's.
#pragma once
#include "cuda/score_job.cuh"

namespace topkey::cuda {

void score_f32(const ScoreJob& job, uint32_t blocks, const Launch& launch);
/// On Hopper: query rows that share a read of their keys at most; and the kernel, behind the cut into pieces of 64 keys.
int tile_rows_sm90(int heads);
void score_sm90(ScoreJob job, int64_t pieces, const Launch& launch);

}  // namespace topkey::cuda
