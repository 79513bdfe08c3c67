// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `rows`: windows, expand_rows, to_slots, expand_pools. See include/topkey/rows.h for what each does.
#include "ref/rows.h"

#include <algorithm>
#include <vector>

namespace topkey::ref {
namespace {

/// Request b with indptr[b] <= row < indptr[b+1], or -1. By halves, and part of the specification: where a caller's
/// indptr does not ascend, several b may do, and every backend must find the same one.
int64_t request_in(const Tensor& indptr, int64_t row) {
  int64_t low = 0, high = indptr.shape[0] - 1;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (integer(indptr, middle + 1) <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const bool inside = low + 1 < indptr.shape[0] && integer(indptr, low) <= row && row < integer(indptr, low + 1);
  return inside ? low : -1;
}

/// Past the largest position that an index can carry.
constexpr int64_t kMaxTokens = int64_t{INT32_MAX} + 1;

struct ExpandedRow {
  int64_t request = -1, length = 0, position = -1, slot = -1;
};

ExpandedRow expand_row(const ExpandRows& a, int64_t row, Counts& counts) {
  const int64_t ratio = a.ratio > 1 ? a.ratio : 1;
  ExpandedRow x;
  x.request = request_in(a.query_start, row);
  if (x.request < 0) return x;
  const int64_t first = integer(a.query_start, x.request), count = integer(a.query_start, x.request + 1) - first;
  x.position = integer(a.seq_lens, x.request) - count + row - first;
  if (x.position < 0) x.position = -1;  // more query rows than tokens: nothing to see, nothing to store
  x.length = a.shard.local_length((x.position + 1) / ratio);
  const int64_t key_row = x.position / ratio;
  const bool completes = x.position >= 0 && (x.position + 1) % ratio == 0;
  if (a.slots.data == nullptr || !completes || !a.shard.owns(key_row)) return x;
  const int64_t last = a.slots.dtype == DType::i64 ? INT64_MAX : INT32_MAX;
  x.slot = slot_of(a.block_table, x.request, a.page_size, a.shard.local(key_row), last);
  if (x.slot < 0) counts.wild(kSkippedSlots, 1, "key position", row, key_row);
  return x;
}

}  // namespace

Window window_of(const Rows& rows, int64_t row, int64_t default_end) {
  const int64_t next_n = rows.next_n > 1 ? rows.next_n : 1;
  Window w{};
  if (rows.request.data != nullptr) {
    w.request = integer(rows.request, row);
  } else if (rows.q_indptr.data != nullptr) {
    w.request = request_in(rows.q_indptr, row);
  } else {
    w.request = row / next_n;
  }
  w.start = rows.start.data != nullptr ? integer(rows.start, row) : 0;
  if (rows.length.data != nullptr) {
    w.end = w.start + integer(rows.length, row);
  } else if (rows.end.data == nullptr) {
    w.end = default_end;
  } else if (rows.end.shape[0] == rows.count) {
    w.end = integer(rows.end, row);
  } else {
    w.end = integer(rows.end, row / next_n) - next_n + 1 + row % next_n;
  }
  w.whole_start = w.start;
  w.whole_end = w.end;
  return w;
}

Window sharded_window(const Window& own, Shard shard, const Tensor& whole_start, const Tensor& whole_end, int64_t row) {
  Window w = own;
  if (!shard.active()) return w;
  w.shard = shard;
  w.whole_start = whole_start.data != nullptr ? integer(whole_start, row) : 0;
  w.whole_end = whole_end.data != nullptr ? integer(whole_end, row) : INT32_MAX;
  w.start = std::max(w.start, w.position_at(0));
  if (whole_end.data != nullptr) w.end = std::min(w.end, w.position_at(w.whole_end - w.whole_start));
  return w;
}

void Counts::wild(Stat stat, int64_t n, const char* what, int64_t row, int64_t value) {
  if (n <= 0) return;
  add(stat, n);
  if (first_wild.empty())
    first_wild = std::string(what) + " " + std::to_string(value) + " of row " + std::to_string(row);
}

void Counts::publish(const Exec& exec) const {
  if (exec.stats == nullptr) return;
  for (int i = 0; i < kNumStats; ++i) exec.stats[i] += words[i];
}

void Counts::raise_if_strict(const char* op, const Exec& exec) const {
  if (!exec.strict || first_wild.empty()) return;
  throw Error(Status::invalid_argument,
              std::string(op) + ": device values must be inside the caller's tables under strict, got " + first_wild);
}

int64_t slot_of(const Tensor& block_table, int64_t table_row, int64_t page_size, int64_t position, int64_t last) {
  if (position < 0 || table_row < 0 || table_row >= block_table.shape[0]) return -1;
  const int64_t column = position / page_size;
  if (column >= block_table.shape[1]) return -1;
  const int64_t page = integer(block_table, table_row, column);
  const int64_t slot = page * page_size + position % page_size;
  return page < 0 || slot > last ? -1 : slot;
}

void expand_rows(const ExpandRows& a, const Exec& exec) {
  Counts counts;
  std::vector<ExpandedRow> rows;
  for (int64_t row = 0; row < a.capacity; ++row) rows.push_back(expand_row(a, row, counts));
  counts.raise_if_strict("expand_rows", exec);
  for (int64_t row = 0; row < a.capacity; ++row) {
    const ExpandedRow& x = rows[static_cast<size_t>(row)];
    if (a.row_request.data != nullptr) put_integer(a.row_request, row, x.request);
    if (a.lens.data != nullptr) put_integer(a.lens, row, x.length);
    if (a.positions.data != nullptr) put_integer(a.positions, row, x.position);
    if (a.slots.data != nullptr) put_integer(a.slots, row, x.slot);
  }
  counts.add(kRows, a.capacity);
  counts.publish(exec);
}

void to_slots(const ToSlots& a, const Exec& exec) {
  const int64_t rows = a.indices.shape[0], width = a.indices.shape[1];
  Counts counts;
  std::vector<int64_t> all(static_cast<size_t>(rows * width));
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t request = a.row_request.data != nullptr ? integer(a.row_request, r) : r;
    for (int64_t i = 0; i < width; ++i) {
      const int64_t position = integer(a.indices, r, i);
      int64_t slot = -1;
      if (position >= 0 && a.shard.owns(position)) {
        slot = slot_of(a.block_table, request, a.page_size, a.shard.local(position), INT32_MAX);
        if (slot < 0) counts.wild(kSkippedSlots, 1, "position", r, position);
      }
      all[static_cast<size_t>(r * width + i)] = slot;
    }
  }
  counts.raise_if_strict("to_slots", exec);
  for (int64_t r = 0; r < rows; ++r) {
    int64_t valid = 0;
    for (int64_t i = 0; i < width; ++i) {
      const int64_t slot = all[static_cast<size_t>(r * width + i)];
      if (!a.compact) *element<int32_t>(a.slots, r, i) = static_cast<int32_t>(slot);
      if (slot < 0) continue;
      if (a.compact) *element<int32_t>(a.slots, r, valid) = static_cast<int32_t>(slot);
      ++valid;
    }
    for (int64_t i = valid; a.compact && i < width; ++i) *element<int32_t>(a.slots, r, i) = -1;
    if (a.counts.data != nullptr) *element<int32_t>(a.counts, r) = static_cast<int32_t>(valid);
  }
  counts.add(kRows, rows);
  counts.publish(exec);
}

namespace {

/// Tokens of every column of a row, -1 where it has none.
std::vector<int64_t> tokens_of(const ExpandPools& a, int64_t row, Counts& counts) {
  const int64_t size = a.pool_size, pools = a.pools.shape[1];
  const bool counted = a.positions.data != nullptr || a.rows.end.data != nullptr || a.rows.length.data != nullptr;
  std::vector<int64_t> tokens(static_cast<size_t>(pools * size + (counted ? size - 1 : 0)), -1);
  Window w = window_of(a.rows, row, kMaxTokens);
  if (a.positions.data != nullptr) w.end = std::min(integer(a.positions, row), kMaxTokens) + 1;
  const int64_t visible = std::min(w.size(), kMaxTokens), complete = visible / size;
  for (int64_t i = 0; visible > 0 && i < pools; ++i) {
    const int64_t id = integer(a.pools, row, i);
    if (id >= complete) counts.wild(kSkippedPages, 1, "pool id", row, id);
    for (int64_t j = 0; id >= 0 && id < complete && j < size; ++j)
      tokens[static_cast<size_t>(i * size + j)] = id * size + j;
  }
  for (int64_t j = 0; counted && j < visible % size; ++j) {
    tokens[static_cast<size_t>(pools * size + j)] = complete * size + j;
  }
  return tokens;
}

std::vector<int64_t> slots_of(const ExpandPools& a, int64_t row, const std::vector<int64_t>& tokens, Counts& counts) {
  const SlotMap& map = a.out.slot_map;
  const int64_t table_row = map.table_per_row ? row : window_of(a.rows, row, 0).request;
  std::vector<int64_t> slots;
  for (const int64_t token : tokens) {
    slots.push_back(token < 0 ? -1 : slot_of(map.block_table, table_row, map.page_size, token, INT32_MAX));
    if (token >= 0 && slots.back() < 0) counts.wild(kSkippedSlots, 1, "position", row, token);
  }
  return slots;
}

/// values[i] where tokens[i] is one, else the fill.
void put_columns(const Tensor& out, int64_t row, const Selection& how, const std::vector<int64_t>& tokens,
                 const std::vector<int64_t>& values) {
  int64_t fill = how.fill == Fill::value ? how.fill_value : -1;
  for (size_t i = tokens.size(); how.fill == Fill::repeat && i-- > 0;) {
    if (tokens[i] >= 0) fill = values[i];
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    *element<int32_t>(out, row, static_cast<int64_t>(i)) = static_cast<int32_t>(tokens[i] < 0 ? fill : values[i]);
  }
}

}  // namespace

void expand_pools(const ExpandPools& a, const Exec& exec) {
  Counts counts;
  std::vector<std::vector<int64_t>> tokens, slots;
  for (int64_t row = 0; row < a.rows.count; ++row) {
    tokens.push_back(tokens_of(a, row, counts));
    if (a.out.slots.data != nullptr) slots.push_back(slots_of(a, row, tokens.back(), counts));
  }
  counts.raise_if_strict("expand_pools", exec);
  for (int64_t row = 0; row < a.rows.count; ++row) {
    std::vector<int64_t>& own = tokens[static_cast<size_t>(row)];
    if (a.out.slots.data != nullptr) put_columns(a.out.slots, row, a.out, own, slots[static_cast<size_t>(row)]);
    const int64_t base = a.out.index_base.data != nullptr ? integer(a.out.index_base, row) : 0;
    std::vector<int64_t> indices;
    int64_t used = 0;
    for (const int64_t token : own) {
      indices.push_back(token + base);
      used += token >= 0;
    }
    if (a.out.indices.data != nullptr) put_columns(a.out.indices, row, a.out, own, indices);
    if (a.out.counts.data != nullptr) *element<int32_t>(a.out.counts, row) = static_cast<int32_t>(used);
  }
  counts.add(kRows, a.rows.count);
  counts.publish(exec);
}

}  // namespace topkey::ref
