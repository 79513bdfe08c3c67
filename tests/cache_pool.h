// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A paged cache for tests of stage `cache`: an allocation as engines make it (any page stride, a base at any multiple
// of 4 bytes), poisoned throughout, 4 KiB of guard on either side, beside an image of what its bytes must be. The
// image is written here by the formula of docs/formats.md, byte by byte, so that one comparison finds a wrong offset,
// a torn row and a stray write.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "support/array.h"
#include "topkey/topkey.h"

namespace topkey::testing {

using Bytes = std::vector<uint8_t>;

/// One key row as bytes.
struct KeyRow {
  Bytes values, scales;
  bool operator==(const KeyRow& o) const { return values == o.values && scales == o.scales; }
};

class Pool {
 public:
  static constexpr int64_t kGuard = 4096;

  Pool(KeyFormat format, Layout layout, int32_t page_size, int32_t head_dim, int64_t pages, int64_t stride,
       int64_t base = 0)
      : memory_(kGuard + base + pages * stride + kGuard, 0xA5),
        image_(memory_),
        start_(kGuard + base),
        stride_(stride) {
    store_ = support::aligned_bytes(memory_.size());
    std::memcpy(store_.get(), memory_.data(), memory_.size());
    cache_ = {tensor(store_.get() + start_, DType::u8, {pages, tight(format, page_size, head_dim)}, {stride, 1}),
              format, layout, page_size, head_dim};
  }
  static int64_t tight(KeyFormat format, int64_t page_size, int64_t head_dim) {
    return page_size * row_bytes(format, head_dim);
  }

  const KeyCache& cache() const { return cache_; }
  int64_t slots() const { return cache_.pages.shape[0] * cache_.page_size; }
  uint8_t* page(int64_t p) const { return store_.get() + start_ + p * stride_; }

  /// What slot `slot` must hold from now on.
  void expect(int64_t slot, const KeyRow& row) {
    const auto v = static_cast<int64_t>(row.values.size()), g = static_cast<int64_t>(row.scales.size());
    const int64_t t = slot % cache_.page_size, page = start_ + slot / cache_.page_size * stride_;
    if (tile_rows(cache_.layout) > 0) return expect_tiled(page, t, row);
    const bool planar = cache_.layout == Layout::planar;
    const int64_t value = page + (planar ? t * v : t * (v + g)),
                  scale = page + (planar ? cache_.page_size * v + t * g : t * (v + g) + v);
    std::memcpy(image_.data() + value, row.values.data(), row.values.size());
    if (g > 0) std::memcpy(image_.data() + scale, row.scales.data(), row.scales.size());
  }
  /// Empty, or where the memory first differs from the image.
  std::string difference() const {
    for (size_t i = 0; i < image_.size(); ++i) {
      if (store_.get()[i] == image_[i]) continue;
      const int64_t at = static_cast<int64_t>(i) - start_;
      return "byte " + std::to_string(at) + " of the cache (page " + std::to_string(at / stride_) + ", byte " +
             std::to_string(at % stride_) + "): got " + std::to_string(store_.get()[i]) + ", want " +
             std::to_string(image_[i]);
    }
    return {};
  }

 private:
  /// Piece by piece, and scale by scale where those are tiled too.
  void expect_tiled(int64_t page, int64_t t, const KeyRow& row) {
    const int64_t n = tile_rows(cache_.layout), group = t / n, lane = t % n;
    const auto v = static_cast<int64_t>(row.values.size()), g = static_cast<int64_t>(row.scales.size());
    for (int64_t piece = 0; piece < v / 16; ++piece) {
      std::memcpy(image_.data() + page + group * n * v + (piece * n + lane) * 16, row.values.data() + piece * 16, 16);
    }
    uint8_t* scales = image_.data() + page + cache_.page_size * v + group * n * g;
    const int64_t low = 64 / n, high = n / 16;
    for (int64_t s = 0; s < g; ++s) {
      const bool whole = cache_.format != KeyFormat::mxfp4;
      scales[whole ? lane * g + s : (s % low * n + lane) * high + s / low] = row.scales[static_cast<size_t>(s)];
    }
  }

