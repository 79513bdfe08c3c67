// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Who scores what: a group's rows in tiles of a few rows, each tile's keys in pieces. Rows of a tile that see keys of one
// table row share their reads; others are worked on one after the other. Thread blocks take equal, contiguous shares of
// all pieces, so time follows the lengths that the device finds.
#pragma once
#include "cuda/device/facts.cuh"

namespace topkey::cuda {

/// The keys of this chunk in one row, as indices.
struct Span {
  uint32_t first, last;
};
/// Fact: has n; RowFact, or what of it matters here.
template <class Fact>
__device__ __forceinline__ Span chunk_of(const Fact& f, uint32_t first_key, uint32_t chunk) {
  const uint32_t first = first_key < f.n ? first_key : f.n;
  const uint32_t rest = f.n - first;
  return {first, first + (rest < chunk ? rest : chunk)};
}

struct TileSpan {
  bool shared;
  int64_t low, high;  ///< shared: positions of all its rows
  uint32_t pieces;
  int32_t table_row;  ///< shared: of all rows that have keys
};

/// facts: of the tile's rows.
template <class Fact>
__device__ inline TileSpan span_of(const Fact* facts, int rows, bool by_ids, uint32_t first_key, uint32_t chunk,
                                   uint32_t piece) {
  TileSpan t{!by_ids, INT64_MAX, 0, 0, -1};
  uint32_t apart = 0;
  for (int r = 0; r < rows; ++r) {
    const Fact& f = facts[r];
    const Span s = chunk_of(f, first_key, chunk);
    if (s.first == s.last) continue;
    t.shared = t.shared && (t.table_row < 0 || t.table_row == f.table_row);
    t.table_row = f.table_row;
    const int64_t low = int64_t{f.low} + s.first, high = int64_t{f.low} + s.last;
    t.low = low < t.low ? low : t.low;
    t.high = high > t.high ? high : t.high;
    apart += (s.last - s.first + piece - 1) / piece;
  }
  if (apart == 0) return t;
  const int64_t together = (t.high - t.low + piece - 1) / piece;
  t.shared = t.shared && together <= apart;
  t.pieces = t.shared ? static_cast<uint32_t>(together) : apart;
  return t;
}

/// One piece: rows [first, last) of a tile, and where its keys begin.
struct Piece {
  int first, last;
  int64_t at;  ///< shared: a position; else an index of the only row
};
__device__ inline Piece piece_of(const TileSpan& t, const RowFact* facts, int rows, uint32_t first_key, uint32_t chunk,
                                 uint32_t piece, uint32_t number) {
  if (t.shared) return {0, rows, t.low + int64_t{number} * piece};
  for (int r = 0; r < rows; ++r) {
    const Span s = chunk_of(facts[r], first_key, chunk);
    const uint32_t own = (s.last - s.first + piece - 1) / piece;
    if (number < own) return {r, r + 1, int64_t{s.first} + int64_t{number} * piece};
    number -= own;
  }
  return {0, 0, 0};
}

}  // namespace topkey::cuda
