// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `cache`, reading: gather_k gives back what store_k wrote, in request order, over formats, layouts and shards;
// rows that no request has stay untouched, keys that cannot be read become NaN keys, a destination that is too small
// is refused (CASES B39).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
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
using topkey::GatherK;
using topkey::KeyFormat;
using topkey::Layout;
using topkey::support::Array;
using topkey::support::Random;
using topkey::testing::Dense;
using topkey::testing::KeyRow;
using topkey::testing::nan_row;
using topkey::testing::poison_row;
using topkey::testing::Pool;
using Table = std::vector<std::vector<int32_t>>;

constexpr KeyFormat kFormats[] = {KeyFormat::fp8, KeyFormat::mxfp4, KeyFormat::bf16,    KeyFormat::f16,
                                  KeyFormat::f32, KeyFormat::q8_0,  KeyFormat::fp8_fnuz};
constexpr int32_t kDim = 32;

Array table_of(const Table& rows) {
  Array table(DType::i32, {static_cast<int64_t>(rows.size()), rows.empty() ? 0 : static_cast<int64_t>(rows[0].size())});
  int32_t* at = table.as<int32_t>();
  for (const auto& row : rows) at = std::copy(row.begin(), row.end(), at);
  return table;
}
Dense random_codes(KeyFormat format, int64_t rows, uint64_t seed, int32_t head_dim = kDim) {
  Dense codes(format, rows, head_dim);
  Random random(seed);
  for (size_t i = 0; i < codes.values.bytes(); ++i)
    codes.values.as<uint8_t>()[i] = static_cast<uint8_t>(random.next() & 0xBB);
  for (size_t i = 0; i < codes.scales.bytes(); ++i) codes.scales.as<uint8_t>()[i] = static_cast<uint8_t>(random.next());
  return codes;
}

class GatherTest : public topkey::testing::BackendTest {
 protected:
  void store(const Dense& codes, const std::vector<int64_t>& slots, const Pool& pool) {
    Array mapping(DType::i64, {static_cast<int64_t>(slots.size())});
    std::copy(slots.begin(), slots.end(), mapping.as<int64_t>());
    topkey::StoreK a{};
    a.k = codes.values.view();
    a.k_scales = codes.scales.view();
    a.slot_mapping = mapping.view();
    a.cache = pool.cache();
    topkey::support::run(a, exec());
  }
  /// A pool of `pages` pages whose slot s holds row s of the codes.
  struct Filled {
    Pool pool;
    Dense codes;
  };
  Filled filled(KeyFormat format, int32_t page_size, int64_t pages, Layout layout = Layout::planar) {
    const int64_t stride = (Pool::tight(format, page_size, kDim) + 3) / 4 * 4 + 4;
    Filled f{Pool(format, layout, page_size, kDim, pages, stride, 4), random_codes(format, page_size * pages, 90)};
    std::vector<int64_t> slots;
    for (int64_t s = 0; s < page_size * pages; ++s) slots.push_back(s);
    store(f.codes, slots, f.pool);
    return f;
  }
  /// Gathers into `out`; returns the statistics.
  std::vector<uint64_t> gather(const Pool& pool, const Table& table, const std::vector<int32_t>& indptr, int64_t total,
                               const Dense& out, topkey::Shard shard = {}, bool strict = false) {
    const Array pages = table_of(table), starts = Array::of(indptr);
    GatherK a{};
    a.keys.cache = pool.cache();
    a.keys.shard = shard;
    a.keys.block_table = pages.view();
    a.indptr = starts.view();
    a.total = total;
    a.out = out.view();
    std::vector<uint64_t> stats(topkey::kNumStats);
    topkey::Exec e = exec();
    e.stats = stats.data();
    e.strict = strict;
    topkey::support::run(a, e);
    return stats;
  }
};