  Bytes memory_, image_;
  int64_t start_, stride_;
  std::shared_ptr<uint8_t> store_;
  KeyCache cache_{};
};

inline DType value_dtype(KeyFormat format) {
  switch (format) {
    case KeyFormat::bf16: return DType::bf16;
    case KeyFormat::f16: return DType::f16;
    case KeyFormat::f32: return DType::f32;
    default: return DType::u8;
  }
}

/// Dense key rows [rows, ...] of a format in owned memory, poisoned.
struct Dense {
  Dense(KeyFormat f, int64_t rows, int64_t head_dim)
      : format(f), width(value_bytes(f, head_dim)), scale_width(scale_bytes(f, head_dim)) {
    const DType dtype = value_dtype(f);
    values = support::Array(dtype, {rows, width / static_cast<int64_t>(support::dtype_bytes(dtype))});
    if (is_fp8(f)) scales = support::Array(DType::f32, {rows});
    if (f == KeyFormat::mxfp4) scales = support::Array(DType::u8, {rows, scale_width});
    std::memset(values.as<uint8_t>(), 0xA5, values.bytes());
    if (scales) std::memset(scales.as<uint8_t>(), 0xA5, scales.bytes());
  }
  DenseKeys view() const { return {values.view(), scales.view(), format}; }
  KeyRow row(int64_t r) const {
    const uint8_t *v = values.as<uint8_t>() + r * width, *s = scales.as<uint8_t>() + r * scale_width;
    return {Bytes(v, v + width), scales ? Bytes(s, s + scale_width) : Bytes()};
  }
  KeyFormat format;
  int64_t width, scale_width;
  support::Array values, scales;
};

struct Tiled {
  KeyFormat format;
  Layout layout;
  int32_t head_dim;
};
/// Every format and tile that there is, at one head_dim each.
inline const std::vector<Tiled>& all_tiled() {
  static const std::vector<Tiled> all = {
      {KeyFormat::fp8, Layout::tiled16, 128},     {KeyFormat::fp8, Layout::tiled16, 48},
      {KeyFormat::fp8_fnuz, Layout::tiled16, 64}, {KeyFormat::mxfp4, Layout::tiled16, 128},
      {KeyFormat::mxfp4, Layout::tiled32, 128},   {KeyFormat::mxfp4, Layout::tiled64, 128}};
  return all;
}

/// A row of poison: what an untouched row of Dense looks like.
inline KeyRow poison_row(KeyFormat format, int64_t head_dim) {
  return {Bytes(static_cast<size_t>(value_bytes(format, head_dim)), 0xA5),
          Bytes(static_cast<size_t>(scale_bytes(format, head_dim)), 0xA5)};
}
/// The key that stands where none can be read: NaN in every element.
inline KeyRow nan_row(KeyFormat format, int64_t head_dim) {
  KeyRow row = poison_row(format, head_dim);
  Bytes unit;
  switch (format) {
    case KeyFormat::fp8: unit = {0x7F}; break;
    case KeyFormat::fp8_fnuz: unit = {0x80}; break;
    case KeyFormat::mxfp4: unit = {0x00}; break;
    case KeyFormat::bf16: unit = {0xC0, 0x7F}; break;
    case KeyFormat::f16: unit = {0x00, 0x7E}; break;
    case KeyFormat::f32: unit = {0x00, 0x00, 0xC0, 0x7F}; break;
    case KeyFormat::q8_0: unit = Bytes(34); unit[1] = 0x7E;
  }
  for (size_t i = 0; i < row.values.size(); ++i) row.values[i] = unit[i % unit.size()];
  const Bytes scale = is_fp8(format) ? Bytes{0x00, 0x00, 0xC0, 0x7F} : Bytes(row.scales.size(), 0xFF);
  row.scales = scale;
  return row;
}

}  // namespace topkey::testing
