// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// exchange_rows: row shards back into global order. One all_gatherv of what each rank has written.
#include <numeric>
#include <vector>

#include "shard/comm.h"
#include "shard/host.h"

namespace topkey::shard {
namespace {

int64_t width_of(const ExchangeRows& a) { return a.buffer.ndim == 1 ? 1 : a.width; }

int64_t total_of(const ExchangeRows& a, int32_t ranks) {
  return std::accumulate(a.row_shard_sizes, a.row_shard_sizes + ranks, int64_t{0});
}

}  // namespace

size_t exchange_rows_bytes(const ExchangeRows& a, const topkey_communicator& comm) {
  const int64_t rows = total_of(a, comm.size), width = width_of(a);
  const Tensor part = rows_of(a.buffer, a.first_row, rows);
  return contiguous(part, width) ? 0 : padded(static_cast<size_t>(rows * row_size(part, width)));
}

void exchange_rows(const ExchangeRows& a, topkey_communicator& twin, const Exec& exec) {
  Comm comm("exchange_rows", twin, exec);
  const int64_t rows = total_of(a, comm.size()), width = width_of(a);
  const Tensor part = rows_of(a.buffer, a.first_row, rows);
  const int64_t own_first = total_of(a, comm.rank()), own = a.row_shard_sizes[comm.rank()];
  std::vector<size_t> bytes;
  for (int32_t r = 0; r < comm.size(); ++r) {
    bytes.push_back(static_cast<size_t>(a.row_shard_sizes[r] * row_size(part, width)));
  }
  char* packed = static_cast<char*>(part.data);
  const bool staged = !contiguous(part, width);
  if (staged) packed = Workspace("exchange_rows", exec).take(static_cast<size_t>(rows * row_size(part, width)));
  char* mine = packed + own_first * row_size(part, width);
  if (staged) comm.memory().copy_rows(packing(rows_of(part, own_first, own), width, mine), exec);
  comm.all_gatherv(mine, packed, bytes.data());
  if (staged) comm.memory().copy_rows(unpacking(packed, width, part), exec);
}

}  // namespace topkey::shard
