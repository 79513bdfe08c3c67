// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The callers' keys as the device sees them (device/keys.cuh).
#pragma once
#include <algorithm>

#include "cuda/device/keys.cuh"

namespace topkey::cuda {

inline bool words_suit(const void* data, int64_t step) {
  return reinterpret_cast<uintptr_t>(data) % 4 == 0 && step % 4 == 0;
}

inline KeySource source_of(const DenseKeys& keys) {
  KeySource s{};
  s.format = keys.format;
  const int64_t width = keys.values.shape[1];
  s.head_dim = static_cast<int32_t>(dim_of_elements(keys.format, width));
  s.count = keys.values.shape[0];
  s.values = static_cast<const uint8_t*>(keys.values.data);
  s.value_step = keys.values.stride[0] * (value_bytes(keys.format, s.head_dim) / std::max<int64_t>(width, 1));
  s.scales = static_cast<const uint8_t*>(keys.scales.data);
  const bool wide = keys.scales.dtype == DType::f32 || keys.scales.dtype == DType::i32;
  s.scale_step = keys.scales.data != nullptr ? keys.scales.stride[0] * (wide ? 4 : 1) : 0;
  s.words = words_suit(s.values, s.value_step);
  s.page_size = 1;
  return s;
}

inline KeySource source_of(const PagedKeys& keys) {
  const KeyCache& cache = keys.cache;
  const PageLayout layout = page_layout(cache.format, cache.layout, cache.page_size, cache.head_dim);
  KeySource s{};
  s.format = cache.format;
  s.paged = true;
  s.table_per_row = keys.table_per_row;
  s.head_dim = cache.head_dim;
  s.page_size = cache.page_size;
  s.count = std::min<int64_t>(keys.block_table.shape[1] * cache.page_size, INT32_MAX);
  s.num_pages = cache.pages.shape[0];
  s.page_stride = cache.pages.stride[0];
  s.values = static_cast<const uint8_t*>(cache.pages.data);
  s.scales = s.values + layout.scale_base;
  s.value_step = layout.value_step;
  s.scale_step = layout.scale_step;
  s.words = words_suit(s.values, s.value_step);
  if (layout.tile > 0) s.layout = layout;
  s.block_table = keys.block_table;
  return s;
}

/// Given scores: columns that exist, and nothing to read of them here.
inline KeySource columns_of(int64_t count) {
  KeySource s{};
  s.count = count;
  s.page_size = 1;
  return s;
}

}  // namespace topkey::cuda
