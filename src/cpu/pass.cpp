// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See pass.h.
#include "cpu/pass.h"

#include <algorithm>

namespace topkey::cpu {
namespace {

int64_t cost_of(const RowFact& f) { return f.scored ? std::min(f.live, f.high - f.low) : 0; }

bool starts_alike(const RowFact& a, const RowFact& b) { return a.start == b.start && a.whole_start == b.whole_start; }

/// Rows of the next group where `left` scored rows are to come. Large groups decode a key for many rows; the last ones
/// are small, so that workers end together; few rows are cut along their keys instead.
int64_t rows_of_group(const Cutting& cut, int64_t left, int64_t scored) {
  if (cut.workers <= 1) return cut.row_block;
  const int64_t least = scored >= 8 * cut.workers ? 4 : 8;
  return std::min(std::max((left + 2 * cut.workers - 1) / (2 * cut.workers), least), cut.row_block);
}

/// Rows [first, result) share keys and can be one group of at most `most`.
int64_t group_end(const Cutting& cut, const RowFact* facts, int64_t first, int64_t rows, int64_t most) {
  int64_t end = first + 1;
  while (!cut.row_by_row && end < rows && end - first < most && facts[end].scored &&
         facts[end].table_row == facts[first].table_row && (!cut.by_start || starts_alike(facts[end], facts[first]))) {
    ++end;
  }
  return end;
}

/// Calls f(first, end) for each group.
template <class F>
void for_each_group(const Cutting& cut, const RowFact* facts, int64_t rows, F&& f) {
  int64_t scored = 0;
  for (int64_t r = 0; r < rows; ++r) scored += facts[r].scored;
  int64_t left = scored;
  for (int64_t r = 0; r < rows;) {
    if (!facts[r].scored) {
      ++r;
      continue;
    }
    const int64_t end = group_end(cut, facts, r, rows, rows_of_group(cut, left, scored));
    f(r, end);
    left -= end - r;
    r = end;
  }
}

int64_t bytes_of_part(const Cutting& cut, int64_t entries) {
  return (entries + 15) / 16 * 16 * 8 + cut.block_bytes;  // two arrays of 4-byte words on cache lines of their own
}

/// Slices are whole steps: whole blocks, else whole panels.
int64_t step_of(const Cutting& cut) {
  if (cut.block_size == 0) return cut.panel;
  return (8 + cut.block_size - 1) / cut.block_size * cut.block_size;
}

/// A group's keys in slices of `length`.
struct Slicing {
  int64_t slices, length, entries;
};
/// As many slices as wanted, or as there is room for.
Slicing slice(const Cutting& cut, const TaskTable& table, int64_t rows, int64_t keys, int64_t wanted) {
  const PassState& state = *table.state;
  const int64_t step = step_of(cut);
  for (int64_t slices = wanted; slices > 1; slices -= (slices + 3) / 4) {
    const int64_t length = ((keys + slices - 1) / slices + step - 1) / step * step;
    // The first slice may begin up to a step before its keys.
    const int64_t entries = std::min(length + step, cut.part_entries);
    if (state.num_parts + slices * rows <= cut.max_parts &&
        state.part_bytes + slices * rows * bytes_of_part(cut, entries) <= cut.part_room) {
      return {slices, length, entries};
    }
  }
  return {1, (keys + step) / step * step, 0};
}

/// Keys of a slice beyond one a worker: shorter ones keep all their keys, and the merge then costs more than the balance
/// saves (16,384 admitted keys on two threads: 3.3 ms in sixteen slices, 2.5 in four).
constexpr int64_t kFineSlice = 4096;

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
  const int64_t rows = end - first, step = step_of(cut);
  // Rounded: a group that is a little dearer than a fair share is not cut.
  const int64_t spare_tasks = table.max_tasks - state.num_tasks - (table.max_rows - first);
  const int64_t worth = std::min(cost / rows / cut.least_slice, std::max(cut.workers, cost / rows / kFineSlice));
  const int64_t wanted = std::min({(cost + fair / 2) / fair, spare_tasks, worth, kMaxSlices});
  const auto [slices, length, entries] = slice(cut, table, rows, high - low, wanted);
  const int64_t part = slices > 1 ? state.num_parts : -1, part_at = state.part_bytes, sliced = state.sliced_rows;
  if (slices > 1) {
    state.num_parts += slices * rows;
    state.part_bytes += slices * rows * bytes_of_part(cut, entries);
    state.sliced_rows += rows;
  }
  // Slices are cut at multiples of step from the start, where blocks begin.
  const int64_t base = facts[first].start + (low - facts[first].start) / step * step;
  // Under a shard a block has as many keys as this rank owns of it: the slice ends where the block of its end begins.
  const auto cut_at = [&](int64_t key) {
    const RowFact& f = facts[first];
    return cut.block_size > 0 && f.shard.active() ? f.position_at(f.distance(key) / cut.block_size * cut.block_size)
                                                  : key;
  };
  for (int64_t s = 0; s < slices; ++s) {
    const int64_t from = s == 0 ? low : std::max(low, cut_at(base + s * length));
    const int64_t to = s + 1 == slices ? high : std::max(low, cut_at(base + (s + 1) * length));
    Task& task = table.tasks[state.num_tasks++];
    task.first_row = static_cast<int32_t>(first), task.num_rows = static_cast<int32_t>(rows);
    task.first_key = std::min(from, high), task.last_key = std::min(to, high);
    task.slice = static_cast<int32_t>(s), task.slices = static_cast<int32_t>(slices);
    task.part = part, task.part_at = part_at, task.part_entries = entries;
    task.sliced = sliced;
  }
}

}  // namespace

void cut_tasks(const Cutting& cut, int64_t rows, const TaskTable& table) {
  PassState& state = *table.state;
  const RowFact* facts = table.facts;
  state.next_task = 0;
  state.num_tasks = state.num_parts = state.part_bytes = state.sliced_rows = 0;
  int64_t total = 0, groups = 0;
  for_each_group(cut, facts, rows, [&](int64_t first, int64_t end) {
    ++groups;
    for (int64_t r = first; r < end; ++r) total += cost_of(facts[r]);
  });
  // Few groups: slices for all, so that workers end together; many: only what would keep a worker late is cut.
  const int64_t shares = cut.workers <= 1            ? 1
                         : groups >= 2 * cut.workers ? 2 * cut.workers
                                                     : std::max(kSlicesPerWorker * cut.workers, kLeastSlices);
  const int64_t fair = cut.workers <= 1 ? 2 * total + 1 : std::max<int64_t>((total + shares - 1) / shares, 1);
  for_each_group(cut, facts, rows, [&](int64_t first, int64_t end) { add_group(cut, first, end, fair, table); });
}

}  // namespace topkey::cpu
