// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The search of a trace on several ranks: threads of this process, or the processes that mpirun has started.
#pragma once
#include <string>

#include "command.h"

namespace topkey::cli {

struct RanksOptions {
  int32_t ranks = 0;  ///< 0: as many as mpirun has started
  std::string cut = "context";
  int32_t interleave = 1;
  bool json = false;
};

/// Answers the call alone, then on the ranks, and prints what each did, what it received and whether it is the same.
Exit run_on_ranks(const support::Call& call, const std::string& backend, const RanksOptions& options);

}  // namespace topkey::cli
