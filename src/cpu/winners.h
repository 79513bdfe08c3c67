// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The running selection of a row. Entries are appended in position order to a bounded buffer; when it is full, an
// exact radix selection keeps the k best, in place and stable, and sets a gate that only rises. So positions stay
// ascending, a tie at the cut falls to the lower position by itself, and no final sort exists. No capacity is assumed
// of the data: a full buffer is shrunk, however often it fills.
#pragma once
#include <atomic>
#include <cstdint>
#include <limits>

#include "topkey/number.h"

namespace topkey::cpu {

/// f32 scores as u32 in their order (docs/numerics.md): NaN lowest, every NaN alike, -0 = +0.
inline uint32_t key_of(float score) {
  const uint32_t u = bits_of(score + 0.0f);  // -0 becomes +0
  if (is_nan_bits(u)) return 0;
  return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}
inline float score_of_key(uint32_t key) {
  if (key == 0) return canonical_nan();
  return float_of((key & 0x80000000u) != 0 ? key & 0x7FFFFFFFu : ~key);
}
inline float canonical(float score) { return is_nan_bits(bits_of(score)) ? canonical_nan() : score + 0.0f; }

/// Positions below `first` or from `last` on win before any score (forced keys).
struct Forced {
  int64_t first = std::numeric_limits<int64_t>::min(), last = std::numeric_limits<int64_t>::max();
  bool has(int64_t position) const { return position < first || position >= last; }
  uint32_t key(float score, int64_t position) const { return has(position) ? 0xFFFFFFFFu : key_of(score); }
};

/// Entries of one or more parts, each ascending, parts ascending.
struct Entries {
  float* score;
  int32_t* position;
  int64_t size;
};

/// What an exact selection found.
struct Cut {
  uint32_t key = 0;   ///< of the k-th entry; 0 where all were kept
  bool tied = false;  ///< an entry with the same key was left out, and it is not a forced one
};

/// Keeps the k best of `parts` (forced first, then key descending, then position ascending), stable, at out (which
/// may be parts[0]'s own arrays; else it has room for k + 1 entries); the number kept is min(k, all).
int64_t select_best(const Entries* parts, int64_t num_parts, int64_t k, const Forced& forced, Entries out, Cut* cut);

/// A key that at least k entries of a row reach, whoever found them: what those that walk slices of the row tell each
/// other. It only rises; when a slice learns of it decides what is buffered, never what is selected.
using SharedGate = std::atomic<uint32_t>;
/// Raises it to `key` unless it is there or higher; what it is then.
inline uint32_t raise_gate(SharedGate* gate, uint32_t key) {
  uint32_t known = gate->load(std::memory_order_relaxed);
  while (key > known) {
    if (gate->compare_exchange_weak(known, key, std::memory_order_relaxed)) return key;
  }
  return known;
}

class Winners {
 public:
  struct Wanted {
    int64_t k;
    Forced forced;
    /// Let equals of the k-th score in, so that cut() knows of them (statistics ask; it costs time on data full of
    /// ties).
    bool count_ties;
    SharedGate* shared;  ///< null: nobody else walks this row
  };
  /// Buffers of `capacity` > k entries, or >= all keys that can come.
  void reset(float* score, int32_t* position, int64_t capacity, const Wanted& wanted) {
    entries_ = {score, position, 0};
    capacity_ = capacity;
    wanted_ = wanted;
    open_ = true;
    gate_ = 0.0f;
    cut_ = Cut{};
    heard_ = 0;
  }
  /// While open, everything is taken; then only scores >= gate (and forced keys) can matter.
  bool open() const { return open_; }
  float gate() const { return gate_; }
  const Forced& forced() const { return wanted_.forced; }
  /// Takes over what others found, now and then.
  void listen() {
    if (wanted_.shared == nullptr) return;
    const uint32_t key = wanted_.shared->load(std::memory_order_relaxed);
    if (key > heard_) hear(key);
  }

  void append(float score, int32_t position) {
    if (entries_.size == capacity_) shrink();
    entries_.score[entries_.size] = score;
    entries_.position[entries_.size] = position;
    ++entries_.size;
  }
  void append_all(const float* score, const int32_t* position, int64_t n);
  /// At most k entries are left, the k best of all that came. Not needed where a merge follows: it takes any number.
  void finish();
  const Entries& entries() const { return entries_; }
  /// The last cut: after finish() that at the k-th of all that came.
  const Cut& cut() const { return cut_; }

 private:
  void shrink();
  void hear(uint32_t key);

  Entries entries_{};
  int64_t capacity_ = 0;
  Wanted wanted_{};
  bool open_ = true;
  float gate_ = 0.0f;
  uint32_t heard_ = 0;  ///< highest key seen at `shared`
  Cut cut_;
};

}  // namespace topkey::cpu
