// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See keys.h.
#include "ref/keys.h"

namespace topkey::ref {

Keys::Keys(const DenseKeys& dense) : dense_(&dense), format_(dense.format), count_(dense.values.shape[0]) {
  const int64_t width = dense.values.shape[1];
  head_dim_ = format_ == KeyFormat::q8_0 ? width / 34 * 32 : width;
}

Keys::Keys(const PagedKeys& paged)
    : paged_(&paged),
      format_(paged.cache.format),
      head_dim_(paged.cache.head_dim),
      count_(paged.block_table.shape[1] * paged.cache.page_size),
      layout_(page_layout(format_, paged.cache.layout, paged.cache.page_size, head_dim_)) {}

int64_t Keys::table_row(int64_t row, int64_t request, Counts& counts) const {
  if (request < 0) return -1;
  if (paged_ == nullptr) return 0;
  if (paged_->table_per_row) return row;
  if (request < paged_->block_table.shape[0]) return request;
  counts.wild(kSkippedPages, 1, "request id", row, request);
  return -1;
}

int64_t Keys::page_of(int64_t table_row, int64_t position) const {
  return integer(paged_->block_table, table_row, position / paged_->cache.page_size);
}

KeyBytes Keys::find(int64_t table_row, int64_t position) const {
  if (paged_ == nullptr) {
    const int64_t bytes =
        position * dense_->values.stride[0] * (value_bytes(format_, head_dim_) / dense_->values.shape[1]);
    const uint8_t* scale = dense_->scales.data == nullptr
                               ? nullptr
                               : reinterpret_cast<const uint8_t*>(element<float>(dense_->scales, position));
    return {static_cast<const uint8_t*>(dense_->values.data) + bytes, scale};
  }
  const int64_t page = page_of(table_row, position);
  if (page < 0 || page >= paged_->cache.pages.shape[0]) return {nullptr, nullptr};
  const uint8_t* base = static_cast<const uint8_t*>(paged_->cache.pages.data) + page * paged_->cache.pages.stride[0];
  const int64_t offset = position % paged_->cache.page_size;
  return {base + layout_.value_offset(offset), base + layout_.scale_offset(offset)};
}

double decode_key(KeyFormat format, const KeyBytes& key, std::vector<double>& out) {
  for (size_t d = 0; d < out.size(); ++d) {
    switch (format) {
      case KeyFormat::bf16: out[d] = bf16_to_float(load_u16(key.values + 2 * d)); break;
      case KeyFormat::f16: out[d] = f16_to_float(load_u16(key.values + 2 * d)); break;
      case KeyFormat::f32: out[d] = load_f32(key.values + 4 * d); break;
      case KeyFormat::q8_0: {
        const uint8_t* block = key.values + d / 32 * 34;
        out[d] = static_cast<double>(f16_to_float(load_u16(block))) * static_cast<int8_t>(block[2 + d % 32]);
        break;
      }
      default: out[d] = e4m3_to_float(key.values[d]);
    }
  }
  return format == KeyFormat::fp8 ? static_cast<double>(load_f32(key.scale)) : 1.0;
}

}  // namespace topkey::ref
