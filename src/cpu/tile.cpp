// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See tile.h.
#include "cpu/tile.h"

#include <algorithm>
#include <array>

#include "cpu/view.h"

namespace topkey::cpu {
namespace {

using Values = std::array<float, 256>;

Values values_of(float (*value)(uint8_t)) {
  Values t{};
  for (int i = 0; i < 256; ++i) t[static_cast<size_t>(i)] = value(static_cast<uint8_t>(i));
  return t;
}
const Values& e4m3_values(KeyFormat format) {
  static const Values fn = values_of([](uint8_t c) { return e4m3_to_float(c); });
  static const Values fnuz = values_of([](uint8_t c) { return e4m3fnuz_to_float(c); });
  return format == KeyFormat::fp8_fnuz ? fnuz : fn;
}

/// e2m1 pairs times their block scales, times kMxfp4Down: exact, and never beyond f32 (docs/numerics.md).
void widen_mxfp4(const uint8_t* codes, const uint8_t* scales, int64_t dim, float* out, int64_t step) {
  static const Values quarters =
      values_of([](uint8_t c) { return e2m1_to_float(static_cast<uint8_t>(c & 15)) * kMxfp4Down; });
  for (int64_t block = 0; block < dim / 32; ++block) {
    const float scale = e8m0_to_float(scales[block]);
    for (int64_t i = 0; i < 16; ++i, ++codes, out += 2 * step) {
      out[0] = quarters[*codes] * scale;
      out[step] = quarters[*codes >> 4] * scale;
    }
  }
}

/// Query values of one head, widened exactly, to out[d * head_block].
void widen_head(const Query& q, KeyFormat format, int64_t row, int64_t head, int64_t dim, float* out) {
  const Tensor& t = q.values;
  const int64_t step = kernels().head_block;
  const int64_t at = row * t.stride[0] + head * t.stride[1];
  if (format == KeyFormat::mxfp4) {
    return widen_mxfp4(static_cast<const uint8_t*>(t.data) + at, scale_bytes_at(q.scales, row, head), dim, out, step);
  }
  for (int64_t d = 0; d < dim; ++d) {
    switch (t.dtype) {
      case DType::f32: out[d * step] = static_cast<const float*>(t.data)[at + d]; break;
      case DType::bf16: out[d * step] = bf16_to_float(static_cast<const uint16_t*>(t.data)[at + d]); break;
      case DType::f16: out[d * step] = f16_to_float(static_cast<const uint16_t*>(t.data)[at + d]); break;
      default: out[d * step] = e4m3_values(format)[static_cast<const uint8_t*>(t.data)[at + d]];
    }
  }
}

int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

}  // namespace

PackedQueries take_queries(Arena& arena, int64_t rows, int64_t heads, int64_t head_dim, KeyFormat format) {
  PackedQueries p{};
  p.format = format;
  p.heads = heads;
  p.weight_step = round_up(heads, kernels().head_block);
  p.value_step = p.weight_step * head_dim;
  p.values = arena.take<float>(rows * p.value_step);
  p.weights = arena.take<float>(rows * p.weight_step);
  return p;
}

void pack_query(const Query& q, int64_t row, int64_t head_dim, int64_t at, const PackedQueries& packed) {
  const int64_t heads = q.values.shape[1], block = kernels().head_block;
  float* values = packed.values + at * packed.value_step;
  float* weights = packed.weights + at * packed.weight_step;
  if (heads < packed.weight_step) {
    std::fill(values + heads / block * block * head_dim, values + packed.value_step, 0.0f);
    std::fill(weights + heads, weights + packed.weight_step, 0.0f);
  }
  for (int64_t h = 0; h < heads; ++h) {
    widen_head(q, packed.format, row, h, head_dim, values + h / block * block * head_dim + h % block);
    const int64_t w = row * q.weights.stride[0] + h * q.weights.stride[1];
    weights[h] = q.weights.dtype == DType::bf16 ? bf16_to_float(static_cast<const uint16_t*>(q.weights.data)[w])
                                                : static_cast<const float*>(q.weights.data)[w];
  }
}

int64_t Tile::keys_for(int64_t rows, int64_t head_dim) {
  const int64_t wanted = rows <= 1 ? 96 : rows < 8 ? 192 : 480;
  // Panels of a tile stay within 256 KiB, half of a small L2.
  const int64_t fits = std::max<int64_t>(65536 / head_dim, 1);
  const int64_t panel = kernels().panel_keys;
  return std::max(panel, std::min(wanted, fits) / panel * panel);
}

void Tile::take(Arena& arena, int64_t most_keys, KeyFormat format, int64_t head_dim) {
  format_ = format;
  head_dim_ = head_dim;
  row_bytes_ = topkey::row_bytes(format, head_dim);
  rows_ = arena.take<const uint8_t*>(most_keys);
  scale_rows_ = arena.take<const uint8_t*>(most_keys);
  page_rows_ = arena.take<int32_t>(most_keys);
  unpacked_ = arena.take<uint8_t>(kernels().panel_keys * row_bytes_);
  positions_ = arena.take<int32_t>(most_keys);
  kscale_ = arena.take<float>(most_keys);
  panels_ = arena.take<float>(most_keys * head_dim);
  scores_ = arena.take<float>(most_keys);
  zero_row_ = arena.take<uint8_t>(row_bytes_);
}

void Tile::append(const Source& source, const Chunk& chunk, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    rows_[size_ + i] = chunk.values + i * source.value_step;
    positions_[size_ + i] = static_cast<int32_t>(chunk.first + i);
  }
  tiled_ = source.tiled() ? &source : nullptr;
  for (int64_t i = 0; tiled_ != nullptr && i < n; ++i) page_rows_[size_ + i] = static_cast<int32_t>(chunk.row + i);
  append_scales(source, chunk, n);
  size_ += n;
}

