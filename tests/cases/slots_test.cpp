// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// CASES B28 and B36, writing into pages: padding slots, slot lists shorter than the keys, caches of another geometry.
// What is written is compared with quantize_k, byte by byte, and everything around it must stay as it was.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "support/exact.h"
#include "tests/cases/case.h"

namespace topkey::cases {
namespace {

using support::element;

constexpr int64_t kRows = 512, kSlots = 509, kDim = 128, kPages = 16, kPageSize = 64;

/// Keys of a padded batch: rows without a slot hold NaN and a position far outside every table.
struct Batch {
  Array k, positions, cos_sin;
  Ints slots;
  bool padded(int64_t row) const { return row >= kSlots || slots[static_cast<size_t>(row)] < 0; }
};

Batch padded_batch(bool exact, int32_t first_slot) {
  Random random(128);
  Batch b{Array(DType::f32, {kRows, kDim}), Array(DType::i32, {kRows}), Array(DType::f32, {kRows, kDim}), {}};
  b.slots = progression(first_slot, static_cast<int32_t>(kPages * kPageSize - first_slot));
  random.shuffle(b.slots);
  b.slots.resize(kSlots);
  std::fill_n(b.slots.begin() + 100, 11, -1);
  for (int64_t i = 0; i < kRows * kDim; ++i) {
    b.k.as<float>()[i] = b.padded(i / kDim) ? canonical_nan() : exact ? support::exact_code(random) : random.normal();
    b.cos_sin.as<float>()[i] = random.normal();
  }
  for (int64_t r = 0; r < kRows; ++r) b.positions.as<int32_t>()[r] = b.padded(r) ? 1 << 30 : static_cast<int32_t>(r);
  return b;
}

Rope rope_of(const Batch& b, bool rope) {
  return rope ? Rope{b.positions.view(), b.cos_sin.view(), static_cast<int32_t>(kDim), true, false} : Rope{};
}

/// The bytes that each row should have become.
DenseKeys quantised(const Batch& b, bool rope, const Array& values, const Array& scales, const Exec& exec) {
  QuantizeK a{};
  a.k = b.k.view();
  a.rope = rope_of(b, rope);
  a.out = {values.view(), scales.view(), KeyFormat::fp8};
  support::run(a, exec);
  return a.out;
}

/// Slots as i32 or i64.
Array slot_list(const Batch& b, DType dtype) {
  if (dtype == DType::i32) return Array::of(b.slots);
  const Array wide(DType::i64, {kSlots});
  std::copy(b.slots.begin(), b.slots.end(), wide.as<int64_t>());
  return wide;
}

/// Every byte of the cache: a stored row's own, or what was there before.
void expect_stored(const Batch& b, const DenseKeys& rows, const uint8_t* cache, uint8_t before) {
  std::vector<int64_t> row_at(kPages * kPageSize, -1);
  for (int64_t r = 0; r < kSlots; ++r) {
    if (!b.padded(r)) row_at[static_cast<size_t>(b.slots[static_cast<size_t>(r)])] = r;
  }
  const PageLayout at = page_layout(KeyFormat::fp8, Layout::planar, kPageSize, kDim);
  const std::vector<uint8_t> old(kDim, before);
  int64_t stored = 0;
  for (int64_t slot = 0; slot < kPages * kPageSize; ++slot) {
    const uint8_t* page = cache + slot / kPageSize * at.page_bytes;
    const int64_t r = row_at[static_cast<size_t>(slot)];
    const void* values = r < 0 ? old.data() : element(rows.values, r);
    const void* scale = r < 0 ? old.data() : element(rows.scales, r);
    stored += r >= 0;
    ASSERT_EQ(std::memcmp(page + at.value_offset(slot % kPageSize), values, kDim), 0) << "slot " << slot;
    ASSERT_EQ(std::memcmp(page + at.scale_offset(slot % kPageSize), scale, 4), 0) << "slot " << slot;
  }
  EXPECT_EQ(stored, 498);
}

/// gather_k of the whole cache sees the stored bytes in slot order.
void expect_gathered(const KeyCache& cache, const Exec& exec) {
  const Array table = ints({progression(0, kPages)}), indptr = Array::of({0, kPages * kPageSize});
  const Array values(DType::f8_e4m3fn, {kPages * kPageSize, kDim}), scales(DType::f32, {kPages * kPageSize});
  GatherK a{};
  a.keys.cache = cache, a.keys.block_table = table.view(), a.indptr = indptr.view();
  a.total = kPages * kPageSize, a.out = {values.view(), scales.view(), KeyFormat::fp8};
  support::run(a, exec);
  const PageLayout at = page_layout(KeyFormat::fp8, Layout::planar, kPageSize, kDim);
  for (int64_t slot = 0; slot < kPages * kPageSize; ++slot) {
    const uint8_t* page = element(cache.pages, slot / kPageSize);
    ASSERT_EQ(std::memcmp(element(values.view(), slot), page + at.value_offset(slot % kPageSize), kDim), 0) << slot;
    ASSERT_EQ(std::memcmp(element(scales.view(), slot), page + at.scale_offset(slot % kPageSize), 4), 0) << slot;
  }
}

// ROCm/aiter PR #3235, TensorRT-LLM PR #18673, ROCm/ATOM PR #2008: slot -1 lands below the cache, or 0 in block 0.
// The 498 real slots hold their keys, nothing else changed; padded rows are not looked at.
TEST_P(Cases, B28_padding_slots_and_slots_shorter_than_keys) {
  for (bool exact : {false, true}) {
    for (bool rope : {false, true}) {
      for (DType dtype : {DType::i32, DType::i64}) {
        const int32_t first_slot = dtype == DType::i32 ? kPageSize : 0;  // block 0 without, and with real slots
        const Batch b = padded_batch(exact, first_slot);
        const Array values(DType::f8_e4m3fn, {kRows, kDim}), scales(DType::f32, {kRows}), slots = slot_list(b, dtype);
        const DenseKeys rows = quantised(b, rope, values, scales, exec());
        const Walled cache(kPages * kPageSize * (kDim + 4), 0x5A);
        StoreK a{};
        a.k = b.k.view(), a.slot_mapping = slots.view(), a.rope = rope_of(b, rope);
        a.cache = {tensor(cache.data(), DType::u8, {kPages, kPageSize * (kDim + 4)}), KeyFormat::fp8, Layout::planar,
                   kPageSize, kDim};
        uint64_t stats[kNumStats] = {};
        Exec counted = exec();
        counted.stats = stats;
        support::run(a, counted);
        EXPECT_TRUE(cache.intact());
        EXPECT_EQ(stats[kSkippedSlots], 0U) << "padding is no fault";
        expect_stored(b, rows, cache.data(), 0x5A);
        expect_gathered(a.cache, exec());
      }
    }
  }
}

// The same under strict: padding does not raise.
TEST_P(Cases, B28_padding_slots_are_not_wild_under_strict) {
  const Batch b = padded_batch(true, kPageSize);
  const Array slots = slot_list(b, DType::i32), values(DType::f8_e4m3fn, {kRows, kDim}), scales(DType::f32, {kRows});
  const DenseKeys rows = quantised(b, true, values, scales, exec());
  const Walled cache(kPages * kPageSize * (kDim + 4), 0x5A);
  StoreK a{};
  a.k = b.k.view(), a.slot_mapping = slots.view(), a.rope = rope_of(b, true);
  a.cache = {tensor(cache.data(), DType::u8, {kPages, kPageSize * (kDim + 4)}), KeyFormat::fp8, Layout::planar,
             kPageSize, kDim};
  Exec strict = exec();
  strict.strict = true;
  if (store_k_unsupported(a, strict) != nullptr) GTEST_SKIP() << "this backend has no strict mode";
  support::run(a, strict);
  EXPECT_TRUE(cache.intact());
  expect_stored(b, rows, cache.data(), 0x5A);
}

// ---- B36: another cache's geometry
// --------------------------------------------------------------------------------------

constexpr int64_t kSmallDim = 64;
const Ints kWrittenPages = {0, 9, 10, 39};

KeyCache cache_of(uint8_t* bytes, int64_t pages, int32_t page_size) {
  return {tensor(bytes, DType::u8, {pages, page_size * (kSmallDim + 4)}), KeyFormat::fp8, Layout::planar, page_size,
          static_cast<int32_t>(kSmallDim)};
}

struct Geometry {
  Array codes{DType::f8_e4m3fn, {4, kSmallDim}}, scales{DType::f32, {4}}, slots{DType::i32, {4}};
  Array table, indptr = Array::of({0, 1, 2, 3, 4});
  Array values{DType::f8_e4m3fn, {4, kSmallDim}}, out_scales{DType::f32, {4}};

