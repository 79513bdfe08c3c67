// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// How the search is cut into tasks, and what a task needs. Rows that share keys form a group (up to kRowBlock of
// them); a group whose cost is more than a fair share of a worker is cut along its keys. Neither cut changes a bit:
// selection is exact on any partition.
#pragma once
#include <atomic>
#include <cstdint>

#include "cpu/window.h"
#include "cpu/winners.h"

namespace topkey::cpu {

constexpr int64_t kRowBlock =
    32;  // rows of a group: decoding a key (50 cycles) is then under 1 % of scoring it (32 x 512)
constexpr int64_t kMaxSlices = 1024;
/// Slices of one group for each worker: the more, the less the slowest worker is waited for. They cost little, since
/// parts up to their buffers' size keep all, and longer ones share a gate.
constexpr int64_t kSlicesPerWorker = 4;
constexpr int64_t kLeastSlices = 32;  // also for two workers: 2,048 keys a slice cost under 1 % more than 32,768
constexpr int64_t kRowChunk = 4096;   // rows looked at together: bounds the facts kept in the workspace

struct Task {
  int32_t first_row, num_rows;  ///< of the chunk
  int64_t first_key, last_key;  ///< the part of the keys that this task walks
  int32_t slice, slices;        ///< more than one slice: the parts meet in a merge
  int64_t part;                 ///< of a sliced group: index of its first part (slices * num_rows of them), else -1
  int64_t part_at;              ///< and where their buffers begin, in bytes
  int64_t part_entries;         ///< keys that one of them holds
  int64_t sliced;               ///< sliced rows before the group's
};

/// Shared by the members of a call, in the workspace; written by rank 0 between barriers, but for the counter.
struct PassState {
  std::atomic<int64_t> next_task, wild;
  int64_t num_tasks, num_parts, part_bytes, sliced_rows;
};

/// What rank 0 cuts: facts of rows [0, max_rows) and room for their tasks.
struct TaskTable {
  PassState* state;
  RowFact* facts;
  Task* tasks;
  SharedGate* gates;            ///< [max_rows]
  int64_t max_rows, max_tasks;  ///< max_tasks > max_rows
};

struct Cutting {
  int64_t workers;
  int64_t row_block;     ///< rows of a group at most
  int64_t max_parts;     ///< parts of sliced groups at most
  int64_t part_room;     ///< bytes for their buffers
  int64_t part_entries;  ///< keys that a part must be able to hold, unless its slice is shorter
  int64_t block_bytes;   ///< bytes of a part's buffers beside those of its keys
  int64_t block_size;    ///< of published blocks, 0 = none: slices must not cut a block
  int64_t least_slice;   ///< keys a row: a shorter slice is not worth its merge
  int64_t panel;         ///< keys that are scored together: slices are cut at multiples where they can be
  bool row_by_row;       ///< rows do not share keys (candidates)
  bool by_start;         ///< rows of a group must start alike (blocks count from the start)
};

/// Groups and slices the scored rows among facts[0..rows).
void cut_tasks(const Cutting& cut, int64_t rows, const TaskTable& table);

}  // namespace topkey::cpu
