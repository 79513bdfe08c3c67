// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Where the bytes of a row lie in tiled pages of AMD caches: the device twin of PageLayout (include/topkey/format.h), whose
// functions are host code. Rows of other layouts are whole, and byte j follows byte 0 by j.
#pragma once
#include "cuda/device/view.cuh"

namespace topkey::cuda {

/// From byte 0 of a row to its byte j; `tile` rows alternate by 16 bytes.
__device__ __forceinline__ int64_t value_gap(int64_t tile, int64_t j) {
  return tile == 0 ? j : j / 16 * 16 * tile + j % 16;
}
/// From byte 0 of a row's scales (`bytes` of them) to byte j: of tiled mxfp4 64 / tile of a row's lie apart.
__device__ __forceinline__ int64_t scale_gap(int64_t tile, int64_t bytes, int64_t j) {
  if (tile == 0) return j;
  const int64_t apart = 64 / tile;
  return j % apart * tile * (bytes / apart) + j / apart;
}
__device__ __forceinline__ int64_t value_start(const PageLayout& l, int64_t row) {
  return l.tile == 0 ? row * l.value_step : row / l.tile * l.tile * l.value + row % l.tile * 16;
}
__device__ __forceinline__ int64_t scale_start(const PageLayout& l, int64_t row) {
  if (l.scale_tile == 0) return l.scale_base + row * l.scale_step;
  return l.scale_base + row / l.scale_tile * l.scale_tile * l.scale +
         row % l.scale_tile * (l.scale * l.scale_tile / 64);
}

}  // namespace topkey::cuda
