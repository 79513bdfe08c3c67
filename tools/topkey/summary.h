// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A finished call in a few lines: what it was, how fast, what came out.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "support/call.h"

namespace topkey::cli {

struct Summary {
  std::string what;                  ///< "256 query rows x 8192 keys, fp8, H 3, D 64, topk 256"
  std::string speed;                 ///< "2.1 million scores, 2.0 million keys/s"
  std::string numerics, arithmetic;  ///< empty where the operation scores nothing
  bool search = false;
  std::vector<std::string> lines;         ///< the selection, or the outputs
  std::map<std::string, double> numbers;  ///< the same for a script
};

Summary summarise(const support::Call& call, const uint64_t* stats, double seconds);
/// Adds the backend's names for its arithmetic.
void name_numerics(const support::CallArgs& args, const std::string& backend, Summary& summary);

}  // namespace topkey::cli
