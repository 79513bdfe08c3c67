// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `pool`: the tokens of a pool or window, each found by request and position, joined by a softmax over their
// scores and sent through producer.h. All is read before anything is written: a call sees the state as it was.
#include "ref/pool.h"

#include <cmath>
#include <optional>
#include <vector>

#include "backend_table.h"
#include "ref/cache.h"
#include "ref/producer.h"
#include "ref/rows.h"

namespace topkey::ref {
namespace {

/// One token's part of a key row: what is summed and what weighs it, [D] each.
struct Token {
  std::vector<float> value, score;
};

/// softmax over the tokens, channel by channel. exp is that of double precision, rounded once.
std::vector<float> join(const std::vector<Token>& tokens, int64_t dim) {
  std::vector<float> x(static_cast<size_t>(dim));
  for (size_t d = 0; d < x.size(); ++d) {
    float most = tokens[0].score[d];
    for (const Token& t : tokens) most = t.score[d] > most ? t.score[d] : most;
    float sum = 0.0f, weights = 0.0f;
    for (const Token& t : tokens) {
      const float p = static_cast<float>(std::exp(static_cast<double>(t.score[d] - most)));
      const float weighted = t.value[d] * p;
      sum = sum + weighted;
      weights = weights + p;
    }
    x[d] = sum / weights;
  }
  return x;
}

/// The rows of a call as tokens: each row's request and position.
class Batch {
 public:
  Batch(const Rows& rows, const Tensor& positions) : positions_(positions) {
    for (int64_t r = 0; r < rows.count; ++r) requests_.push_back(window_of(rows, r, 0).request);
  }
  /// -1: a padding row, or no position that a sequence can have.
  int64_t position(int64_t row) const {
    constexpr int64_t kLast = int64_t{1} << 48;
    const int64_t position = integer(positions_, row);
    return request(row) < 0 || position < 0 || position > kLast ? -1 : position;
  }
  int64_t request(int64_t row) const { return requests_[static_cast<size_t>(row)]; }
  /// The nearest row at or before `row` that holds this position of the same request, or -1.
  int64_t find(int64_t row, int64_t wanted) const {
    for (int64_t r = row; r >= 0 && request(r) == request(row); --r) {
      if (position(r) == wanted) return r;
    }
    return -1;
  }

 private:
  const Tensor& positions_;
  std::vector<int64_t> requests_;
};

/// A key row that is ready to be stored.
struct Made {
  int64_t slot;
  std::vector<float> x;
};

/// For every row that has a slot and wants(row), make(row) gives its vector, or nothing where that cannot be made: then,
/// and where the slot lies outside the cache, it is counted.
template <class Wants, class Make>
std::vector<Made> make_all(const Tensor& slot_mapping, const KeyCache& cache, Counts& counts, const Wants& wants,
                           const Make& make) {
  std::vector<Made> made;
  const int64_t slots = cache.pages.shape[0] * cache.page_size;
  for (int64_t r = 0; r < slot_mapping.shape[0]; ++r) {
    const int64_t slot = integer(slot_mapping, r);
    if (slot < 0 || !wants(r)) continue;
    std::optional<std::vector<float>> x;
    if (slot < slots) x = make(r);
    if (x) {
      made.push_back({slot, std::move(*x)});
    } else {
      counts.wild(kSkippedSlots, 1, "slot", r, slot);
    }
  }
  return made;
}

/// Counts state slots of real rows that lie outside the state.
void count_wild_slots(const Batch& batch, const Tensor& slots, int64_t rows, int64_t entries, Counts& counts) {
  for (int64_t r = 0; slots.data != nullptr && r < rows; ++r) {
    if (batch.position(r) >= 0 && integer(slots, r) >= entries) {
      counts.wild(kSkippedSlots, 1, "state slot", r, integer(slots, r));
    }
  }
}

/// The state entry that row `row` writes, or -1.
int64_t entry_of(const Batch& batch, const Tensor& slots, int64_t row, int64_t entries) {
  if (slots.data == nullptr || batch.position(row) < 0) return -1;
  const int64_t slot = integer(slots, row);
  return slot < entries ? slot : -1;
}

// ---- pool_k
// ----------------------------------------------------------------------------------------------------------------

/// One element of the tail: half 0 is k, half 1 the gate.
uint16_t* tail_at(const Tensor& tail, int64_t entry, int64_t half) {
  const int64_t ring = tail.shape[2];
  return static_cast<uint16_t*>(tail.data) + entry / ring * tail.stride[0] + half * tail.stride[1] +
         entry % ring * tail.stride[2];
}

class Pools {
 public:
  explicit Pools(const PoolK& a)
      : a_(a),
        batch_(rows_of(a), a.positions),
        entries_(a.tail.data == nullptr ? 0 : a.tail.shape[0] * a.tail.shape[2]) {}

