// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `pool`, CPU backend.
#pragma once
#include <cstddef>

#include "topkey/topkey.h"

namespace topkey::cpu {

/// What pool_k and compress_k need of exec.workspace.
size_t pool_workspace_bytes(int64_t head_dim);

void pool_k(const PoolK&, const Exec&);
void compress_k(const CompressK&, const Exec&);

}  // namespace topkey::cpu
