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

/// What the task of one part of a sliced row found; the entries are in the part's buffers.
struct Part {
  int64_t size, blocks;
  Cut cut;
};

/// The least that a call needs, and what it can put to use (both grow with every extent).
size_t least_bytes(const Extents& e);
size_t wanted_bytes(const Extents& e);

struct Room {
  TaskTable table;
  int64_t workers, row_block, max_parts;
  Scratch scratch;  ///< this member's; none for a member beyond `workers`
  Part* parts;      ///< [max_parts]
  SinkBuffers part_buffers(int64_t part) const;

  char* part_base;
  Extents extents;
};
/// Cuts the workspace for a team of `size`; every member gets the same answer but for its own scratch.
Room make_room(const Extents& e, void* workspace, size_t bytes, int32_t rank, int32_t size);

}  // namespace topkey::cpu
