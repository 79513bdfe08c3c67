// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// One selecting call as the members of a team see it, whatever operation it came from.
#pragma once
#include "cpu/keys.h"
#include "cpu/room.h"
#include "topkey/topkey.h"

namespace topkey::cpu {

/// One call, as the members see it.
struct Job {
  const char* op;
  Rows rows;
  Admit admit;
  int64_t topk;
  Selection out;
  Extents extents;
  Source source;         ///< keys; for given scores only `count` is used
  const Query* q;        ///< null: given scores
  const Tensor* scores;  ///< null: keys
  const Tensor* row_topk;
  Shard shard;
  bool absolute_slots;
  Tensor whole_start, whole_end, block_scores;
};

/// Answers every row of the job.
void run_job(const Job& job, const Exec& exec);

}  // namespace topkey::cpu
