// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `cache`, reference backend.
#pragma once
#include <vector>

#include "topkey/topkey.h"

namespace topkey::ref {

/// Quantises x to the bytes of slot `slot` of the cache; it must lie inside.
void store_vector(const KeyCache& cache, QuantRule rule, ScaleRule scale, int64_t slot, std::vector<float>& x);

void store_k(const StoreK&, const Exec&);
void gather_k(const GatherK&, const Exec&);

}  // namespace topkey::ref
