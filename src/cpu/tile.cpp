// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See tile.h.
#include "cpu/tile.h"

#include <algorithm>
#include <utility>

#include "cpu/view.h"

namespace topkey::cpu {
namespace {

/// Query values are widened as keys of the same dtype are; codes are in the keys' own format.
KeyFormat format_of(DType dtype, KeyFormat keys) {
  switch (dtype) {
    case DType::f32: return KeyFormat::f32;
    case DType::bf16: return KeyFormat::bf16;
    case DType::f16: return KeyFormat::f16;
    default: return keys;
  }
}

int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

}  // namespace

PackedQueries take_queries(Arena& arena, int64_t rows, int64_t heads, int64_t head_dim, KeyFormat format) {
  PackedQueries p{};
  p.format = format;
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
  const KeyFormat format = format_of(q.values.dtype, packed.format);
  const int64_t bytes = format == KeyFormat::mxfp4 ? 1 : value_bytes(format, 1);  // of an element
  const uint8_t* first = static_cast<const uint8_t*>(q.values.data) + row * q.values.stride[0] * bytes;
  for (int64_t h = 0; h < heads; h += 8) {
    const uint8_t *eight[8], *scales[8] = {};
    for (int64_t i = 0; i < 8; ++i) {
      const int64_t head = std::min(h + i, heads - 1);
      eight[i] = first + head * q.values.stride[1] * bytes;
      if (format == KeyFormat::mxfp4) scales[i] = scale_bytes_at(q.scales, row, head);
    }
    kernels().pack(format, {eight, scales}, head_dim, packed.scratch,
                   packed.values + at * packed.value_step + h * head_dim);
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
  value_bytes_ = value_bytes(format, head_dim);
  row_bytes_ = topkey::row_bytes(format, head_dim);
  next_.rows = arena.take<const uint8_t*>(most_keys);
  next_.scales = arena.take<const uint8_t*>(most_keys);
  next_.page_rows = arena.take<int32_t>(most_keys);
  next_.positions = arena.take<int32_t>(most_keys);
  positions_ = arena.take<int32_t>(most_keys);
  kscale_ = arena.take<float>(most_keys);
  panels_ = arena.take<float>(most_keys * head_dim);
  scores_ = arena.take<float>(most_keys);
  zero_row_ = arena.take<uint8_t>(row_bytes_);
  unpacked_ = arena.take<uint8_t>(kernels().panel_keys * row_bytes_);
}

void Tile::append(const Source& source, const Chunk& chunk, int64_t n) {
  tiled_ = source.tiled() ? &source : nullptr;
  const uint8_t** rows = next_.rows + next_.size;
  int32_t* positions = next_.positions + next_.size;
  for (int64_t i = 0; i < n; ++i) {
    rows[i] = chunk.values + i * source.value_step;
    positions[i] = static_cast<int32_t>(chunk.first + i);
  }
  const uint8_t** scales = next_.scales + next_.size;
  for (int64_t i = 0; i < n && scaled(); ++i) {
    scales[i] = chunk.scales + (tiled_ != nullptr ? source.layout.scale_offset(chunk.row + i) : i * source.scale_step);
  }
  for (int64_t i = 0; i < n && tiled_ != nullptr; ++i) {
    next_.page_rows[next_.size + i] = static_cast<int32_t>(chunk.row + i);
  }
  // Later tiles are asked for while the one before is scored; the first has none before.
  if (size_ == 0 && tiled_ == nullptr) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t at = 0; at < value_bytes_; at += 64) __builtin_prefetch(rows[i] + at);
    }
  }
  next_.size += n;
}

/// Gathered keys [first, first + count) row by row into unpacked_; their pointers then lead there.
void Tile::unpack_tiles(int64_t first, int64_t count) {
  const PageLayout& layout = tiled_->layout;
  for (int64_t i = 0; i < count; ++i) {
    uint8_t* row = unpacked_ + i * row_bytes_;
    read_row(layout, next_.rows[first + i], next_.page_rows[first + i], row, row + layout.value);
    next_.rows[first + i] = row;
    next_.scales[first + i] = row + layout.value;
  }
}

void Tile::decode() {
  size_ = std::exchange(next_.size, 0);
  std::swap(positions_, next_.positions);
  const int64_t panel = kernels().panel_keys, padded = round_up(size_, panel);
  for (int64_t i = size_; i < padded; ++i) next_.rows[i] = next_.scales[i] = zero_row_;
  for (int64_t i = 0; i < size_ && is_fp8(format_); ++i) std::memcpy(kscale_ + i, next_.scales[i], sizeof(float));
  if (format_ == KeyFormat::mxfp4) std::fill(kscale_, kscale_ + size_, kMxfp4Up);
  std::fill(kscale_ + size_, kscale_ + padded, 0.0f);
  if (tiled_ == nullptr) return kernels().decode(format_, {next_.rows, next_.scales}, padded, head_dim_, panels_);
  for (int64_t i = 0; i < padded; i += panel) {
    unpack_tiles(i, std::min(panel, size_ - i));
    kernels().decode(format_, {next_.rows + i, next_.scales + i}, panel, head_dim_, panels_ + i * head_dim_);
  }
}

/// A row's fair share of the gathered keys; of tiled pages none, their rows lie in pieces.
Ahead Tile::ask() {
  if (tiled_ != nullptr) return Ahead{};
  const int64_t share = (next_.size + query_rows_ - 1) / query_rows_;
  Ahead ahead{};
  ahead.rows = next_.rows + asked_;
  if (scaled()) ahead.scales = next_.scales + asked_;
  ahead.count = std::min(share, next_.size - asked_);
  ahead.bytes = value_bytes_;
  asked_ += ahead.count;
  return ahead;
}

/// Keys with scales of their own have a factor left for the end: fp8's scale, mxfp4's kMxfp4Up.
void Tile::score(const PackedQueries& q, int64_t at, int64_t first, int64_t last) {
  const int64_t panel = kernels().panel_keys, p = first / panel;
  ScoreJob job{};
  job.panels = panels_ + p * panel * head_dim_;
  job.count = (last + panel - 1) / panel - p;
  job.dim = head_dim_;
  job.q = q.values + at * q.value_step;
  job.weights = q.weights + at * q.weight_step;
  job.heads = q.heads;
  job.kscale = scaled() ? kscale_ + p * panel : nullptr;
  job.out = scores_ + p * panel;
  job.ahead = ask();
  kernels().score(job);
}

}  // namespace topkey::cpu
