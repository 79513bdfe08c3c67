// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// How well a selection serves attention. Exact attention is taken in double from the bf16 queries and keys that a trace
// may carry: softmax of q.k * D^-0.5 over the row's window, summed over heads.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "support/call.h"

namespace topkey::cli {

/// Means over rows at one topk.
struct Quality {
  int64_t topk;
  double recall;  ///< share of exact attention's topk positions that are selected
  double mass;    ///< attention probability on the selected positions, mean over heads
  double best;    ///< on exact attention's own topk positions: no selection holds more
  double recent;  ///< on the topk latest positions: what a sliding window would hold
};
struct Study {
  std::vector<Quality> table;  ///< empty: the trace has no truth, see `missing`
  int64_t rows = 0, of_rows = 0;
  std::string missing;
};

/// One Quality for each topk of 64, 128, ..., 2048 that is below the keys, and for the call's own. Runs the search
/// again, in score order, on as many evenly spaced rows as a few seconds allow.
Study study(const support::Call& call, const Exec& exec);

/// Where the keys of a row's window lie: row r sees positions [start, end) of `request`.
struct Window {
  int64_t start, end, request;
  int64_t size() const { return end - start; }
};
/// Of every row, in the search operations and logits; empty for others.
std::vector<Window> windows_of(const support::CallArgs& args);

/// Why the truth of the trace cannot be held against the call; empty = it can: q_bf16 [R,H,D] and keys_bf16 ([T,D], or
/// [B,T,D] by request) are there, cover every window, and positions count their keys.
std::string study_obstacle(const support::Call& call, const std::vector<Window>& windows);

}  // namespace topkey::cli
