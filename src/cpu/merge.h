// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `merge` of backend `cpu`.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cpu/arena.h"
#include "topkey/topkey.h"

namespace topkey::cpu {

void merge_topk(const MergeTopk&, const Exec&);
/// entries: parts times entries of a part.
size_t merge_workspace_bytes(int64_t entries, int64_t topk);

}  // namespace topkey::cpu
