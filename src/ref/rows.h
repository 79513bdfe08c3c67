// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A query row's request and window, as the caller's tensors say it (include/topkey/rows.h), and the counts that a
// call adds to exec.stats.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>

#include "ref/view.h"

namespace topkey::ref {

/// 64-bit: what the tensors hold may be wild, and no length is ever read as unsigned.
struct Window {
  int64_t request;  ///< < 0: a padding row
  int64_t start, end;
  /// The window in the whole request, global key rows; without a shard the same window.
  Shard shard;
  int64_t whole_start, whole_end;

  int64_t size() const { return request < 0 || end <= start ? 0 : end - start; }
  int64_t whole_size() const { return request < 0 || whole_end <= whole_start ? 0 : whole_end - whole_start; }
  /// How far the key at `position` is from the start of the whole window, and the first position of that distance or
  /// more.
  int64_t distance(int64_t position) const { return shard.global(position) - whole_start; }
  int64_t position_at(int64_t distance) const {
    return shard.active() ? shard.local_length(std::max<int64_t>(whole_start + distance, 0)) : whole_start + distance;
  }
};
/// default_end: N of dense keys, where neither end nor length is given.
Window window_of(const Rows& rows, int64_t row, int64_t default_end);
/// The same under a shard: what both the rank's own window and the whole one (where given) show.
Window sharded_window(const Window& own, Shard shard, const Tensor& whole_start, const Tensor& whole_end, int64_t row);

/// Statistics of one call, and the first wild value met, for `strict`.
struct Counts {
  uint64_t words[kNumStats] = {};
  std::string first_wild;

  void add(Stat stat, int64_t n = 1) { words[stat] += static_cast<uint64_t>(n); }
  /// n values that made something not live; `where` names the first.
  void wild(Stat stat, int64_t n, const char* what, int64_t row, int64_t value);
  /// Adds the words to exec.stats, once the call has succeeded.
  void publish(const Exec& exec) const;
  /// Throws where exec.strict and a wild value was met: before anything is written.
  void raise_if_strict(const char* op, const Exec& exec) const;
};

/// block_table[row, column] * page_size + offset for a position; -1 where the table has no such row, column or page,
/// or the slot is past `last`, the largest that the output can carry.
int64_t slot_of(const Tensor& block_table, int64_t table_row, int64_t page_size, int64_t position, int64_t last);

void expand_rows(const ExpandRows&, const Exec&);
void to_slots(const ToSlots&, const Exec&);
void expand_pools(const ExpandPools&, const Exec&);

}  // namespace topkey::ref
