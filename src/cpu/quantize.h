// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `quantize`, CPU backend.
#pragma once
#include "topkey/topkey.h"

namespace topkey::cpu {

void quantize_q(const QuantizeQ&, const Exec&);
void quantize_k(const QuantizeK&, const Exec&);

}  // namespace topkey::cpu
