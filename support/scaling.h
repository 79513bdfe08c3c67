// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What sharding costs, from shapes: bytes that a rank receives (exact: the collectives exchange nothing that lengths
// decide; without the hashes by which a step begins) and times (a model: work over a rate, bytes over a link). docs/
// scaling.md reads its tables from here.
#pragma once
#include <cstdint>

namespace topkey::support {

/// How the work is cut. context: keys over ranks, winners merged. rows: query rows over ranks, answers exchanged.
/// tokens: query rows and their new tokens over ranks, tokens gathered, all keys on every rank. gathered: the same, but the
/// keys are interleaved over these ranks and gathered for the search.
enum class Cut { context, rows, tokens, gathered };

/// Bytes a second into a rank; seconds of a collective before the first byte.
struct Link {
  double rate, latency;
  double seconds(double bytes) const { return latency + bytes / rate; }
};

struct Scale {
  Cut cut = Cut::context;
  int64_t ranks = 1;
  int64_t interleave = 1;
  int64_t rows = 1, requests = 1;  ///< of a step
  int64_t context = 0;             ///< key rows that a row sees
  int64_t heads = 64, head_dim = 128, topk = 2048, blocks = 0;
  int64_t key_bytes = 132;    ///< of a key row
  int64_t token_bytes = 256;  ///< of a new token on its way: k in bf16; of pools k and gate; 0 = none are new
  int64_t exchange_limit = 64 << 20;
  // The machine.
  double flops = 1.45e15, read = 4.3e12;  ///< of a rank: scores a second times 2 H D; bytes a second
  Link link = {2.48e11, 23e-6}, small_link = {1.09e11, 8e-6};  ///< a collective takes the sooner of the two
};

struct Cost {
  int64_t received_bytes = 0;  ///< by a rank, from the others
  int64_t exchanges = 0;       ///< collectives
  double local = 0, exchange = 0, merge = 0;
  double seconds() const { return local + exchange + merge; }
};

/// Seconds of a collective in which a rank receives so many bytes.
double collective(const Scale& s, double bytes);
/// Of one rank; of the one with the most work where they differ.
Cost cost_of(const Scale& s);

}  // namespace topkey::support