  Geometry(int32_t page_size, const Ints& pages) {
    std::vector<Ints> lines;
    for (int64_t i = 0; i < 4; ++i) {
      const int32_t page = pages[static_cast<size_t>(i)];
      std::memset(element(codes.view(), i), static_cast<int>(0x30 + i), kSmallDim);
      scales.as<float>()[i] = static_cast<float>(page + 1);
      slots.as<int32_t>()[i] = page * page_size;
      lines.push_back({page});
    }
    table = ints(lines);
  }
  StoreK store(const KeyCache& cache) const {
    StoreK a{};
    a.k = codes.view(), a.k_scales = scales.view(), a.slot_mapping = slots.view(), a.cache = cache;
    return a;
  }
  GatherK gather(const KeyCache& cache) const {
    GatherK a{};
    a.keys.cache = cache, a.keys.block_table = table.view(), a.indptr = indptr.view(), a.total = 4;
    a.out = {values.view(), out_scales.view(), KeyFormat::fp8};
    return a;
  }
};

void expect_round_trip(const KeyCache& cache, const Ints& pages, const Exec& exec) {
  const Geometry g(cache.page_size, pages);
  support::run(g.store(cache), exec);
  support::run(g.gather(cache), exec);
  EXPECT_EQ(std::memcmp(g.values.as<uint8_t>(), g.codes.as<uint8_t>(), g.codes.bytes()), 0) << cache.page_size;
  EXPECT_EQ(std::memcmp(g.out_scales.as<uint8_t>(), g.scales.as<uint8_t>(), g.scales.bytes()), 0) << cache.page_size;
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(*element(cache.pages, pages[i]), 0x30 + i) << "page " << pages[i] << " is not where it should be";
  }
}

// TensorRT-LLM PR #16219, #16223: a stride remembered from cache X (256 keys a page) is used on cache Y (64). Nothing
// is remembered: each call goes by its own view, and Y seen through X's page size is refused.
TEST_P(Cases, B36_geometry_is_not_remembered_between_caches) {
  const Walled x(10 * 256 * (kSmallDim + 4)), y(40 * 64 * (kSmallDim + 4));
  const KeyCache cache_x = cache_of(x.data(), 10, 256), cache_y = cache_of(y.data(), 40, 64);
  for (int turn = 0; turn < 2; ++turn) {
    expect_round_trip(cache_x, {0, 3, 4, 9}, exec());
    expect_round_trip(cache_y, kWrittenPages, exec());
  }
  EXPECT_TRUE(x.intact() && y.intact());
}

TEST_P(Cases, B36_a_wrong_page_size_is_refused) {
  const Walled y(40 * 64 * (kSmallDim + 4), 0x11);
  const std::vector<uint8_t> before(y.data(), y.data() + 40 * 64 * (kSmallDim + 4));
  KeyCache wrong = cache_of(y.data(), 40, 64);
  wrong.page_size = 256;
  const Geometry g(256, kWrittenPages);
  EXPECT_FALSE(ran([&] { support::run(g.store(wrong), exec()); }));
  EXPECT_FALSE(ran([&] { support::run(g.gather(wrong), exec()); }));
  ProblemSpec spec;
  spec.head_dim = kSmallDim, spec.rows = 1, spec.paged = true, spec.page_size = 64;
  const Problem p = support::make_problem(spec);
  const topkey::testing::Outputs out(p.count(), 8, {});
  PagedMqaTopk search = p.paged_search(8, out.selection());
  search.keys.cache = wrong;
  EXPECT_FALSE(ran([&] { support::run(search, exec()); }));
  EXPECT_TRUE(out.untouched() && y.intact());
  EXPECT_EQ(std::memcmp(y.data(), before.data(), before.size()), 0);
}

TOPKEY_CASES();

}  // namespace
}  // namespace topkey::cases
