// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `rows`: device lengths to rows, positions to slots, pools to tokens. include/topkey/rows.h says what each does; 64-bit
// throughout, since what the tensors hold may be wild.
#include "cpu/rows.h"

#include <algorithm>
#include <climits>

#include "cpu/emit.h"
#include "cpu/share.h"
#include "cpu/view.h"
#include "cpu/window.h"

namespace topkey::cpu {
namespace {

/// Slots of a block table's rows.
class Pages {
 public:
  /// last: the largest slot that the output can carry.
  Pages(const Tensor& table, int64_t page_size, const Shard& shard, int64_t last)
      : table_(table),
        page_size_(page_size),
        last_(last),
        shard_(shard),
        by_page_(page_size),
        by_run_(shard.run()),
        by_world_(shard.active() ? shard.world_size : 1) {}

  bool has_row(int64_t row) const { return row >= 0 && row < table_.shape[0]; }
  /// A global position >= 0 among this rank's own, as Shard::local has it; -1 where another rank owns it.
  int64_t local(int64_t position) const {
    if (!shard_.active()) return position;
    const int64_t run = by_run_.quotient(position), round = by_world_.quotient(run);
    if (run - round * shard_.world_size != shard_.rank) return -1;
    return round * shard_.run() + (position - run * shard_.run());
  }
  /// Slot of a local position >= 0 of a row that the table has; -1 where it has no such column or page, or the slot
  /// is past `last`.
  int64_t slot(int64_t row, int64_t local) const {
    const int64_t column = by_page_.quotient(local);
    if (column >= table_.shape[1]) return -1;
    const int64_t page = static_cast<const int32_t*>(table_.data)[row * table_.stride[0] + column * table_.stride[1]];
    const int64_t slot = page * page_size_ + (local - column * page_size_);
    return page < 0 || slot > last_ ? -1 : slot;
  }

 private:
  const Tensor& table_;
  int64_t page_size_, last_;
  const Shard& shard_;
  Divider by_page_, by_run_, by_world_;
};

// ---- expand_rows
// -----------------------------------------------------------------------------------------------------------

/// The request of each of some ascending rows: the first b with starts[b] <= row < starts[b+1], or -1. Ascending
/// starts, as they should be, are walked along; others are searched from the beginning for every row.
class RequestCursor {
 public:
  explicit RequestCursor(const Tensor& starts) : starts_(starts), requests_(starts.shape[0] - 1) {
    for (int64_t b = 0; b < requests_; ++b)
      ascending_ = ascending_ && integer_at(starts, b) <= integer_at(starts, b + 1);
  }
  int64_t find(int64_t row) {
    if (!ascending_) at_ = 0;
    for (; at_ < requests_; ++at_) {
      const bool begun = integer_at(starts_, at_) <= row;
      if (begun && row < integer_at(starts_, at_ + 1)) return at_;
      if (!begun && ascending_) return -1;
    }
    return -1;
  }

 private:
  const Tensor& starts_;
  int64_t requests_, at_ = 0;
  bool ascending_ = true;
};

struct ExpandedRow {
  int64_t request = -1, length = 0, position = -1, slot = -1;
  bool wild = false;  ///< it should have a slot and has none
};

/// Rows in ascending order, from any on.
class RowExpander {
 public:
  explicit RowExpander(const ExpandRows& a)
      : a_(a),
        ratio_(a.ratio > 1 ? a.ratio : 1),
        divide_(ratio_),
        cursor_(a.query_start),
        pages_(a.block_table, a.page_size, a.shard, a.slots.dtype == DType::i64 ? INT64_MAX : INT32_MAX) {}

  ExpandedRow next(int64_t row) {
    ExpandedRow x;
    x.request = cursor_.find(row);
    if (x.request < 0) return x;
    const int64_t first = integer_at(a_.query_start, x.request),
                  count = integer_at(a_.query_start, x.request + 1) - first;
    x.position = integer_at(a_.seq_lens, x.request) - count + row - first;
    if (x.position < 0) x.position = -1;  // more query rows than tokens: nothing to see, nothing to store
    const int64_t visible = divide_.quotient(x.position + 1);
    x.length = a_.shard.local_length(visible);
    // A token that completes a key row completes the last one that it sees.
    const bool completes = x.position >= 0 && visible * ratio_ == x.position + 1;
    const int64_t key = a_.slots.data != nullptr && completes ? pages_.local(visible - 1) : -1;
    if (key < 0) return x;
    x.slot = pages_.has_row(x.request) ? pages_.slot(x.request, key) : -1;
    x.wild = x.slot < 0;
    return x;
  }

