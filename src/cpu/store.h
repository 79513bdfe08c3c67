// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Where a slot's bytes lie, which member writes them, and how a produced vector gets there: what store_k, pool_k and
// compress_k share. Work is divided by where a row is written, not by where it comes from: of several rows for one
// place the last wins, whole, as in a loop over all rows, and no two members ever write one row.
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/producer.h"
#include "cpu/view.h"
#include "topkey/format.h"

namespace topkey::cpu {

/// A row of the cache.
struct Place {
  uint8_t* page;
  int64_t row;
};

/// Which member writes a slot. Sixteen slots share a line of scales, and the golden ratio spreads runs of such groups
/// evenly, whatever pages they lie in (Fibonacci hashing); cutting the pool into ranges would give all of a batch to
/// one member.
inline uint32_t writer_of(int64_t slot, int32_t members) {
  const uint32_t mixed = static_cast<uint32_t>(static_cast<uint64_t>(slot) >> 4) * 0x9E3779B1u;
  return static_cast<uint32_t>((static_cast<uint64_t>(mixed) * static_cast<uint32_t>(members)) >> 32);
}

/// The slots of a cache.
class Slots {
 public:
  explicit Slots(const KeyCache& cache)
      : layout(page_layout(cache.format, cache.layout, cache.page_size, cache.head_dim)),
        count(cache.pages.shape[0] * cache.page_size),
        cache_(cache),
        page_size_(cache.page_size) {}

  /// Slot 0 <= slot < count.
  Place at(int64_t slot) const {
    const int64_t page = page_size_.quotient(slot);
    return {row_at(cache_.pages, page, 1), slot - page * cache_.page_size};
  }
  KeyFormat format() const { return cache_.format; }

  const PageLayout layout;
  const int64_t count;

 private:
  const KeyCache& cache_;
  Divider page_size_;
};

/// The vector at `from`, whose rope position is that of `row`, as codes to a slot.
inline void store_vector(const Producer& produce, const void* from, int64_t row, const Slots& slots, int64_t slot) {
  const PageLayout& layout = slots.layout;
  const Place place = slots.at(slot);
  // A tiled row is made whole in scratch, then cut up.
  const bool tiled = layout.tile > 0;
  uint8_t* const values = tiled ? produce.spare() : place.page + layout.value_offset(place.row);
  uint8_t* const scales = tiled ? values + layout.value : place.page + layout.scale_offset(place.row);
  const float scale = produce(from, row, values, scales);
  if (is_fp8(slots.format())) std::memcpy(scales, &scale, sizeof scale);
  if (tiled) write_row(layout, place.page, place.row, values, scales);
}

}  // namespace topkey::cpu
