// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The GPU's benchmark, as the command line and topkey_gpu_bench run it: every case cold and warm, eager and as a graph,
// beside its floor, what it must reach, and what others reach. In a build without CUDA its twin throws.
#pragma once
#include <string>

namespace topkey::bench {

struct GpuOptions {
  std::string suite = "all";  ///< all (performance), decode, prefill, select, producers, worst
  std::string rows;           ///< only cases in whose name this regular expression is found; what they need joins
  std::string backend;        ///< empty: the first that can be used
  std::string json, commit;
  bool quick = false, list = false;
  double idle = 2, load = 1;  ///< seconds before cold and warm figures of the tables; other cases: a quarter of it
};

/// Prints the table, and writes the rows where `json` is set. False: a call failed, or wrote something wrong.
bool run_gpu_suite(const GpuOptions& options);

}  // namespace topkey::bench
