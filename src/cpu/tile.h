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

/// Query rows packed for the kernels: [blocks][dim][head_block] f32, the last block padded with heads that no sum
/// takes.
struct PackedQueries {
  KeyFormat format;  ///< of the keys that they meet
  float* values;     ///< [rows][blocks * dim * head_block]
  float* weights;    ///< [rows][blocks * head_block]
  int64_t value_step, weight_step, heads;
};
PackedQueries take_queries(Arena& arena, int64_t rows, int64_t heads, int64_t head_dim, KeyFormat format);
void pack_query(const Query& q, int64_t row, int64_t head_dim, int64_t at, const PackedQueries& packed);

class Tile {
 public:
  /// Keys a tile holds: few for one row (its panels stay in L1), more where many rows share them.
  static int64_t keys_for(int64_t rows, int64_t head_dim);
  void take(Arena& arena, int64_t most_keys, KeyFormat format, int64_t head_dim);
  /// Before the first key of a walk; keys at most as many as were taken.
  void begin(int64_t keys) {
    keys_ = keys;
    size_ = 0;
    std::memset(zero_row_, 0, static_cast<size_t>(row_bytes_));
  }

  int64_t size() const { return size_; }
  const int32_t* positions() const { return positions_; }
  const float* scores() const { return scores_; }

  /// Takes keys of `chunk`; calls flush() and starts anew whenever it is full.
  template <class Flush>
  void push(const Source& source, Chunk chunk, Flush&& flush) {
    while (chunk.count > 0) {
      const int64_t n = chunk.count < keys_ - size_ ? chunk.count : keys_ - size_;
      append(source, chunk, n);
      chunk.first += n;
      chunk.count -= n;
      chunk.values += n * source.value_step;
      chunk.row += n;
      if (chunk.scales != nullptr) chunk.scales += n * source.scale_step;
      if (size_ == keys_) drain(flush);
    }
  }
  /// Flushes what is left.
  template <class Flush>
  void drain(Flush&& flush) {
    if (size_ > 0) {
      decode();
      flush();
    }
    size_ = 0;
  }
  /// Scores of keys [first, last) of the tile for packed row `at`; valid at scores()[first..last).
  void score(const PackedQueries& q, int64_t at, int64_t first, int64_t last);

 private:
  void append(const Source& source, const Chunk& chunk, int64_t n);
  void append_scales(const Source& source, const Chunk& chunk, int64_t n);
  void decode();
  void unpack_tiles(int64_t first, int64_t count);

  KeyFormat format_ = KeyFormat::fp8;
  int64_t head_dim_ = 0, keys_ = 0, size_ = 0, row_bytes_ = 0;
  const Source* tiled_ = nullptr;         // the source, if its pages are tiled
  const uint8_t** rows_ = nullptr;        // values of each key, or the page where it is tiled
  const uint8_t** scale_rows_ = nullptr;  // mxfp4: scales of each key
  int32_t* page_rows_ = nullptr;          // tiled: each key's row in its page
  uint8_t* unpacked_ = nullptr;           // tiled: one panel of keys, row by row
  int32_t* positions_ = nullptr;
  float* kscale_ = nullptr;
  float* panels_ = nullptr;
  float* scores_ = nullptr;
  uint8_t* zero_row_ = nullptr;
};

}  // namespace topkey::cpu
