// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See pass.h.
#include "cpu/pass.h"

#include <algorithm>

namespace topkey::cpu {
namespace {

int64_t cost_of(const RowFact& f) { return f.scored ? std::min(f.live, f.high - f.low) : 0; }

bool starts_alike(const RowFact& a, const RowFact& b) { return a.start == b.start && a.whole_start == b.whole_start; }

/// Rows [first, result) share keys and can be one group.
int64_t group_end(const Cutting& cut, const RowFact* facts, int64_t first, int64_t rows) {
  int64_t end = first + 1;
  while (!cut.row_by_row && end < rows && end - first < cut.row_block && facts[end].scored &&
         facts[end].table_row == facts[first].table_row && (!cut.by_start || starts_alike(facts[end], facts[first]))) {
    ++end;
  }
  return end;
}

void add_group(const Cutting& cut, int64_t first, int64_t end, int64_t fair, const TaskTable& table) {
  const RowFact* facts = table.facts;
  PassState& state = *table.state;
  int64_t low = INT64_MAX, high = INT64_MIN, cost = 0;
  for (int64_t r = first; r < end; ++r) {
    if (facts[r].low >= facts[r].high) continue;  // nothing of its own to walk
    low = std::min(low, facts[r].low);
    high = std::max(high, facts[r].high);
    cost += cost_of(facts[r]);
  }
  if (low > high) low = high = 0;
  const int64_t rows = end - first, block = std::max<int64_t>(cut.block_size, 1);
  const int64_t step = (8 + block - 1) / block * block;  // whole blocks, and eight keys or more
  int64_t slices = std::max<int64_t>(1, (cost + fair - 1) / fair);
  slices = std::min(
      {slices, (cut.max_parts - state.num_parts) / rows, table.max_tasks - state.num_tasks - (table.max_rows - first)});
  // A slice under a thousand keys a row is not worth its merge.
  slices = std::max<int64_t>(1, std::min({slices, cost / rows / 1024, kMaxSlices}));
  const int64_t length = ((high - low + slices - 1) / slices + step - 1) / step * step;
  const int64_t part = slices > 1 ? state.num_parts : -1;
  if (slices > 1) state.num_parts += slices * rows;
  // Slices are cut at multiples of step from the start, where blocks begin.
  const int64_t base = facts[first].start + (low - facts[first].start) / step * step;
  // Under a shard a block has as many keys as this rank owns of it: the slice ends where the block of its end begins.
  const auto cut_at = [&](int64_t key) {
    const RowFact& f = facts[first];
    return cut.block_size > 0 && f.shard.active() ? f.position_at(f.distance(key) / block * block) : key;
  };
  for (int64_t s = 0; s < slices; ++s) {
    const int64_t from = s == 0 ? low : std::max(low, cut_at(base + s * length));
    const int64_t to = s + 1 == slices ? high : std::max(low, cut_at(base + (s + 1) * length));
    table.tasks[state.num_tasks++] = {static_cast<int32_t>(first),
                                      static_cast<int32_t>(rows),
                                      std::min(from, high),
                                      std::min(to, high),
                                      static_cast<int32_t>(s),
                                      static_cast<int32_t>(slices),
                                      part};
  }
}

}  // namespace

void cut_tasks(const Cutting& cut, int64_t rows, const TaskTable& table) {
  PassState& state = *table.state;
  const RowFact* facts = table.facts;
  state.next_task = 0;
  state.num_tasks = state.num_parts = 0;
  int64_t total = 0, groups = 0;
  for (int64_t r = 0; r < rows; ++groups) {
    const int64_t end = facts[r].scored ? group_end(cut, facts, r, rows) : r + 1;
    groups -= !facts[r].scored;
    for (; r < end; ++r) total += cost_of(facts[r]);
  }
  // One group: a slice a worker. Several: finer, so that workers end together; many: only what would keep a worker
  // late is cut.
  const int64_t shares = cut.workers <= 1           ? 1
                         : groups <= 1              ? cut.workers
                         : groups < 4 * cut.workers ? 4 * cut.workers
                                                    : 2 * cut.workers;
  const int64_t fair =
      cut.workers <= 1 ? std::max<int64_t>(total, 1) : std::max<int64_t>((total + shares - 1) / shares, 1);
  for (int64_t r = 0; r < rows;) {
    if (!facts[r].scored) {
      ++r;
      continue;
    }
    const int64_t end = group_end(cut, facts, r, rows);
    add_group(cut, r, end, fair, table);
    r = end;
  }
}

}  // namespace topkey::cpu