 private:
  const ExpandRows& a_;
  int64_t ratio_;
  Divider divide_;
  RequestCursor cursor_;
  Pages pages_;
};

// ---- to_slots
// --------------------------------------------------------------------------------------------------------------

/// One row of to_slots.
struct SlotRow {
  const int32_t* positions;
  int64_t request;
  SlotRow(const ToSlots& a, int64_t row)
      : positions(static_cast<const int32_t*>(a.indices.data) + row * a.indices.stride[0]),
        request(a.row_request.data != nullptr ? integer_at(a.row_request, row) : row) {}
};

/// Slot of a position; -1: none, and *wild where it should have one.
int64_t slot_of_position(const Pages& pages, bool has_row, int64_t request, int64_t position, bool* wild) {
  *wild = false;
  const int64_t local = position < 0 ? -1 : pages.local(position);
  if (local < 0) return -1;
  const int64_t slot = has_row ? pages.slot(request, local) : -1;
  *wild = slot < 0;
  return slot;
}

int64_t wild_positions(const ToSlots& a, const Pages& pages) {
  int64_t all_wild = 0;
  for (int64_t r = 0; r < a.indices.shape[0]; ++r) {
    const SlotRow row(a, r);
    const bool has_row = pages.has_row(row.request);
    for (int64_t i = 0; i < a.indices.shape[1]; ++i) {
      bool wild;
      slot_of_position(pages, has_row, row.request, row.positions[i], &wild);
      all_wild += wild;
    }
  }
  return all_wild;
}

/// Returns how many positions should have a slot and have none. Slots may be written over the positions they come from.
int64_t write_slots(const ToSlots& a, const Pages& pages, int64_t r) {
  const SlotRow row(a, r);
  const bool has_row = pages.has_row(row.request);
  const int64_t width = a.indices.shape[1];
  int32_t* const slots = static_cast<int32_t*>(a.slots.data) + r * a.slots.stride[0];
  int64_t valid = 0, all_wild = 0;
  for (int64_t i = 0; i < width; ++i) {
    bool wild;
    const int64_t slot = slot_of_position(pages, has_row, row.request, row.positions[i], &wild);
    all_wild += wild;
    if (!a.compact || slot >= 0) slots[a.compact ? valid : i] = static_cast<int32_t>(slot);
    valid += slot >= 0;
  }
  if (a.compact) std::fill(slots + valid, slots + width, -1);
  put_integer(a.counts, r, valid);
  return all_wild;
}

// ---- expand_pools
// ----------------------------------------------------------------------------------------------------------

/// One row of expand_pools.
struct PoolRow {
  const int32_t* ids;
  int64_t request;
  int64_t visible, complete;  ///< tokens, and whole pools of them
  int64_t open;               ///< tokens of the pool that is not whole and has columns

  PoolRow(const ExpandPools& a, int64_t row)
      : ids(static_cast<const int32_t*>(a.pools.data) + row * a.pools.stride[0]) {
    RowFact fact = read_row(a.rows, row, kMostTokens);
    if (a.positions.data != nullptr) fact.end = std::min(integer_at(a.positions, row), kMostTokens) + 1;
    request = fact.request;
    visible = std::min(fact.size(), kMostTokens);
    complete = visible / a.pool_size;
    open = has_tail(a) ? visible % a.pool_size : 0;
  }
  static bool has_tail(const ExpandPools& a) {
    return a.positions.data != nullptr || a.rows.end.data != nullptr || a.rows.length.data != nullptr;
  }
  /// A pool whose tokens have columns of their own.
  bool shows(int64_t id) const { return id >= 0 && id < complete; }
  int64_t wild_ids(int64_t pools) const {
    int64_t wild = 0;
    for (int64_t i = 0; visible > 0 && i < pools; ++i) wild += ids[i] >= complete;
    return wild;
  }
  /// The first token of the row's columns, or -1.
  int64_t first(const ExpandPools& a) const {
    for (int64_t i = 0; i < a.pools.shape[1]; ++i) {
      if (shows(ids[i])) return int64_t{ids[i]} * a.pool_size;
    }
    return open > 0 ? complete * a.pool_size : -1;
  }

