// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See room.h.
#include "cpu/room.h"

#include <algorithm>

namespace topkey::cpu {
namespace {

constexpr size_t kMostBytes = size_t{60} << 20;  // of 64 MiB promised; the rest is slack for rounding
constexpr int64_t kSpare = 2048;                 // entries beyond topk before a selection is shrunk
constexpr int64_t kWantedWorkers = 16;
constexpr size_t kSlack = 128;  // lines that arrays begin on

int64_t capacity_for(int64_t k, int64_t all) { return std::max<int64_t>(1, std::min(k + kSpare, all)); }

SinkBuffers take_sink(Arena& arena, const Extents& e, int64_t entries) {
  SinkBuffers b{};
  b.capacity = entries;
  b.score = arena.take<float>(b.capacity);
  b.position = arena.take<int32_t>(b.capacity);
  if (e.blocks > 0) {
    b.block_capacity = capacity_for(e.blocks, e.keys + 1);
    b.block_score = arena.take<float>(b.block_capacity);
    b.block_id = arena.take<int32_t>(b.block_capacity);
  }
  return b;
}

TeamRoom take_together(Arena& arena, const Extents& e, int64_t lists) {
  TeamRoom t{};
  t.lists = lists;
  t.most = std::max(std::min(e.topk, e.keys), std::min(e.blocks, e.keys + 1));
  t.bins = arena.take<uint32_t>(lists * kDigits * kBins);
  t.found = arena.take<TeamFound>(lists);
  t.score = arena.take<float>(lists * t.most);
  t.position = arena.take<int32_t>(lists * t.most);
  return t;
}

TaskTable take_table(Arena& arena, const Extents& e) {
  TaskTable t{};
  t.max_rows = std::clamp<int64_t>(e.rows, 1, kRowChunk);
  t.max_tasks = t.max_rows + std::min<int64_t>(kRowChunk, t.max_rows * 256);
  t.state = arena.take<PassState>(1);
  t.facts = arena.take<RowFact>(t.max_rows);
  t.tasks = arena.take<Task>(t.max_tasks);
  t.gates = arena.take<SharedGate>(t.max_rows);
  return t;
}

Scratch take_scratch(Arena& arena, const Extents& e, int64_t row_block) {
  Scratch s{};
  if (e.heads > 0) {
    s.tile.take(arena, Tile::keys_for(row_block, e.head_dim), e.format, e.head_dim);
    s.queries = take_queries(arena, row_block, e.heads, e.head_dim, e.format);
  } else {
    s.scores = arena.take<float>(kTakeKeys);
    s.positions = arena.take<int32_t>(kTakeKeys);
  }
  s.sinks = arena.take<SinkBuffers>(row_block);
  s.accepted = arena.take<int32_t>(kTakeKeys);
  s.candidates = arena.take<int32_t>(e.candidates);
  s.words = arena.take<uint64_t>(std::min(e.topk, std::max<int64_t>(e.keys, 1)));
  for (int64_t i = 0; i < row_block; ++i) {
    const SinkBuffers b = take_sink(arena, e, most_entries(e));
    if (s.sinks != nullptr) s.sinks[i] = b;
  }
  return s;
}

size_t table_bytes(const Extents& e) {
  Arena arena(nullptr, 0);
  take_table(arena, e);
  return arena.used();
}
size_t scratch_bytes(const Extents& e, int64_t row_block) {
  Arena arena(nullptr, 0);
  take_scratch(arena, e, row_block);
  return arena.used();
}
size_t together_bytes(const Extents& e, int64_t lists) {
  Arena arena(nullptr, 0);
  take_together(arena, e, lists);
  return arena.used();
}
int64_t most_rows(const Extents& e) { return e.candidates > 0 ? 1 : std::clamp<int64_t>(e.rows, 1, kRowBlock); }

}  // namespace

size_t least_bytes(const Extents& e) { return table_bytes(e) + scratch_bytes(e, 1) + kSlack; }

int64_t most_entries(const Extents& e) { return capacity_for(e.topk, e.keys); }

int64_t part_bytes(const Extents& e, int64_t entries) {
  Arena arena(nullptr, 0);
  take_sink(arena, e, entries);
  return static_cast<int64_t>(arena.used());
}

size_t wanted_bytes(const Extents& e) {
  // Eight rows in as many slices as pass.cpp cuts for that many workers; a part holds its slice, or what a running
  // selection needs. Sums by row, so that it grows with every extent.
  const int64_t slices = kWantedWorkers * kSlicesPerWorker, rows = std::clamp<int64_t>(e.rows, 1, 8);
  const int64_t entries = std::min(e.keys + slices * 16, slices * most_entries(e));
  const int64_t parts = rows * (entries * 8 + slices * (part_bytes(e, 0) + 256 + static_cast<int64_t>(sizeof(Part))));
  const size_t all = table_bytes(e) + kWantedWorkers * scratch_bytes(e, most_rows(e)) + together_bytes(e, kMostLists) +
                     static_cast<size_t>(parts);
  return std::max(least_bytes(e), std::min(all, kMostBytes));
}

SinkBuffers Room::part_buffers(const Task& task, int64_t i) const {
  const int64_t each = part_bytes(extents, task.part_entries);
  const int64_t at = task.part_at + (int64_t{task.slice} * task.num_rows + i) * each;
  Arena arena(part_base + at, static_cast<size_t>(each));
  return take_sink(arena, extents, task.part_entries);
}

Room make_room(const Extents& e, void* workspace, size_t bytes, int32_t rank, int32_t size) {
  Arena arena(workspace, bytes);
  Room room{};
  room.extents = e;
  room.table = take_table(arena, e);
  // A row group as large as fits beside room for parts; then as many workers as fit.
  const size_t left = arena.left();
  room.row_block = most_rows(e);
  while (room.row_block > 1 && scratch_bytes(e, room.row_block) * static_cast<size_t>(size) > left / 4 * 3)
    room.row_block /= 2;
  const size_t each = scratch_bytes(e, room.row_block);
  room.workers = std::clamp<int64_t>(static_cast<int64_t>(left / each), 1, size);
  char* scratch = arena.take<char>(room.workers * static_cast<int64_t>(each));
  if (rank < room.workers) {
    Arena own(scratch + static_cast<size_t>(rank) * each, each);
    room.scratch = take_scratch(own, e, room.row_block);
  }
  if (room.workers <= 1) return room;
  if (together_bytes(e, kMostLists) <= arena.left() / 2) room.together = take_together(arena, e, kMostLists);
  // One part for each kilobyte of their entries is more than pass.cpp ever cuts.
  const int64_t rest = static_cast<int64_t>(arena.left() - std::min(arena.left(), 2 * kSlack));
  room.max_parts = rest / (1024 + static_cast<int64_t>(sizeof(Part)));
  room.parts = arena.take<Part>(room.max_parts);
  room.part_room = std::max<int64_t>(rest - room.max_parts * static_cast<int64_t>(sizeof(Part)), 0);
  room.part_base = arena.take<char>(room.part_room);
  return room;
}

}  // namespace topkey::cpu