TEST_P(GatherTest, RoundTripOfEveryFormat) {
  int ran = 0;
  for (KeyFormat format : kFormats) {
    for (Layout layout : {Layout::planar, Layout::interleaved}) {
      for (int32_t page_size : {1, 2, 16, 48, 64, 256}) {
        const Filled f = filled(format, page_size, 7, layout);
        // Three requests, the middle one empty; lengths that end inside a page.
        const Table table = {{6, 2, 0}, {1, 1, 1}, {3, 5, 4}};
        const int32_t first = 2 * page_size + 1, last = page_size;
        const int64_t rows = first + last;
        const Dense out(format, rows + 3, kDim);
        const auto stats = gather(f.pool, table, {0, first, first, first + last}, rows, out);
        for (int64_t i = 0; i < rows; ++i) {
          const int64_t position = i < first ? i : i - first;
          const int32_t page = table[i < first ? 0 : 2][static_cast<size_t>(position / page_size)];
          ASSERT_TRUE(out.row(i) == f.codes.row(int64_t{page} * page_size + position % page_size))
              << topkey::format_name(format) << ", page of " << page_size << ", row " << i;
        }
        for (int64_t i = rows; i < rows + 3; ++i) ASSERT_TRUE(out.row(i) == poison_row(format, kDim));
        EXPECT_EQ(stats[topkey::kSkippedPages], 0u);
        EXPECT_EQ(stats[topkey::kRows], static_cast<uint64_t>(rows));
        ++ran;
      }
    }
  }
  EXPECT_EQ(ran, 7 * 2 * 6);
}

TEST_P(GatherTest, RoundTripOfTiledPages) {
  for (const topkey::testing::Tiled& t : topkey::testing::all_tiled()) {
    const auto page_size = static_cast<int32_t>(2 * topkey::tile_rows(t.layout));
    const int64_t slots = 3 * page_size, tight = Pool::tight(t.format, page_size, t.head_dim);
    const Pool pool(t.format, t.layout, page_size, t.head_dim, 3, tight + 8, 4);
    const Dense codes = random_codes(t.format, slots, 91, t.head_dim);
    std::vector<int64_t> order;
    for (int64_t s = 0; s < slots; ++s) order.push_back(s);
    store(codes, order, pool);
    const auto first = static_cast<int32_t>(page_size + 7);
    const Dense out(t.format, first + 20, t.head_dim);
    gather(pool, {{2, 0}, {1, -1}}, {0, first, first + 20}, first + 20, out);
    for (int64_t i = 0; i < first + 20; ++i) {
      const int64_t position = i < first ? i : i - first, page = i >= first ? 1 : position < page_size ? 2 : 0;
      ASSERT_TRUE(out.row(i) == codes.row(page * page_size + position % page_size))
          << topkey::format_name(t.format) << " " << topkey::layout_name(t.layout) << ", row " << i;
    }
  }
}

TEST_P(GatherTest, RowsBeyondTheLastRequestStayUntouched) {
  // total is an upper bound: the host may over-estimate.
  const Filled f = filled(KeyFormat::fp8, 4, 3);
  const Dense out(KeyFormat::fp8, 40, kDim);
  gather(f.pool, {{1, 2}, {0, 0}}, {0, 5, 8}, 40, out);
  for (int64_t i = 0; i < 40; ++i) EXPECT_EQ(out.row(i) == poison_row(KeyFormat::fp8, kDim), i >= 8) << i;
}

TEST_P(GatherTest, RowsPastTotalAreNotWrittenAndCounted) {
  const Filled f = filled(KeyFormat::fp8, 4, 3);
  const Dense out(KeyFormat::fp8, 12, kDim);
  const auto stats = gather(f.pool, {{1, 2}, {0, 0}}, {0, 5, 10}, 7, out);
  for (int64_t i = 0; i < 12; ++i) EXPECT_EQ(out.row(i) == poison_row(KeyFormat::fp8, kDim), i >= 7) << i;
  EXPECT_EQ(stats[topkey::kSkippedPages], 3u);
}

TEST_P(GatherTest, SmallDestinationOfCaseB39) {
  const Filled f = filled(KeyFormat::fp8, 4, 3);
  const Dense out(KeyFormat::fp8, 7, kDim);
  const auto thrown = topkey::testing::thrown_by([&] { gather(f.pool, {{1, 2}, {0, 0}}, {0, 5, 8}, 8, out); });
  EXPECT_EQ(thrown.status, topkey::Status::invalid_argument);
  EXPECT_EQ(thrown.sentence.rfind("gather_k: ", 0), 0u) << thrown.sentence;
  for (int64_t i = 0; i < 7; ++i) EXPECT_TRUE(out.row(i) == poison_row(KeyFormat::fp8, kDim)) << i;
}

