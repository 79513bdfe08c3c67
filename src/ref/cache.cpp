// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `cache`: key rows into pages and out of them.
#include "ref/cache.h"

#include <algorithm>
#include <vector>

#include "backend_table.h"
#include "ref/keys.h"
#include "ref/producer.h"
#include "ref/rows.h"

namespace topkey::ref {
namespace {

struct RowBytes {
  uint8_t* values;
  uint8_t* scale;
};

void write_slot(const KeyCache& cache, const PageLayout& layout, int64_t slot, const RowBytes& row) {
  uint8_t* page = static_cast<uint8_t*>(cache.pages.data) + slot / cache.page_size * cache.pages.stride[0];
  write_row(layout, page, slot % cache.page_size, row.values, row.scale);
}

/// Bytes of row `row` of dense keys (never tiled).
RowBytes dense_bytes(const DenseKeys& keys, const PageLayout& layout, int64_t row) {
  const int64_t element_bytes = layout.value / keys.values.shape[1];
  return {static_cast<uint8_t*>(keys.values.data) + row * keys.values.stride[0] * element_bytes,
          scale_at(keys.scales, row)};
}

void copy_row(const RowBytes& to, const RowBytes& from, const PageLayout& layout) {
  std::memcpy(to.values, from.values, static_cast<size_t>(layout.value));
  if (layout.scale > 0) std::memcpy(to.scale, from.scale, static_cast<size_t>(layout.scale));
}

/// A key that scores NaN for every query: what stands where no key can be read.
void nan_row(const RowBytes& to, KeyFormat format, const PageLayout& layout) {
  const int64_t dim = format == KeyFormat::f32                                ? layout.value / 4
                      : format == KeyFormat::bf16 || format == KeyFormat::f16 ? layout.value / 2
                                                                              : dim_of_elements(format, layout.value);
  std::vector<float> x(static_cast<size_t>(dim), canonical_nan());
  quantize_row(format, QuantRule::automatic, ScaleRule::ue8m0, x, to.values, to.scale);
}

}  // namespace

void store_vector(const KeyCache& cache, QuantRule rule, ScaleRule scale, int64_t slot, std::vector<float>& x) {
  const PageLayout layout = page_layout(cache.format, cache.layout, cache.page_size, cache.head_dim);
  std::vector<uint8_t> codes(static_cast<size_t>(layout.value + layout.scale));
  const RowBytes row{codes.data(), codes.data() + layout.value};
  quantize_row(cache.format, rule, scale, x, row.values, row.scale);
  write_slot(cache, layout, slot, row);
}

void store_k(const StoreK& a, const Exec& exec) {
  const KeyCache& cache = a.cache;
  const PageLayout layout = page_layout(cache.format, cache.layout, cache.page_size, cache.head_dim);
  const int64_t rows = a.slot_mapping.shape[0], slots = cache.pages.shape[0] * cache.page_size;
  const bool ready = a.k_scales.data != nullptr || a.k.dtype == DType::u8;
  const Transform t{&a.norm, &a.rope, a.hadamard, a.k.dtype, false};
  Counts counts;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t slot = integer(a.slot_mapping, r);
    if (slot >= slots) counts.wild(kSkippedSlots, 1, "slot", r, slot);
  }
  const auto unwritten = [&](int64_t r) {
    return integer(a.slot_mapping, r) < 0 || integer(a.slot_mapping, r) >= slots;
  };
  count_wild_positions(a.rope, rows, counts, unwritten);
  counts.raise_if_strict("store_k", exec);
  if ((exec.flags & kCheckOnly) != 0) return;
  std::vector<float> x(static_cast<size_t>(cache.head_dim));
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t slot = integer(a.slot_mapping, r);
    if (slot < 0 || slot >= slots) continue;
    if (ready) {
      write_slot(cache, layout, slot, dense_bytes({a.k, a.k_scales, cache.format}, layout, r));
      continue;
    }
    for (int64_t d = 0; d < cache.head_dim; ++d) x[static_cast<size_t>(d)] = real(a.k, r, d);
    transform(t, r, x);
    store_vector(cache, a.rule, a.scale, slot, x);
  }
  counts.add(kRows, rows);
  counts.publish(exec);
}

void gather_k(const GatherK& a, const Exec& exec) {
  const Keys keys(a.keys);
  const PageLayout layout =
      page_layout(a.out.format, a.keys.cache.layout, a.keys.cache.page_size, a.keys.cache.head_dim);
  const int64_t requests = a.indptr.shape[0] - 1;
  Counts counts;
  for (int pass = exec.strict ? 0 : 1; pass < 2; ++pass) {
    if (pass == 1) counts.raise_if_strict("gather_k", exec);
    for (int64_t b = 0; b < requests; ++b) {
      const int64_t first = std::max<int64_t>(integer(a.indptr, b), 0), last = integer(a.indptr, b + 1);
      const int64_t end = std::min(last, a.total);
      if (last > end) counts.wild(kSkippedPages, last - std::max(first, end), "rows past total, request", b, last);
      for (int64_t i = first; i < end; ++i) {
        const int64_t position = i - first;
        const KeyBytes from = position < keys.count() ? keys.find(b, position) : KeyBytes{nullptr, nullptr};
        if (from.values == nullptr) counts.wild(kSkippedPages, 1, "position of request", b, position);
        if (pass == 0) continue;
        const RowBytes to = dense_bytes(a.out, layout, i);
        if (from.values == nullptr) {
          nan_row(to, a.out.format, layout);
        } else {
          copy_row(to, {const_cast<uint8_t*>(from.values), const_cast<uint8_t*>(from.scale)}, layout);
        }
      }
    }
  }
  counts.add(kRows, requests > 0 ? std::clamp<int64_t>(integer(a.indptr, requests), 0, a.total) : 0);
  counts.publish(exec);
}

}  // namespace topkey::ref
