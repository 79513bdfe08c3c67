// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `pool`: tokens are found by request and position, joined (join.h) and produced like any key (producer.h). Two
// rounds with a barrier between them: all key rows are made from the state as it was, then the state is written. Each
// divides its work by where a row is written (store.h).
#include "cpu/pool.h"

#include <algorithm>

#include "backend_table.h"
#include "cpu/join.h"
#include "cpu/producer.h"
#include "cpu/share.h"
#include "cpu/store.h"
#include "cpu/view.h"
#include "cpu/window.h"

namespace topkey::cpu {
namespace {

/// A row of the call as a token.
struct TokenRow {
  int64_t row;
  int64_t request;   ///< < 0: padding
  int64_t first;     ///< of the rows up to this one that belong to one request without a gap
  int64_t position;  ///< < 0: padding
};

/// The rows of a call, in order.
class Batch {
 public:
  Batch(const Rows& rows, const Tensor& positions) : rows_(rows), positions_(positions) {}

  int64_t count() const { return rows_.count; }
  template <class F>
  void for_each(F&& f) const {
    TokenRow t{0, -1, 0, -1};
    for (int64_t row = 0; row < rows_.count; ++row) {
      const int64_t request = read_row(rows_, row, 0).request;
      if (request != t.request) t.first = row;
      t.row = row, t.request = request;
      t.position = request < 0 ? -1 : position(row);
      f(t);
    }
  }
  bool padding(int64_t row) const { return position(row) < 0 || read_row(rows_, row, 0).request < 0; }
  /// For each of the `count` positions that end with t's own, ascending: the nearest row up to t that holds it, or -1.
  void find(const TokenRow& t, int64_t count, int64_t* rows) const {
    int64_t found = 0;  // consecutive positions stand in consecutive rows nearly always
    while (found < count && t.row - found >= t.first && integer_at(positions_, t.row - found) == t.position - found) {
      rows[count - 1 - found] = t.row - found;
      ++found;
    }
    for (int64_t i = found; i < count; ++i) {
      int64_t row = t.row - found;
      while (row >= t.first && integer_at(positions_, row) != t.position - i) --row;
      rows[count - 1 - i] = row < t.first ? -1 : row;
    }
  }

 private:
  /// -1: none that a sequence can have.
  int64_t position(int64_t row) const {
    constexpr int64_t kLast = int64_t{1} << 48;
    const int64_t position = integer_at(positions_, row);
    return position < 0 || position > kLast ? -1 : position;
  }

  Rows rows_;
  const Tensor& positions_;
};

bool is_mine(const Share& share, int64_t place) {
  return share.size == 1 || writer_of(place, share.size) == static_cast<uint32_t>(share.rank);
}

// ---- pool_k
// ----------------------------------------------------------------------------------------------------------------

/// The tail as entries: half 0 is k, half 1 the gate.
struct Tail {
  const Tensor& t;
  int64_t ring, entries;

  explicit Tail(const PoolK& a)
      : t(a.tail),
        ring(a.tail.data == nullptr ? 1 : a.tail.shape[2]),
        entries(a.tail.data == nullptr ? 0 : a.tail.shape[0] * a.tail.shape[2]) {}
  uint16_t* at(int64_t entry, int64_t half) const {
    return static_cast<uint16_t*>(t.data) + entry / ring * t.stride[0] + half * t.stride[1] +
           entry % ring * t.stride[2];
  }
};

class Pools {
 public:
  explicit Pools(const PoolK& a) : a_(a), batch_(rows_of(a), a.positions), tail_(a) {}

  const Batch& batch() const { return batch_; }
  const Tensor& slot_mapping() const { return a_.slot_mapping; }
  const KeyCache& cache() const { return a_.cache; }
  Recipe recipe() const {
    Recipe r = make_recipe(a_.cache.head_dim, DType::bf16, Norm{}, Rope{}, true);
    const bool fp8 = a_.cache.format == KeyFormat::fp8;
    set_key_rule(r, a_.cache.format, fp8 ? QuantRule::kpool_key : QuantRule::automatic, a_.scale);
    return r;
  }
  Norm norm() const { return Norm{}; }
  Rope rope() const { return Rope{}; }

