// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `score` as a matrix: the score kernels write the keys that a row can reach; what is left of its row of logits is
// hidden here.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/search_parts.h"
#include "cuda/stages.h"

namespace topkey::cuda {
namespace {

struct HideJob {
  const RowFact* facts;
  Tensor logits;
  Group group;
  int64_t width;
  bool clean;
};

/// -inf in columns [0, width) where no key can be reached: all of them if clean, else the visible ones.
__global__ __launch_bounds__(256) void hide_columns(const __grid_constant__ HideJob job) {
  for (int64_t r = blockIdx.x; r < job.group.count; r += gridDim.x) {
    const RowFact f = job.facts[r];
    const int64_t first = job.clean ? 0 : max(0ll, static_cast<long long>(f.start));
    const int64_t last = job.clean ? job.width : min(static_cast<long long>(job.width), static_cast<long long>(f.end));
    for (int64_t n = first + threadIdx.x; n < last; n += blockDim.x) {
      if (n < f.low || n >= f.high) put_real(job.logits, __uint_as_float(0xFF800000u), job.group.first_row + r, n);
    }
  }
}

const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&hide_columns), 0}};

template <class Args>
void logits_of(Cores cores, Op op, const Args& a, const KeySource& keys, int64_t width, const Tensor& mask,
               const Exec& exec) {
  if (a.rows.count == 0) return;
  const Launch launch(op_name(op), exec);
  if (cores == Cores::hopper) launch.require_hopper(op_name(op));
  Shape shape{};
  shape.rows = a.rows.count, shape.keys = width, shape.candidates = -1;
  const Room room = make_room(op, shape, exec.workspace);
  LookParams look_at{};
  look_at.keys = keys, look_at.rows = a.rows, look_at.admit.mask = mask, look_at.width = width;
  look_at.needs_scores = true, look_at.facts = room.facts, look_at.stats = exec.stats;
  ScoreParams scoring{};
  scoring.cores = cores, scoring.keys = keys, scoring.q = a.q, scoring.sink.logits = a.logits, scoring.sink.mask = mask;
  scoring.facts = room.facts, scoring.work = room.work, scoring.stats = exec.stats;
  scoring.by_request = a.rows.request.data != nullptr || a.rows.q_indptr.data != nullptr;
  scoring.next_n = a.rows.next_n;
  for (int64_t row = 0; row < a.rows.count; row += room.group_rows) {
    const Group group{row, std::min(room.group_rows, a.rows.count - row), 0,
                      static_cast<uint32_t>(std::max<int64_t>(width, 1))};
    look(look_at, group, launch);
    hide_columns<<<launch.blocks(group.count, 8), 256, 0, launch.stream()>>>(
        {room.facts, a.logits, group, width, a.clean});
    TOPKEY_CUDA_LAUNCHED("hide_columns");
    score(scoring, group, launch);
  }
}

}  // namespace

KernelList logits_kernels() { return {kEntries, 1}; }

void mqa_logits(Cores cores, const MqaLogits& a, const Exec& exec) {
  const KeySource keys = source_of(a.keys);
  logits_of(cores, Op::mqa_logits, a, keys, keys.count, a.mask, exec);
}

void paged_mqa_logits(Cores cores, const PagedMqaLogits& a, const Exec& exec) {
  const KeySource keys = source_of(a.keys);
  const bool bounded = a.rows.max_len > 0 && a.rows.start.data == nullptr;
  const int64_t columns = bounded ? std::min(a.rows.max_len, keys.count) : keys.count;
  logits_of(cores, Op::paged_mqa_logits, a, keys, std::min(a.logits.shape[1], columns), Tensor{}, exec);
}

void mqa_logits(const MqaLogits& a, const Exec& exec) { mqa_logits(Cores::portable, a, exec); }
void paged_mqa_logits(const PagedMqaLogits& a, const Exec& exec) { paged_mqa_logits(Cores::portable, a, exec); }

}  // namespace topkey::cuda
