// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `cache`, CPU backend.
#pragma once
#include "topkey/topkey.h"

namespace topkey::cpu {

void store_k(const StoreK&, const Exec&);
void gather_k(const GatherK&, const Exec&);

}  // namespace topkey::cpu
