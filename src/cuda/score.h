// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Which arithmetic a pairing has here, and the kernel of the plain one.
#pragma once
#include "cuda/score_job.cuh"

namespace topkey::cuda {

bool on_tensor_cores(KeyFormat format, DType q);
void score_f32(const ScoreJob& job, uint32_t blocks, const Launch& launch);

}  // namespace topkey::cuda
