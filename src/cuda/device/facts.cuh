// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What is known of a row before any of its keys is scored (made by look.cu, read by score and select), and the keys it
// looks at: index i of [0, n) stands for one reachable, admitted position, ascending. Without candidates that is low + i;
// with them the row's kept block ids are walked.
#pragma once
#include "cuda/device/view.cuh"
#include "topkey/select.h"

namespace topkey::cuda {

struct RowFact {
  int64_t start, end;          ///< window
  int32_t request, table_row;  ///< table_row < 0: no key of the row can be found
  int32_t low, high;           ///< reachable positions
  uint32_t n;                  ///< keys looked at
  uint32_t live;               ///< those of them that are admitted and readable
  uint32_t blocks;             ///< candidate blocks kept
  uint32_t lead;               ///< keys of the first kept block that are not reachable
  uint32_t topk;
  int32_t scored;  ///< 0: all live keys are wanted and no score is
};

/// Position of index i of a row. ids: the row's kept candidate blocks, null = none given.
__device__ __forceinline__ int64_t position_of(const RowFact& f, const int32_t* ids, uint32_t block_size, uint32_t i) {
  if (ids == nullptr) return int64_t{f.low} + i;
  const uint64_t at = uint64_t{i} + f.lead;
  return f.start + int64_t{ids[at / block_size]} * block_size + static_cast<int64_t>(at % block_size);
}

/// True if the mask hides the column; else *addend is what it adds to the score (0 for b8, and without a mask).
__device__ inline bool masked(const Tensor& mask, int64_t row, int64_t column, float* addend) {
  *addend = 0.0f;
  if (mask.data == nullptr) return false;
  if (mask.dtype == DType::b8) return *element<uint8_t>(mask, row, column) == 0;
  *addend = real(mask, row, column);
  return __float_as_uint(*addend) == 0xFF800000u;
}

}  // namespace topkey::cuda
