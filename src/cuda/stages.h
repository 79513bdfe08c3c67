// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Every operation of the CUDA backend, and every stage's kernels for prepare().
#pragma once
#include <array>

#include "backend_table.h"
#include "cuda/launch.h"

namespace topkey::cuda {

#define X(name, Args) void name(const Args&, const Exec&);
TOPKEY_OPERATIONS(X)
#undef X

/// All columns of i32 rows [0, rows) to -1.
void clear_rows(const Tensor& t, int64_t rows, const Exec& exec);

KernelList look_kernels();
KernelList score_kernels();
KernelList score_f32_kernels();
KernelList pick_kernels();
KernelList merge_kernels();
KernelList logits_kernels();
KernelList rows_kernels();
KernelList quantize_kernels();
KernelList cache_kernels();
KernelList pool_kernels();

inline std::array<KernelList, 10> kernel_lists() {
  return {look_kernels(),   score_kernels(), score_f32_kernels(), pick_kernels(),  merge_kernels(),
          logits_kernels(), rows_kernels(),  quantize_kernels(),  cache_kernels(), pool_kernels()};
}

}  // namespace topkey::cuda
