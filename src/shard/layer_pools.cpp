// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The tokens of a sharded step of the k-pool layer into this rank's pools and tails. A pool is made of tokens that stand
// side by side, so every rank needs them all. Prefill ranks have k and gate of their own rows only: these are gathered,
// and put into the order of the tokens that the caller gives, in the workspace; then it is one rank's pool_k.
#include "shard/layer.h"

namespace topkey::shard {
namespace {

/// k and gate in the order of the tokens.
struct Tokens {
  int64_t own, each, chunk, row;  ///< decode rows, prefill rows of each rank, rows exchanged at once, bytes of a row

  explicit Tokens(const Step& s)
      : own(common_rows(s)), each(s.step.k.shape[0] - own), row(row_size(s.step.k, s.step.k.shape[1])) {
    chunk = key_chunk(row, each, s.spec.prefill_size, limit_of(s.spec));
  }
  static int64_t count(const Step& s) { return s.step.slot_mapping.shape[0]; }
  size_t bytes(const Step& s) const { return padded(static_cast<size_t>(count(s) * row)); }
};

/// The call over gathered tokens. Null memory: its sizes.
PoolK gathered_args(const Step& s, char* k, char* gate) {
  PoolK a = pool_args(s);
  const int64_t dim = s.config.head_dim;
  a.k = tensor(k, s.step.k.dtype, {Tokens::count(s), dim});
  a.gate = tensor(gate, s.step.gate.dtype, {Tokens::count(s), dim});
  return a;
}

/// One of k and gate to `out`, chunk after chunk.
void order_tokens(const Step& s, const Tensor& rows, char* out, const Exec& exec) {
  Comm comm(s.op(), *s.in.prefill_comm, exec);
  const Tokens n(s);
  const Tensor order = rows_of(s.in.token_order, 0, Tokens::count(s));
  const int64_t step = rows.stride[0] * dtype_bytes(rows.dtype);
  int64_t first = 0;
  do {
    const int64_t count = std::min(n.chunk, n.each - first);
    Tensor all = rows;
    Workspace room(s.op(), exec);
    if (count > 0) gather_part(comm, all, {n.own + first, n.own + first + count}, room, exec);
    comm.memory().place_tokens({order, n.own, n.each, comm.size(), rows.data, step, all.data, first, count, n.row, out},
                               exec);
    first += n.chunk;
  } while (first < n.each);
}

}  // namespace

size_t store_pools_bytes(const Step& s, const Exec& exec) {
  if (!s.orders_tokens()) return pool_k_workspace_bytes(pool_args(s), exec);
  const Tokens n(s);
  const size_t exchange = static_cast<size_t>((1 + s.spec.prefill_size) * n.chunk * n.row) + 2 * kLine;
  return 2 * n.bytes(s) + std::max(exchange, pool_k_workspace_bytes(gathered_args(s, nullptr, nullptr), exec));
}

void store_pools(const Step& s, const Exec& exec) {
  if (!s.orders_tokens()) return pool_k(pool_args(s), exec);
  Workspace room(s.op(), exec);
  const size_t bytes = Tokens(s).bytes(s);
  char *k = room.take(bytes), *gate = room.take(bytes);
  const Exec rest = room.rest(exec);
  order_tokens(s, s.step.k, k, rest);
  order_tokens(s, s.step.gate, gate, rest);
  pool_k(gathered_args(s, k, gate), rest);
}

}  // namespace topkey::shard
