// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `search`: find a row's live keys, score them, choose. What every fast backend must equal.
#include "ref/search.h"

#include <cmath>

#include "ref/score.h"
#include "ref/select.h"

namespace topkey::ref {
namespace {

struct Search {
  const Query& q;
  const Keys& keys;
  const Rows& rows;
  const Admit& admit;
  int64_t topk;
  const Selection& out;
  Shard shard;
  Tensor whole_start, whole_end;
};

struct LiveKey {
  int64_t position;
  float addend;
};

std::vector<LiveKey> live_keys(const Search& s, const Window& w, int64_t row, int64_t table_row, Counts& counts) {
  std::vector<LiveKey> live;
  if (table_row < 0) return live;
  for (const Run& run :
       reachable_runs(admitted_runs(w, s.admit, row), w, s.keys.count(), s.rows.max_len, row, counts)) {
    for (int64_t n = run.first; n < run.last; ++n) {
      float addend = 0.0f;
      if (masked(s.admit.mask, row, n, &addend)) continue;
      const KeyBytes bytes = s.keys.find(table_row, n);
      if (bytes.values == nullptr) {
        counts.wild(kSkippedPages, 1, "page id", row, s.keys.page_of(table_row, n));
      } else {
        live.push_back({n, addend});
      }
    }
  }
  return live;
}

Answer answer_row(const Search& s, int64_t row, Counts& counts) {
  Window w = sharded_window(window_of(s.rows, row, s.keys.count()), s.shard, s.whole_start, s.whole_end, row);
  const int64_t table_row = s.keys.table_row(row, w.request, counts);
  if (table_row < 0) w.request = -1;  // fill only, and no newest block
  const std::vector<LiveKey> live = live_keys(s, w, row, table_row, counts);
  const bool scored = needs_scores(s.out) || static_cast<int64_t>(live.size()) > s.topk;
  std::vector<Entry> entries;
  Scorer score(s.q, s.keys, row);
  for (const LiveKey& key : live) {
    float value = scored ? score(s.keys.find(table_row, key.position)) : 0.0f;
    if (s.admit.mask.data != nullptr) value = canonical(value + key.addend);
    const bool forced = w.distance(key.position) < s.admit.force_first ||
                        w.whole_end - w.shard.global(key.position) <= s.admit.force_last;
    entries.push_back({value, key.position, forced});
    counts.add(kScoredKeys, scored);
    counts.add(kNanScores, scored && std::isnan(value));
  }
  return choose(std::move(entries), w, s.topk, s.out, scored, counts);
}

void search(const char* op, const Search& s, const Tensor& block_scores, Emission::Relative slot_position,
            const Exec& exec) {
  Counts counts;
  answer_rows(op, s.rows.count, {&s.out, s.topk, s.shard, slot_position, block_scores}, exec, counts,
              [&](int64_t r) { return answer_row(s, r, counts); });
}

}  // namespace

void mqa_topk(const MqaTopk& a, const Exec& exec) {
  const Keys keys(a.keys);
  search("mqa_topk", {a.q, keys, a.rows, a.admit, a.topk, a.out, {}, {}, {}}, {}, Emission::to_start, exec);
}

void paged_mqa_topk(const PagedMqaTopk& a, const Exec& exec) {
  const Keys keys(a.keys);
  search("paged_mqa_topk", {a.q, keys, a.rows, a.admit, a.topk, a.out, a.keys.shard, a.whole_start, a.whole_end},
         a.block_scores, Emission::absolute, exec);
}

}  // namespace topkey::ref