  bool wants(const TokenRow&) const { return true; }
  /// Fills tokens; their number, or 0 where they cannot all be found or t completes nothing.
  int64_t collect(const TokenRow& t, JoinToken* tokens) const {
    const int64_t size = a_.pool_size;
    if (t.position < 0 || (t.position + 1) % size != 0) return 0;
    int64_t rows[kMaxTokens];
    batch_.find(t, size, rows);
    const int64_t own = entry(t);
    for (int64_t j = 0; j < size; ++j) {
      tokens[j].value_dtype = tokens[j].score_dtype = DType::bf16;
      tokens[j].ape = static_cast<const float*>(a_.ape.data) + j * a_.ape.stride[0];
      if (rows[j] >= 0) {
        tokens[j].value = row_at(a_.k, rows[j], 2), tokens[j].score = row_at(a_.gate, rows[j], 2);
        continue;
      }
      if (own < 0) return 0;
      const int64_t at = own / tail_.ring * tail_.ring + (t.position - size + 1 + j) % tail_.ring;
      tokens[j].value = tail_.at(at, 0), tokens[j].score = tail_.at(at, 1);
    }
    return size;
  }
  int64_t rope_position(const TokenRow&) const { return 0; }
  /// What a joined vector is to the producer.
  const void* input(float* x, int64_t dim) const {
    uint16_t* narrow = reinterpret_cast<uint16_t*>(x + padded_dim(dim));
    join_kernels().narrow(x, dim, narrow);
    return narrow;
  }

  /// State slot of a real row, -1 without one.
  int64_t state_slot(const TokenRow& t) const {
    return a_.tail_slots.data == nullptr || t.position < 0 ? -1 : integer_at(a_.tail_slots, t.row);
  }
  int64_t entries() const { return tail_.entries; }
  /// A later row of the same request takes this row's place in the ring.
  bool superseded(const TokenRow& t) const {
    const int64_t later = t.row + tail_.ring;
    return later < batch_.count() && integer_at(a_.tail_slots, later) == integer_at(a_.tail_slots, t.row) &&
           !batch_.padding(later);
  }
  void leave(const TokenRow& t, int64_t slot) const {
    const size_t bytes = static_cast<size_t>(a_.cache.head_dim) * sizeof(uint16_t);
    std::memcpy(tail_.at(slot, 0), row_at(a_.k, t.row, 2), bytes);
    std::memcpy(tail_.at(slot, 1), row_at(a_.gate, t.row, 2), bytes);
  }

 private:
  static Rows rows_of(const PoolK& a) {
    Rows rows{};
    rows.count = a.slot_mapping.shape[0];
    rows.request = a.request, rows.q_indptr = a.q_indptr, rows.next_n = a.next_n;
    return rows;
  }
  int64_t entry(const TokenRow& t) const {
    const int64_t slot = state_slot(t);
    return slot < tail_.entries ? slot : -1;
  }

  const PoolK& a_;
  Batch batch_;
  Tail tail_;
};

// ---- compress_k
// ------------------------------------------------------------------------------------------------------------

class Windows {
 public:
  explicit Windows(const CompressK& a)
      : a_(a),
        batch_(rows_of(a), a.positions),
        width_(a.kv.shape[1]),
        ratio_(a.ape.shape[0]),
        block_(a.state.shape[1]),
        entries_(a.state.shape[0] * a.state.shape[1]) {}

  const Batch& batch() const { return batch_; }
  const Tensor& slot_mapping() const { return a_.slot_mapping; }
  const KeyCache& cache() const { return a_.cache; }
  Recipe recipe() const {
    Recipe r = make_recipe(a_.cache.head_dim, DType::f32, norm(), rope(), false);
    const bool automatic = a_.rule == QuantRule::automatic && a_.cache.format == KeyFormat::fp8;
    set_key_rule(r, a_.cache.format, automatic ? QuantRule::v4_key : a_.rule, ScaleRule::ue8m0);
    return r;
  }
  Norm norm() const {
    Norm n{};
    n.kind = NormKind::rms, n.weight = a_.rms_weight, n.eps = a_.eps;
    return n;
  }
  Rope rope() const {
    Rope r{};
    r.interleaved = r.trailing = true;
    if (a_.cos_sin.data == nullptr) return r;
    r.cos_sin = a_.cos_sin;
    r.dim = static_cast<int32_t>(a_.cos_sin.shape[1]);
    return r;
  }

