// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The bench suites as data: which calls are timed, and what of the machine's ceiling each must reach.
#pragma once
#include <string>
#include <vector>

#include "support/problem.h"

namespace topkey::cli {

struct BenchCase {
  std::string name;  ///< short, for the table
  support::ProblemSpec spec;
  int32_t topk = 2048;
  int threads = 0;         ///< 0 = those of the suite
  double must = 0;         ///< share of the FMA peak, 0 = none set
  int64_t blocks = 0;      ///< published blocks
  int64_t admitted = 0;    ///< keys admitted as candidate blocks spread over the row
  int32_t block_size = 8;  ///< of either
  std::string against{};   ///< timed in turn with this case
  double at_most = 0;      ///< and must take at most so many times its time
};

/// Throws Failure for a suite that there is not. quick: the same shapes, smaller, to see that all runs.
std::vector<BenchCase> suite_cases(const std::string& suite, int threads, bool quick);

}  // namespace topkey::cli
