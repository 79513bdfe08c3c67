// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See keys.h.
#include "ref/keys.h"

namespace topkey::ref {

Keys::Keys(const DenseKeys& dense) : dense_(&dense), format_(dense.format), count_(dense.values.shape[0]) {
  head_dim_ = dim_of_elements(format_, dense.values.shape[1]);
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
    return {static_cast<const uint8_t*>(dense_->values.data) + bytes, scale_at(dense_->scales, position)};
  }
  const int64_t page = page_of(table_row, position);
  if (page < 0 || page >= paged_->cache.pages.shape[0]) return {nullptr, nullptr};
  const uint8_t* base = static_cast<const uint8_t*>(paged_->cache.pages.data) + page * paged_->cache.pages.stride[0];
  const int64_t offset = position % paged_->cache.page_size;
  if (layout_.tile == 0) return {base + layout_.value_offset(offset), base + layout_.scale_offset(offset)};
  row_.resize(static_cast<size_t>(layout_.value + layout_.scale));
  read_row(layout_, base, offset, row_.data(), row_.data() + layout_.value);
  return {row_.data(), row_.data() + layout_.value};
}

double code_value(KeyFormat format, const uint8_t* values, const uint8_t* scales, size_t d) {
  switch (format) {
    case KeyFormat::fp8_fnuz: return e4m3fnuz_to_float(values[d]);
    case KeyFormat::mxfp4: {
      const int code = d % 2 == 0 ? values[d / 2] & 15 : values[d / 2] >> 4;
      return static_cast<double>(e2m1_to_float(static_cast<uint8_t>(code))) *
             static_cast<double>(e8m0_to_float(scales[d / 32]));
    }
    default: return e4m3_to_float(values[d]);
  }
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
      default: out[d] = code_value(format, key.values, key.scale, d);
    }
  }
  return is_fp8(format) ? static_cast<double>(load_f32(key.scale)) : 1.0;
}

}  // namespace topkey::ref
