// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What happens to a row's scores as they are made: mask, forced keys, candidate blocks, and the running selection.
// One sink a row and task; search feeds it from tiles, topk from given scores.
#pragma once
#include <cstdint>

#include "cpu/counts.h"
#include "cpu/window.h"
#include "cpu/winners.h"
#include "topkey/topkey.h"

namespace topkey::cpu {

/// Buffers of one row's two selections: keys and, where asked for, blocks.
struct SinkBuffers {
  float* score;
  int32_t* position;
  float* block_score;
  int32_t* block_id;
  int64_t capacity, block_capacity;
};

class RowSink {
 public:
  /// What a row is asked for; count_all: statistics want NaNs and ties.
  struct Wanted {
    int64_t topk;
    const Admit* admit;
    const Selection* out;
    bool count_all;
    SharedGate* gate;  ///< of a row whose slices others walk; null: none does
  };
  void start(const RowFact& fact, int64_t row, const Wanted& wanted, const SinkBuffers& buffers);
  /// n scores of ascending positions; accepted is scratch for n.
  void take(const float* scores, const int32_t* positions, int64_t n, int32_t* accepted, Counts& counts);
  /// After the last key; newest: the newest block is of this part of the keys, and must be among the published.
  /// merged: this is one of several parts, whose merge makes the cut.
  void finish(bool newest, bool merged);

  const Entries& entries() const { return winners_.entries(); }
  const Entries& blocks() const { return blocks_.entries(); }
  const Cut& cut() const { return winners_.cut(); }
  const Forced& forced() const { return winners_.forced(); }

 private:
  void take_one(float score, int32_t position, Counts& counts);
  void turn_to_block(int64_t position);
  void see_blocks(const float* scores, const int32_t* positions, int64_t n);
  void close_block();

  const RowFact* fact_ = nullptr;
  const Admit* admit_ = nullptr;
  int64_t row_ = 0, block_size_ = 0;
  bool count_all_ = false, in_block_ = false;
  int64_t block_end_ = 0;
  int32_t block_id_ = -1;
  uint32_t block_key_ = 0;
  Winners winners_, blocks_;
};

/// Forced keys of a row as positions; forced block: its newest.
Forced forced_keys(const Admit& admit, const RowFact& fact);
Forced forced_block(const RowFact& fact, int64_t block_size);

}  // namespace topkey::cpu
