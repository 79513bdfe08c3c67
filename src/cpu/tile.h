// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A tile: some hundred live keys of one request, decoded once, scored for every row that shares them. Keys that
// cannot be read never enter it, so nothing later has to ask whether a key is live.
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/arena.h"
#include "cpu/kernels.h"
#include "cpu/keys.h"

namespace topkey::cpu {

/// Query rows packed for the kernels: [blocks][dim][head_block] f32; heads are whole eights, of which no sum takes those
/// that only pad.
struct PackedQueries {
  KeyFormat format;  ///< of the keys that they meet
  float* values;     ///< [rows][blocks * dim * head_block]
  float* weights;    ///< [rows][blocks * head_block]
  float* scratch;    ///< [8 * dim]
  int64_t value_step, weight_step, heads;
};
PackedQueries take_queries(Arena& arena, int64_t rows, int64_t heads, int64_t head_dim, KeyFormat format);
void pack_query(const Query& q, int64_t row, int64_t head_dim, int64_t at, const PackedQueries& packed);

/// Two tiles at a time: one is decoded and being scored, the next is gathered meanwhile, so that its bytes are on their
/// way when it is decoded.
class Tile {
 public:
  /// Keys a tile holds: few for one row (its panels stay in L1), more where many rows share them.
  static int64_t keys_for(int64_t rows, int64_t head_dim);
  void take(Arena& arena, int64_t most_keys, KeyFormat format, int64_t head_dim);
  /// Before the first key of a walk for `rows` rows; keys at most as many as were taken.
  void begin(int64_t keys, int64_t rows) {
    keys_ = keys;
    query_rows_ = rows;
    size_ = next_.size = 0;
    std::memset(zero_row_, 0, static_cast<size_t>(row_bytes_));
  }

  int64_t size() const { return size_; }
  const int32_t* positions() const { return positions_; }
  const float* scores() const { return scores_; }

  /// Takes keys of `chunk`; decodes whenever a tile is full, and calls flush() for the tile before.
  template <class Flush>
  void push(const Source& source, Chunk chunk, Flush&& flush) {
    while (chunk.count > 0) {
      const int64_t n = chunk.count < keys_ - next_.size ? chunk.count : keys_ - next_.size;
      append(source, chunk, n);
      chunk.first += n;
      chunk.count -= n;
      chunk.values += n * source.value_step;
      chunk.row += n;
      if (chunk.scales != nullptr) chunk.scales += n * source.scale_step;
      if (next_.size == keys_) advance(flush);
    }
  }
  /// Flushes what is left.
  template <class Flush>
  void drain(Flush&& flush) {
    advance(flush);
    advance(flush);
  }
  /// Scores of keys [first, last) of the tile for packed row `at`; valid at scores()[first..last).
  void score(const PackedQueries& q, int64_t at, int64_t first, int64_t last);

 private:
  /// Keys gathered, not yet decoded.
  struct Gathered {
    const uint8_t** rows;    ///< values, or the page where it is tiled
    const uint8_t** scales;  ///< where the format has its own
    int32_t* page_rows;      ///< tiled: each key's row in its page
    int32_t* positions;
    int64_t size;
  };

  /// Flushes the decoded tile, then decodes the gathered one.
  template <class Flush>
  void advance(Flush& flush) {
    asked_ = 0;
    if (size_ > 0) flush();
    size_ = 0;
    if (next_.size > 0) decode();
  }
  void append(const Source& source, const Chunk& chunk, int64_t n);
  void decode();
  Ahead ask();
  void unpack_tiles(int64_t first, int64_t count);
  bool scaled() const { return scale_bytes(format_, 32) > 0; }

  KeyFormat format_ = KeyFormat::fp8;
  int64_t head_dim_ = 0, keys_ = 0, query_rows_ = 1, value_bytes_ = 0, row_bytes_ = 0;
  Gathered next_{};
  int64_t size_ = 0;               ///< of the decoded tile
  int64_t asked_ = 0;              ///< gathered keys that were asked for while the decoded tile was scored
  const Source* tiled_ = nullptr;  ///< the source, if its pages are tiled
  uint8_t* unpacked_ = nullptr;    ///< tiled: one panel of keys, row by row
  int32_t* positions_ = nullptr;
  float* kscale_ = nullptr;
  float* panels_ = nullptr;
  float* scores_ = nullptr;
  uint8_t* zero_row_ = nullptr;
};

}  // namespace topkey::cpu
