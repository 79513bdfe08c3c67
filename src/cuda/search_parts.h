// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The kernels that score, select and search are made of, in the order in which they run: look (what is known of each row),
// cut (who works on what), score, pick.
#pragma once
#include "cuda/device/emit.cuh"
#include "cuda/device/look.cuh"
#include "cuda/keys.h"
#include "cuda/launch.h"
#include "cuda/room.h"
#include "cuda/stages.h"

namespace topkey::cuda {

/// Rows [first_row, first_row + count) of a call, and keys [first_key, first_key + chunk) of each.
struct Group {
  int64_t first_row, count;
  uint32_t first_key, chunk;
};

void look(const LookParams& params, const Group& group, const Launch& launch);
/// Answers a search whose rows, by their bound, have no more keys than are wanted, and no score of them is: one launch, no
/// workspace. False where that is not so.
bool answer_whole_rows(const LookParams& look, const Emission& emission, const Launch& launch);

/// Where a kernel's scores go: the search's own buffer, or the caller's matrix.
struct ScoreSink {
  float* scores;  ///< [group rows, chunk]; null = logits
  Tensor logits, mask;
  int32_t force_first, force_last;
};
struct ScoreParams {
  Cores cores;
  KeySource keys;
  Query q;
  ScoreSink sink;
  const RowFact* facts;
  const int32_t* ids;
  int64_t id_stride;
  uint32_t id_block;  ///< keys a candidate block
  uint64_t* work;
  uint64_t* stats;
  bool by_request;  ///< paged rows: their requests are only known on the device; else next_n rows have one
  int32_t next_n;
};
/// Cuts the group's keys into pieces and scores them.
void score(const ScoreParams& params, const Group& group, const Launch& launch);

struct PickParams {
  Emission emission;
  Tensor scores, mask;  ///< given scores; absent in a search
  Tensor block_scores;  ///< of published blocks; optional
  Rows rows;
  Admit admit;
  Room room;
  int64_t keys;  ///< most that a row can look at
  bool has_entries, has_blocks;
};
/// The same where a row's scores fit a thread block's shared memory and positions alone decide the order of the answer;
/// false where that is not so.
bool pick_quickly(const PickParams& params, const Group& group, const Launch& launch);
/// The same for many rows of many scores each.
bool pick_in_stream(const PickParams& params, const Group& group, const Launch& launch);
/// Whether the shape is one for that.
bool stream_suits(int64_t rows, int64_t keys, int64_t topk);
/// Picks the group's winners: from given scores, or from those that score() has left in room.scores.
void pick(const PickParams& params, const Group& group, const Launch& launch);

}  // namespace topkey::cuda
