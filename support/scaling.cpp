// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See scaling.h.
#include "support/scaling.h"

#include <algorithm>

namespace topkey::support {
namespace {

int64_t divided(int64_t a, int64_t by) { return (a + by - 1) / by; }

/// Scoring `pairs` (row, key) pairs of `keys` different keys: bound by arithmetic or by reading.
double scoring(const Scale& s, double pairs, double keys) {
  const double flop = 2.0 * static_cast<double>(s.heads) * static_cast<double>(s.head_dim);
  return std::max(pairs * flop / s.flops, keys * static_cast<double>(s.key_bytes) / s.read);
}

/// New tokens to all ranks, in chunks that keep the limit.
void gather_tokens(const Scale& s, Cost& c) {
  if (s.token_bytes == 0) return;
  const int64_t each = divided(s.rows, s.ranks);
  const int64_t chunk = std::max<int64_t>(1, std::min(each, s.exchange_limit / (s.token_bytes * s.ranks)));
  c.received_bytes += (s.ranks - 1) * each * s.token_bytes;
  c.exchanges += divided(each, chunk);
}

}  // namespace

double collective(const Scale& s, double bytes) { return std::min(s.small_link.seconds(bytes), s.link.seconds(bytes)); }

Cost cost_of(const Scale& s) {
  Cost c;
  const double rows = static_cast<double>(s.rows), context = static_cast<double>(s.context);
  const double ranks = static_cast<double>(s.ranks), keys = static_cast<double>(s.requests) * context;
  const int64_t others = s.ranks - 1;
  switch (s.cut) {
    case Cut::context: {
      const int64_t row_bytes = 8 * (s.topk + s.blocks);  // a score and a position for each winner and block
      c.local = scoring(s, rows * context / ranks, keys / ranks);
      c.received_bytes = others * s.rows * row_bytes;
      const int64_t chunk = std::max<int64_t>(1, s.exchange_limit / (row_bytes * s.ranks));
      c.exchanges = divided(s.rows, chunk);
      // What was received is read twice and what is chosen written.
      c.merge = 2.0 * static_cast<double>(s.ranks * s.rows * row_bytes) / s.read;
      break;
    }
    case Cut::rows:
      // Every rank reads all keys that its rows see; a slice of one request's rows sees all of them.
      c.local = scoring(s, rows * context / ranks, keys);
      c.received_bytes = (s.rows - s.rows / s.ranks) * 4 * (s.topk + s.blocks);
      c.exchanges = s.blocks > 0 ? 2 : 1;
      break;
    case Cut::tokens:
      c.local = scoring(s, rows * context / ranks, keys);
      gather_tokens(s, c);
      break;
    case Cut::gathered: {
      c.local = scoring(s, rows * context / ranks, keys);
      // Of each rank as many rows, chosen from shapes: its share, and of each request less than a run more.
      const int64_t all = s.requests * s.context;
      const int64_t each = std::min(all, all / s.ranks + s.requests * s.interleave);
      const int64_t piece = std::max<int64_t>(1, std::min(each, s.exchange_limit / (s.ranks * s.key_bytes)));
      c.received_bytes = others * each * s.key_bytes;
      c.exchanges = 2 * divided(each, piece);  // values and scales
      gather_tokens(s, c);
      break;
    }
  }
  if (s.ranks == 1) c.received_bytes = c.exchanges = 0, c.merge = 0;
  if (c.exchanges == 0) return c;
  const double exchanges = static_cast<double>(c.exchanges);
  c.exchange = exchanges * collective(s, static_cast<double>(c.received_bytes) / exchanges);
  return c;
}

}  // namespace topkey::support
