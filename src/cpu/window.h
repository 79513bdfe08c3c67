// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A query row's request, window and admitted runs, as the caller's tensors say them. 64-bit throughout: what the
// tensors hold may be wild, and no length is ever read as unsigned.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "topkey/topkey.h"

namespace topkey::cpu {

inline int32_t read_i32(const Tensor& t, int64_t i) { return static_cast<const int32_t*>(t.data)[i * t.stride[0]]; }

/// What is known of a row before any score.
struct RowFact {
  int64_t request;     ///< < 0: padding
  int64_t table_row;   ///< < 0: nothing to read
  int64_t start, end;  ///< the window as asked for
  int64_t low, high;   ///< the part of it that the tables and max_len can reach
  int64_t live;        ///< live keys
  bool scored;         ///< its answer needs scores
  /// The window in the whole request, global key rows; without a shard the same window.
  Shard shard;
  int64_t whole_start, whole_end;

  int64_t whole_size() const { return table_row < 0 || whole_end <= whole_start ? 0 : whole_end - whole_start; }
  /// How far the key at `position` is from the start of the whole window, and the first position of that distance or
  /// more.
  int64_t distance(int64_t position) const { return shard.global(position) - whole_start; }
  int64_t position_at(int64_t distance) const {
    return shard.active() ? shard.local_length(std::max<int64_t>(whole_start + distance, 0)) : whole_start + distance;
  }
  int64_t size() const { return table_row < 0 || end <= start ? 0 : end - start; }
};

/// Request and window of `row`. default_end: N of dense keys, where neither end nor length is given.
RowFact read_row(const Rows& rows, int64_t row, int64_t default_end);
/// Under a shard: cuts the window to what both the rank's own and the whole one (where given) show.
void shard_row(RowFact& fact, Shard shard, const Tensor& whole_start, const Tensor& whole_end, int64_t row);
/// Fills low and high: positions in [0, count), within max_len of the start.
void clip_row(RowFact& fact, int64_t count, int64_t max_len);

/// Candidate ids of a row, sorted, without repeats and without ids that lie outside the window; scratch holds
/// shape[1] ids.
int64_t sort_candidates(const Admit& admit, const RowFact& fact, int64_t row, int32_t* scratch);

/// Calls f(first, last) for each run of visible admitted keys that can be reached, ascending; returns how many
/// visible admitted keys cannot.
template <class F>
int64_t for_each_run(const Admit& admit, const RowFact& fact, const int32_t* ids, int64_t num_ids, F&& f) {
  if (fact.size() == 0) return 0;
  int64_t cut = 0;
  const auto clipped = [&](int64_t first, int64_t last) {
    const int64_t a = std::clamp(first, fact.low, fact.high), b = std::clamp(last, fact.low, fact.high);
    cut += (last - first) - (b - a);
    if (a < b) f(a, b);
  };
  if (!present(admit.candidates)) {
    clipped(fact.start, fact.end);
    return cut;
  }
  for (int64_t i = 0; i < num_ids; ++i) {
    const int64_t distance = static_cast<int64_t>(ids[i]) * admit.candidate_block_size;
    const int64_t first = std::max(fact.start, fact.position_at(distance));
    clipped(first, std::clamp(fact.position_at(distance + admit.candidate_block_size), first, fact.end));
  }
  return cut;
}

/// True if the mask hides column `column`; else *addend is what it adds (0 for b8 or no mask).
inline bool masked(const Tensor& mask, int64_t row, int64_t column, float* addend) {
  *addend = 0.0f;
  if (mask.data == nullptr) return false;
  const int64_t at = row * mask.stride[0] + column * mask.stride[1];
  if (mask.dtype == DType::b8) return static_cast<const uint8_t*>(mask.data)[at] == 0;
  *addend = mask.dtype == DType::f16 ? f16_to_float(static_cast<const uint16_t*>(mask.data)[at])
                                     : static_cast<const float*>(mask.data)[at];
  return std::isinf(*addend) && *addend < 0.0f;
}

}  // namespace topkey::cpu
