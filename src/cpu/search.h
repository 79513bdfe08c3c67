// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stages `search`, `select` and `merge` of backend `cpu`: one pass over the keys (or the given scores), winners kept
// on the way.
#pragma once
#include <cstddef>

#include "backend_table.h"
#include "topkey/topkey.h"

namespace topkey::cpu {

void mqa_topk(const MqaTopk&, const Exec&);
void paged_mqa_topk(const PagedMqaTopk&, const Exec&);
void topk(const Topk&, const Exec&);
void select_blocks(const SelectBlocks&, const Exec&);
void mqa_logits(const MqaLogits&, const Exec&);
void paged_mqa_logits(const PagedMqaLogits&, const Exec&);

/// Workspace of the operations above: a pure function of shapes, at most 64 MiB for topk <= 8192.
size_t search_workspace_bytes(Op op, const Shape& shape);

}  // namespace topkey::cpu
