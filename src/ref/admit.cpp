// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See admit.h.
#include "ref/admit.h"

#include <algorithm>
#include <cmath>

namespace topkey::ref {

std::vector<Run> admitted_runs(const Window& w, const Admit& admit, int64_t row) {
  if (w.size() == 0) return {};
  if (!present(admit.candidates)) return {{w.start, w.end}};
  std::vector<int64_t> ids;
  for (int64_t c = 0; c < admit.candidates.shape[1]; ++c) ids.push_back(integer(admit.candidates, row, c));
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  std::vector<Run> runs;
  for (int64_t id : ids) {
    if (id < 0) continue;
    const int64_t first = std::max(w.start, w.position_at(id * admit.candidate_block_size));
    const int64_t last = std::min(w.end, w.position_at((id + 1) * admit.candidate_block_size));
    if (first < last) runs.push_back({first, last});
  }
  return runs;
}

std::vector<Run> reachable_runs(const std::vector<Run>& runs, const Window& w, int64_t count, int64_t max_len,
                                int64_t row, Counts& counts) {
  const int64_t low = std::max<int64_t>(w.start, 0);
  const int64_t high = max_len > 0 ? std::min(count, w.start + max_len) : count;
  std::vector<Run> kept;
  for (const Run& run : runs) {
    const Run cut{std::clamp(run.first, low, std::max(low, high)), std::clamp(run.last, low, std::max(low, high))};
    counts.wild(kSkippedPages, (run.last - run.first) - (cut.last - cut.first), "position", row,
                run.first < low ? run.first : high);
    if (cut.first < cut.last) kept.push_back(cut);
  }
  return kept;
}

bool masked(const Tensor& mask, int64_t row, int64_t column, float* addend) {
  *addend = 0.0f;
  if (mask.data == nullptr) return false;
  if (mask.dtype == DType::b8) return *element<uint8_t>(mask, row, column) == 0;
  *addend = real(mask, row, column);
  return std::isinf(*addend) && *addend < 0.0f;
}

}  // namespace topkey::ref