TEST_P(GatherTest, KeysThatCannotBeReadAreNanKeys) {
  for (KeyFormat format : kFormats) {
    const Filled f = filled(format, 2, 3);
    // Page ids below and above the cache, and positions beyond the table's width.
    const Table table = {{2, -1, 3}, {INT32_MAX, INT32_MIN, 0}};
    const Dense out(format, 16, kDim);
    const auto stats = gather(f.pool, table, {0, 8, 16}, 16, out);
    uint64_t nan = 0;
    for (int64_t i = 0; i < 16; ++i) {
      const int64_t position = i % 8;
      const int32_t page = position < 6 ? table[static_cast<size_t>(i / 8)][static_cast<size_t>(position / 2)] : -1;
      const bool readable = page >= 0 && page < 3;
      nan += readable ? 0 : 1;
      EXPECT_TRUE(out.row(i) == (readable ? f.codes.row(page * 2 + position % 2) : nan_row(format, kDim)))
          << topkey::format_name(format) << " row " << i;
    }
    EXPECT_EQ(stats[topkey::kSkippedPages], nan);
  }
}

TEST_P(GatherTest, StrictRaisesBeforeWriting) {
  const Filled f = filled(KeyFormat::fp8, 2, 3);
  const Dense out(KeyFormat::fp8, 8, kDim);
  const auto strictly = [&](const Table& table, const std::vector<int32_t>& indptr, int64_t total) {
    return topkey::testing::thrown_by([&] { gather(f.pool, table, indptr, total, out, {}, true); }).status;
  };
  if (strictly({{2, 0}}, {0, 1}, 8) == topkey::Status::unsupported) GTEST_SKIP() << "strict is not offered here";
  const KeyRow untouched = poison_row(KeyFormat::fp8, kDim);
  const auto rest_is_poison = [&] {
    for (int64_t i = 1; i < 8; ++i) EXPECT_TRUE(out.row(i) == untouched) << i;
  };
  EXPECT_EQ(strictly({{2, 0}, {1, 99}}, {0, 4, 8}, 8), topkey::Status::invalid_argument) << "a wild page id";
  rest_is_poison();
  EXPECT_EQ(strictly({{2, 0}}, {0, 5}, 8), topkey::Status::invalid_argument) << "a position beyond the table";
  rest_is_poison();
  EXPECT_EQ(strictly({{2, 0}}, {0, 4}, 3), topkey::Status::invalid_argument) << "rows past total";
  rest_is_poison();
}

TEST_P(GatherTest, WildIndptrStaysInside) {
  const Filled f = filled(KeyFormat::bf16, 2, 3);
  for (const std::vector<int32_t>& indptr :
       {std::vector<int32_t>{5, 2, 4}, std::vector<int32_t>{-3, 2, 1}, std::vector<int32_t>{0, INT32_MAX, 3},
        std::vector<int32_t>{INT32_MIN, INT32_MAX, INT32_MIN}}) {
    const Dense out(KeyFormat::bf16, 8, kDim);
    gather(f.pool, {{0, 1}, {2, 2}}, indptr, 6, out);  // the destination has more rows than total, and they are guards
    for (int64_t i = 6; i < 8; ++i) EXPECT_TRUE(out.row(i) == poison_row(KeyFormat::bf16, kDim));
  }
}