 private:
  static constexpr int64_t kMostTokens = int64_t{INT32_MAX} + 1;
};

/// A row's columns, one token after the other: write(column, token), token -1 for those without one. From the last
/// column to the first: ids that stand in the first columns of the row are read before they are written over.
template <class Write>
void for_each_column(const ExpandPools& a, const PoolRow& row, const Write& write) {
  const int64_t size = a.pool_size, pools = a.pools.shape[1];
  for (int64_t o = PoolRow::has_tail(a) ? size - 2 : -1; o >= 0; --o) {
    write(pools * size + o, o < row.open ? row.complete * size + o : -1);
  }
  for (int64_t i = pools - 1; i >= 0; --i) {
    const int64_t id = row.ids[i];
    const bool shown = row.shows(id);
    for (int64_t j = size - 1; j >= 0; --j) write(i * size + j, shown ? id * size + j : -1);
  }
}

int64_t slot_of_token(const ExpandPools& a, const PoolRow& row, int64_t r, int64_t token) {
  return slot_of(a.out.slot_map, r, row.request, token);
}

int64_t wild_pools(const ExpandPools& a) {
  int64_t wild = 0;
  for (int64_t r = 0; r < a.rows.count; ++r) {
    const PoolRow row(a, r);
    wild += row.wild_ids(a.pools.shape[1]);
    for_each_column(a, row, [&](int64_t, int64_t token) {
      wild += a.out.slots.data != nullptr && token >= 0 && slot_of_token(a, row, r, token) < 0;
    });
  }
  return wild;
}

void write_tokens(const ExpandPools& a, int64_t r, Counts& counts) {
  const Selection& out = a.out;
  const PoolRow row(a, r);
  counts.add(kSkippedPages, row.wild_ids(a.pools.shape[1]));
  const int64_t base = out.index_base.data != nullptr ? integer_at(out.index_base, r) : 0;
  const auto cells = [&](const Tensor& t) {
    return t.data == nullptr ? nullptr : static_cast<int32_t*>(t.data) + r * t.stride[0];
  };
  int32_t *const indices = cells(out.indices), *const slots = cells(out.slots);
  int64_t fill_index = out.fill == Fill::value ? out.fill_value : -1, fill_slot = fill_index;
  if (const int64_t first = row.first(a); out.fill == Fill::repeat && first >= 0) {
    fill_index = first + base;
    if (slots != nullptr) fill_slot = slot_of_token(a, row, r, first);
  }
  int64_t used = 0;
  for_each_column(a, row, [&](int64_t column, int64_t token) {
    used += token >= 0;
    if (slots != nullptr) {
      const int64_t slot = token < 0 ? fill_slot : slot_of_token(a, row, r, token);
      counts.add(kSkippedSlots, token >= 0 && slot < 0);
      slots[column] = static_cast<int32_t>(slot);
    }
    if (indices != nullptr) indices[column] = static_cast<int32_t>(token < 0 ? fill_index : token + base);
  });
  put_integer(out.counts, r, used);
}

}  // namespace

void expand_rows(const ExpandRows& a, const Exec& exec) {
  if (exec.strict) {
    int64_t wild = 0;
    RowExpander expander(a);
    for (int64_t row = 0; row < a.capacity; ++row) wild += expander.next(row).wild;
    raise_if_wild(exec, "expand_rows", wild);
  }
  constexpr int64_t kRowsEach = 4096;  // 8 ns a row
  run_shared(exec, a.capacity / kRowsEach, a.capacity, [&](const Share& share, Counts& counts) {
    RowExpander expander(a);
    for (int64_t row = share.first(a.capacity), end = share.last(a.capacity); row < end; ++row) {
      const ExpandedRow x = expander.next(row);
      put_integer(a.row_request, row, x.request);
      put_integer(a.lens, row, x.length);
      put_integer(a.positions, row, x.position);
      put_integer(a.slots, row, x.slot);
      counts.add(kSkippedSlots, x.wild);
    }
  });
}

void to_slots(const ToSlots& a, const Exec& exec) {
  const Pages pages(a.block_table, a.page_size, a.shard, INT32_MAX);
  if (exec.strict) raise_if_wild(exec, "to_slots", wild_positions(a, pages));
  const int64_t rows = a.indices.shape[0];
  constexpr int64_t kPositionsEach = 16384;  // 2 to 5 ns each
  run_shared(exec, rows * a.indices.shape[1] / kPositionsEach, rows, [&](const Share& share, Counts& counts) {
    for (int64_t r = share.first(rows), end = share.last(rows); r < end; ++r) {
      counts.add(kSkippedSlots, write_slots(a, pages, r));
    }
  });
}

void expand_pools(const ExpandPools& a, const Exec& exec) {
  if (exec.strict) raise_if_wild(exec, "expand_pools", wild_pools(a));
  const int64_t rows = a.rows.count;
  constexpr int64_t kColumnsEach = 32768;  // 1 ns each
  run_shared(exec, rows * a.pools.shape[1] * a.pool_size / kColumnsEach, rows, [&](const Share& share, Counts& counts) {
    for (int64_t r = share.first(rows), end = share.last(rows); r < end; ++r) write_tokens(a, r, counts);
  });
}

}  // namespace topkey::cpu
