// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// gather_k over all ranks of a shard: each rank gathers the keys that it owns, the parts are exchanged in pieces of the
// same number of rows from each, and every row goes to its global place. What a rank owns follows from the lengths, which
// lie where the keys do: it is counted there.
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

/// Values or scales: what this rank owns, and pieces of what all do.
struct Part {
  int64_t bytes;  ///< of a row; 0: there are none
  char *own, *all;
  void* out;
  int64_t out_step;
};
Part part_of(Workspace& room, const GatherK& a, const Tensor& out, int64_t bytes) {
  if (bytes == 0) return {};
  char* own = room.take(static_cast<size_t>(most_rows(a) * bytes));
  char* all = room.take(static_cast<size_t>(a.keys.shard.world_size * piece_rows(a) * bytes));
  return {bytes, own, all, out.data, out.stride[0] * dtype_bytes(out.dtype)};
}

/// The keys of this rank, request after request.
GatherK own_part(const GatherK& a, const OwnedKeys& keys, const Part& values, const Part& scales) {
  GatherK part = a;
  part.total = most_rows(a);
  part.indptr = rows_of(keys.owned, a.keys.shard.rank, 1);
  part.indptr = tensor(part.indptr.data, DType::i32, {keys.owned.shape[1]});
  part.out.values = tensor(values.own, a.out.values.dtype, {part.total, a.out.values.shape[1]});
  const Tensor& s = a.out.scales;
  if (scales.bytes == 0) return part;
  part.out.scales =
      s.ndim == 1 ? tensor(scales.own, s.dtype, {part.total}) : tensor(scales.own, s.dtype, {part.total, s.shape[1]});
  return part;
}

size_t parts_bytes(const GatherK& a) {
  const int64_t world = a.keys.shard.world_size, rows = most_rows(a), piece = piece_rows(a);
  const auto bytes = [&](int64_t n, int64_t row) { return padded(static_cast<size_t>(n * row)); };
  return bytes(world * a.indptr.shape[0], 4) + bytes(rows, value_row(a)) + bytes(rows, scale_row(a)) +
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
  Comm comm("gather_k_sharded", twin, exec);
  const int64_t world = comm.size(), rows = most_rows(a), piece = piece_rows(a), requests = a.indptr.shape[0];
  Workspace room("gather_k_sharded", exec);
  const OwnedKeys keys{a.indptr, a.keys.shard,
                       tensor(room.take(static_cast<size_t>(world * requests * 4)), DType::i32, {world, requests})};
  const Part values = part_of(room, a, a.out.values, value_row(a)),
             scales = part_of(room, a, a.out.scales, scale_row(a));
  comm.memory().count_owned(keys, exec);
  topkey::gather_k(own_part(a, keys, values, scales), room.rest(exec));
  for (int64_t first = 0; first < rows; first += piece) {
    const int64_t n = std::min(piece, rows - first);
    for (const Part& part : {values, scales}) {
      if (part.bytes == 0) continue;
      comm.all_gather(part.own + first * part.bytes, part.all, static_cast<size_t>(n * part.bytes));
      comm.memory().place_keys({keys, part.all, first, n, part.bytes, part.out, part.out_step, a.total}, exec);
    }
  }
}

}  // namespace topkey::shard