  bool wants(const TokenRow& t) const { return integer_at(a_.state_slots, t.row) >= 0; }
  int64_t collect(const TokenRow& t, JoinToken* tokens) const {
    const int64_t dim = a_.cache.head_dim, length = width_ / dim * ratio_;
    if (t.position < 0 || (t.position + 1) % ratio_ != 0 || state_slot(t) >= entries_) return 0;
    const int64_t count = std::min(length, t.position + 1);  // positions before 0 take no part
    int64_t rows[kMaxTokens];
    batch_.find(t, count, rows);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t position = t.position - count + 1 + j;
      const int64_t channel = (length - count + j) / ratio_ * dim;
      if (rows[j] < 0) {
        const int64_t at = state_entry(t, position);
        if (at < 0) return 0;
        tokens[j] = {state_at(at) + channel, state_at(at) + width_ + channel, nullptr, DType::f32, DType::f32};
        continue;
      }
      const int64_t kv_bytes = float_bytes(a_.kv.dtype), score_bytes = float_bytes(a_.score.dtype);
      tokens[j] = {row_at(a_.kv, rows[j], kv_bytes) + channel * kv_bytes,
                   row_at(a_.score, rows[j], score_bytes) + channel * score_bytes, ape_at(position) + channel,
                   a_.kv.dtype, a_.score.dtype};
    }
    return count;
  }
  int64_t rope_position(const TokenRow& t) const { return t.position / ratio_ * ratio_; }
  const void* input(float* x, int64_t) const { return x; }

  int64_t state_slot(const TokenRow& t) const { return t.position < 0 ? -1 : integer_at(a_.state_slots, t.row); }
  int64_t entries() const { return entries_; }
  bool superseded(const TokenRow& t) const {
    const int64_t later = t.row + block_;
    return later < batch_.count() && integer_at(a_.state_slots, later) == integer_at(a_.state_slots, t.row) &&
           !batch_.padding(later);
  }
  void leave(const TokenRow& t, int64_t slot) const {
    const JoinToken token{row_at(a_.kv, t.row, float_bytes(a_.kv.dtype)),
                          row_at(a_.score, t.row, float_bytes(a_.score.dtype)), ape_at(t.position), a_.kv.dtype,
                          a_.score.dtype};
    join_kernels().widen(token, width_, state_at(slot), state_at(slot) + width_);
  }

 private:
  static Rows rows_of(const CompressK& a) {
    Rows rows{};
    rows.count = a.slot_mapping.shape[0];
    rows.q_indptr = a.query_start;
    return rows;
  }
  const float* ape_at(int64_t position) const {
    return static_cast<const float*>(a_.ape.data) + position % ratio_ * a_.ape.stride[0];
  }
  float* state_at(int64_t entry) const {
    return static_cast<float*>(a_.state.data) + entry / block_ * a_.state.stride[0] +
           entry % block_ * a_.state.stride[1];
  }
  /// Where the state holds a position of the row's request: in its ring, or in the page that the table names.
  int64_t state_entry(const TokenRow& t, int64_t position) const {
    if (a_.state_table.data == nullptr) return state_slot(t) / block_ * block_ + position % block_;
    const Tensor& table = a_.state_table;
    const int64_t column = position / block_;
    if (t.request >= table.shape[0] || column >= table.shape[1]) return -1;
    const int64_t page =
        static_cast<const int32_t*>(table.data)[t.request * table.stride[0] + column * table.stride[1]];
    return page < 0 || page >= a_.state.shape[0] ? -1 : page * block_ + position % block_;
  }

