// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See emit.h.
#include "cpu/emit.h"

#include <algorithm>
#include <limits>

namespace topkey::cpu {
namespace {

int32_t* row_of(const Tensor& t, int64_t row) {
  return t.data == nullptr ? nullptr : static_cast<int32_t*>(t.data) + row * t.stride[0];
}

void fill_row(const Selection& out, int32_t* cells, int64_t used, int64_t topk) {
  if (cells == nullptr) return;
  int32_t value = -1;
  if (out.fill == Fill::value) value = out.fill_value;
  if (out.fill == Fill::repeat && used > 0) value = cells[0];
  std::fill(cells + used, cells + topk, value);
}

/// Order of the selection: forced first, by position, then score descending, position ascending. Sorted as (inverted
/// key, position) words with the entry's place found again by position, which no two entries share.
void sort_entries(const Entries& entries, const Forced& forced, uint64_t* words) {
  for (int64_t i = 0; i < entries.size; ++i) {
    const uint32_t key = forced.key(entries.score[i], entries.position[i]);
    words[i] = static_cast<uint64_t>(~key) << 32 | static_cast<uint64_t>(i);
  }
  std::sort(words, words + entries.size);
}

template <class At>
void put_indices(const Emitter& e, int64_t row, const RowFact& fact, const Entries& entries, const At& at,
                 int32_t* indices) {
  const int64_t start = e.shard.active() ? 0 : fact.start;
  const int64_t shift = (e.out->index_base.data != nullptr ? read_i32(e.out->index_base, row) : 0) - start;
  if (e.shard.active() || e.out->order == Order::score) {
    for (int64_t i = 0; i < entries.size; ++i)
      indices[i] = static_cast<int32_t>(e.shard.global(entries.position[at(i)]) + shift);
  } else {
    // The common case, kept so plain that it becomes vector code.
    const int32_t low = static_cast<int32_t>(shift);
    for (int64_t i = 0; i < entries.size; ++i) {
      indices[i] = static_cast<int32_t>(static_cast<uint32_t>(entries.position[i]) + static_cast<uint32_t>(low));
    }
  }
}

}  // namespace

bool needs_scores(const Selection& out) {
  return out.scores.data != nullptr || out.blocks.data != nullptr || out.order == Order::score;
}

int64_t slot_of(const SlotMap& map, int64_t row, int64_t request, int64_t position) {
  const int64_t table_row = map.table_per_row ? row : request;
  const Tensor& t = map.block_table;
  if (position < 0 || table_row < 0 || table_row >= t.shape[0]) return -1;
  const int64_t column = position / map.page_size;
  if (column >= t.shape[1]) return -1;
  const int64_t page = static_cast<const int32_t*>(t.data)[table_row * t.stride[0] + column * t.stride[1]];
  const int64_t slot = page * map.page_size + position % map.page_size;
  return page < 0 || slot > std::numeric_limits<int32_t>::max() ? -1 : slot;
}

void emit_row(const Emitter& e, int64_t row, const RowFact& fact, const Entries& entries, const Forced& forced,
              Counts& counts) {
  const Selection& out = *e.out;
  int32_t* indices = row_of(out.indices, row);
  int32_t* slots = row_of(out.slots, row);
  if (e.dry) {
    for (int64_t i = 0; slots != nullptr && i < entries.size; ++i) {
      const int64_t position = entries.position[i] - (e.absolute_slots ? 0 : fact.start);
      counts.add(kSkippedSlots, slot_of(out.slot_map, row, fact.request, position) < 0);
    }
    return;
  }
  float* scores = reinterpret_cast<float*>(row_of(out.scores, row));
  const bool by_score = out.order == Order::score;
  if (by_score) sort_entries(entries, forced, e.words);
  const auto at = [&](int64_t i) { return by_score ? static_cast<int64_t>(e.words[i] & 0xFFFFFFFFu) : i; };
  if (indices != nullptr) put_indices(e, row, fact, entries, at, indices);
  for (int64_t i = 0; scores != nullptr && i < entries.size; ++i) scores[i] = canonical(entries.score[at(i)]);
  for (int64_t i = 0; slots != nullptr && i < entries.size; ++i) {
    const int64_t position = entries.position[at(i)] - (e.absolute_slots ? 0 : fact.start);
    const int64_t slot = slot_of(out.slot_map, row, fact.request, position);
    slots[i] = static_cast<int32_t>(slot);
    counts.add(kSkippedSlots, slot < 0);
  }
  fill_row(out, indices, entries.size, e.topk);
  fill_row(out, slots, entries.size, e.topk);
  if (scores != nullptr) std::fill(scores + entries.size, scores + e.topk, -std::numeric_limits<float>::infinity());
  if (out.counts.data != nullptr) *row_of(out.counts, row) = static_cast<int32_t>(entries.size);
}

void emit_blocks(const Tensor& blocks, const Tensor& scores, int64_t row, const Entries& chosen) {
  int32_t* cells = row_of(blocks, row);
  std::copy(chosen.position, chosen.position + chosen.size, cells);
  std::fill(cells + chosen.size, cells + blocks.shape[1], -1);
  float* values = reinterpret_cast<float*>(row_of(scores, row));
  if (values == nullptr) return;
  for (int64_t i = 0; i < chosen.size; ++i) values[i] = canonical(chosen.score[i]);
  std::fill(values + chosen.size, values + blocks.shape[1], -std::numeric_limits<float>::infinity());
}

}  // namespace topkey::cpu
