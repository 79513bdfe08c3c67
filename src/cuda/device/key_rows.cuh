// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Rows of keys as bytes, moved by a warp: dense rows, rows of pages, tiled or not, and the row of a key that cannot be
// read.
#pragma once
#include "cuda/device/keys.cuh"
#include "cuda/device/producer.cuh"

namespace topkey::cuda {

struct RowBytes {
  uint8_t *values, *scale;
};
/// Bytes of row `row` of dense keys of this layout.
__device__ inline RowBytes dense_row(const Tensor& values, const Tensor& scales, const PageLayout& layout,
                                     int64_t row) {
  const int64_t element_bytes = layout.value / values.shape[1];
  return {static_cast<uint8_t*>(values.data) + row * values.stride[0] * element_bytes, scale_at(scales, row)};
}

__device__ inline void copy_bytes(uint8_t* to, const uint8_t* from, int64_t bytes) {
  const uint64_t both = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from);
  const int64_t words = both % 4 == 0 ? bytes / 4 : 0;
  for (int64_t i = lane_id(); i < words; i += 32)
    reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(from)[i];
  for (int64_t i = words * 4 + lane_id(); i < bytes; i += 32) to[i] = from[i];
}
__device__ inline void copy_row(const RowBytes& to, const uint8_t* values, const uint8_t* scale,
                                const PageLayout& layout) {
  copy_bytes(to.values, values, layout.value);
  if (layout.scale > 0) copy_bytes(to.scale, scale, layout.scale);
}

__device__ inline void copy_to_page(uint8_t* values, uint8_t* scale, const RowBytes& from, const PageLayout& layout) {
  if (layout.tile == 0) {
    copy_row({values, scale}, from.values, from.scale, layout);
    return;
  }
  for (int64_t j = lane_id(); j < layout.value; j += 32) values[value_gap(layout.tile, j)] = from.values[j];
  for (int64_t j = lane_id(); j < layout.scale; j += 32)
    scale[scale_gap(layout.scale_tile, layout.scale, j)] = from.scale[j];
}
__device__ inline void copy_from_page(const RowBytes& to, const KeyBytes& from, const PageLayout& layout) {
  if (layout.tile == 0) {
    copy_row(to, from.values, from.scale, layout);
    return;
  }
  for (int64_t j = lane_id(); j < layout.value; j += 32) to.values[j] = from.values[value_gap(layout.tile, j)];
  for (int64_t j = lane_id(); j < layout.scale; j += 32)
    to.scale[j] = from.scale[scale_gap(layout.scale_tile, layout.scale, j)];
}

/// A key that scores NaN for every query: what stands where no key can be read.
__device__ inline void nan_row(const RowBytes& to, KeyFormat format, const PageLayout& layout) {
  for (int64_t i = lane_id(); i < layout.value; i += 32) {
    uint32_t byte = format == KeyFormat::fp8_fnuz ? 0x80 : 0x7F;  // e4m3
    if (format == KeyFormat::bf16) byte = i % 2 == 0 ? 0xC0 : 0x7F;
    if (format == KeyFormat::f16) byte = i % 2 == 0 ? 0x00 : 0x7E;
    if (format == KeyFormat::f32) byte = kCanonicalNan >> (8 * (i % 4)) & 0xFF;
    if (format == KeyFormat::q8_0) byte = i % 34 == 1 ? 0x7E : 0x00;
    if (format == KeyFormat::mxfp4) byte = 0x00;
    to.values[i] = static_cast<uint8_t>(byte);
  }
  if (is_e4m3(format) && lane_id() == 0) store_word(to.scale, kCanonicalNan);
  for (int64_t i = lane_id(); format == KeyFormat::mxfp4 && i < layout.scale; i += 32) to.scale[i] = 255;
}

}  // namespace topkey::cuda
