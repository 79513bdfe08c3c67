// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See tile.h.
#include "cpu/tile.h"

#include <algorithm>
#include <utility>

namespace topkey::cpu {
namespace {

/// Query values are widened as keys of the same dtype are.
KeyFormat format_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return KeyFormat::f32;
    case DType::bf16: return KeyFormat::bf16;
    case DType::f16: return KeyFormat::f16;
    default: return KeyFormat::fp8;
  }
}

int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

}  // namespace

PackedQueries take_queries(Arena& arena, int64_t rows, int64_t heads, int64_t head_dim) {
  PackedQueries p{};
  p.heads = heads;
  p.weight_step = round_up(heads, 8);
  p.value_step = p.weight_step * head_dim;
  p.values = arena.take<float>(rows * p.value_step);
  p.weights = arena.take<float>(rows * p.weight_step);
  p.scratch = arena.take<float>(8 * head_dim);
  return p;
}

void pack_query(const Query& q, int64_t row, int64_t head_dim, int64_t at, const PackedQueries& packed) {
  const int64_t heads = q.values.shape[1];
  const KeyFormat format = format_of(q.values.dtype);
  const int64_t bytes = value_bytes(format, 1);
  const uint8_t* first = static_cast<const uint8_t*>(q.values.data) + row * q.values.stride[0] * bytes;
  for (int64_t h = 0; h < heads; h += 8) {
    const uint8_t* eight[8];
    for (int64_t i = 0; i < 8; ++i) eight[i] = first + std::min(h + i, heads - 1) * q.values.stride[1] * bytes;
    kernels().pack(format, eight, head_dim, packed.scratch, packed.values + at * packed.value_step + h * head_dim);
  }
  float* weights = packed.weights + at * packed.weight_step;
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t w = row * q.weights.stride[0] + h * q.weights.stride[1];
    weights[h] = q.weights.dtype == DType::bf16 ? bf16_to_float(static_cast<const uint16_t*>(q.weights.data)[w])
                                                : static_cast<const float*>(q.weights.data)[w];
  }
}

int64_t Tile::keys_for(int64_t rows, int64_t head_dim) {
  const int64_t wanted = rows <= 1 ? 48 : rows < 8 ? 192 : 480;
  // Panels of a tile stay within 256 KiB, half of a small L2.
  const int64_t fits = std::max<int64_t>(65536 / head_dim, 1);
  const int64_t panel = kernels().panel_keys;
  return std::max(panel, std::min(wanted, fits) / panel * panel);
}

void Tile::take(Arena& arena, int64_t most_keys, KeyFormat format, int64_t head_dim) {
  format_ = format;
  head_dim_ = head_dim;
  zero_bytes_ = value_bytes(format, head_dim);
  next_.rows = arena.take<const uint8_t*>(most_keys);
  next_.scales = arena.take<const uint8_t*>(most_keys);
  next_.positions = arena.take<int32_t>(most_keys);
  positions_ = arena.take<int32_t>(most_keys);
  kscale_ = arena.take<float>(most_keys);
  panels_ = arena.take<float>(most_keys * head_dim);
  scores_ = arena.take<float>(most_keys);
  zero_row_ = arena.take<uint8_t>(zero_bytes_);
}

void Tile::append(const Source& source, const Chunk& chunk, int64_t n) {
  const uint8_t** rows = next_.rows + next_.size;
  int32_t* positions = next_.positions + next_.size;
  for (int64_t i = 0; i < n; ++i) {
    rows[i] = chunk.values + i * source.value_step;
    positions[i] = static_cast<int32_t>(chunk.first + i);
  }
  const uint8_t** scales = next_.scales + next_.size;
  for (int64_t i = 0; i < n && format_ == KeyFormat::fp8; ++i) scales[i] = chunk.scales + i * source.scale_step;
  // Later tiles are asked for while the one before is scored; the first has none before.
  if (size_ == 0) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t at = 0; at < zero_bytes_; at += 64) __builtin_prefetch(rows[i] + at);
    }
  }
  next_.size += n;
}

void Tile::decode() {
  size_ = std::exchange(next_.size, 0);
  std::swap(positions_, next_.positions);
  const int64_t padded = round_up(size_, kernels().panel_keys);
  for (int64_t i = size_; i < padded; ++i) next_.rows[i] = zero_row_;
  for (int64_t i = 0; i < size_ && format_ == KeyFormat::fp8; ++i) {
    std::memcpy(kscale_ + i, next_.scales[i], sizeof(float));
  }
  std::fill(kscale_ + size_, kscale_ + padded, 0.0f);
  kernels().decode(format_, next_.rows, padded, head_dim_, panels_);
}

/// A row's fair share of the gathered keys.
Ahead Tile::ask() {
  const int64_t share = (next_.size + query_rows_ - 1) / query_rows_;
  Ahead ahead{};
  ahead.rows = next_.rows + asked_;
  if (format_ == KeyFormat::fp8) ahead.scales = next_.scales + asked_;
  ahead.count = std::min(share, next_.size - asked_);
  ahead.bytes = zero_bytes_;
  asked_ += ahead.count;
  return ahead;
}

void Tile::score(const PackedQueries& q, int64_t at, int64_t first, int64_t last) {
  const int64_t panel = kernels().panel_keys, p = first / panel;
  ScoreJob job{};
  job.panels = panels_ + p * panel * head_dim_;
  job.count = (last + panel - 1) / panel - p;
  job.dim = head_dim_;
  job.q = q.values + at * q.value_step;
  job.weights = q.weights + at * q.weight_step;
  job.heads = q.heads;
  job.kscale = format_ == KeyFormat::fp8 ? kscale_ + p * panel : nullptr;
  job.out = scores_ + p * panel;
  job.ahead = ask();
  kernels().score(job);
}

}  // namespace topkey::cpu
