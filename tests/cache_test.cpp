// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `cache`, writing: store_k against an image of every byte of the pool, over formats, page sizes, page strides,
// layouts and storage offsets; documented offsets (CASES B43); slots that must not be written (B28); equal slots;
// ready codes; views.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "support/array.h"
#include "support/patterns.h"
#include "support/run.h"
#include "tests/backend_test.h"
#include "tests/cache_pool.h"
#include "topkey/topkey.h"

namespace {

using topkey::DType;
using topkey::KeyFormat;
using topkey::Layout;
using topkey::StoreK;
using topkey::support::Array;
using topkey::support::Random;
using topkey::testing::Bytes;
using topkey::testing::Dense;
using topkey::testing::KeyRow;
using topkey::testing::Pool;

constexpr KeyFormat kFormats[] = {KeyFormat::fp8, KeyFormat::mxfp4, KeyFormat::bf16,    KeyFormat::f16,
                                  KeyFormat::f32, KeyFormat::q8_0,  KeyFormat::fp8_fnuz};

Array normal_keys(int64_t rows, int64_t dim, uint64_t seed) {
  Random random(seed);
  Array k(DType::f32, {rows, dim});
  for (int64_t i = 0; i < rows * dim; ++i) k.as<float>()[i] = random.normal();
  return k;
}
Array slots_of(const std::vector<int64_t>& slots, DType dtype = DType::i64) {
  Array a(dtype, {static_cast<int64_t>(slots.size())});
  for (size_t i = 0; i < slots.size(); ++i) {
    if (dtype == DType::i64) a.as<int64_t>()[i] = slots[i];
    if (dtype == DType::i32) a.as<int32_t>()[i] = static_cast<int32_t>(slots[i]);
  }
  return a;
}
/// `count` different slots of a pool, in disorder.
std::vector<int64_t> scattered(int64_t slots, int64_t count, uint64_t seed) {
  std::vector<int64_t> all(static_cast<size_t>(slots));
  std::iota(all.begin(), all.end(), int64_t{0});
  Random random(seed);
  random.shuffle(all);
  all.resize(static_cast<size_t>(count));
  return all;
}

class CacheTest : public topkey::testing::BackendTest {
 protected:
  /// The rows that quantize_k makes of k: what store_k must put into pages.
  Dense quantized(const topkey::Tensor& k, KeyFormat format, const StoreK& like = {}) {
    Dense out(format, k.shape[0], k.shape[1]);
    topkey::QuantizeK a{};
    a.k = k;
    a.norm = like.norm;
    a.rope = like.rope;
    a.hadamard = like.hadamard;
    a.scale = like.scale;
    a.rule = like.rule;
    a.out = out.view();
    topkey::support::run(a, exec());
    return out;
  }
  void store(const Array& k, const std::vector<int64_t>& slots, const Pool& pool, StoreK a = {},
             uint64_t* stats = nullptr) {
    const Array mapping = slots_of(slots);
    a.k = k.view();
    a.slot_mapping = mapping.view();
    a.cache = pool.cache();
    topkey::Exec e = exec();
    e.stats = stats;
    topkey::support::run(a, e);
  }
};

TEST_P(CacheTest, EveryFormatPageSizeStrideLayoutAndBase) {
  constexpr int32_t kDim = 64;
  constexpr int64_t kPages = 3;
  int ran = 0;
  for (KeyFormat format : kFormats) {
    for (int32_t page_size : {1, 2, 16, 48, 64, 256}) {
      const int64_t rows = std::min<int64_t>(kPages * page_size - 1, 100);
      const Array k = normal_keys(rows, kDim, 50 + static_cast<uint64_t>(page_size));
      const Dense want = quantized(k.view(), format);
      const int64_t tight = Pool::tight(format, page_size, kDim), even = (tight + 3) / 4 * 4;
      for (int64_t stride : {even, even + 4, (even + 575) / 576 * 576 + 576}) {
        for (Layout layout : {Layout::planar, Layout::interleaved}) {
          const int64_t base = stride == even + 4 ? 12 : 0;
          Pool pool(format, layout, page_size, kDim, kPages, stride, base);
          const auto slots = scattered(pool.slots(), rows, 60);
          store(k, slots, pool);
          for (int64_t t = 0; t < rows; ++t) pool.expect(slots[static_cast<size_t>(t)], want.row(t));
          ASSERT_EQ(pool.difference(), "") << topkey::format_name(format) << ", page of " << page_size << ", stride "
                                           << stride << (layout == Layout::planar ? ", planar" : ", interleaved");
          ++ran;
        }
      }
    }
  }
  std::cout << ran << " caches compared byte for byte\n";
  EXPECT_EQ(ran, 7 * 6 * 3 * 2);
}

TEST_P(CacheTest, TiledPages) {
  for (const topkey::testing::Tiled& t : topkey::testing::all_tiled()) {
    for (int32_t tiles : {1, 3}) {
      const auto page_size = static_cast<int32_t>(topkey::tile_rows(t.layout) * tiles);
      const int64_t rows = 2 * page_size - 5, tight = Pool::tight(t.format, page_size, t.head_dim);
      const Array k = normal_keys(rows, t.head_dim, 80 + static_cast<uint64_t>(page_size));
      const Dense want = quantized(k.view(), t.format);
      for (int64_t stride : {tight, tight + 4, (tight + 575) / 576 * 576}) {
        for (const bool ready : {false, true}) {
          Pool pool(t.format, t.layout, page_size, t.head_dim, 2, stride, 4);
          const auto slots = scattered(pool.slots(), rows, 81);
          StoreK a{};
          if (ready) a.k_scales = want.scales.view();
          store(ready ? want.values : k, slots, pool, a);
          for (int64_t r = 0; r < rows; ++r) pool.expect(slots[static_cast<size_t>(r)], want.row(r));
          ASSERT_EQ(pool.difference(), "") << topkey::format_name(t.format) << " " << topkey::layout_name(t.layout)
                                           << ", page of " << page_size << (ready ? ", codes" : ", vectors");
        }
      }
    }
  }
}

TEST_P(CacheTest, StridesOfProduction) {
  struct Shape {
    int32_t page_size;
    int64_t stride, base;
  };
  for (const Shape& s : {Shape{1, 132, 0}, Shape{1, 136, 4}, Shape{64, 8448, 8}, Shape{64, 8452, 0}, Shape{64, 8640, 0},
                         Shape{64, 8704, 4}, Shape{256, 33792, 0}}) {
    Pool pool(KeyFormat::fp8, Layout::planar, s.page_size, 128, 5, s.stride, s.base);
    const int64_t rows = std::min<int64_t>(pool.slots(), 50);
    const Array k = normal_keys(rows, 128, 70);
    const auto slots = scattered(pool.slots(), rows, 71);
    store(k, slots, pool);
    const Dense want = quantized(k.view(), KeyFormat::fp8);
    for (int64_t t = 0; t < rows; ++t) pool.expect(slots[static_cast<size_t>(t)], want.row(t));
    EXPECT_EQ(pool.difference(), "") << s.page_size << " x " << s.stride;
  }
}

TEST_P(CacheTest, DocumentedOffsetsOfCaseB43) {
  for (int32_t page_size : {64, 256}) {
    for (Layout layout : {Layout::planar, Layout::interleaved}) {
      const Pool pool(KeyFormat::fp8, layout, page_size, 128, 1, page_size * 132);
      Array codes(DType::f8_e4m3fn, {page_size, 128}), scales(DType::f32, {page_size});
      std::vector<int64_t> slots;
      for (int64_t t = 0; t < page_size; ++t) {  // key t points along dimension t, scale t + 1
        codes.as<uint8_t>()[t * 128 + t % 128] = 0x38;
        scales.as<float>()[t] = static_cast<float>(t + 1);
        slots.push_back(t);
      }
      StoreK a{};
      a.k_scales = scales.view();
      store(codes, slots, pool, a);
      for (int64_t t : {0, 1, 63}) {
        const uint8_t* value = pool.page(0) + (layout == Layout::planar ? t * 128 : t * 132);
        const uint8_t* scale = pool.page(0) + (layout == Layout::planar ? page_size * 128 + t * 4 : t * 132 + 128);
        float s;
        std::memcpy(&s, scale, sizeof s);
        EXPECT_EQ(s, static_cast<float>(t + 1));
        for (int64_t d = 0; d < 128; ++d) ASSERT_EQ(value[d], d == t ? 0x38 : 0) << t << " " << d;
      }
    }
  }
}

TEST_P(CacheTest, SlotsOfCaseB28) {
  constexpr int64_t kRows = 512, kSlots = 509;
  Array k = normal_keys(kRows, 32, 72);
  Array positions(DType::i32, {kRows});
  const Array table = normal_keys(64, 8, 73);
  std::vector<int64_t> slots;
  for (int64_t t = 0; t < kSlots; ++t) slots.push_back(t >= 100 && t <= 110 ? -1 : 16 + t);
  for (int64_t t = 0; t < kRows; ++t) {
    const bool unused = t >= kSlots || slots[static_cast<size_t>(t)] < 0;
    positions.as<int32_t>()[t] = unused ? 1 << 30 : static_cast<int32_t>(t % 64);
    for (int64_t d = 0; d < 32 && unused; ++d) k.as<float>()[t * 32 + d] = topkey::canonical_nan();
  }
  StoreK a{};
  a.rope = {positions.view(), table.view(), 8, false, false};
  Pool pool(KeyFormat::fp8, Layout::planar, 16, 32, 40, 16 * 36);
  const Dense want = quantized(k.view(), KeyFormat::fp8, a);
  uint64_t stats[topkey::kNumStats] = {};
  store(k, slots, pool, a, stats);
  int written = 0;
  for (int64_t t = 0; t < kSlots; ++t) {
    if (slots[static_cast<size_t>(t)] < 0) continue;
    pool.expect(slots[static_cast<size_t>(t)], want.row(t));
    ++written;
  }
  EXPECT_EQ(written, 498);
  EXPECT_EQ(pool.difference(), "") << "page 0, the guards and the rest of the pool included";
  EXPECT_EQ(stats[topkey::kSkippedSlots], 0u) << "-1 asks for nothing";
  EXPECT_EQ(stats[topkey::kSkippedPages], 0u) << "positions of rows that are not stored are not looked at";
}

TEST_P(CacheTest, WildSlotsAreCountedAndNotWritten) {
  const std::vector<int64_t> slots = {
      5, 8, -1, INT64_MIN, 7, INT64_MAX, int64_t{1} << 40, -(int64_t{1} << 32), int64_t{1} << 32, 0};
  const Array k = normal_keys(static_cast<int64_t>(slots.size()), 32, 74);
  const Dense want = quantized(k.view(), KeyFormat::fp8);
  Pool pool(KeyFormat::fp8, Layout::planar, 4, 32, 2, 4 * 36);
  uint64_t stats[topkey::kNumStats] = {};
  store(k, slots, pool, {}, stats);
  for (size_t t : {0u, 4u, 9u}) pool.expect(slots[t], want.row(static_cast<int64_t>(t)));
  EXPECT_EQ(pool.difference(), "");
  EXPECT_EQ(stats[topkey::kSkippedSlots], 4u) << "8, 2^63-1, 2^40 and 2^32; negative ones are padding";
}

TEST_P(CacheTest, StrictRaisesBeforeWriting) {
  const Array k = normal_keys(3, 32, 75), mapping = slots_of({0, 1, 8});
  const Pool pool(KeyFormat::fp8, Layout::planar, 4, 32, 2, 4 * 36);
  StoreK a{};
  a.k = k.view();
  a.slot_mapping = mapping.view();
  a.cache = pool.cache();
  topkey::Exec strict = exec();
  strict.strict = true;
  uint64_t stats[topkey::kNumStats] = {};
  strict.stats = stats;
  if (topkey::store_k_unsupported(a, strict) != nullptr) GTEST_SKIP() << "strict is not offered here";
  EXPECT_THROW(topkey::support::run(a, strict), topkey::Error);
  EXPECT_EQ(pool.difference(), "");
  EXPECT_EQ(std::set<uint64_t>(stats, stats + topkey::kNumStats), std::set<uint64_t>{0})
      << "a call that failed counts nothing";
}

TEST_P(CacheTest, RopePositionOutsideTheTableStoresANanKey) {
  const Array k = normal_keys(3, 32, 81), table = normal_keys(4, 8, 82), positions = Array::of({3, 4, 0});
  StoreK a{};
  a.rope = {positions.view(), table.view(), 8, false, false};
  Pool pool(KeyFormat::fp8, Layout::planar, 4, 32, 1, 4 * 36);
  uint64_t stats[topkey::kNumStats] = {};
  store(k, {0, 1, 2}, pool, a, stats);
  const Dense want = quantized(k.view(), KeyFormat::fp8, a);
  for (int64_t t = 0; t < 3; ++t) {
    pool.expect(t, t == 1 ? topkey::testing::nan_row(KeyFormat::fp8, 32) : want.row(t));
  }
  EXPECT_EQ(pool.difference(), "");
  EXPECT_EQ(stats[topkey::kSkippedPages], 1u);
}

/// Few rows, and so many that a backend may not look through all of them for each.
TEST_P(CacheTest, EqualSlotsHoldOneRowWhole) {
  for (const int32_t dim : {32, 64, 128}) {
    for (const int64_t count : {60, 3000}) {
      std::vector<int64_t> slots;
      for (int64_t t = 0; t < count; ++t) slots.push_back(t % 3);
      const Array k = normal_keys(count, dim, 76);
      const Dense rows = quantized(k.view(), KeyFormat::fp8);
      const Pool pool(KeyFormat::fp8, Layout::planar, 4, dim, 1, 4 * (dim + 4));
      store(k, slots, pool);
      for (int64_t slot = 0; slot < 3; ++slot) {
        const uint8_t *v = pool.page(0) + slot * dim, *s = pool.page(0) + int64_t{4} * dim + slot * 4;
        const KeyRow held{Bytes(v, v + dim), Bytes(s, s + 4)};
        int matches = 0;
        for (int64_t t = slot; t < count; t += 3) matches += rows.row(t) == held;
        EXPECT_GE(matches, 1) << "slot " << slot << " of " << count << " rows holds a mixture";
      }
    }
  }
}

/// Rows of many slots, of which some come twice: one of them stays, whole, and all others are where they belong.
TEST_P(CacheTest, ManyRowsOfWhichSomeMeet) {
  constexpr int64_t kRows = 5000, kSlots = 4100;
  const Array k = normal_keys(kRows, 128, 77);
  const Dense rows = quantized(k.view(), KeyFormat::fp8);
  const Pool pool(KeyFormat::fp8, Layout::planar, 64, 128, (kSlots + 63) / 64, 64 * 132);
  std::vector<int64_t> slots;
  for (int64_t t = 0; t < kRows; ++t) slots.push_back(t % 7 == 3 ? -1 : t * 2477 % kSlots);
  store(k, slots, pool);
  std::vector<int> held(kSlots, 0);
  for (int64_t t = 0; t < kRows; ++t) {
    if (slots[static_cast<size_t>(t)] < 0) continue;
    const int64_t slot = slots[static_cast<size_t>(t)], at = slot % 64;
    const uint8_t *v = pool.page(slot / 64) + at * 128, *s = pool.page(slot / 64) + 64 * 128 + at * 4;
    held[static_cast<size_t>(slot)] += rows.row(t) == KeyRow{Bytes(v, v + 128), Bytes(s, s + 4)} ? 1 : 2;
  }
  for (int64_t slot = 0; slot < kSlots; ++slot)
    EXPECT_TRUE(held[static_cast<size_t>(slot)] != 2 && held[static_cast<size_t>(slot)] != 4) << slot;
}

TEST_P(CacheTest, ReadyCodesAreCopied) {
  constexpr int64_t kRows = 7;
  for (KeyFormat format : kFormats) {
    for (Layout layout : {Layout::planar, Layout::interleaved}) {
      const Dense codes(format, kRows, 64);
      Random random(77);
      for (size_t i = 0; i < codes.values.bytes(); ++i)
        codes.values.as<uint8_t>()[i] = static_cast<uint8_t>(random.next());
      for (size_t i = 0; i < codes.scales.bytes(); ++i)
        codes.scales.as<uint8_t>()[i] = static_cast<uint8_t>(random.next());
      if (format == KeyFormat::bf16 || format == KeyFormat::f16 || format == KeyFormat::f32) {
        // Not raw: these pass through the producer, which may make a signalling NaN quiet. Keep them finite.
        for (size_t i = 1; i < codes.values.bytes(); i += 2) codes.values.as<uint8_t>()[i] &= 0xBB;
      }
      Pool pool(format, layout, 4, 64, 3, (Pool::tight(format, 4, 64) + 3) / 4 * 4);
      StoreK a{};
      a.k_scales = codes.scales.view();
      const auto slots = scattered(pool.slots(), kRows, 78);
      store(codes.values, slots, pool, a);
      for (int64_t t = 0; t < kRows; ++t) pool.expect(slots[static_cast<size_t>(t)], codes.row(t));
      EXPECT_EQ(pool.difference(), "") << topkey::format_name(format);
    }
  }
}

TEST_P(CacheTest, MxFp4ScalesAsWords) {
  const Dense codes(KeyFormat::mxfp4, 4, 128);
  for (size_t i = 0; i < codes.scales.bytes(); ++i) codes.scales.as<uint8_t>()[i] = static_cast<uint8_t>(120 + i);
  Pool pool(KeyFormat::mxfp4, Layout::planar, 4, 128, 1, 4 * 68);
  StoreK a{};
  a.k_scales = topkey::tensor(codes.scales.view().data, DType::i32, {4});  // the four bytes of a row as one word
  store(codes.values, {3, 2, 1, 0}, pool, a);
  for (int64_t t = 0; t < 4; ++t) pool.expect(3 - t, codes.row(t));
  EXPECT_EQ(pool.difference(), "");
}

TEST_P(CacheTest, ViewsOfKeysAndSlots) {
  const Array wide = normal_keys(6, 100, 79);
  Array mapping(DType::i32, {5, 3});
  for (int64_t t = 0; t < 5; ++t) mapping.as<int32_t>()[3 * t] = static_cast<int32_t>(4 - t);
  for (int64_t step : {int64_t{100}, int64_t{0}}) {  // a slice of wider rows; one row expanded over all slots
    StoreK a{};
    a.k = topkey::tensor(wide.as<float>() + 10, DType::f32, {6, 64}, {step, 1});
    a.slot_mapping = topkey::tensor(mapping.view().data, DType::i32, {5}, {3});
    Pool pool(KeyFormat::q8_0, Layout::interleaved, 5, 64, 1, 5 * 68);
    a.cache = pool.cache();
    topkey::support::run(a, exec());
    const Dense want = quantized(a.k, KeyFormat::q8_0);
    for (int64_t t = 0; t < 5; ++t) pool.expect(4 - t, want.row(t));
    EXPECT_EQ(pool.difference(), "");
  }
}

TEST_P(CacheTest, StridedReadyCodes) {
  Array codes(DType::u8, {4, 40});
  Array scales(DType::f32, {4, 3});
  std::iota(codes.as<uint8_t>(), codes.as<uint8_t>() + 160, uint8_t{0});
  for (int i = 0; i < 12; ++i) scales.as<float>()[i] = static_cast<float>(i) + 0.5f;
  const Array mapping = slots_of({2, 0, 3});
  Pool pool(KeyFormat::fp8, Layout::planar, 4, 32, 1, 4 * 36);
  StoreK a{};
  a.k = topkey::tensor(codes.as<uint8_t>() + 4, DType::u8, {4, 32}, {40, 1});
  a.k_scales = topkey::tensor(scales.as<float>() + 1, DType::f32, {4}, {3});
  a.slot_mapping = mapping.view();
  a.cache = pool.cache();
  topkey::support::run(a, exec());
  for (int64_t t = 0; t < 3; ++t) {
    const uint8_t* v = codes.as<uint8_t>() + t * 40 + 4;
    const auto* s = reinterpret_cast<const uint8_t*>(scales.as<float>() + 3 * t + 1);
    pool.expect(mapping.as<int64_t>()[t], {Bytes(v, v + 32), Bytes(s, s + 4)});
  }
  EXPECT_EQ(pool.difference(), "");
}

TEST_P(CacheTest, NothingToStore) {
  Pool pool(KeyFormat::fp8, Layout::planar, 4, 32, 1, 4 * 36);
  store(normal_keys(3, 32, 80), {}, pool);
  store(normal_keys(3, 32, 80), {-1, -1, -7}, pool);
  EXPECT_EQ(pool.difference(), "");
}

TOPKEY_ON_EVERY_BACKEND(CacheTest);

}  // namespace
