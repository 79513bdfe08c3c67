// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The workspace of a search and how it is shared out: facts and tasks, the workers' scratch, parts of sliced rows.
// Sizes come from shapes alone; whatever is given beyond the least is used for more rows a group, more workers, more
// slices. No result depends on it.
#pragma once
#include <cstdint>

#include "cpu/arena.h"
#include "cpu/pass.h"
#include "cpu/sink.h"
#include "cpu/tile.h"
#include "cpu/together.h"

namespace topkey::cpu {

/// What sizes depend on. heads = 0: given scores, no tiles.
struct Extents {
  int64_t rows, keys, heads, head_dim, topk, blocks, candidates;
  KeyFormat format;
};

/// One worker's own memory.
struct Scratch {
  Tile tile;
  PackedQueries queries;
  SinkBuffers* sinks;   ///< [row_block]
  int32_t* accepted;    ///< [kTakeKeys]
  int32_t* candidates;  ///< sorted ids of one row
  uint64_t* words;      ///< [topk], for order by score
  float* scores;        ///< [kTakeKeys], given scores widened
  int32_t* positions;   ///< [kTakeKeys]
};
constexpr int64_t kTakeKeys = 512;  // most keys that a sink takes at once

/// The least that a call needs, and what it can put to use (both grow with every extent).
size_t least_bytes(const Extents& e);
size_t wanted_bytes(const Extents& e);

struct Room {
  TaskTable table;
  int64_t workers, row_block;
  Scratch scratch;  ///< this member's; none for a member beyond `workers`
  Part* parts;      ///< [max_parts]
  int64_t max_parts, part_room;
  TeamRoom together;  ///< lists = 0 where there is no room for it
  /// Buffers of row i of a sliced task.
  SinkBuffers part_buffers(const Task& task, int64_t i) const;

  char* part_base;  ///< [part_room] bytes
  Extents extents;
};
/// Bytes of a part's buffers for `entries` keys.
int64_t part_bytes(const Extents& e, int64_t entries);
/// Entries that a row's buffers need where any number of keys may come.
int64_t most_entries(const Extents& e);
/// Cuts the workspace for a team of `size`; every member gets the same answer but for its own scratch.
Room make_room(const Extents& e, void* workspace, size_t bytes, int32_t rank, int32_t size);

}  // namespace topkey::cpu
