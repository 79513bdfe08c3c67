// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `merge`: the parts' entries sorted as if they had been selected together.
#include <cmath>

#include "ref/score.h"
#include "ref/search.h"
#include "ref/select.h"

namespace topkey::ref {

void merge_topk(const MergeTopk& a, const Exec& exec) {
  Counts counts;
  answer_rows("merge_topk", a.rows.count, {&a.out, a.topk, Shard{}, Emission::absolute}, exec, counts, [&](int64_t r) {
    Window w = window_of(a.rows, r, 0);
    w.start = w.end = 0;  // positions are global already
    std::vector<Entry> entries;
    if (w.request < 0) return choose({}, w, a.topk, a.out, true, counts);
    for (int64_t part = 0; part < a.scores.shape[0]; ++part) {
      for (int64_t i = 0; i < a.scores.shape[2]; ++i) {
        const int64_t position = integer(a.indices, part, r, i);
        if (position < 0) continue;
        entries.push_back({canonical(real(a.scores, part, r, i)), position, false});
        counts.add(kNanScores, std::isnan(entries.back().score));
      }
    }
    counts.add(kScoredKeys, static_cast<int64_t>(entries.size()));
    return choose(std::move(entries), w, a.topk, a.out, true, counts);
  });
}

}  // namespace topkey::ref
