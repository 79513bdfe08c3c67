// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See window.h.
#include "cpu/window.h"

namespace topkey::cpu {
namespace {

/// Request b with indptr[b] <= row < indptr[b+1], or -1. indptr ascends; garbage in it gives some request or none,
/// never a wild read.
int64_t request_in(const Tensor& indptr, int64_t row) {
  int64_t low = 0, high = indptr.shape[0] - 1;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (read_i32(indptr, middle + 1) <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const bool inside = low + 1 < indptr.shape[0] && read_i32(indptr, low) <= row && row < read_i32(indptr, low + 1);
  return inside ? low : -1;
}

}  // namespace

RowFact read_row(const Rows& rows, int64_t row, int64_t default_end) {
  const int64_t next_n = rows.next_n > 1 ? rows.next_n : 1;
  RowFact f{};
  if (rows.request.data != nullptr) {
    f.request = read_i32(rows.request, row);
  } else if (rows.q_indptr.data != nullptr) {
    f.request = request_in(rows.q_indptr, row);
  } else {
    f.request = row / next_n;
  }
  f.table_row = f.request < 0 ? -1 : 0;
  f.start = rows.start.data != nullptr ? read_i32(rows.start, row) : 0;
  if (rows.length.data != nullptr) {
    f.end = f.start + read_i32(rows.length, row);
  } else if (rows.end.data == nullptr) {
    f.end = default_end;
  } else if (rows.end.shape[0] == rows.count) {
    f.end = read_i32(rows.end, row);
  } else {
    f.end = read_i32(rows.end, row / next_n) - next_n + 1 + row % next_n;
  }
  f.whole_start = f.start;
  f.whole_end = f.end;
  return f;
}

void shard_row(RowFact& fact, Shard shard, const Tensor& whole_start, const Tensor& whole_end, int64_t row) {
  if (!shard.active()) return;
  fact.shard = shard;
  fact.whole_start = whole_start.data != nullptr ? read_i32(whole_start, row) : 0;
  fact.whole_end = whole_end.data != nullptr ? read_i32(whole_end, row) : INT32_MAX;
  fact.start = std::max(fact.start, fact.position_at(0));
  if (whole_end.data != nullptr) fact.end = std::min(fact.end, fact.position_at(fact.whole_end - fact.whole_start));
}

void clip_row(RowFact& fact, int64_t count, int64_t max_len) {
  const int64_t reach = max_len > 0 ? std::min(count, fact.start + max_len) : count;
  fact.low = std::max<int64_t>(fact.start, 0);
  fact.high = std::max(fact.low, std::min(fact.end, reach));
}

int64_t sort_candidates(const Admit& admit, const RowFact& fact, int64_t row, int32_t* scratch) {
  if (!present(admit.candidates) || fact.size() == 0) return 0;
  const Tensor& t = admit.candidates;
  const int32_t* ids = static_cast<const int32_t*>(t.data) + row * t.stride[0];
  const int64_t last = fact.distance(fact.end - 1) / admit.candidate_block_size;
  int64_t n = 0;
  for (int64_t i = 0; i < t.shape[1]; ++i) {
    if (ids[i] >= 0 && ids[i] <= last) scratch[n++] = ids[i];
  }
  if (!std::is_sorted(scratch, scratch + n)) std::sort(scratch, scratch + n);
  return std::unique(scratch, scratch + n) - scratch;
}

}  // namespace topkey::cpu
