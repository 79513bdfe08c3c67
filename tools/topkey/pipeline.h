// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The stages before the search, run on the vectors that a trace's codes were made from: quantise the queries, store the
// keys. Shows what they cost, and whether they give the bytes that the trace has.
#pragma once
#include <string>
#include <vector>

#include "support/call.h"

namespace topkey::cli {

struct Stage {
  std::string name;
  double seconds = 0;
  std::string result;  ///< what came out, in words
};

/// Empty when the trace has no q_bf16 or keys_bf16, or when they are not those of the call.
std::vector<Stage> run_producers(const support::Call& call, const Exec& exec);

}  // namespace topkey::cli
