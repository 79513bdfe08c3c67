// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `rows`, from lengths to rows: expand_rows against golden values (REFERENCE A.5, A.8, 9.2; CASES B31) and
// against a second formulation that counts key rows one by one. The way back, to_slots, is in slots_test.cpp.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "support/array.h"
#include "support/patterns.h"
#include "support/run.h"
#include "tests/backend_test.h"
#include "topkey/topkey.h"

namespace {

using topkey::DType;
using topkey::ExpandRows;
using topkey::Shard;
using topkey::support::Array;
using topkey::support::Guarded;
using Longs = std::vector<int64_t>;

struct Step {
  std::vector<int32_t> query_start, seq_lens;
  int32_t ratio = 0;
  Shard shard{};
  std::vector<std::vector<int32_t>> table{};  ///< empty: no slots are asked for
  int32_t page_size = 64;
  int64_t capacity = 0;
  DType wide = DType::i32;  ///< of positions and slots
};
struct Expanded {
  Longs request, lens, positions, slots;
  bool operator==(const Expanded& o) const {
    return request == o.request && lens == o.lens && positions == o.positions && slots == o.slots;
  }
};

Array table_of(const std::vector<std::vector<int32_t>>& rows) {
  if (rows.empty()) return {};
  Array table(DType::i32, {static_cast<int64_t>(rows.size()), static_cast<int64_t>(rows[0].size())});
  int32_t* at = table.as<int32_t>();
  for (const auto& row : rows) at = std::copy(row.begin(), row.end(), at);
  return table;
}

Longs values_of(const Guarded& out, int64_t count) {
  Longs values;
  for (int64_t i = 0; i < count; ++i) values.push_back(topkey::support::int_at(out.view(), i));
  return values;
}

Expanded expand(const Step& s, topkey::Exec exec, uint64_t* skipped = nullptr) {
  const Array starts = Array::of(s.query_start), lens = Array::of(s.seq_lens), table = table_of(s.table);
  const Guarded request(DType::i32, s.capacity, -1), length(DType::i32, s.capacity, -1);
  const Guarded positions(s.wide, s.capacity, -1), slots(s.wide, s.capacity, -1);
  ExpandRows a{};
  a.query_start = starts.view();
  a.seq_lens = lens.view();
  a.ratio = s.ratio;
  a.shard = s.shard;
  a.capacity = s.capacity;
  a.row_request = request.view();
  a.lens = length.view();
  a.positions = positions.view();
  if (table) {
    a.block_table = table.view();
    a.page_size = s.page_size;
    a.slots = slots.view();
  }
  uint64_t stats[topkey::kNumStats] = {};
  exec.stats = stats;
  topkey::support::run(a, exec);
  EXPECT_EQ(stats[topkey::kRows], static_cast<uint64_t>(s.capacity));
  if (skipped != nullptr) *skipped = stats[topkey::kSkippedSlots];
  for (const Guarded* out : {&request, &length, &positions}) EXPECT_EQ(out->touched_outside(), "");
  EXPECT_EQ(table ? slots.touched_outside() : slots.touched_outside(0, 0), "");
  return {values_of(request, s.capacity), values_of(length, s.capacity), values_of(positions, s.capacity),
          table ? values_of(slots, s.capacity) : Longs{}};
}

/// The same from first principles: walk a request's tokens, count the key rows they complete and those this rank owns.
Expanded counted(const Step& s) {
  const auto n = static_cast<size_t>(s.capacity);
  Expanded e{Longs(n, -1), Longs(n, 0), Longs(n, -1), Longs(s.table.empty() ? 0 : n, -1)};
  const int64_t ratio = std::max(s.ratio, 1), world = std::max(s.shard.world_size, 1),
                run = std::max(s.shard.interleave, 1);
  for (size_t b = 0; b < s.seq_lens.size(); ++b) {
    const int64_t first = s.query_start[b], count = s.query_start[b + 1] - first;
    int64_t owned = 0, key_rows = 0;
    for (int64_t position = 0; position < s.seq_lens[b]; ++position) {
      int64_t slot = -1;
      if (position % ratio == ratio - 1) {  // the token completes a key row
        if (world == 1 || key_rows / run % world == s.shard.rank) {
          const auto column = static_cast<size_t>(owned / s.page_size);
          if (!s.table.empty() && column < s.table[b].size() && s.table[b][column] >= 0) {
            slot = int64_t{s.table[b][column]} * s.page_size + owned % s.page_size;
          }
          ++owned;
        }
        ++key_rows;
      }
      const int64_t row = first + position - (s.seq_lens[b] - count);
      if (row < first || row >= s.capacity) continue;
      const auto r = static_cast<size_t>(row);
      e.request[r] = static_cast<int64_t>(b);
      e.lens[r] = owned;
      e.positions[r] = position;
      if (!s.table.empty()) e.slots[r] = slot;
    }
  }
  return e;
}

class RowsTest : public topkey::testing::BackendTest {};

TEST_P(RowsTest, FlattenedRowsOfReferenceA8) {
  Step s{{0, 2, 3, 6, 6}, {21, 6, 40, 0}};
  s.capacity = 8;
  const Expanded e = expand(s, exec());
  EXPECT_EQ(e.lens, (Longs{20, 21, 6, 38, 39, 40, 0, 0}));
  EXPECT_EQ(e.request, (Longs{0, 0, 1, 2, 2, 2, -1, -1}));
  EXPECT_EQ(e.positions, (Longs{19, 20, 5, 37, 38, 39, -1, -1}));
}

TEST_P(RowsTest, CompressedSlotsOfReferenceA5) {
  Step s{{0, 260}, {260}};
  s.ratio = 4;
  s.table = {{7, 9}};
  s.capacity = 260;
  const Expanded e = expand(s, exec());
  EXPECT_EQ((Longs{e.slots[2], e.slots[3], e.slots[7], e.slots[255], e.slots[259]}), (Longs{-1, 448, 449, 511, 576}));
  EXPECT_EQ((Longs{e.lens[2], e.lens[3], e.lens[7], e.lens[255], e.lens[259]}), (Longs{0, 1, 2, 64, 65}));
}

TEST_P(RowsTest, LengthUnitsOfCaseB31) {
  const auto lens = [&](int32_t seq, int32_t next_n, int32_t ratio) {
    Step s{{0, next_n}, {seq}};
    s.ratio = ratio;
    s.capacity = next_n;
    return expand(s, exec()).lens;
  };
  EXPECT_EQ(lens(1000, 2, 4), (Longs{249, 250}));
  EXPECT_EQ(lens(1000, 2, 2), (Longs{499, 500}));
  EXPECT_EQ(lens(1000, 2, 1), (Longs{999, 1000}));
  EXPECT_EQ(lens(1000, 2, 0), (Longs{999, 1000}));
  EXPECT_EQ(lens(3, 1, 4), (Longs{0}));
  EXPECT_EQ(lens(4, 1, 4), (Longs{1}));
}

TEST_P(RowsTest, ShardAfterExpansion) {  // REFERENCE 9.2: 8, 9, 10 become 4, 4, 5 on rank 1 of 2
  Step s{{0, 3}, {10}};
  s.shard = {1, 2, 1};
  s.capacity = 3;
  EXPECT_EQ(expand(s, exec()).lens, (Longs{4, 4, 5}));
}

TEST_P(RowsTest, SlotsUnderAShardFollowTheReference) {
  // REFERENCE 4.6: blk = c // (R*W), o = c % (R*W), local = (o // (W*I))*I + o % I, where I divides R.
  for (int32_t rank = 0; rank < 3; ++rank) {
    Step s{{0, 200}, {200}};
    s.ratio = 2;
    s.shard = {rank, 3, 4};
    s.page_size = 8;
    s.table = {{5, 3, 11, 2, 8}};
    s.capacity = 200;
    const Expanded e = expand(s, exec());
    for (int64_t p = 0; p < 200; ++p) {
      const int64_t c = p / 2, block = c / (8 * 3), o = c % (8 * 3);
      const bool owned = (p + 1) % 2 == 0 && o / 4 % 3 == rank;
      const int64_t want = owned ? s.table[0][static_cast<size_t>(block)] * 8 + o / (3 * 4) * 4 + o % 4 : -1;
      ASSERT_EQ(e.slots[static_cast<size_t>(p)], want) << "rank " << rank << " position " << p;
    }
  }
}

TEST_P(RowsTest, CapacityAboveAndBelowTheRows) {
  for (int64_t capacity : {0, 1, 2, 5, 6, 7, 100}) {
    for (DType wide : {DType::i32, DType::i64}) {
      Step s{{0, 2, 2, 6}, {9, 4, 5}};
      s.ratio = 2;
      s.page_size = 2;
      s.table = {{4, 5, 6}, {1, 2, 3}, {9, 8, 7}};
      s.capacity = capacity;
      s.wide = wide;
      EXPECT_EQ(expand(s, exec()), counted(s)) << capacity;
    }
  }
}

TEST_P(RowsTest, NoRequestsAtAll) {
  Step s{{0}, {}};
  s.capacity = 4;
  const Expanded e = expand(s, exec());
  EXPECT_EQ(e.request, Longs(4, -1));
  EXPECT_EQ(e.lens, Longs(4, 0));
  EXPECT_EQ(e.positions, Longs(4, -1));
}

TEST_P(RowsTest, OutputsAreOptionalOneByOne) {
  const Array starts = Array::of({0, 3}), seq = Array::of({7});
  for (int which = -1; which < 4; ++which) {
    const Guarded out(DType::i32, 3, -1);
    const Array table = table_of({{2, 1}});
    ExpandRows a{};
    a.query_start = starts.view();
    a.seq_lens = seq.view();
    a.capacity = 3;
    if (which == 0) a.row_request = out.view();
    if (which == 1) a.lens = out.view();
    if (which == 2) a.positions = out.view();
    if (which == 3) a.slots = out.view(), a.block_table = table.view(), a.page_size = 4;
    topkey::support::run(a, exec());
    if (which < 0) continue;  // nothing to write, and no fault
    EXPECT_EQ(out.touched_outside(), "");
    EXPECT_EQ(values_of(out, 3),
              (std::vector<Longs>{{0, 0, 0}, {5, 6, 7}, {4, 5, 6}, {4, 5, 6}}[static_cast<size_t>(which)]));
  }
}

TEST_P(RowsTest, NegativeResultsAreNoLengths) {
  // More query rows than tokens, no tokens, and a negative length: nothing visible, never a huge unsigned number.
  for (int32_t ratio : {1, 2, 4, 128}) {
    Step s{{0, 4, 6, 9}, {2, 0, -1000}};
    s.ratio = ratio;
    s.table = {{1, 2}, {3, 4}, {5, 6}};
    s.capacity = 10;
    s.wide = DType::i64;
    const Expanded e = expand(s, exec());
    EXPECT_EQ(e.lens, ratio == 1   ? (Longs{0, 0, 1, 2, 0, 0, 0, 0, 0, 0})
                      : ratio == 2 ? (Longs{0, 0, 0, 1, 0, 0, 0, 0, 0, 0})
                                   : Longs(10, 0));
    EXPECT_EQ(e.request, (Longs{0, 0, 0, 0, 1, 1, 2, 2, 2, -1}));
    for (size_t r : {0u, 1u, 4u, 5u, 6u, 7u, 8u, 9u}) {
      EXPECT_LT(e.positions[r], 0) << r;
      EXPECT_EQ(e.slots[r], -1) << r;
    }
  }
}

TEST_P(RowsTest, GarbageQueryStartStaysInside) {
  for (const std::vector<int32_t>& garbage :
       {std::vector<int32_t>{5, -3, 1 << 30, 7}, std::vector<int32_t>{-7, 2, 2, 1},
        std::vector<int32_t>{INT32_MAX, INT32_MIN, INT32_MAX, 0},
        std::vector<int32_t>{0, INT32_MAX, INT32_MAX, INT32_MAX}}) {
    Step s{garbage, {9, INT32_MAX, INT32_MIN}};
    s.ratio = 2;
    s.page_size = 4;
    s.table = {{1, 2}, {3, 4}, {5, 6}};
    s.capacity = 8;
    const Expanded e = expand(s, exec());  // which checks the guards
    topkey::Exec ref{};
    ref.backend = "ref";
    EXPECT_TRUE(e == expand(s, ref)) << "one request a row, whatever stands there";
    for (size_t r = 0; r < 8; ++r) {
      EXPECT_TRUE(e.request[r] >= -1 && e.request[r] < 3) << e.request[r];
      EXPECT_GE(e.lens[r], 0);
      EXPECT_GE(e.slots[r], -1);
    }
  }
}

TEST_P(RowsTest, SlotsBeyondTheTableAreNoSlots) {
  Step s{{0, 6}, {6}};
  s.page_size = 2;
  s.table = {{3, -1}};  // two of three pages, one of them unassigned
  s.capacity = 6;
  uint64_t skipped = 0;
  EXPECT_EQ(expand(s, exec(), &skipped).slots, (Longs{6, 7, -1, -1, -1, -1}));
  EXPECT_EQ(skipped, 4u);
}

TEST_P(RowsTest, SlotsPast31BitsFitI64) {
  Step s{{0, 2}, {66}};
  s.table = {{1, 40000000}};
  s.capacity = 2;
  s.wide = DType::i64;
  EXPECT_EQ(expand(s, exec()).slots, (Longs{40000000LL * 64, 40000000LL * 64 + 1}));
}

TEST_P(RowsTest, StrictRaisesBeforeWriting) {
  const Array starts = Array::of({0, 4}), seq = Array::of({4}), table = table_of({{3, -1}});
  const Guarded slots(DType::i32, 4, -1), lens(DType::i32, 4, -1);
  ExpandRows a{};
  a.query_start = starts.view();
  a.seq_lens = seq.view();
  a.capacity = 4;
  a.block_table = table.view();
  a.page_size = 2;
  a.slots = slots.view();
  a.lens = lens.view();
  topkey::Exec strict = exec();
  strict.strict = true;
  if (topkey::expand_rows_unsupported(a, strict) != nullptr) GTEST_SKIP() << "strict is not offered here";
  EXPECT_THROW(topkey::support::run(a, strict), topkey::Error);
  EXPECT_TRUE(slots.untouched() && lens.untouched())
      << "half-written: " << slots.touched_outside(0, 0) << lens.touched_outside(0, 0);
  topkey::support::run(a, exec());
  EXPECT_EQ(values_of(slots, 4), (Longs{6, 7, -1, -1}));
}

TEST_P(RowsTest, EveryTensorMayBeStrided) {
  Array starts(DType::i32, {4, 3}), seq(DType::i32, {3, 8}), pages(DType::i32, {3, 12});
  const std::vector<int32_t> start_values = {0, 2, 2, 5}, seq_values = {7, 3, 9};
  for (int64_t i = 0; i < 4; ++i) starts.as<int32_t>()[i * 3] = start_values[static_cast<size_t>(i)];
  for (int64_t i = 0; i < 3; ++i) seq.as<int32_t>()[i * 8] = seq_values[static_cast<size_t>(i)];
  for (int32_t i = 0; i < 36; ++i) pages.as<int32_t>()[i] = 100 + i;
  const Array lens(DType::i32, {6, 2}), slots(DType::i64, {6, 5});
  ExpandRows a{};
  a.query_start = topkey::tensor(starts.view().data, DType::i32, {4}, {3});
  a.seq_lens = topkey::tensor(seq.view().data, DType::i32, {3}, {8});
  a.block_table = topkey::tensor(pages.as<int32_t>() + 1, DType::i32, {3, 3}, {12, 4});  // every fourth column, from 1
  a.page_size = 4;
  a.capacity = 6;
  a.lens = topkey::tensor(lens.view().data, DType::i32, {6}, {2});
  a.slots = topkey::tensor(slots.view().data, DType::i64, {6}, {5});
  topkey::support::run(a, exec());
  Step s{start_values, seq_values};
  s.table = {{101, 105, 109}, {113, 117, 121}, {125, 129, 133}};
  s.page_size = 4;
  s.capacity = 6;
  const Expanded want = counted(s);
  for (int64_t r = 0; r < 6; ++r) {
    EXPECT_EQ(lens.as<int32_t>()[r * 2], want.lens[static_cast<size_t>(r)]);
    EXPECT_EQ(slots.as<int64_t>()[r * 5], want.slots[static_cast<size_t>(r)]);
    EXPECT_EQ(lens.as<int32_t>()[r * 2 + 1], 0);  // between the elements
    EXPECT_EQ(slots.as<int64_t>()[r * 5 + 1], 0);
  }
}

TEST_P(RowsTest, CountedFormulationAgrees) {
  topkey::testing::property("expand_rows equals counting key rows one by one", 300, [this] {
    topkey::support::Random random(static_cast<uint64_t>(topkey::testing::draw(0, UINT32_MAX)));
    Step s;
    s.query_start = {0};
    const int32_t ratios[] = {0, 1, 2, 4, 128};
    s.ratio = ratios[random.below(5)];
    s.shard = random.chance(0.5)
                  ? Shard{}
                  : Shard{0, static_cast<int32_t>(random.between(1, 5)), static_cast<int32_t>(random.below(6))};
    if (s.shard.world_size > 1)
      s.shard.rank = static_cast<int32_t>(random.below(static_cast<uint64_t>(s.shard.world_size)));
    s.page_size = static_cast<int32_t>(random.between(1, 20));
    const int64_t requests = random.between(0, 6), columns = random.between(1, 12);
    for (int64_t b = 0; b < requests; ++b) {
      const int64_t tokens = random.between(0, 300), rows = random.between(0, std::min<int64_t>(tokens, 9));
      s.query_start.push_back(s.query_start.back() + static_cast<int32_t>(rows));
      s.seq_lens.push_back(static_cast<int32_t>(tokens));
      s.table.emplace_back();
      for (int64_t c = 0; c < columns; ++c) s.table.back().push_back(static_cast<int32_t>(random.between(-1, 50)));
    }
    s.capacity = random.between(0, s.query_start.back() + 5);
    s.wide = random.chance(0.5) ? DType::i32 : DType::i64;
    RC_ASSERT(expand(s, exec()) == counted(s));
  });
}

TOPKEY_ON_EVERY_BACKEND(RowsTest);

}  // namespace
