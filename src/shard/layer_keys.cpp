// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The keys of a sharded step into this rank's cache. Prefill ranks have new keys of their own: these are gathered, rank
// after rank, and every rank stores them all; those that it does not own have slot -1 in its own slot mapping. Decode
// keys, which every rank has, come from its own. Pools are in layer_pools.cpp.
#include <array>

#include "shard/layer.h"

namespace topkey::shard {
namespace {

/// Codes or vectors, and scales.
std::array<Tensor*, 2> parts_of(StoreK& a) { return {&a.k, &a.k_scales}; }

int64_t bytes_of(const Tensor& t) { return there(t) ? row_size(t, row_elements(t)) : 0; }

/// Stores rows [key, key + count) of `a`, whose slots and positions begin at `slot`.
void store_some(const StoreK& a, int64_t key, int64_t slot, int64_t count, const Exec& exec) {
  StoreK some = a;
  for (Tensor* t : parts_of(some)) *t = rows_of(*t, key, count);
  for (Tensor* t : {&some.slot_mapping, &some.rope.positions}) *t = rows_of(*t, slot, count);
  if (count > 0) store_k(some, exec);
}

}  // namespace

void gather_part(Comm& comm, Tensor& t, RowRange rows, Workspace& room, const Exec& exec) {
  if (!there(t)) return;
  const Tensor own = rows_of(t, rows.first, rows.size());
  const size_t bytes = static_cast<size_t>(rows.size() * bytes_of(t));
  const char* send = static_cast<const char*>(own.data);
  if (!contiguous(own, row_elements(t))) {
    char* packed = room.take(bytes);
    comm.memory().copy_rows(packing(own, row_elements(t), packed), exec);
    send = packed;
  }
  char* all = room.take(bytes * static_cast<size_t>(comm.size()));
  comm.all_gather(send, all, bytes);
  const int64_t count = rows.size() * comm.size();
  t = t.ndim == 1 ? tensor(all, t.dtype, {count}) : tensor(all, t.dtype, {count, t.shape[1]});
}

int64_t key_chunk(int64_t row_bytes, int64_t rows, int32_t ranks, size_t limit) {
  const int64_t fit = static_cast<int64_t>(limit) / std::max<int64_t>(row_bytes * ranks, 1);
  return std::max<int64_t>(1, std::min(rows, fit));
}

size_t store_bytes(const Step& s, const Exec& exec) {
  if (s.pools) return store_pools_bytes(s, exec);
  StoreK a = store_args(s);
  const int32_t ranks = s.spec.prefill_size;
  if (ranks <= 1) return store_k_workspace_bytes(a, exec);
  // Any one of the calls that store_keys makes, and what it gathers before.
  const int64_t keys = std::min(a.k.shape[0], a.slot_mapping.shape[0]);
  a.slot_mapping = rows_of(a.slot_mapping, 0, keys);
  const int64_t row = bytes_of(a.k) + bytes_of(a.k_scales);
  const int64_t chunk = key_chunk(row, keys, ranks, limit_of(s.spec));
  return static_cast<size_t>((1 + ranks) * chunk * row) + 4 * kLine + store_k_workspace_bytes(a, exec);
}

void store_keys(const Step& s, const Exec& exec) {
  if (!stores(s)) return;
  if (s.pools) return store_pools(s, exec);
  const StoreK whole = store_args(s);
  if (s.spec.prefill_size <= 1) return store_k(whole, exec);
  const int64_t own = common_rows(s);
  store_some(whole, 0, 0, own, exec);
  Comm comm(s.op(), *s.in.prefill_comm, exec);
  const int64_t each = (whole.slot_mapping.shape[0] - own) / comm.size();
  const int64_t chunk = key_chunk(bytes_of(whole.k) + bytes_of(whole.k_scales), each, comm.size(), limit_of(s.spec));
  for (int64_t first = 0; first < each; first += chunk) {
    const int64_t count = std::min(chunk, each - first);
    Workspace room(s.op(), exec);
    StoreK all = whole;
    for (Tensor* t : parts_of(all)) gather_part(comm, *t, {own + first, own + first + count}, room, exec);
    for (int32_t r = 0; r < comm.size(); ++r) {
      store_some(all, r * count, own + r * each + first, count, room.rest(exec));
    }
  }
}

}  // namespace topkey::shard
