// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `cache`: key rows into pages and out of them. Both divide their work by where a row is written (store.h).
#include "cpu/cache.h"

#include "backend_table.h"

#include <algorithm>
#include <cstring>

#include "cpu/keys.h"
#include "cpu/producer.h"
#include "cpu/share.h"
#include "cpu/store.h"
#include "cpu/view.h"

namespace topkey::cpu {
namespace {

struct RowBytes {
  uint8_t* values;
  uint8_t* scale;
};

/// Rows of dense keys.
struct DenseRows {
  uint8_t* values;
  uint8_t* scales;  ///< null where the format has none of its own
  int64_t value_step, scale_step;

  DenseRows(const DenseKeys& keys, const PageLayout& layout)
      : values(static_cast<uint8_t*>(keys.values.data)),
        scales(static_cast<uint8_t*>(keys.scales.data)),
        value_step(keys.values.stride[0] * (layout.value / keys.values.shape[1])),
        scale_step(keys.scales.stride[0] * scale_element_bytes(keys.scales)) {}
  RowBytes at(int64_t row) const {
    return {values + row * value_step, scales == nullptr ? nullptr : scales + row * scale_step};
  }
};

void copy_bytes(uint8_t* to, const uint8_t* from, int64_t n) { std::memcpy(to, from, static_cast<size_t>(n)); }

/// n pieces of `bytes` bytes, each a step after the one before.
void copy_pieces(uint8_t* to, int64_t to_step, const uint8_t* from, int64_t from_step, int64_t bytes, int64_t n) {
  if (to_step == bytes && from_step == bytes) return copy_bytes(to, from, n * bytes);
  for (int64_t i = 0; i < n; ++i) copy_bytes(to + i * to_step, from + i * from_step, bytes);
}

/// 20 us of copying, more or less.
constexpr int64_t kCopyBytes = int64_t{256} * 1024;

// ---- store_k
// ---------------------------------------------------------------------------------------------------------------

/// Calls f(row, slot) for each row of slot_mapping that this member writes; returns how many slots lie outside the
/// cache.
template <class F>
int64_t for_each_stored(const StoreK& a, const Slots& slots, const Share& share, const F& f) {
  const int64_t rows = a.slot_mapping.shape[0];
  int64_t outside = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t slot = integer_at(a.slot_mapping, r);
    if (slot < 0) continue;
    if (slot >= slots.count) {
      ++outside;
      continue;
    }
    if (share.size > 1 && writer_of(slot, share.size) != static_cast<uint32_t>(share.rank)) continue;
    f(r, slot);
  }
  return outside;
}

int64_t wild_values(const StoreK& a, const Slots& slots) {
  int64_t positions = 0;
  const int64_t outside =
      for_each_stored(a, slots, Share{0, 1}, [&](int64_t r, int64_t) { positions += position_outside(a.rope, r); });
  return outside + positions;
}

void store_codes(const StoreK& a, const Slots& slots, const Exec& exec) {
  const PageLayout& layout = slots.layout;
  const int64_t rows = a.slot_mapping.shape[0];
  const DenseRows from({a.k, a.k_scales, a.cache.format}, layout);
  run_shared(exec, rows * layout.value / kCopyBytes, rows, [&](const Share& share, Counts& counts) {
    const int64_t outside = for_each_stored(a, slots, share, [&](int64_t r, int64_t slot) {
      const RowBytes row = from.at(r);
      const Place to = slots.at(slot);
      write_row(layout, to.page, to.row, row.values, row.scale);
    });
    if (share.rank == 0) counts.add(kSkippedSlots, outside);
  });
}

void store_vectors(const StoreK& a, const Slots& slots, const Exec& exec) {
  const int64_t rows = a.slot_mapping.shape[0], in_bytes = float_bytes(a.k.dtype);
  Recipe recipe = make_recipe(a.cache.head_dim, a.k.dtype, a.norm, a.rope, a.hadamard);
  set_key_rule(recipe, a.cache.format, a.rule, a.scale);
  run_shared(exec, producer_members(recipe, rows), rows, [&](const Share& share, Counts& counts) {
    Producer::Stack stack;
    const Producer produce(recipe, a.norm, a.rope, stack, exec, share.rank);
    const int64_t outside = for_each_stored(a, slots, share, [&](int64_t r, int64_t slot) {
      const int64_t ahead = r + kPrefetchRows;
      if (ahead < rows) prefetch_vector(row_at(a.k, ahead, in_bytes), recipe.dim * in_bytes);
      store_vector(produce, row_at(a.k, r, in_bytes), r, slots, slot);
      counts.add(kSkippedPages, position_outside(a.rope, r));
    });
    if (share.rank == 0) counts.add(kSkippedSlots, outside);
  });
}

// ---- gather_k
// --------------------------------------------------------------------------------------------------------------

/// Rows [first, end) of request b, as far as out reaches.
struct Span {
  int64_t first, last, end;
  Span(const GatherK& a, int64_t b)
      : first(std::max<int64_t>(integer_at(a.indptr, b), 0)),
        last(integer_at(a.indptr, b + 1)),
        end(std::min(last, a.total)) {}
  int64_t past_total() const { return last > end ? std::max<int64_t>(last - std::max(first, end), 0) : 0; }
};

/// A key that scores NaN for every query: what stands where no key can be read.
void nan_row(KeyFormat format, const RowBytes& to, int64_t bytes) {
  const float nan = canonical_nan();
  const uint16_t half = format == KeyFormat::bf16 ? uint16_t{0x7FC0} : uint16_t{0x7E00};
  if (is_fp8(format)) {
    std::memset(to.values, format == KeyFormat::fp8 ? 0x7F : 0x80, static_cast<size_t>(bytes));
    std::memcpy(to.scale, &nan, sizeof nan);
  } else if (format == KeyFormat::mxfp4) {
    std::memset(to.values, 0, static_cast<size_t>(bytes));
    std::memset(to.scale, 0xFF, static_cast<size_t>(bytes / 16));
  } else if (format == KeyFormat::q8_0) {
    std::memset(to.values, 0, static_cast<size_t>(bytes));
    for (int64_t i = 0; i < bytes; i += 34) std::memcpy(to.values + i, &half, sizeof half);
  } else if (format == KeyFormat::f32) {
    for (int64_t i = 0; i < bytes; i += 4) std::memcpy(to.values + i, &nan, sizeof nan);
  } else {
    for (int64_t i = 0; i < bytes; i += 2) std::memcpy(to.values + i, &half, sizeof half);
  }
}

struct Gather {
  const GatherK& a;
  Source keys;
  PageLayout layout;
  DenseRows out;

