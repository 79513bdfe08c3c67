// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// gather_k over all ranks of a shard: each rank gathers the keys that it owns, the parts are exchanged in pieces of the
// same number of rows from each, and every row goes to its global place. Host memory.
#include <vector>

#include "shard/comm.h"
#include "shard/host.h"

namespace topkey::shard {
namespace {

/// Key rows of one rank at most, from shapes alone: of each request its share, and less than a run more.
int64_t most_rows(const GatherK& a) {
  const int64_t world = a.keys.shard.world_size, requests = a.indptr.shape[0] - 1;
  return std::min(a.total, a.total / world + requests * a.keys.shard.run());
}

int64_t value_row(const GatherK& a) { return row_size(a.out.values, a.out.values.shape[1]); }
int64_t scale_row(const GatherK& a) {
  return there(a.out.scales) || a.out.scales.dtype != DType::none ? row_size(a.out.scales, row_elements(a.out.scales))
                                                                  : 0;
}

/// Rows exchanged at once.
int64_t piece_rows(const GatherK& a) {
  const int64_t bytes = a.keys.shard.world_size * (value_row(a) + scale_row(a));
  return std::max<int64_t>(1,
                           std::min(most_rows(a), static_cast<int64_t>(kExchangeLimit) / std::max<int64_t>(bytes, 1)));
}

/// Lengths of the requests, and where each begins in the output.
struct Requests {
  std::vector<int64_t> first, length;
};
Requests requests_of(const GatherK& a) {
  Requests r;
  const auto at = [&](int64_t b) {
    return int64_t{static_cast<const int32_t*>(a.indptr.data)[b * a.indptr.stride[0]]};
  };
  for (int64_t b = 0; b + 1 < a.indptr.shape[0]; ++b) {
    r.first.push_back(at(b));
    r.length.push_back(std::max<int64_t>(0, at(b + 1) - at(b)));
  }
  return r;
}

/// The keys of this rank, request after request, and where each request's begin.
GatherK own_part(const GatherK& a, const Requests& requests, int32_t* indptr, char* values, char* scales) {
  const int64_t rows = most_rows(a);
  indptr[0] = 0;
  for (size_t b = 0; b < requests.length.size(); ++b) {
    const int64_t own = a.keys.shard.local_length(requests.length[b]);
    indptr[b + 1] = static_cast<int32_t>(std::min<int64_t>(indptr[b] + own, INT32_MAX));
  }
  GatherK part = a;
  part.indptr = tensor(indptr, DType::i32, {a.indptr.shape[0]});
  part.total = rows;
  part.out.values = tensor(values, a.out.values.dtype, {rows, a.out.values.shape[1]});
  if (scales == nullptr) return part;
  const Tensor& s = a.out.scales;
  part.out.scales = s.ndim == 1 ? tensor(scales, s.dtype, {rows}) : tensor(scales, s.dtype, {rows, s.shape[1]});
  return part;
}

/// Rows [piece, piece + rows) of rank r to their global places.
struct Piece {
  int64_t first, rows;
  const char *values, *scales;
};
void place(const GatherK& a, const Requests& requests, int32_t rank, const Piece& piece) {
  Shard shard = a.keys.shard;
  shard.rank = rank;
  int64_t before = 0;
  for (size_t b = 0; b < requests.length.size(); ++b) {
    const int64_t own = shard.local_length(requests.length[b]);
    const int64_t from = std::max<int64_t>(piece.first - before, 0);
    const int64_t to = std::min(own, piece.first + piece.rows - before);
    for (int64_t l = from; l < to; ++l) {
      const int64_t row = requests.first[b] + shard.global(l), i = before + l - piece.first;
      if (row < 0 || row >= a.total) continue;
      unpack_rows(piece.values + i * value_row(a), a.out.values.shape[1], rows_of(a.out.values, row, 1));
      if (piece.scales == nullptr) continue;
      unpack_rows(piece.scales + i * scale_row(a), row_elements(a.out.scales), rows_of(a.out.scales, row, 1));
    }
    before += own;
  }
}

size_t parts_bytes(const GatherK& a) {
  const int64_t world = a.keys.shard.world_size, rows = most_rows(a), piece = piece_rows(a);
  const auto bytes = [&](int64_t n, int64_t row) { return padded(static_cast<size_t>(n * row)); };
  return bytes(a.indptr.shape[0], 4) + bytes(rows, value_row(a)) + bytes(rows, scale_row(a)) +
         bytes(world * piece, value_row(a)) + bytes(world * piece, scale_row(a));
}

}  // namespace

size_t gather_k_bytes(const GatherK& a, const Exec& exec) {
  if (!a.keys.shard.active()) return gather_k_workspace_bytes(a, exec);
  GatherK part = a;
  part.total = most_rows(a);
  part.out.values.shape[0] = part.total;
  if (part.out.scales.dtype != DType::none) part.out.scales.shape[0] = part.total;
  return parts_bytes(a) + gather_k_workspace_bytes(part, exec);
}

void gather_k(const GatherK& a, topkey_communicator& twin, const Exec& exec) {
  if (!a.keys.shard.active()) return topkey::gather_k(a, exec);
  require_host("gather_k_sharded", exec, "keys gathered over ranks");
  Comm comm("gather_k_sharded", twin, exec.stream);
  const int64_t world = comm.size(), rows = most_rows(a), piece = piece_rows(a), v = value_row(a), g = scale_row(a);
  Workspace room("gather_k_sharded", exec);
  const auto take = [&](int64_t n, int64_t row) {
    return row == 0 ? nullptr : room.take(static_cast<size_t>(n * row));
  };
  char* indptr = take(a.indptr.shape[0], 4);
  char *values = take(rows, v), *scales = take(rows, g);
  char *all_values = take(world * piece, v), *all_scales = take(world * piece, g);
  const Requests requests = requests_of(a);
  topkey::gather_k(own_part(a, requests, reinterpret_cast<int32_t*>(indptr), values, scales), room.rest(exec));
  for (int64_t first = 0; first < rows; first += piece) {
    const int64_t n = std::min(piece, rows - first);
    comm.all_gather(values + first * v, all_values, static_cast<size_t>(n * v));
    if (g > 0) comm.all_gather(scales + first * g, all_scales, static_cast<size_t>(n * g));
    for (int32_t r = 0; r < world; ++r) {
      const char* s = g > 0 ? all_scales + r * n * g : nullptr;
      place(a, requests, r, {first, n, all_values + r * n * v, s});
    }
  }
}

}  // namespace topkey::shard
