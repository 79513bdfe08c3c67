// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Selection given scores: every output of a call against a full sort of the same scores, no band at all.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "support/compare.h"

namespace topkey::support {
namespace {

struct Entry {
  int64_t index, slot;
  float score;
};

/// Where positions become indices and slots: what differs between the five operations.
struct Naming {
  std::function<int64_t(int64_t, const RowRange&)> index;  ///< of a relative position, before index_base
  std::function<int64_t(int64_t, const RowRange&)> slot_position;
};

struct Counted {
  uint64_t words[kNumStats] = {};
};

int64_t slot_of(const SlotMap& map, int64_t line, int64_t position) {
  const Tensor& table = map.block_table;
  const int64_t column = position / map.page_size;
  if (position < 0 || line < 0 || line >= table.shape[0] || column >= table.shape[1]) return -1;
  const int64_t page = int_at(table, line, column);
  const int64_t slot = page * map.page_size + position % map.page_size;
  return page < 0 || slot > std::numeric_limits<int32_t>::max() ? -1 : slot;
}

std::vector<Entry> entries_of(const Selection& out, const Naming& naming, const RowQuestion& q, const RowAnswer& a,
                              int64_t row) {
  const int64_t base = out.index_base.data != nullptr ? int_at(out.index_base, row) : 0;
  std::vector<Entry> entries;
  for (const Key& key : a.chosen) {
    Entry entry{naming.index(key.position, q.range) + base, -1, key.score};
    if (out.slots.data != nullptr) {
      const int64_t line = table_line(out.slot_map.table_per_row, row, q.range);
      entry.slot = slot_of(out.slot_map, line, naming.slot_position(key.position, q.range));
    }
    entries.push_back(entry);
  }
  if (out.order != Order::score) {
    std::sort(entries.begin(), entries.end(), [](const Entry& x, const Entry& y) { return x.index < y.index; });
  }
  return entries;
}

int64_t fill_of(const Selection& out, const std::vector<Entry>& entries, int64_t Entry::*field) {
  if (out.fill == Fill::value) return out.fill_value;
  return out.fill == Fill::repeat && !entries.empty() ? entries[0].*field : -1;
}

/// For order `any`: brings `entries` into the order in which the call wrote them, where it wrote the same set.
void follow_written_order(const Tensor& written, int64_t Entry::*field, int64_t row, std::vector<Entry>& entries) {
  for (size_t i = 0; i < entries.size(); ++i) {
    const int64_t got = int_at(written, row, static_cast<int64_t>(i));
    const auto at = std::find_if(entries.begin() + static_cast<int64_t>(i), entries.end(),
                                 [&](const Entry& entry) { return entry.*field == got; });
    if (at != entries.end()) std::iter_swap(entries.begin() + static_cast<int64_t>(i), at);
  }
}

void expect_int(Report& report, const char* what, int64_t got, int64_t want, int64_t row, int64_t column) {
  ++report.compared;
  if (got == want) return;
  ++report.differing;
  report.fail(std::string(what) + " " + std::to_string(got) + ", expected " + std::to_string(want), row, column);
}

void expect_score(Report& report, float got, float want, int64_t row, int64_t column) {
  ++report.compared;
  if (bits_of(got) == bits_of(want)) return;
  ++report.differing;
  char text[120];
  std::snprintf(text, sizeof text, "score %.9g (0x%08X), expected %.9g (0x%08X)", static_cast<double>(got),
                bits_of(got), static_cast<double>(want), bits_of(want));
  report.fail(text, row, column);
}

void judge_row(Report& report, const Selection& out, int64_t width, std::vector<Entry> entries, int64_t row) {
  if (out.order == Order::any) {
    const bool by_index = out.indices.data != nullptr;
    follow_written_order(by_index ? out.indices : out.slots, by_index ? &Entry::index : &Entry::slot, row, entries);
  }
  const int64_t index_fill = fill_of(out, entries, &Entry::index), slot_fill = fill_of(out, entries, &Entry::slot);
  const auto used = static_cast<int64_t>(entries.size());
  for (int64_t i = 0; i < width; ++i) {
    const Entry entry = i < used ? entries[static_cast<size_t>(i)]
                                 : Entry{index_fill, slot_fill, -std::numeric_limits<float>::infinity()};
    if (out.indices.data != nullptr) expect_int(report, "index", int_at(out.indices, row, i), entry.index, row, i);
    if (out.slots.data != nullptr) expect_int(report, "slot", int_at(out.slots, row, i), entry.slot, row, i);
    if (out.scores.data != nullptr) expect_score(report, float_at(out.scores, row, i), entry.score, row, i);
  }
  if (out.counts.data != nullptr) expect_int(report, "count", int_at(out.counts, row), used, row, -1);
}

void judge_blocks(Report& report, const Tensor& blocks, const RowAnswer& a, int64_t row) {
  for (int64_t c = 0; c < blocks.shape[1]; ++c) {
    const bool used = c < static_cast<int64_t>(a.blocks.size());
    expect_int(report, "block", int_at(blocks, row, c), used ? a.blocks[static_cast<size_t>(c)] : -1, row, c);
  }
}

void count_row(Counted& counted, const RowQuestion& q, const RowAnswer& a, const std::vector<Entry>& entries,
               bool slots) {
  counted.words[kRows] += 1;
  counted.words[kSkippedPages] += static_cast<uint64_t>(q.wild);
  if (a.tied_cut) counted.words[kTiedCuts] += 1;
  for (const Entry& entry : entries) counted.words[kSkippedSlots] += slots && entry.slot < 0;
  if (!a.scored) return;
  counted.words[kScoredKeys] += q.live.size();
  for (const Key& key : q.live) counted.words[kNanScores] += std::isnan(key.score);
}

void judge_stats(Report& report, const Counted& counted, const uint64_t* stats) {
  static constexpr const char* kNames[] = {"rows",          "scored keys", "rescans",  "skipped pages",
                                           "skipped slots", "NaN scores",  "tied cuts"};
  if (stats == nullptr) return;
  for (const int32_t word : {kRows, kScoredKeys, kSkippedPages, kSkippedSlots, kNanScores, kTiedCuts}) {
    ++report.compared;
    if (stats[word] == counted.words[word]) continue;
    ++report.differing;
    report.fail("statistics: " + std::to_string(stats[word]) + " " + kNames[word] + ", expected " +
                std::to_string(counted.words[word]));
  }
}

/// Relative positions stay indices; slots of `slot_position`.
template <class Question>
Report selection_report(const Selection& out, int64_t rows, int64_t width, const Naming& naming, const Question& ask,
                        const uint64_t* stats) {
  Report report;
  report.name = "selection";
  report.rows = rows;
  Counted counted;
  for (int64_t r = 0; r < rows; ++r) {
    const RowQuestion q = ask(r);
    const RowAnswer a = answer(q);
    const std::vector<Entry> entries = entries_of(out, naming, q, a, r);
    judge_row(report, out, width, entries, r);
    if (out.blocks.data != nullptr) judge_blocks(report, out.blocks, a, r);
    count_row(counted, q, a, entries, out.slots.data != nullptr);
  }
  judge_stats(report, counted, stats);
  return report;
}

int64_t same(int64_t position, const RowRange&) { return position; }
int64_t absolute(int64_t position, const RowRange& range) { return range.start + position; }

}  // namespace

Report compare_selection(const Topk& args, const uint64_t* stats) {
  return selection_report(
      args.out, args.rows.count, args.topk, {same, same}, [&](int64_t r) { return question(args, r); }, stats);
}

Report compare_selection(const MqaTopk& args, const Tensor& logits, const uint64_t* stats) {
  return selection_report(
      args.out, args.rows.count, args.topk, {same, same}, [&](int64_t r) { return question(args, logits, r); }, stats);
}

Report compare_selection(const PagedMqaTopk& args, const Tensor& logits, const uint64_t* stats) {
  const Shard shard = args.keys.shard;
  const bool sharded = shard.world_size > 1;
  // Under a shard indices are global, and the slot is that of this rank's own position.
  const auto own = [shard](int64_t distance, const RowRange& range) {
    const int64_t run = std::max(1, shard.interleave), global = range.start + distance;
    return global / (run * shard.world_size) * run + global % run;
  };
  const Naming naming = sharded ? Naming{absolute, own} : Naming{same, absolute};
  Report report = selection_report(
      args.out, args.rows.count, args.topk, naming, [&](int64_t r) { return question(args, logits, r); }, stats);
  for (int64_t r = 0; args.block_scores.data != nullptr && r < args.rows.count; ++r) {
    const RowAnswer a = answer(question(args, logits, r));
    for (int64_t c = 0; c < args.out.blocks.shape[1]; ++c) {
      const bool used = c < static_cast<int64_t>(a.blocks.size());
      const float want = used ? a.block_scores[static_cast<size_t>(c)] : -std::numeric_limits<float>::infinity();
      expect_score(report, float_at(args.block_scores, r, c), want, r, c);
    }
  }
  return report;
}

Report compare_selection(const MergeTopk& args, const uint64_t* stats) {
  Selection out = args.out;
  out.blocks = {};  // of the parts, not of the keys
  Report report = selection_report(
      out, args.rows.count, args.topk, {same, absolute}, [&](int64_t r) { return question(args, r); }, stats);
  for (int64_t r = 0; args.out.blocks.data != nullptr && r < args.rows.count; ++r) {
    RowAnswer a;
    if (!question(args, r).range.fill_only) {
      for (const auto& [id, score] : merged_blocks(args, r)) a.blocks.push_back(static_cast<int32_t>(id));
    }
    judge_blocks(report, args.out.blocks, a, r);
  }
  return report;
}

Report compare_selection(const SelectBlocks& args, const uint64_t* stats) {
  Report report;
  report.name = "selection";
  report.rows = args.rows.count;
  Counted counted;
  for (int64_t r = 0; r < args.rows.count; ++r) {
    const RowQuestion q = question(args, r);
    const RowAnswer a = answer(q);
    judge_blocks(report, args.blocks, a, r);
    count_row(counted, q, a, {}, false);
  }
  judge_stats(report, counted, stats);
  return report;
}

}  // namespace topkey::support
