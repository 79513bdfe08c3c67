// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stages `search` and `merge`, reference backend.
#pragma once
#include "topkey/topkey.h"

namespace topkey::ref {

void mqa_topk(const MqaTopk&, const Exec&);
void paged_mqa_topk(const PagedMqaTopk&, const Exec&);
void merge_topk(const MergeTopk&, const Exec&);

}  // namespace topkey::ref