  const Batch& batch() const { return batch_; }
  int64_t entries() const { return entries_; }
  std::optional<std::vector<float>> make(int64_t row) const {
    const int64_t last = batch_.position(row), dim = a_.cache.head_dim;
    if (last < 0 || (last + 1) % a_.pool_size != 0) return std::nullopt;
    std::vector<Token> tokens;
    for (int64_t j = 0; j < a_.pool_size; ++j) {
      std::optional<Token> token = find(row, last - a_.pool_size + 1 + j);
      if (!token) return std::nullopt;
      for (int64_t d = 0; d < dim; ++d) {
        float& score = token->score[static_cast<size_t>(d)];
        score = score + *element<float>(a_.ape, j, d);
      }
      tokens.push_back(std::move(*token));
    }
    std::vector<float> x = join(tokens, dim);
    for (float& v : x) v = round_to_bf16(v);
    transform({nullptr, nullptr, true, DType::bf16, false}, row, x);
    return x;
  }
  void leave(int64_t row) const {
    const int64_t entry = entry_of(batch_, a_.tail_slots, row, entries_);
    if (entry < 0) return;
    const size_t bytes = static_cast<size_t>(a_.cache.head_dim) * sizeof(uint16_t);
    std::memcpy(tail_at(a_.tail, entry, 0), element<uint16_t>(a_.k, row), bytes);
    std::memcpy(tail_at(a_.tail, entry, 1), element<uint16_t>(a_.gate, row), bytes);
  }

 private:
  static Rows rows_of(const PoolK& a) {
    Rows rows{};
    rows.count = a.slot_mapping.shape[0];
    rows.request = a.request, rows.q_indptr = a.q_indptr, rows.next_n = a.next_n;
    return rows;
  }
  std::optional<Token> find(int64_t row, int64_t position) const {
    const int64_t at = batch_.find(row, position);
    if (at >= 0) return token(element<uint16_t>(a_.k, at), element<uint16_t>(a_.gate, at));
    const int64_t own = entry_of(batch_, a_.tail_slots, row, entries_);
    if (own < 0) return std::nullopt;
    const int64_t ring = a_.tail.shape[2], entry = own / ring * ring + position % ring;
    return token(tail_at(a_.tail, entry, 0), tail_at(a_.tail, entry, 1));
  }
  Token token(const uint16_t* k, const uint16_t* gate) const {
    Token t;
    for (int64_t d = 0; d < a_.cache.head_dim; ++d) {
      t.value.push_back(bf16_to_float(k[d]));
      t.score.push_back(bf16_to_float(gate[d]));
    }
    return t;
  }

  const PoolK& a_;
  Batch batch_;
  int64_t entries_;
};

// ---- compress_k
// ------------------------------------------------------------------------------------------------------------

class Windows {
 public:
  explicit Windows(const CompressK& a)
      : a_(a),
        batch_(rows_of(a), a.positions),
        dim_(a.cache.head_dim),
        width_(a.kv.shape[1]),
        ratio_(a.ape.shape[0]),
        entries_(a.state.shape[0] * a.state.shape[1]) {}

  const Batch& batch() const { return batch_; }
  int64_t entries() const { return entries_; }
  /// Position at which the key row of `row` is rotated.
  int64_t group_start(int64_t row) const { return batch_.position(row) / ratio_ * ratio_; }
  std::optional<std::vector<float>> make(int64_t row) const {
    const int64_t last = batch_.position(row), length = width_ / dim_ * ratio_;
    if (last < 0 || (last + 1) % ratio_ != 0) return std::nullopt;
    std::vector<Token> tokens;
    for (int64_t w = 0; w < length; ++w) {
      const int64_t position = last - length + 1 + w;
      if (position < 0) continue;
      std::optional<Token> token = find(row, position, w / ratio_ * dim_);
      if (!token) return std::nullopt;
      tokens.push_back(std::move(*token));
    }
    std::vector<float> x = join(tokens, dim_);
    int64_t start = group_start(row);
    Norm norm{};
    norm.kind = NormKind::rms, norm.weight = a_.rms_weight, norm.eps = a_.eps;
    Rope rope{};
    rope.interleaved = rope.trailing = true;
    if (a_.cos_sin.data != nullptr) {
      rope.positions = tensor(&start, DType::i64, {1});
      rope.cos_sin = a_.cos_sin;
      rope.dim = static_cast<int32_t>(a_.cos_sin.shape[1]);
    }
    transform({&norm, &rope, false, DType::f32, false}, 0, x);
    return x;
  }
  void leave(int64_t row) const {
    const int64_t entry = entry_of(batch_, a_.state_slots, row, entries_);
    if (entry < 0) return;
    float* to = state_at(entry);
    for (int64_t i = 0; i < width_; ++i) {
      to[i] = real(a_.kv, row, i);
      to[width_ + i] = score(row, i);
    }
  }

