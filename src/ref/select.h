// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `select`, reference backend: a full sort under the order of docs/numerics.md, and the one way by which
// answers leave this backend.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "ref/admit.h"
#include "ref/rows.h"

namespace topkey::ref {

/// A live key. The score is canonical; 0 where it was not needed.
struct Entry {
  float score;
  int64_t position;
  bool forced;
};

/// score descending, then position ascending; NaN below everything, every NaN alike.
bool better(float score_a, int64_t position_a, float score_b, int64_t position_b);

/// A published block: the score is that of its best live key, NaN where it has none.
struct Block {
  int64_t id;
  float score;
};

/// What a row will be given: its chosen entries in the order in which they are written, and its blocks.
struct Answer {
  Window window;
  std::vector<Entry> entries;
  std::vector<Block> blocks;
};

/// How the answers of one operation become output values.
struct Emission {
  const Selection* out;
  int64_t topk;                                        ///< columns to write
  Shard shard;                                         ///< positions become global under it
  enum Relative { to_start, absolute } slot_position;  ///< which position slot_map translates
  Tensor block_scores;                                 ///< beside out->blocks; may be absent
};

/// Whether the row must be scored even if its live keys fit topk.
bool needs_scores(const Selection& out);
/// The best `topk` of `live` (any order) and, if asked for, the best blocks. Counts ties at the cut.
Answer choose(std::vector<Entry> live, const Window& w, int64_t topk, const Selection& out, bool scored,
              Counts& counts);
/// Best `count` blocks of `block_size` keys: ascending ids, the newest visible key's block among them.
std::vector<Block> best_blocks(const std::vector<Entry>& live, const Window& w, int64_t block_size, int64_t count);
/// The best `count` of the blocks in `best` (id -> score), `newest` always among them, ascending.
std::vector<Block> choose_blocks(const std::map<int64_t, float>& best, int64_t newest, int64_t count);

/// Computes every row's answer by `answer_row`, raises under strict, then writes. Rows are written as they come
/// unless strict.
void answer_rows(const char* op, int64_t rows, const Emission& emission, const Exec& exec, Counts& counts,
                 const std::function<Answer(int64_t)>& answer_row);
/// scores may be absent.
void put_blocks(const Tensor& blocks, const Tensor& scores, int64_t row, const std::vector<Block>& chosen);

void topk(const Topk&, const Exec&);
void select_blocks(const SelectBlocks&, const Exec&);

}  // namespace topkey::ref