void Tile::append_scales(const Source& source, const Chunk& chunk, int64_t n) {
  float* const kscale = kscale_ + size_;
  if (format_ == KeyFormat::mxfp4) {
    for (int64_t i = 0; i < n; ++i) scale_rows_[size_ + i] = chunk.scales + i * source.scale_step;
    std::fill(kscale, kscale + n, kMxfp4Up);
  } else if (is_fp8(format_)) {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = tiled_ != nullptr ? source.layout.scale_offset(chunk.row + i) : i * source.scale_step;
      std::memcpy(kscale + i, chunk.scales + at, sizeof(float));
    }
  }
}

/// Keys [first, first + count) row by row into unpacked_; rows_ then points there.
void Tile::unpack_tiles(int64_t first, int64_t count) {
  const PageLayout& layout = tiled_->layout;
  for (int64_t i = 0; i < count; ++i) {
    uint8_t* row = unpacked_ + i * row_bytes_;
    read_row(layout, rows_[first + i], page_rows_[first + i], row, row + layout.value);
    rows_[first + i] = row;
    scale_rows_[first + i] = row + layout.value;
  }
}

void Tile::decode() {
  const int64_t padded = round_up(size_, kernels().panel_keys);
  for (int64_t i = size_; i < padded; ++i) {
    rows_[i] = scale_rows_[i] = zero_row_;
    kscale_[i] = 0.0f;
  }
  if (tiled_ == nullptr) return kernels().decode(format_, {rows_, scale_rows_}, padded, head_dim_, panels_);
  const int64_t panel = kernels().panel_keys;
  for (int64_t i = 0; i < padded; i += panel) {
    unpack_tiles(i, std::min(panel, size_ - i));
    kernels().decode(format_, {rows_ + i, scale_rows_ + i}, panel, head_dim_, panels_ + i * head_dim_);
  }
}

/// Keys with scales of their own have a factor left for the end: fp8's scale, mxfp4's kMxfp4Up.
void Tile::score(const PackedQueries& q, int64_t at, int64_t first, int64_t last) {
  const int64_t panel = kernels().panel_keys;
  const int64_t p = first / panel, count = (last + panel - 1) / panel - p;
  kernels().score(panels_ + p * panel * head_dim_, count, head_dim_, q.values + at * q.value_step,
                  q.weights + at * q.weight_step, q.heads, scale_bytes(format_, 32) > 0 ? kscale_ + p * panel : nullptr,
                  scores_ + p * panel);
}

}  // namespace topkey::cpu