 private:
  static Rows rows_of(const CompressK& a) {
    Rows rows{};
    rows.count = a.slot_mapping.shape[0];
    rows.q_indptr = a.query_start;
    return rows;
  }
  float score(int64_t row, int64_t i) const {
    return real(a_.score, row, i) + *element<float>(a_.ape, batch_.position(row) % ratio_, i);
  }
  float* state_at(int64_t entry) const {
    return element<float>(a_.state, entry / a_.state.shape[1], entry % a_.state.shape[1]);
  }
  /// Where the state holds a position of the row's request: in its ring, or in the page that the table names.
  int64_t state_entry(int64_t row, int64_t position) const {
    const int64_t block = a_.state.shape[1];
    if (a_.state_table.data == nullptr) return integer(a_.state_slots, row) / block * block + position % block;
    return slot_of(a_.state_table, batch_.request(row), block, position, entries_ - 1);
  }
  std::optional<Token> find(int64_t row, int64_t position, int64_t first) const {
    Token t;
    const int64_t at = batch_.find(row, position), entry = at < 0 ? state_entry(row, position) : -1;
    if (at < 0 && entry < 0) return std::nullopt;
    for (int64_t i = first; i < first + dim_; ++i) {
      t.value.push_back(at >= 0 ? real(a_.kv, at, i) : state_at(entry)[i]);
      t.score.push_back(at >= 0 ? score(at, i) : state_at(entry)[width_ + i]);
    }
    return t;
  }

  const CompressK& a_;
  Batch batch_;
  int64_t dim_, width_, ratio_, entries_;
};

QuantRule rule_of(QuantRule rule, KeyFormat format, QuantRule fp8) {
  return rule == QuantRule::automatic && format == KeyFormat::fp8 ? fp8 : rule;
}

}  // namespace

void pool_k(const PoolK& a, const Exec& exec) {
  const Pools pools(a);
  const int64_t rows = a.slot_mapping.shape[0];
  Counts counts;
  count_wild_slots(pools.batch(), a.tail_slots, rows, pools.entries(), counts);
  std::vector<Made> made = make_all(
      a.slot_mapping, a.cache, counts, [](int64_t) { return true; }, [&](int64_t r) { return pools.make(r); });
  counts.raise_if_strict("pool_k", exec);
  if ((exec.flags & kCheckOnly) != 0) return;
  const QuantRule rule = rule_of(QuantRule::automatic, a.cache.format, QuantRule::kpool_key);
  for (Made& m : made) store_vector(a.cache, rule, a.scale, m.slot, m.x);
  for (int64_t r = 0; r < rows; ++r) pools.leave(r);
  counts.add(kRows, rows);
  counts.publish(exec);
}

void compress_k(const CompressK& a, const Exec& exec) {
  const Windows windows(a);
  const int64_t rows = a.slot_mapping.shape[0];
  Counts counts;
  count_wild_slots(windows.batch(), a.state_slots, rows, windows.entries(), counts);
  const auto wants = [&](int64_t r) { return integer(a.state_slots, r) >= 0; };
  const auto make = [&](int64_t r) -> std::optional<std::vector<float>> {
    if (integer(a.state_slots, r) >= windows.entries()) return std::nullopt;
    auto x = windows.make(r);
    const int64_t start = windows.group_start(r);
    if (x && a.cos_sin.data != nullptr && start >= a.cos_sin.shape[0]) {
      counts.wild(kSkippedPages, 1, "rope position", r, start);
    }
    return x;
  };
  std::vector<Made> made = make_all(a.slot_mapping, a.cache, counts, wants, make);
  counts.raise_if_strict("compress_k", exec);
  if ((exec.flags & kCheckOnly) != 0) return;
  const QuantRule rule = rule_of(a.rule, a.cache.format, QuantRule::v4_key);
  for (Made& m : made) store_vector(a.cache, rule, ScaleRule::ue8m0, m.slot, m.x);
  for (int64_t r = 0; r < rows; ++r) windows.leave(r);
  counts.add(kRows, rows);
  counts.publish(exec);
}

}  // namespace topkey::ref
