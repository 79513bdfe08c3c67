// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The calls that a GPU's benchmark times, as data: shapes, contents, what each must reach and what others reach.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "support/patterns.h"

namespace topkey::bench {

/// D = 128, fp8, pages of 64 keys in shuffled order, unless the operation says otherwise.
struct GpuCase {
  std::string name, suite;  ///< suite: decode, prefill, select, producers or worst
  std::string op;           ///< the operation's name; mqa_topk: causal, the last rows of the keys; "empty": a kernel
  int32_t heads = 64;
  int64_t rows = 1;  ///< query rows; producers: key rows or query rows
  int64_t keys = 0;  ///< per request
  int32_t next_n = 1, topk = 2048;
  support::Pattern pattern = support::Pattern::normal;
  std::vector<int32_t> lengths{};  ///< of each request, instead of `keys` for all
  int64_t bound = 0;               ///< paged: rows.max_len and the table's width where they are more than `keys`
  int64_t blocks = 0;              ///< publish so many blocks of 8
  int64_t admitted = 0;            ///< candidates: so many blocks of 8, other ones for each row
  // What it must reach, in microseconds: a figure of its own (0 = none), or that of another case of this run times
  // `times` or plus `plus_us`, whichever is more (the eager figure where eager_base).
  double must_us = 0, target_us = 0;
  double must_fraction = 0;  ///< of the floor
  std::string against{};
  double times = 0, plus_us = 0, target_times = 0;
  bool eager_base = false;
  // What others reach (see gpu_cases.cpp), cold and warm; 0 = unknown.
  const char* peer = nullptr;
  double peer_cold_us = 0, peer_warm_us = 0;
  double read_us = 0;  ///< measured time of reading the keys alone
};

std::vector<GpuCase> gpu_cases();
/// A few of each suite, the smaller ones.
std::vector<GpuCase> quick_gpu_cases();

}  // namespace topkey::bench
