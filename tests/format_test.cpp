// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// format.h: where bytes lie (REFERENCE A.4, and that no two rows of a page share a byte), the shard maps (A.6, inverse
// of each other, lengths add up), and the order of scores as TopKey has it (A.11 with -0 = +0 and every NaN last).
#include "topkey/format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/testing.h"
#include "topkey/topkey.h"

namespace {

using topkey::KeyFormat;
using topkey::Layout;
using topkey::page_layout;
using topkey::PageLayout;
using topkey::Shard;
using topkey::testing::draw;

constexpr KeyFormat kFormats[] = {KeyFormat::fp8, KeyFormat::mxfp4, KeyFormat::bf16,    KeyFormat::f16,
                                  KeyFormat::f32, KeyFormat::q8_0,  KeyFormat::fp8_fnuz};

TEST(Format, BytesOfARow) {
  struct Want {
    KeyFormat format;
    int64_t dim, values, scales;
    const char* name;
  };
  for (const Want& w : {Want{KeyFormat::fp8, 128, 128, 4, "fp8"}, Want{KeyFormat::fp8, 64, 64, 4, "fp8"},
                        Want{KeyFormat::mxfp4, 128, 64, 4, "mxfp4"}, Want{KeyFormat::mxfp4, 32, 16, 1, "mxfp4"},
                        Want{KeyFormat::bf16, 128, 256, 0, "bf16"}, Want{KeyFormat::f16, 3, 6, 0, "f16"},
                        Want{KeyFormat::f32, 5, 20, 0, "f32"}, Want{KeyFormat::q8_0, 64, 68, 0, "q8_0"},
                        Want{KeyFormat::fp8_fnuz, 48, 48, 4, "fp8_fnuz"}}) {
    EXPECT_EQ(topkey::value_bytes(w.format, w.dim), w.values) << w.name;
    EXPECT_EQ(topkey::scale_bytes(w.format, w.dim), w.scales) << w.name;
    EXPECT_EQ(topkey::row_bytes(w.format, w.dim), w.values + w.scales) << w.name;
    EXPECT_STREQ(topkey::format_name(w.format), w.name);
  }
  EXPECT_STREQ(topkey::format_name(static_cast<KeyFormat>(99)), "?");
  EXPECT_EQ(topkey::dim_multiple(KeyFormat::mxfp4), 32);
  EXPECT_EQ(topkey::dim_multiple(KeyFormat::q8_0), 32);
  EXPECT_EQ(topkey::dim_multiple(KeyFormat::fp8), 1);
  EXPECT_EQ(topkey::dim_of_elements(KeyFormat::fp8_fnuz, 48), 48);
  EXPECT_EQ(topkey::dim_of_elements(KeyFormat::mxfp4, 48), 96);
  EXPECT_EQ(topkey::dim_of_elements(KeyFormat::q8_0, 68), 64);
  EXPECT_EQ(topkey::dim_of_elements(KeyFormat::q8_0, 64), -1);
}

TEST(Format, OffsetsOfReferenceA4) {
  const PageLayout fp8 = page_layout(KeyFormat::fp8, Layout::planar, 64, 128);
  EXPECT_EQ(3 * 8448 + fp8.value_offset(5) + 7, 25991);
  EXPECT_EQ(3 * 8448 + fp8.scale_offset(5), 33556);
  EXPECT_EQ(fp8.page_bytes, 8448);
  const PageLayout fp4 = page_layout(KeyFormat::mxfp4, Layout::planar, 64, 128);
  EXPECT_EQ(3 * 4352 + fp4.value_offset(5) + 100 / 2, 13426);
  EXPECT_EQ(3 * 4352 + fp4.scale_offset(5) + 100 / 32, 17175);
  EXPECT_EQ(fp4.page_bytes, 4352);
}

TEST(Format, Interleaved) {
  const PageLayout p = page_layout(KeyFormat::fp8, Layout::interleaved, 64, 128);
  EXPECT_EQ(p.value_offset(5), 5 * 132);
  EXPECT_EQ(p.scale_offset(5), 5 * 132 + 128);
  EXPECT_EQ(p.page_bytes, 64 * 132);
}

/// Single bytes of a page of 64 rows, worked out by hand.
TEST(Format, Tiled) {
  const PageLayout fp8 = page_layout(KeyFormat::fp8, Layout::tiled16, 64, 128);
  EXPECT_EQ(fp8.value_byte(37, 100), 2 * 2048 + 6 * 256 + 5 * 16 + 4);
  EXPECT_EQ(fp8.value_offset(37), 2 * 2048 + 5 * 16);
  EXPECT_EQ(fp8.scale_offset(37), 64 * 128 + 37 * 4);
  EXPECT_EQ(fp8.scale_byte(37, 3), 64 * 128 + 37 * 4 + 3);
  const PageLayout fp4 = page_layout(KeyFormat::mxfp4, Layout::tiled16, 64, 128);
  EXPECT_EQ(fp4.value_byte(37, 50), 2 * 1024 + 3 * 256 + 5 * 16 + 2);
  EXPECT_EQ(fp4.scale_byte(37, 3), 4096 + 2 * 64 + 3 * 16 + 5);  // all four apart
  const PageLayout wide = page_layout(KeyFormat::mxfp4, Layout::tiled32, 64, 128);
  EXPECT_EQ(wide.value_byte(37, 50), 1 * 2048 + 3 * 512 + 5 * 16 + 2);
  EXPECT_EQ(wide.scale_byte(37, 3), 4096 + 1 * 128 + 1 * 64 + 5 * 2 + 1);  // 0 and 2 side by side, 1 and 3
  const PageLayout whole = page_layout(KeyFormat::mxfp4, Layout::tiled64, 64, 128);
  EXPECT_EQ(whole.value_byte(37, 50), 3 * 1024 + 37 * 16 + 2);
  EXPECT_EQ(whole.scale_byte(37, 3), 4096 + 37 * 4 + 3);  // side by side
  EXPECT_STREQ(topkey::layout_name(Layout::tiled32), "tiled32");
  EXPECT_STREQ(topkey::layout_name(static_cast<Layout>(99)), "?");
}

TEST(Format, RowsOfTiledPages) {
  for (const auto& [format, layout, dim] : {std::tuple{KeyFormat::fp8, Layout::tiled16, 128},
                                            {KeyFormat::fp8_fnuz, Layout::tiled16, 48},
                                            {KeyFormat::mxfp4, Layout::tiled16, 128},
                                            {KeyFormat::mxfp4, Layout::tiled32, 128},
                                            {KeyFormat::mxfp4, Layout::tiled64, 128}}) {
    const int64_t size = 2 * topkey::tile_rows(layout);
    const PageLayout p = page_layout(format, layout, size, dim);
    std::vector<int> uses(static_cast<size_t>(p.page_bytes));
    std::vector<uint8_t> page(uses.size(), 0xEE), row(static_cast<size_t>(p.value + p.scale)), back(row.size());
    for (int64_t t = 0; t < size; ++t) {
      for (int64_t i = 0; i < p.value; ++i) ++uses.at(static_cast<size_t>(p.value_byte(t, i)));
      for (int64_t i = 0; i < p.scale; ++i) ++uses.at(static_cast<size_t>(p.scale_byte(t, i)));
      for (size_t i = 0; i < row.size(); ++i) row[i] = static_cast<uint8_t>(t * 31 + static_cast<int64_t>(i) * 7);
      topkey::write_row(p, page.data(), t, row.data(), row.data() + p.value);
      topkey::read_row(p, page.data(), t, back.data(), back.data() + p.value);
      EXPECT_EQ(back, row);
      EXPECT_EQ(page[static_cast<size_t>(p.value_byte(t, p.value - 1))], row[static_cast<size_t>(p.value - 1)]);
      EXPECT_EQ(page[static_cast<size_t>(p.scale_byte(t, p.scale - 1))], row.back());
    }
    EXPECT_TRUE(std::all_of(uses.begin(), uses.end(), [](int n) { return n == 1; })) << topkey::layout_name(layout);
    EXPECT_EQ(p.page_bytes, size * topkey::row_bytes(format, dim));
  }
}

TEST(Format, RowsTileThePage) {
  for (KeyFormat format : kFormats) {
    for (Layout layout : {Layout::planar, Layout::interleaved}) {
      for (int64_t page_size : {1, 2, 16, 48, 64, 256}) {
        const PageLayout p = page_layout(format, layout, page_size, 64);
        std::vector<int> uses(static_cast<size_t>(p.page_bytes));
        for (int64_t t = 0; t < page_size; ++t) {
          for (int64_t i = 0; i < p.value; ++i) ++uses.at(static_cast<size_t>(p.value_offset(t) + i));
          for (int64_t i = 0; i < p.scale; ++i) ++uses.at(static_cast<size_t>(p.scale_offset(t) + i));
        }
        const bool once = std::all_of(uses.begin(), uses.end(), [](int n) { return n == 1; });
        EXPECT_TRUE(once) << topkey::format_name(format) << " " << static_cast<int>(layout) << " " << page_size;
        EXPECT_EQ(p.page_bytes, page_size * topkey::row_bytes(format, 64));
      }
    }
  }
}

TEST(Format, PageOffsetsAre64Bit) {
  const PageLayout p = page_layout(KeyFormat::f32, Layout::planar, int64_t{1} << 31, 128);
  EXPECT_EQ(p.page_bytes, int64_t{1} << 40);
  EXPECT_EQ(p.value_offset((int64_t{1} << 31) - 1), (int64_t{1} << 40) - 512);
}

TEST(Shard, LocalLengthsOfReferenceA6) {
  const auto lengths = [](int32_t interleave, int32_t world, int64_t length) {
    std::vector<int64_t> out;
    for (int32_t rank = 0; rank < world; ++rank) out.push_back(Shard{rank, world, interleave}.local_length(length));
    return out;
  };
  using L = std::vector<int64_t>;
  EXPECT_EQ(lengths(4, 3, 1), (L{1, 0, 0}));
  EXPECT_EQ(lengths(4, 3, 5), (L{4, 1, 0}));
  EXPECT_EQ(lengths(4, 3, 13), (L{5, 4, 4}));
  EXPECT_EQ(lengths(4, 3, 29), (L{12, 9, 8}));
  for (int32_t interleave : {1, 2}) {
    EXPECT_EQ(lengths(interleave, 2, 13), (L{7, 6}));
    EXPECT_EQ(lengths(interleave, 2, 29), (L{15, 14}));
  }
}

TEST(Shard, OwnersOfCaseB40) {
  const Shard one{1, 4, 1};
  std::vector<int64_t> locals;
  for (int64_t g : {0, 5, 6, 7, 12, 13}) {
    if (one.owns(g)) locals.push_back(one.local(g));
  }
  EXPECT_EQ(locals, (std::vector<int64_t>{1, 3}));
  const auto place = [](int64_t g) {
    const Shard any{0, 2, 64};
    const int64_t rank = any.owns(g) ? 0 : 1;
    return std::pair<int64_t, int64_t>(rank, any.local(g));
  };
  EXPECT_EQ(place(64), std::make_pair(int64_t{1}, int64_t{0}));
  EXPECT_EQ(place(128), std::make_pair(int64_t{0}, int64_t{64}));
  EXPECT_EQ(place(130), std::make_pair(int64_t{0}, int64_t{66}));
  EXPECT_EQ(place(192), std::make_pair(int64_t{1}, int64_t{64}));
}

TEST(Shard, ZeroMeansWhole) {
  for (const Shard& s : {Shard{}, Shard{0, 1, 7}, Shard{0, 0, 3}}) {
    EXPECT_FALSE(s.active());
    for (int64_t g : {int64_t{0}, int64_t{5}, int64_t{1} << 40}) {
      EXPECT_TRUE(s.owns(g));
      EXPECT_EQ(s.local(g), g);
      EXPECT_EQ(s.global(g), g);
      EXPECT_EQ(s.local_length(g), g);
    }
  }
}

/// The maps against what they mean: walk the key rows in order and hand each to its owner.
TEST(Shard, MapsAgreeWithDealingOut) {
  for (int32_t world : {1, 2, 3, 8}) {
    for (int32_t interleave : {0, 1, 2, 4, 64}) {
      std::vector<int64_t> dealt(static_cast<size_t>(world));
      const int64_t run = std::max(interleave, 1);
      for (int64_t g = 0; g < 700; ++g) {
        const auto owner = static_cast<size_t>(g / run % world);
        for (int32_t rank = 0; rank < world; ++rank) {
          const Shard s{rank, world, interleave};
          ASSERT_EQ(s.local_length(g), dealt[static_cast<size_t>(rank)]) << world << " " << interleave << " " << g;
          ASSERT_EQ(s.owns(g), static_cast<size_t>(rank) == owner);
        }
        const Shard s{static_cast<int32_t>(owner), world, interleave};
        ASSERT_EQ(s.local(g), dealt[owner]);
        ASSERT_EQ(s.global(dealt[owner]), g);
        ++dealt[owner];
      }
    }
  }
}

TEST(Shard, InverseAtAnySize) {
  topkey::testing::property("local and global are inverse, local_length counts", 500, [] {
    const auto world = static_cast<int32_t>(draw(1, 1000)), interleave = static_cast<int32_t>(draw(0, 5000));
    const int64_t g = draw(0, int64_t{1} << 40), run = std::max(interleave, 1);
    const Shard s{static_cast<int32_t>(world > 1 ? g / run % world : 0), world, interleave};
    RC_ASSERT(s.owns(g));
    RC_ASSERT(s.global(s.local(g)) == g);
    RC_ASSERT(s.local_length(g + 1) == s.local(g) + 1);
    RC_ASSERT(s.local_length(g) == s.local(g));
  });
}

TEST(Shard, LocalLengthsAddUp) {
  topkey::testing::property("local lengths add up", 500, [] {
    const auto world = static_cast<int32_t>(draw(1, 40)), interleave = static_cast<int32_t>(draw(0, 300));
    const int64_t length = draw(0, int64_t{1} << 33);
    int64_t sum = 0;
    for (int32_t rank = 0; rank < world; ++rank) sum += Shard{rank, world, interleave}.local_length(length);
    RC_ASSERT(sum == length);
  });
}

/// Positions of `scores` in score order on one backend, and the scores it returns.
std::vector<int32_t> ranked(const std::vector<float>& scores, const std::string& backend, std::vector<uint32_t>* bits) {
  const auto n = static_cast<int64_t>(scores.size());
  std::vector<int32_t> indices(scores.size());
  std::vector<float> sorted(scores.size());
  topkey::Topk a{};
  a.scores = topkey::tensor(scores.data(), topkey::DType::f32, {1, n});
  a.rows.count = 1;
  a.topk = static_cast<int32_t>(n);
  a.out.order = topkey::Order::score;
  a.out.indices = topkey::tensor(indices.data(), topkey::DType::i32, {1, n});
  a.out.scores = topkey::tensor(sorted.data(), topkey::DType::f32, {1, n});
  topkey::support::run(a, topkey::testing::on(backend));
  bits->clear();
  for (float s : sorted) bits->push_back(topkey::bits_of(s));
  return indices;
}

TEST(Order, ScoresOfReferenceA11) {
  // Ascending in the reference's order; here the zeros are one value and every NaN is below -inf.
  const std::vector<uint32_t> bits = {0xFF800000, 0xBF800000, 0x80000000, 0x00000000, 0x3F800000,
                                      0x7F800000, 0x7FC00000, 0xFFC00001, 0x00000001, 0x80000001};
  const auto level = [&](size_t i) { return std::vector<int>{1, 2, 4, 4, 6, 7, 0, 0, 5, 3}[i]; };
  std::vector<size_t> places(bits.size());
  std::iota(places.begin(), places.end(), 0);
  int tried = 0;
  for (const std::string& backend : topkey::testing::every_backend()) {
    for (uint64_t round = 0; round < 200; ++round, ++tried) {
      for (size_t i = places.size(); i > 1; --i)
        std::swap(places[i - 1], places[(round * 2654435761u + i * 40503u) / 7 % i]);
      std::vector<float> scores;
      for (size_t p : places) scores.push_back(topkey::float_of(bits[p]));
      std::vector<int32_t> want(places.size());
      std::iota(want.begin(), want.end(), 0);
      std::stable_sort(want.begin(), want.end(), [&](int32_t a, int32_t b) {
        return level(places[static_cast<size_t>(a)]) > level(places[static_cast<size_t>(b)]);
      });
      std::vector<uint32_t> got_bits;
      ASSERT_EQ(ranked(scores, backend, &got_bits), want) << backend;
      for (size_t i = 0; i < want.size(); ++i) {
        const uint32_t b = topkey::bits_of(scores[static_cast<size_t>(want[i])]);
        ASSERT_EQ(got_bits[i], topkey::is_nan_bits(b) ? 0x7FC00000u : b == 0x80000000u ? 0u : b) << "not canonical";
      }
    }
  }
  EXPECT_GT(tried, 0);
}

}  // namespace