TEST_P(GatherTest, StridedTableIndptrAndDestination) {
  const Filled f = filled(KeyFormat::fp8, 4, 6);
  Array pages(DType::i32, {2, 12}), starts(DType::i32, {3, 2});
  for (int64_t i = 0; i < 24; ++i) pages.as<int32_t>()[i] = 1000000000;
  const Table table = {{5, 1, 3}, {0, 2, 4}};
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t c = 0; c < 3; ++c)
      pages.as<int32_t>()[b * 12 + 1 + 4 * c] = table[static_cast<size_t>(b)][static_cast<size_t>(c)];
  }
  starts.as<int32_t>()[2] = 9;
  starts.as<int32_t>()[4] = 15;
  const topkey::support::Guarded values(DType::f8_e4m3fn, 15, kDim, 7), scales(DType::f32, 15, 1, 2);
  GatherK a{};
  a.keys.cache = f.pool.cache();
  a.keys.block_table = topkey::tensor(pages.as<int32_t>() + 1, DType::i32, {2, 3}, {12, 4});
  a.indptr = topkey::tensor(starts.view().data, DType::i32, {3}, {2});
  a.total = 15;
  a.out = {values.view(), topkey::tensor(scales.view().data, DType::f32, {15}, {3}), KeyFormat::fp8};
  topkey::support::run(a, exec());
  EXPECT_EQ(values.touched_outside() + scales.touched_outside(), "");
  for (int64_t i = 0; i < 15; ++i) {
    const int64_t position = i < 9 ? i : i - 9;
    const KeyRow want =
        f.codes.row(int64_t{table[i < 9 ? 0 : 1][static_cast<size_t>(position / 4)]} * 4 + position % 4);
    EXPECT_EQ(std::memcmp(topkey::support::element(values.view(), i), want.values.data(), kDim), 0) << i;
    EXPECT_EQ(std::memcmp(topkey::support::element(scales.view(), i), want.scales.data(), 4), 0) << i;
  }
}

/// Each rank stores its part by the slots of expand_rows and gathers it again: its own key rows, in order.
TEST_P(GatherTest, ShardsHoldTheirOwnRows) {
  constexpr int32_t kTokens = 150, kRatio = 2, kPage = 8;
  const Dense keys = random_codes(KeyFormat::fp8, kTokens, 91);  // one a token; those that complete a key row count
  for (const topkey::Shard& shape :
       {topkey::Shard{0, 2, 1}, topkey::Shard{0, 3, 4}, topkey::Shard{0, 2, 64}, topkey::Shard{0, 4, 5}}) {
    int64_t seen = 0;
    for (int32_t rank = 0; rank < shape.world_size; ++rank) {
      const topkey::Shard shard{rank, shape.world_size, shape.interleave};
      const Table table = {{7, 3, 9, 1, 0, 2, 8, 4, 6, 5}};
      const Array starts = Array::of({0, kTokens}), lens = Array::of({kTokens}), pages = table_of(table),
                  slots(DType::i64, {kTokens});
      topkey::ExpandRows expand{};
      expand.query_start = starts.view();
      expand.seq_lens = lens.view();
      expand.ratio = kRatio;
      expand.shard = shard;
      expand.block_table = pages.view();
      expand.page_size = kPage;
      expand.capacity = kTokens;
      expand.slots = slots.view();
      topkey::support::run(expand, exec());
      const Pool pool(KeyFormat::fp8, Layout::planar, kPage, kDim, 10, Pool::tight(KeyFormat::fp8, kPage, kDim));
      store(keys, std::vector<int64_t>(slots.as<int64_t>(), slots.as<int64_t>() + kTokens), pool);
      const auto own = static_cast<int32_t>(shard.local_length(kTokens / kRatio));
      const Dense out(KeyFormat::fp8, own + 1, kDim);
      gather(pool, table, {0, own}, own, out, shard);
      int64_t next = 0;
      for (int64_t g = 0; g < kTokens / kRatio; ++g) {
        if (!shard.owns(g)) continue;
        EXPECT_TRUE(out.row(next) == keys.row(g * kRatio + kRatio - 1)) << "key row " << g << " on rank " << rank;
        ++next;
      }
      EXPECT_EQ(next, own);
      seen += next;
    }
    EXPECT_EQ(seen, kTokens / kRatio);
  }
}

TEST_P(GatherTest, NothingToGather) {
  const Filled f = filled(KeyFormat::fp8, 4, 1);
  const Dense out(KeyFormat::fp8, 2, kDim), none(KeyFormat::fp8, 0, kDim);
  gather(f.pool, {{0}, {0}}, {0, 0, 0}, 2, out);
  gather(f.pool, {{0}}, {0, 0}, 0, none);
  gather(f.pool, {}, {0}, 0, out);
  for (int64_t i = 0; i < 2; ++i) EXPECT_TRUE(out.row(i) == poison_row(KeyFormat::fp8, kDim));
}

TOPKEY_ON_EVERY_BACKEND(GatherTest);

}  // namespace
