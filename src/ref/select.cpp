// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `select`: sort everything, take the first k, write them.
#include "ref/select.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "backend_table.h"
#include "ref/score.h"

namespace topkey::ref {

bool better(float score_a, int64_t position_a, float score_b, int64_t position_b) {
  const bool nan_a = std::isnan(score_a), nan_b = std::isnan(score_b);
  if (nan_a != nan_b) return nan_b;
  if (!nan_a && score_a != score_b) return score_a > score_b;
  return position_a < position_b;
}

bool needs_scores(const Selection& out) {
  return out.scores.data != nullptr || out.blocks.data != nullptr || out.order == Order::score;
}

std::vector<Block> best_blocks(const std::vector<Entry>& live, const Window& w, int64_t block_size, int64_t count) {
  if (w.whole_size() == 0) return {};
  std::map<int64_t, float> best;  // block id -> score of its best live key
  for (const Entry& e : live) {
    const int64_t id = w.distance(e.position) / block_size;
    const auto [at, fresh] = best.emplace(id, e.score);
    if (!fresh && better(e.score, 0, at->second, 0)) at->second = e.score;
  }
  return choose_blocks(best, (w.whole_size() - 1) / block_size, count);
}

std::vector<Block> choose_blocks(const std::map<int64_t, float>& best, int64_t newest, int64_t count) {
  std::vector<Block> chosen{{newest, canonical_nan()}}, others;
  for (const auto& [id, score] : best) {
    if (id == newest) {
      chosen[0].score = score;
    } else {
      others.push_back({id, score});
    }
  }
  std::sort(others.begin(), others.end(),
            [](const Block& a, const Block& b) { return better(a.score, a.id, b.score, b.id); });
  for (const Block& block : others) {
    if (static_cast<int64_t>(chosen.size()) < count) chosen.push_back(block);
  }
  std::sort(chosen.begin(), chosen.end(), [](const Block& a, const Block& b) { return a.id < b.id; });
  return chosen;
}

Answer choose(std::vector<Entry> live, const Window& w, int64_t topk, const Selection& out, bool scored,
              Counts& counts) {
  Answer answer{w, {}, {}};
  if (out.blocks.data != nullptr) answer.blocks = best_blocks(live, w, out.block_size, out.blocks.shape[1]);
  const auto before = [](const Entry& a, const Entry& b) {
    if (a.forced != b.forced) return a.forced;
    return a.forced ? a.position < b.position : better(a.score, a.position, b.score, b.position);
  };
  const size_t k = static_cast<size_t>(std::min<int64_t>(topk, static_cast<int64_t>(live.size())));
  if (scored) {
    std::sort(live.begin(), live.end(), before);
    if (k > 0 && k < live.size() && !live[k].forced && !live[k - 1].forced &&
        bits_of(live[k].score) == bits_of(live[k - 1].score)) {
      counts.add(kTiedCuts);
    }
  }
  live.resize(k);
  if (out.order != Order::score) {
    std::sort(live.begin(), live.end(), [](const Entry& a, const Entry& b) { return a.position < b.position; });
  }
  answer.entries = std::move(live);
  return answer;
}

namespace {

int64_t slot_row(const SlotMap& map, int64_t row, int64_t request) { return map.table_per_row ? row : request; }

void put_fill(const Selection& out, int64_t row, int64_t used, int64_t topk) {
  const auto fill = [&](const Tensor& t) {
    if (t.data == nullptr) return;
    int32_t value = -1;
    if (out.fill == Fill::value) value = out.fill_value;
    if (out.fill == Fill::repeat && used > 0) value = *element<int32_t>(t, row, 0);
    for (int64_t i = used; i < topk; ++i) *element<int32_t>(t, row, i) = value;
  };
  fill(out.indices);
  fill(out.slots);
  for (int64_t i = used; out.scores.data != nullptr && i < topk; ++i) {
    *element<float>(out.scores, row, i) = -std::numeric_limits<float>::infinity();
  }
}

void put_answer(const Emission& e, int64_t row, const Answer& answer, const std::vector<int64_t>& slots) {
  const Selection& out = *e.out;
  const int64_t base = out.index_base.data != nullptr ? integer(out.index_base, row) : 0;
  const int64_t used = static_cast<int64_t>(answer.entries.size());
  for (int64_t i = 0; i < used; ++i) {
    const Entry& entry = answer.entries[static_cast<size_t>(i)];
    const int64_t index =
        e.shard.active() ? e.shard.global(entry.position) + base : entry.position - answer.window.start + base;
    if (out.indices.data != nullptr) *element<int32_t>(out.indices, row, i) = static_cast<int32_t>(index);
    if (out.scores.data != nullptr) *element<float>(out.scores, row, i) = entry.score;
    if (out.slots.data != nullptr)
      *element<int32_t>(out.slots, row, i) = static_cast<int32_t>(slots[static_cast<size_t>(i)]);
  }
  put_fill(out, row, used, e.topk);
  if (out.counts.data != nullptr) *element<int32_t>(out.counts, row) = static_cast<int32_t>(used);
  if (out.blocks.data != nullptr) put_blocks(out.blocks, e.block_scores, row, answer.blocks);
}

std::vector<int64_t> slots_of(const Emission& e, int64_t row, const Answer& answer, Counts& counts) {
  std::vector<int64_t> slots;
  if (e.out->slots.data == nullptr) return slots;
  const SlotMap& map = e.out->slot_map;
  for (const Entry& entry : answer.entries) {
    const int64_t position =
        e.slot_position == Emission::absolute ? entry.position : entry.position - answer.window.start;
    slots.push_back(
        slot_of(map.block_table, slot_row(map, row, answer.window.request), map.page_size, position, INT32_MAX));
    if (slots.back() < 0) counts.wild(kSkippedSlots, 1, "position", row, position);
  }
  return slots;
}

}  // namespace

void put_blocks(const Tensor& blocks, const Tensor& scores, int64_t row, const std::vector<Block>& chosen) {
  for (int64_t i = 0; i < blocks.shape[1]; ++i) {
    const bool used = i < static_cast<int64_t>(chosen.size());
    const Block block = used ? chosen[static_cast<size_t>(i)] : Block{-1, -std::numeric_limits<float>::infinity()};
    *element<int32_t>(blocks, row, i) = static_cast<int32_t>(block.id);
    if (scores.data != nullptr) *element<float>(scores, row, i) = block.score;
  }
}

void answer_rows(const char* op, int64_t rows, const Emission& emission, const Exec& exec, Counts& counts,
                 const std::function<Answer(int64_t)>& answer_row) {
  std::vector<std::pair<Answer, std::vector<int64_t>>> kept;
  for (int64_t r = 0; r < rows; ++r) {
    Answer answer = answer_row(r);
    std::vector<int64_t> slots = slots_of(emission, r, answer, counts);
    if (exec.strict) {
      kept.emplace_back(std::move(answer), std::move(slots));
    } else {
      put_answer(emission, r, answer, slots);
    }
  }
  counts.raise_if_strict(op, exec);
  if ((exec.flags & kCheckOnly) != 0) return;
  for (size_t r = 0; r < kept.size(); ++r) put_answer(emission, static_cast<int64_t>(r), kept[r].first, kept[r].second);
  counts.add(kRows, rows);
  counts.publish(exec);
}

namespace {

/// Live keys of a row of given scores, scores read only if asked for (or if a mask may hide some).
std::vector<Entry> live_scores(const Tensor& scores, const Admit& admit, const std::vector<Run>& runs, const Window& w,
                               int64_t row) {
  std::vector<Entry> live;
  for (const Run& run : runs) {
    for (int64_t n = run.first; n < run.last; ++n) {
      float addend = 0.0f;
      if (masked(admit.mask, row, n, &addend)) continue;
      const bool forced = n - w.start < admit.force_first || w.end - n <= admit.force_last;
      const float given = real(scores, row, n);
      live.push_back({canonical(admit.mask.data != nullptr ? given + addend : given), n, forced});
    }
  }
  return live;
}

void count_scored(const std::vector<Entry>& live, Counts& counts) {
  counts.add(kScoredKeys, static_cast<int64_t>(live.size()));
  for (const Entry& e : live) counts.add(kNanScores, std::isnan(e.score));
}

}  // namespace

void topk(const Topk& a, const Exec& exec) {
  Counts counts;
  const int64_t columns = a.scores.shape[1];
  answer_rows("topk", a.rows.count, {&a.out, a.topk, Shard{}, Emission::to_start, {}}, exec, counts, [&](int64_t r) {
    const Window w = window_of(a.rows, r, columns);
    const std::vector<Run> runs = reachable_runs(admitted_runs(w, a.admit, r), w, columns, a.rows.max_len, r, counts);
    std::vector<Entry> live = live_scores(a.scores, a.admit, runs, w, r);
    const int64_t own = a.row_topk.data != nullptr ? std::clamp<int64_t>(integer(a.row_topk, r), 0, a.topk) : a.topk;
    const bool scored = needs_scores(a.out) || static_cast<int64_t>(live.size()) > own;
    if (scored) count_scored(live, counts);
    return choose(std::move(live), w, own, a.out, scored, counts);
  });
}

void select_blocks(const SelectBlocks& a, const Exec& exec) {
  Counts counts;
  const int64_t columns = a.scores.shape[1];
  std::vector<std::vector<Block>> kept;
  for (int64_t r = 0; r < a.rows.count; ++r) {
    const Window w = window_of(a.rows, r, columns);
    const std::vector<Run> runs = reachable_runs(admitted_runs(w, Admit{}, r), w, columns, a.rows.max_len, r, counts);
    const std::vector<Entry> live = live_scores(a.scores, Admit{}, runs, w, r);
    count_scored(live, counts);
    kept.push_back(best_blocks(live, w, a.block_size, a.blocks.shape[1]));
  }
  counts.raise_if_strict("select_blocks", exec);
  for (size_t r = 0; r < kept.size(); ++r) put_blocks(a.blocks, {}, static_cast<int64_t>(r), kept[r]);
  counts.add(kRows, a.rows.count);
  counts.publish(exec);
}

}  // namespace topkey::ref
