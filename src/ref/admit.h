// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// From a row's window to its live keys: candidates, mask and what the caller's tables can reach. Shared by score,
// select and search, so that a key is live in one exactly when it is in the others.
#pragma once
#include <cstdint>
#include <vector>

#include "ref/keys.h"
#include "ref/rows.h"

namespace topkey::ref {

/// Visible, admitted keys as ascending, disjoint runs of positions: the whole window, or the candidate blocks cut at
/// it.
struct Run {
  int64_t first, last;  ///< [first, last)
};
std::vector<Run> admitted_runs(const Window& w, const Admit& admit, int64_t row);

/// The part of the runs that the tables can reach: position in [0, count) and within max_len of the start. What is
/// cut off is counted.
std::vector<Run> reachable_runs(const std::vector<Run>& runs, const Window& w, int64_t count, int64_t max_len,
                                int64_t row, Counts& counts);

/// True if the mask hides column `column`; else *addend is what it adds to the score (0 for b8).
bool masked(const Tensor& mask, int64_t row, int64_t column, float* addend);

}  // namespace topkey::ref
