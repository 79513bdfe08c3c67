// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See keys.h.
#include "cpu/keys.h"

#include "cpu/view.h"

namespace topkey::cpu {

Source make_source(const DenseKeys& dense) {
  Source s{};
  s.format = dense.format;
  const int64_t width = dense.values.shape[1];
  s.head_dim = dim_of_elements(dense.format, width);
  s.count = dense.values.shape[0];
  s.values = static_cast<const uint8_t*>(dense.values.data);
  s.scales = static_cast<const uint8_t*>(dense.scales.data);
  s.value_step = width == 0 ? 0 : dense.values.stride[0] * (value_bytes(s.format, s.head_dim) / width);
  s.scale_step = dense.scales.stride[0] * scale_element_bytes(dense.scales);
  return s;
}

Source make_source(const PagedKeys& paged) {
  const KeyCache& cache = paged.cache;
  const PageLayout layout = page_layout(cache.format, cache.layout, cache.page_size, cache.head_dim);
  Source s{};
  s.format = cache.format;
  s.head_dim = cache.head_dim;
  s.count = paged.block_table.shape[1] * cache.page_size;
  s.values = static_cast<const uint8_t*>(cache.pages.data);
  s.layout = layout;
  s.value_step = layout.tile > 0 ? 0 : layout.value_step;
  s.scale_step = layout.tile > 0 ? 0 : layout.scale_step;
  s.paged = true;
  s.table_per_row = paged.table_per_row;
  s.block_table = paged.block_table;
  s.pages = cache.pages.shape[0];
  s.page_stride = cache.pages.stride[0];
  s.page_size = cache.page_size;
  s.scale_base = layout.scale == 0 ? -1 : layout.tile > 0 ? 0 : layout.scale_base;
  return s;
}

}  // namespace topkey::cpu
