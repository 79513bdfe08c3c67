// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// From a row's chosen entries to output values: the one way by which answers leave this backend.
#pragma once
#include <cstdint>

#include "cpu/counts.h"
#include "cpu/window.h"
#include "cpu/winners.h"
#include "topkey/topkey.h"

namespace topkey::cpu {

struct Emitter {
  const Selection* out;
  int64_t topk;         ///< columns to write
  Shard shard;          ///< positions become global under it
  bool absolute_slots;  ///< slot_map translates the position itself (paged keys, merge), else position - start
  uint64_t* words;      ///< scratch for topk entries, where order is score
  bool dry = false;     ///< count, write nothing
};

/// Whether rows must be scored even if their live keys fit topk.
bool needs_scores(const Selection& out);
/// Slot of a position by the selection's map, -1 where it has none.
int64_t slot_of(const SlotMap& map, int64_t row, int64_t request, int64_t position);
/// Writes indices, slots, scores, counts and fill of one row. entries in position order; forced as the selection had
/// it.
void emit_row(const Emitter& e, int64_t row, const RowFact& fact, const Entries& entries, const Forced& forced,
              Counts& counts);
/// Block ids, ascending, then -1; their scores, then -inf, where `scores` is given.
void emit_blocks(const Tensor& blocks, const Tensor& scores, int64_t row, const Entries& chosen);

}  // namespace topkey::cpu
