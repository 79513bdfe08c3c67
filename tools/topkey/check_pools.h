// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// k-pools from end to end on one backend: keys written by pool_k over several calls, searched, expanded to tokens, and
// the layer over all of it. What `check --random --op pools` draws.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "check_call.h"

namespace topkey::cli {

/// The name that --op has for them.
inline constexpr const char* kPools = "pools";

struct PoolFindings {
  std::vector<Finding> findings;
  std::shared_ptr<const support::Trace> differing;  ///< of the first stage that differs; null where none does
};
/// The same seed gives the same case on every backend.
PoolFindings check_pools(uint64_t seed, const std::string& backend);

}  // namespace topkey::cli
