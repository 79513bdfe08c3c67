// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Every operation of the CUDA backend, and every stage's kernels for prepare().
#pragma once
#include <array>

#include "backend_table.h"
#include "cuda/launch.h"

namespace topkey::cuda {

/// Whose arithmetic a score has: the portable backend's or Hopper's.
enum class Cores { portable, hopper };

#define X(name, Args) void name(const Args&, const Exec&);
TOPKEY_OPERATIONS(X)
#undef X
/// Of them, those that score take an arithmetic; the ones above are the portable backend's.
void mqa_logits(Cores cores, const MqaLogits&, const Exec&);
void paged_mqa_logits(Cores cores, const PagedMqaLogits&, const Exec&);
void mqa_topk(Cores cores, const MqaTopk&, const Exec&);
void paged_mqa_topk(Cores cores, const PagedMqaTopk&, const Exec&);

/// Whether the portable backend scores such a pairing on tensor cores; else by plain FMA.
bool on_tensor_cores(KeyFormat format, DType q);

extern const Memory kMemory;

KernelList look_kernels();
KernelList whole_kernels();
KernelList score_kernels();
KernelList score_f32_kernels();
KernelList score_sm90_kernels();
KernelList decode_kernels();
KernelList decode_quick_kernels();
KernelList decode_short_kernels();
KernelList prefill_kernels();
KernelList pick_kernels();
KernelList pick_quick_kernels();
KernelList pick_stream_kernels();
KernelList pick_sm90_kernels();
KernelList pick_blocks_kernels();
KernelList decode_admitted_kernels();
KernelList merge_kernels();
KernelList logits_kernels();
KernelList rows_kernels();
KernelList quantize_kernels();
KernelList claim_kernels();
KernelList cache_kernels();
KernelList gather_kernels();
KernelList pool_kernels();
KernelList pool_quick_kernels();
KernelList memory_kernels();

inline std::array<KernelList, 25> kernel_lists() {
  return {look_kernels(),       score_kernels(),        score_f32_kernels(),    score_sm90_kernels(),
          pick_kernels(),       pick_quick_kernels(),   pick_stream_kernels(),  pick_sm90_kernels(),
          decode_kernels(),     decode_quick_kernels(), decode_short_kernels(), prefill_kernels(),
          merge_kernels(),      logits_kernels(),       rows_kernels(),         quantize_kernels(),
          claim_kernels(),      cache_kernels(),        gather_kernels(),       pool_kernels(),
          pool_quick_kernels(), memory_kernels(),       pick_blocks_kernels(),  decode_admitted_kernels(),
          whole_kernels()};
}

}  // namespace topkey::cuda
