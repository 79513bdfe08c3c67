// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `rows`, CPU backend: expand_rows, to_slots, expand_pools. The rows of the search are read by window.h.
#pragma once
#include "topkey/topkey.h"

namespace topkey::cpu {

void expand_rows(const ExpandRows&, const Exec&);
void to_slots(const ToSlots&, const Exec&);
void expand_pools(const ExpandPools&, const Exec&);

}  // namespace topkey::cpu