  explicit Gather(const GatherK& args)
      : a(args),
        keys(make_source(args.keys)),
        layout(
            page_layout(args.out.format, args.keys.cache.layout, args.keys.cache.page_size, args.keys.cache.head_dim)),
        out(args.out, layout) {}
  void nan_rows(int64_t first, int64_t last) const {
    for (int64_t i = first; i < last; ++i) nan_row(a.out.format, out.at(i), layout.value);
  }
  void copy(const Chunk& chunk, int64_t row) const {
    if (keys.tiled()) {
      for (int64_t i = 0; i < chunk.count; ++i) {
        const RowBytes to = out.at(row + i);
        read_row(layout, chunk.values, chunk.row + i, to.values, to.scale);
      }
      return;
    }
    const RowBytes to = out.at(row);
    copy_pieces(to.values, out.value_step, chunk.values, keys.value_step, layout.value, chunk.count);
    if (layout.scale == 0) return;
    copy_pieces(to.scale, out.scale_step, chunk.scales, keys.scale_step, layout.scale, chunk.count);
  }
  /// Out rows [low, high) of request b, which begins at row `first`; returns how many of its keys cannot be read.
  int64_t rows(int64_t b, int64_t first, int64_t low, int64_t high) const {
    const int64_t readable = std::min(high - first, keys.count);  // positions from there on are beyond the table
    int64_t done = low;
    int64_t wild = for_each_chunk(keys, b, low - first, readable, [&](const Chunk& chunk) {
      nan_rows(done, first + chunk.first);
      copy(chunk, first + chunk.first);
      done = first + chunk.first + chunk.count;
    });
    nan_rows(done, high);
    return wild + (high - std::max(low, first + readable));
  }
};

int64_t wild_values(const GatherK& a) {
  const Source keys = make_source(a.keys);
  int64_t wild = 0;
  for (int64_t b = 0; b + 1 < a.indptr.shape[0]; ++b) {
    const Span span(a, b);
    const int64_t length = std::max<int64_t>(span.end - span.first, 0), readable = std::min(length, keys.count);
    wild += span.past_total() + length - readable + for_each_chunk(keys, b, 0, readable, [](const Chunk&) {});
  }
  return wild;
}

}  // namespace

void store_k(const StoreK& a, const Exec& exec) {
  const Slots slots(a.cache);
  if (exec.strict) raise_if_wild(exec, "store_k", wild_values(a, slots));
  if ((exec.flags & kCheckOnly) != 0) return;
  if (a.k_scales.data != nullptr || a.k.dtype == DType::u8) {
    store_codes(a, slots, exec);
  } else {
    store_vectors(a, slots, exec);
  }
}

void gather_k(const GatherK& a, const Exec& exec) {
  if (exec.strict) raise_if_wild(exec, "gather_k", wild_values(a));
  const Gather gather(a);
  const int64_t requests = a.indptr.shape[0] - 1;
  int64_t rows = 0;  // rows that some request has: total may be far beyond
  for (int64_t b = 0; b < requests; ++b) rows = std::max(rows, Span(a, b).end);
  const int64_t counted = requests > 0 ? std::clamp<int64_t>(integer_at(a.indptr, requests), 0, a.total) : 0;
  run_shared(exec, rows * gather.layout.value / kCopyBytes, counted, [&](const Share& share, Counts& counts) {
    const int64_t low = share.first(rows), high = share.last(rows);
    for (int64_t b = 0; b < requests; ++b) {
      const Span span(a, b);
      if (share.rank == 0) counts.add(kSkippedPages, span.past_total());
      const int64_t first = std::max(span.first, low), end = std::min(span.end, high);
      if (first < end) counts.add(kSkippedPages, gather.rows(b, span.first, first, end));
    }
  });
}

}  // namespace topkey::cpu
