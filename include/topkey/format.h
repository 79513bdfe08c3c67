// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Key formats and where their bytes lie: the only place that knows bytes per key, scale groups and page layout; and
// the names of the quantisation rules. docs/formats.md draws the layouts; the cache is byte-compatible with the
// engines' (docs there).
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "topkey/number.h"
#include "topkey/types.h"

namespace topkey {

/// fp8: e4m3fn, one f32 scale a row. mxfp4: e2m1 pairs (low nibble = even d), a ue8m0 byte per 32. bf16, f16, f32:
/// plain values. q8_0: ggml blocks of 34 bytes, an f16 scale and 32 int8. fp8_fnuz: fp8 with e4m3fnuz codes (AMD).
enum class KeyFormat : int32_t { fp8, mxfp4, bf16, f16, f32, q8_0, fp8_fnuz };
/// planar: a page's values, then its scales (the engines' layout). interleaved: row by row, each followed by its scale.
/// tiledN (AMD): groups of N rows whose 16-byte pieces alternate; fp8 and fp8_fnuz: tiled16 only, head_dim a multiple of
/// 16; mxfp4: any, head_dim 128; no other format. page_size is then a multiple of N.
enum class Layout : int32_t { planar, interleaved, tiled16, tiled32, tiled64 };

inline const char* format_name(KeyFormat format) noexcept {
  switch (format) {
    case KeyFormat::fp8: return "fp8";
    case KeyFormat::mxfp4: return "mxfp4";
    case KeyFormat::bf16: return "bf16";
    case KeyFormat::f16: return "f16";
    case KeyFormat::f32: return "f32";
    case KeyFormat::q8_0: return "q8_0";
    case KeyFormat::fp8_fnuz: return "fp8_fnuz";
  }
  return "?";
}
inline const char* layout_name(Layout layout) noexcept {
  switch (layout) {
    case Layout::planar: return "planar";
    case Layout::interleaved: return "interleaved";
    case Layout::tiled16: return "tiled16";
    case Layout::tiled32: return "tiled32";
    case Layout::tiled64: return "tiled64";
  }
  return "?";
}

/// One byte a code and one f32 scale a row; queries have their scale in the weights.
constexpr bool is_fp8(KeyFormat format) noexcept { return format == KeyFormat::fp8 || format == KeyFormat::fp8_fnuz; }
/// Two codes, or whole blocks, share bytes: tensors of values are u8 of value_bytes.
constexpr bool is_packed(KeyFormat format) noexcept { return format == KeyFormat::mxfp4 || format == KeyFormat::q8_0; }

/// Bytes of one key row's values (for q8_0: whole blocks, their scales inside).
constexpr int64_t value_bytes(KeyFormat format, int64_t head_dim) noexcept {
  switch (format) {
    case KeyFormat::fp8:
    case KeyFormat::fp8_fnuz: return head_dim;
    case KeyFormat::mxfp4: return head_dim / 2;
    case KeyFormat::bf16:
    case KeyFormat::f16: return 2 * head_dim;
    case KeyFormat::f32: return 4 * head_dim;
    case KeyFormat::q8_0: return head_dim / 32 * 34;
  }
  return 0;
}
/// Bytes of one key row's separate scales.
constexpr int64_t scale_bytes(KeyFormat format, int64_t head_dim) noexcept {
  return is_fp8(format) ? 4 : format == KeyFormat::mxfp4 ? head_dim / 32 : 0;
}
constexpr int64_t row_bytes(KeyFormat format, int64_t head_dim) noexcept {
  return value_bytes(format, head_dim) + scale_bytes(format, head_dim);
}
/// head_dim must be a positive multiple of this.
constexpr int64_t dim_multiple(KeyFormat format) noexcept { return is_packed(format) ? 32 : 1; }
/// dtype of a matrix of values (fp8: e4m3fn; u8 is accepted there too).
constexpr DType dense_dtype(KeyFormat format) noexcept {
  switch (format) {
    case KeyFormat::fp8: return DType::f8_e4m3fn;
    case KeyFormat::bf16: return DType::bf16;
    case KeyFormat::f16: return DType::f16;
    case KeyFormat::f32: return DType::f32;
    default: return DType::u8;
  }
}
/// Elements of a row of such a matrix.
constexpr int64_t dense_elements(KeyFormat format, int64_t head_dim) noexcept {
  return is_packed(format) ? value_bytes(format, head_dim) : head_dim;
}
/// head_dim of a row of values with this many elements (as tensors count them), -1 where none has.
constexpr int64_t dim_of_elements(KeyFormat format, int64_t elements) noexcept {
  if (format == KeyFormat::mxfp4) return elements * 2;
  if (format == KeyFormat::q8_0) return elements % 34 == 0 ? elements / 34 * 32 : -1;
  return elements;
}
/// Rows of a group of a tiled layout, 0 for the others.
constexpr int64_t tile_rows(Layout layout) noexcept {
  return layout == Layout::tiled16 ? 16 : layout == Layout::tiled32 ? 32 : layout == Layout::tiled64 ? 64 : 0;
}

/// Offsets inside one page, in bytes; 64-bit, as a page's own offset is.
struct PageLayout {
  int64_t value, scale;            ///< bytes of one row's values and scales
  int64_t value_step, scale_step;  ///< from one row to the next
  int64_t scale_base;              ///< of row 0's scales
  int64_t page_bytes;              ///< all rows; a page's stride may exceed it
  int64_t tile, scale_tile;        ///< rows of a group whose values (scales) are tiled; 0 = rows are whole

