// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What sharding costs, from shapes: bytes that a rank receives (exact: the collectives exchange nothing that lengths
// decide) and times (a model: work over a rate, bytes over a link). docs/scaling.md reads its tables from here.
#pragma once
#include <cstdint>

namespace topkey::support {

/// How the work is cut. context: keys over ranks, winners merged. rows: query rows over ranks, answers exchanged.
/// gathered: query rows over ranks, whose keys are interleaved over the same ranks and gathered.
enum class Cut { context, rows, gathered };

struct Scale {
  Cut cut = Cut::context;
  int64_t ranks = 1;
  int64_t interleave = 1;
  int64_t rows = 1, requests = 1;  ///< of a step
  int64_t context = 0;             ///< key rows that a row sees
  int64_t heads = 64, head_dim = 128, topk = 2048, blocks = 0;
  int64_t key_bytes = 132;  ///< of a key row
  int64_t exchange_limit = 64 << 20;
  // The machine.
  double flops = 1.45e15, read = 4.3e12;  ///< of a rank: scores a second times 2 H D; bytes a second
  double link = 2.35e11, latency = 1e-5;  ///< bytes a second into a rank; seconds a collective
};

struct Cost {
  int64_t received_bytes = 0;  ///< by a rank, from the others
  int64_t exchanges = 0;       ///< collectives
  double local = 0, exchange = 0, merge = 0;
  double seconds() const { return local + exchange + merge; }
};

/// Of one rank; of the one with the most work where they differ.
Cost cost_of(const Scale& s);

}  // namespace topkey::support
