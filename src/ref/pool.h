// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `pool`, reference backend.
#pragma once
#include "topkey/topkey.h"

namespace topkey::ref {

void pool_k(const PoolK&, const Exec&);
void compress_k(const CompressK&, const Exec&);

}  // namespace topkey::ref
