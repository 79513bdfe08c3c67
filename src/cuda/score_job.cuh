// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What the score kernels share around their arithmetic: the walk over pieces of work, a thread's own key, and where a
// finished score goes.
#pragma once
#include "cuda/device/keys.cuh"
#include "cuda/device/order.cuh"
#include "cuda/device/work.cuh"
#include "cuda/search_parts.h"
#include "cuda/tuning.h"

namespace topkey::cuda {

struct ScoreJob {
  ScoreParams p;
  Group group;
  int heads, head_tiles;               ///< heads; of them in eights, rounded up
  int tile_rows;                       ///< rows of a tile
  int head_block;                      ///< eights of heads whose queries are in shared memory at a time
  uint32_t piece;                      ///< keys of a piece
  int key_alignment, query_alignment;  ///< Hopper: 16, 4 or 1 bytes
};

struct Share {
  uint64_t next, end;
  uint32_t tile;
};
/// This block's share of the group's pieces; work[t] = pieces before tile t.
__device__ inline Share share_of(const ScoreJob& job) {
  const uint32_t tiles = static_cast<uint32_t>((job.group.count + job.tile_rows - 1) / job.tile_rows);
  const uint64_t total = job.p.work[tiles];
  Share s{total * blockIdx.x / gridDim.x, total * (blockIdx.x + 1) / gridDim.x, 0};
  uint32_t low = 0, high = tiles;  // last tile with work[tile] <= next
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (job.p.work[middle] <= s.next) {
      low = middle;
    } else {
      high = middle;
    }
  }
  s.tile = low;
  return s;
}

/// A key as one thread knows it.
struct OwnKey {
  int64_t position;
  KeyBytes bytes;  ///< null: not readable, or past the end
  bool inside;
};
__device__ __forceinline__ OwnKey own_key(const ScoreJob& job, const TileSpan& span, const RowFact* facts,
                                          const Piece& piece, int64_t tile_row, uint32_t offset) {
  OwnKey key{0, {nullptr, nullptr}, false};
  const RowFact& f = facts[piece.first];
  const int32_t table_row = span.shared ? span.table_row : f.table_row;
  if (span.shared) {
    key.position = piece.at + offset;
    key.inside = key.position < span.high;
  } else {
    const Span s = chunk_of(f, job.group.first_key, job.group.chunk);
    const int64_t index = piece.at + offset;
    key.inside = index < s.last;
    const int32_t* ids = job.p.ids != nullptr ? job.p.ids + (tile_row + piece.first) * job.p.id_stride : nullptr;
    if (key.inside) key.position = position_of(f, ids, job.p.id_block, static_cast<uint32_t>(index));
  }
  if (key.inside) key.bytes = find_key(job.p.keys, table_row, key.position);
  return key;
}

/// Index of the key in row f, or -1 where the row does not look at it in this chunk.
__device__ __forceinline__ int64_t index_in(const ScoreJob& job, const TileSpan& span, const RowFact& f,
                                            const Piece& piece, const OwnKey& key, uint32_t offset) {
  if (!key.inside) return -1;
  const int64_t index = span.shared ? key.position - f.low : piece.at + offset;
  const Span s = chunk_of(f, job.group.first_key, job.group.chunk);
  return index >= s.first && index < s.last ? index : -1;
}

/// A finished score to the caller's matrix.
__device__ inline void put_logit(const ScoreJob& job, int64_t row, int64_t column, bool live, float score) {
  put_real(job.p.sink.logits, live ? score : __uint_as_float(0xFF800000u), row, column);
  if (live && is_nan(score)) count(job.p.stats, kNanScores, 1);
}

/// Writes one finished score: masked, canonical; a key that is not live as kNotLiveScore, or -inf in a matrix.
__device__ __forceinline__ void put_score(const ScoreJob& job, int64_t group_row, const OwnKey& key, int64_t index,
                                          float sum) {
  const ScoreSink& sink = job.p.sink;
  bool live = key.bytes.values != nullptr;
  if (sink.mask.data != nullptr) {
    float addend = 0.0f;
    live = live && !masked(sink.mask, job.group.first_row + group_row, key.position, &addend);
    sum = sum + addend;
  }
  const float score = canonical(sum);
  if (sink.scores != nullptr) {
    sink.scores[group_row * job.group.chunk + (index - job.group.first_key)] =
        live ? score : __uint_as_float(kNotLiveScore);
  } else {
    put_logit(job, job.group.first_row + group_row, key.position, live, score);
  }
}

}  // namespace topkey::cuda
