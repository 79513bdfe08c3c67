// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See include/topkey/indexer.h.
#pragma once
#include "topkey/indexer.h"

namespace topkey::layer {

void check(const IndexerConfig& config);
size_t workspace_bytes(const IndexerConfig& config, const IndexerLimits& limits, const Exec& exec);
void forward(const IndexerConfig& config, const IndexerStep& step, const Exec& exec);

}  // namespace topkey::layer
