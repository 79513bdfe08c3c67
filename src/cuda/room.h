// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The workspace of score, select, search and merge: how many rows are worked on at a time, how many of their keys, and
// where everything lies. A pure function of the operation and its shape, so that the query and the call agree.
#pragma once
#include <cstddef>
#include <cstdint>

#include "backend_table.h"
#include "cuda/device/facts.cuh"
#include "cuda/device/lists.cuh"

namespace topkey::cuda {

struct Room {
  int64_t group_rows;  ///< rows worked on at a time
  int64_t chunk_keys;  ///< keys of each of them at a time; all of them where they fit
  int64_t list_length, block_list_length;
  int64_t sorted;                    ///< numbers that a block may have to sort
  int64_t sort_blocks, sort_length;  ///< thread blocks that sort in memory, and the numbers each may need there
  int64_t id_stride;
  RowFact* facts;                       ///< [group_rows]
  uint64_t* work;                       ///< [group_rows + 1] pieces of work before each tile of rows
  int32_t* ids;                         ///< [group_rows, id_stride] kept candidate blocks (device/facts.cuh); or null
  float* scores;                        ///< [group_rows, chunk_keys]
  WinnerList lists[2], block_lists[2];  ///< what survived the chunks so far; written and read in turns
  RowState* states;                     ///< [group_rows]
  int64_t parts;                        ///< most parts that a row is cut into for the selection; 1 = never cut
  WinnerList part_lists;                ///< [group_rows, parts, list_length]
  PartState* part_states;               ///< [group_rows, parts]
  uint64_t* sort;                       ///< [sort_blocks, sort_length]
  size_t bytes;
};

Room make_room(Op op, const Shape& shape, void* workspace);

}  // namespace topkey::cuda