  /// Byte 0 of row `row`. Without tiles the others follow it.
  int64_t value_offset(int64_t row) const noexcept { return tile == 0 ? row * value_step : value_byte(row, 0); }
  int64_t scale_offset(int64_t row) const noexcept { return scale_byte(row, 0); }
  /// Byte j of a row's values. Tiled: 16 bytes of one row, then the same 16 of the next row of its group.
  int64_t value_byte(int64_t row, int64_t j) const noexcept {
    if (tile == 0) return row * value_step + j;
    return row / tile * tile * value + j / 16 * 16 * tile + row % tile * 16 + j % 16;
  }
  /// Byte j of a row's scales. Tiled (mxfp4, four of them): a matrix core takes 64 scales at a time, so 64/N of a row's
  /// lie apart and the others side by side.
  int64_t scale_byte(int64_t row, int64_t j) const noexcept {
    if (scale_tile == 0) return scale_base + row * scale_step + j;
    const int64_t apart = 64 / scale_tile, together = scale / apart;
    return scale_base + row / scale_tile * scale_tile * scale + j % apart * scale_tile * together +
           row % scale_tile * together + j / apart;
  }
};
/// planar: value = t*V, scale = page_size*V + t*G. interleaved: value = t*(V+G), scale = t*(V+G) + V. Tiled: as planar,
/// but for the order inside a group of rows.
constexpr PageLayout page_layout(KeyFormat format, Layout layout, int64_t page_size, int64_t head_dim) noexcept {
  const int64_t v = value_bytes(format, head_dim), g = scale_bytes(format, head_dim), tile = tile_rows(layout);
  return layout == Layout::interleaved
             ? PageLayout{v, g, v + g, v + g, v, page_size * (v + g), 0, 0}
             : PageLayout{v, g, v, g, page_size * v, page_size * (v + g), tile, format == KeyFormat::mxfp4 ? tile : 0};
}
/// Copies the values and scales of row `row` out of a page, and into one. Any layout; null scales are left out.
inline void read_row(const PageLayout& layout, const uint8_t* page, int64_t row, uint8_t* values,
                     uint8_t* scales) noexcept {
  const int64_t piece = layout.tile == 0 ? layout.value : 16;
  for (int64_t j = 0; j < layout.value; j += piece) {
    std::memcpy(values + j, page + layout.value_byte(row, j), static_cast<size_t>(piece));
  }
  if (scales == nullptr) return;
  const int64_t run = layout.scale_tile == 0 ? layout.scale : 1;
  for (int64_t j = 0; j < layout.scale; j += run) {
    std::memcpy(scales + j, page + layout.scale_byte(row, j), static_cast<size_t>(run));
  }
}
inline void write_row(const PageLayout& layout, uint8_t* page, int64_t row, const uint8_t* values,
                      const uint8_t* scales) noexcept {
  const int64_t piece = layout.tile == 0 ? layout.value : 16;
  for (int64_t j = 0; j < layout.value; j += piece) {
    std::memcpy(page + layout.value_byte(row, j), values + j, static_cast<size_t>(piece));
  }
  if (scales == nullptr) return;
  const int64_t run = layout.scale_tile == 0 ? layout.scale : 1;
  for (int64_t j = 0; j < layout.scale; j += run) {
    std::memcpy(page + layout.scale_byte(row, j), scales + j, static_cast<size_t>(run));
  }
}

/// How a vector becomes codes, one rule per producer found in engines (docs/formats.md has floor, scale, division and
/// rounding of each). automatic: v32_key, v32_query, mxfp4 or q8_0 by operation and format; bf16 and f16 keys are
/// rounded to nearest even.
enum class QuantRule : int32_t {
  automatic,
  v32_key,
  v32_query,
  v4_query,
  v4_key,
  kpool_query,
  kpool_key,
  cpu_query,
  mxfp4,
  q8_0
};
/// ue8m0: the f32 scale is rounded up to a power of two. f32: used as it is (key rules only).
enum class ScaleRule : int32_t { ue8m0, f32 };

/// Keys as a matrix, one row a key.
struct DenseKeys {
  /// fp8: f8_e4m3fn|u8 [N,D]; fp8_fnuz: u8 [N,D]; bf16, f16, f32: [N,D] of that dtype; mxfp4: u8 [N,D/2]; q8_0: u8
  /// [N,D/32*34]; unit
  Tensor values;
  Tensor scales;  ///< fp8, fp8_fnuz: f32 [N]; mxfp4: u8|e8m0 [N,D/32] or i32 [N]; else absent
  KeyFormat format;
};

/// The cache as engines allocate it: u8 [P, bytes]; page p is at p * stride[0] bytes, which may exceed the page
/// (shared pools). The base and stride[0] must be multiples of 4 bytes.
struct KeyCache {
  Tensor pages;
  KeyFormat format;
  Layout layout;
  int32_t page_size, head_dim;
};

/// Keys interleaved over ranks: key row g is owned by rank (g / interleave) % world_size. Zero = not sharded.
struct Shard {
  int32_t rank, world_size, interleave;

  bool active() const noexcept { return world_size > 1; }
  int64_t run() const noexcept { return interleave > 0 ? interleave : 1; }
  bool owns(int64_t global) const noexcept { return !active() || global / run() % world_size == rank; }
  /// Index among the owner's own key rows, and back.
  int64_t local(int64_t global) const noexcept {
    return active() ? global / (run() * world_size) * run() + global % run() : global;
  }
  int64_t global(int64_t local) const noexcept {
    return active() ? local / run() * (run() * world_size) + rank * run() + local % run() : local;
  }
  /// How many of the first `length` key rows this rank owns.
  int64_t local_length(int64_t length) const noexcept {
    if (!active()) return length;
    const int64_t base = length / run() / world_size * run();
    const int64_t rest = length - base * world_size - rank * run();
    return base + (rest < 0 ? 0 : rest > run() ? run() : rest);
  }
};

/// Keys behind a page table. With a shard, Rows count this rank's own keys (local positions) and every output
/// position is global.
struct PagedKeys {
  KeyCache cache;
  Shard shard;
  Tensor block_table;  ///< i32 [B,pages]; both strides free (every P-th column, a slice, ...)
  bool table_per_row;  ///< the table has one row a query row (flattened drafts), not a request
};

}  // namespace topkey