  const CompressK& a_;
  Batch batch_;
  int64_t width_, ratio_, block_, entries_;
};

// ---- both
// ------------------------------------------------------------------------------------------------------------------

/// A joined vector, f32 and what the producer is given.
constexpr int64_t joined_floats(int64_t dim) { return 2 * padded_dim(dim); }

bool rope_outside(const Rope& rope, int64_t position) { return rope.dim > 0 && position >= rope.cos_sin.shape[0]; }

/// Calls f(token row, slot, tokens, count) for each key row that this member writes. Counts what is asked for and
/// cannot be written: slots outside the cache on rank 0, pools and windows that are not whole on their own member.
template <class Kind, class F>
void for_each_made(const Kind& kind, const Slots& slots, const Share& share, Counts& counts, F&& f) {
  JoinToken tokens[kMaxTokens];
  kind.batch().for_each([&](const TokenRow& t) {
    const int64_t slot = integer_at(kind.slot_mapping(), t.row);
    if (slot < 0 || !kind.wants(t)) return;
    if (slot >= slots.count) {
      if (share.rank == 0) counts.add(kSkippedSlots);
      return;
    }
    if (!is_mine(share, slot)) return;
    const int64_t count = kind.collect(t, tokens);
    if (count == 0) {
      counts.add(kSkippedSlots);
      return;
    }
    f(t, slot, tokens, count);
  });
}

/// Calls f(token row, state slot) for each row that leaves something behind and that this member writes.
template <class Kind, class F>
void for_each_left(const Kind& kind, const Share& share, Counts& counts, F&& f) {
  kind.batch().for_each([&](const TokenRow& t) {
    const int64_t slot = kind.state_slot(t);
    if (slot < 0) return;
    if (slot >= kind.entries()) {
      if (share.rank == 0) counts.add(kSkippedSlots);
    } else if (is_mine(share, slot) && !kind.superseded(t)) {
      f(t, slot);
    }
  });
}

/// How many values strict refuses.
template <class Kind>
int64_t wild_values(const Kind& kind, const Slots& slots) {
  const Share all{0, 1};
  const Rope rope = kind.rope();
  Counts counts;
  for_each_made(kind, slots, all, counts, [&](const TokenRow& t, int64_t, const JoinToken*, int64_t) {
    counts.add(kSkippedPages, rope_outside(rope, kind.rope_position(t)));
  });
  for_each_left(kind, all, counts, [](const TokenRow&, int64_t) {});
  return static_cast<int64_t>(counts.words[kSkippedSlots] + counts.words[kSkippedPages]);
}

template <class Kind>
void make_keys(const Kind& kind, const Recipe& recipe, const Slots& slots, const Exec& exec, const Share& share,
               Counts& counts) {
  // Member's own: the rope that its producer reads has one position, which is set before each vector.
  int64_t position = 0;
  Rope rope = kind.rope();
  rope.positions = tensor(&position, DType::i64, {1}, {0});
  Producer::Stack stack;
  const Producer produce(recipe, kind.norm(), rope, stack, exec, share.rank);
  alignas(128) float own[joined_floats(kStackDim)];
  float* x = own;
  if (recipe.dim > kStackDim) {
    x = static_cast<float*>(exec.workspace) + kWideMembers * scratch_floats(recipe.dim) +
        share.rank * joined_floats(recipe.dim);
  }
  for_each_made(kind, slots, share, counts,
                [&](const TokenRow& t, int64_t slot, const JoinToken* tokens, int64_t count) {
                  join_kernels().join(tokens, count, recipe.dim, x);
                  position = kind.rope_position(t);
                  counts.add(kSkippedPages, rope_outside(rope, position));
                  store_vector(produce, kind.input(x, recipe.dim), 0, slots, slot);
                });
}

template <class Kind>
void run_kind(const char* op, const Kind& kind, const Exec& exec) {
  const Slots slots(kind.cache());
  if (exec.strict) raise_if_wild(exec, op, wild_values(kind, slots));
  if ((exec.flags & kCheckOnly) != 0) return;
  const Recipe recipe = kind.recipe();
  const int64_t rows = kind.batch().count();
  run_in_two(
      exec, producer_members(recipe, rows), rows,
      [&](const Share& share, Counts& counts) { make_keys(kind, recipe, slots, exec, share, counts); },
      [&](const Share& share, Counts& counts) {
        for_each_left(kind, share, counts, [&](const TokenRow& t, int64_t slot) { kind.leave(t, slot); });
      });
}

}  // namespace

size_t pool_workspace_bytes(int64_t head_dim) {
  if (head_dim <= kStackDim) return 0;
  return producer_workspace(head_dim) + static_cast<size_t>(kWideMembers * joined_floats(head_dim)) * sizeof(float);
}

void pool_k(const PoolK& a, const Exec& exec) { run_kind("pool_k", Pools(a), exec); }
void compress_k(const CompressK& a, const Exec& exec) { run_kind("compress_k", Windows(a), exec); }

}  // namespace topkey::cpu
