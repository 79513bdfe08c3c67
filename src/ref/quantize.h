// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `quantize`, reference backend.
#pragma once
#include "topkey/topkey.h"

namespace topkey::ref {

void quantize_q(const QuantizeQ&, const Exec&);
void quantize_k(const QuantizeK&, const Exec&);

}  // namespace topkey::ref
