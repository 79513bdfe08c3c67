// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `merge`: the parts' entries sorted as if they had been selected together, and their blocks likewise.
#include <cmath>
#include <map>

#include "ref/score.h"
#include "ref/search.h"
#include "ref/select.h"

namespace topkey::ref {
namespace {

std::vector<Entry> entries_of(const MergeTopk& a, const Window& w, int64_t row, Counts& counts) {
  std::vector<Entry> entries;
  for (int64_t part = 0; part < a.scores.shape[0]; ++part) {
    for (int64_t i = 0; i < a.scores.shape[2]; ++i) {
      const int64_t position = integer(a.indices, part, row, i);
      if (position < 0) continue;
      // Only a merge with keys forced at the end has been given an end.
      const bool forced = position - w.start < a.force_first || (a.force_last > 0 && w.end - position <= a.force_last);
      entries.push_back({canonical(real(a.scores, part, row, i)), position, forced});
      counts.add(kNanScores, std::isnan(entries.back().score));
    }
  }
  counts.add(kScoredKeys, static_cast<int64_t>(entries.size()));
  return entries;
}

std::vector<Block> merged_blocks(const MergeTopk& a, int64_t row) {
  std::map<int64_t, float> best;
  for (int64_t part = 0; part < a.block_ids.shape[0]; ++part) {
    for (int64_t i = 0; i < a.block_ids.shape[2]; ++i) {
      const int64_t id = integer(a.block_ids, part, row, i);
      if (id < 0) continue;
      const float score = canonical(real(a.block_scores, part, row, i));
      const auto [at, fresh] = best.emplace(id, score);
      if (!fresh && better(score, 0, at->second, 0)) at->second = score;
    }
  }
  if (best.empty()) return {};
  // Every part publishes the newest block of a row that has one, and no block lies behind it.
  return choose_blocks(best, best.rbegin()->first, a.out.blocks.shape[1]);
}

}  // namespace

void merge_topk(const MergeTopk& a, const Exec& exec) {
  Counts counts;
  Selection out = a.out;
  out.blocks = {};  // chosen here, from what the parts published
  const Emission emission{&a.out, a.topk, Shard{}, Emission::absolute, {}};
  answer_rows("merge_topk", a.rows.count, emission, exec, counts, [&](int64_t r) {
    const Window w = window_of(a.rows, r, 0);
    if (w.request < 0) return choose({}, w, a.topk, out, true, counts);
    Answer answer = choose(entries_of(a, w, r, counts), w, a.topk, out, true, counts);
    if (a.out.blocks.data != nullptr) answer.blocks = merged_blocks(a, r);
    return answer;
  });
}

}  // namespace topkey::ref
