// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Host memory of layers and ranks.
#include "memory.h"

#include <algorithm>
#include <cstring>

namespace topkey {
namespace {

int64_t entry(const Tensor& t, int64_t i) { return static_cast<const int32_t*>(t.data)[i * t.stride[0]]; }
int64_t bound(const Tensor& indptr, int64_t b) { return std::max<int64_t>(0, entry(indptr, b)); }
int32_t& owned(const OwnedKeys& a, int64_t rank, int64_t b) {
  return static_cast<int32_t*>(a.owned.data)[rank * a.owned.stride[0] + b];
}
Shard of_rank(Shard shard, int64_t rank) {
  shard.rank = static_cast<int32_t>(rank);
  return shard;
}
const char* at(const void* base, int64_t bytes) { return static_cast<const char*>(base) + bytes; }
char* at(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }

bool captured(const Exec&) { return false; }

void copy(void* to, const void* from, size_t bytes, const Exec&) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

void clear_rows(const Tensor& t, int64_t rows, const Exec&) {
  for (int64_t r = 0; t.data != nullptr && r < rows; ++r) {
    int32_t* cells = static_cast<int32_t*>(t.data) + r * t.stride[0];
    std::fill(cells, cells + t.shape[1], -1);
  }
}

void copy_rows(const RowCopy& a, const Exec&) {
  for (int64_t r = 0; r < a.rows; ++r) {
    std::memcpy(at(a.to, r * a.to_step), at(a.from, r * a.from_step), static_cast<size_t>(a.bytes));
  }
}

void count_owned(const OwnedKeys& a, const Exec&) {
  for (int64_t rank = 0; rank < a.owned.shape[0]; ++rank) {
    const Shard shard = of_rank(a.shard, rank);
    int64_t sum = 0;
    owned(a, rank, 0) = 0;
    for (int64_t b = 0; b + 1 < a.indptr.shape[0]; ++b) {
      sum += shard.local_length(std::max<int64_t>(0, bound(a.indptr, b + 1) - bound(a.indptr, b)));
      owned(a, rank, b + 1) = static_cast<int32_t>(std::min<int64_t>(sum, INT32_MAX));
    }
  }
}

void place_keys(const KeyParts& a, const Exec&) {
  const Tensor& indptr = a.keys.indptr;
  const int64_t world = a.keys.shard.world_size, run = a.keys.shard.run();
  for (int64_t b = 0; b + 1 < indptr.shape[0]; ++b) {
    const int64_t first = bound(indptr, b), last = std::min(bound(indptr, b + 1), a.total);
    for (int64_t row = first; row < last; ++row) {
      const int64_t position = row - first, rank = position / run % world;
      const int64_t i = owned(a.keys, rank, b) + of_rank(a.keys.shard, rank).local(position) - a.first;
      if (i < 0 || i >= a.rows) continue;
      std::memcpy(at(a.out, row * a.out_step), at(a.parts, (rank * a.rows + i) * a.bytes),
                  static_cast<size_t>(a.bytes));
    }
  }
}

void place_tokens(const TokenParts& a, const Exec&) {
  for (int64_t t = 0; t < a.order.shape[0]; ++t) {
    const int64_t from = entry(a.order, t), behind = from - a.own;
    char* to = at(a.out, t * a.bytes);
    if (from >= 0 && behind < 0) {
      std::memcpy(to, at(a.front, from * a.front_step), static_cast<size_t>(a.bytes));
    } else if (from < 0 || behind >= a.world * a.each) {
      std::memset(to, 0xFF, static_cast<size_t>(a.bytes));
    } else if (const int64_t i = behind % a.each - a.first; i >= 0 && i < a.rows) {
      std::memcpy(to, at(a.parts, (behind / a.each * a.rows + i) * a.bytes), static_cast<size_t>(a.bytes));
    }
  }
}

}  // namespace

constinit const Memory kHostMemory = {captured, copy, clear_rows, copy_rows, count_owned, place_keys, place_tokens};

}  // namespace topkey
