// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `rows`, from positions back to physical slots: to_slots. Owners of CASES B40, compaction, everything out of
// range is -1 and counted, and a property: over all ranks each position finds exactly one slot, the one that
// expand_rows had given its key.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "support/array.h"
#include "support/patterns.h"
#include "support/run.h"
#include "tests/backend_test.h"
#include "topkey/topkey.h"

namespace {

using topkey::DType;
using topkey::Shard;
using topkey::ToSlots;
using topkey::support::Array;
using topkey::support::Guarded;
using Matrix = std::vector<std::vector<int32_t>>;

Array array_of(const Matrix& rows, int64_t columns) {
  Array a(DType::i32, {static_cast<int64_t>(rows.size()), columns});
  int32_t* at = a.as<int32_t>();
  for (const auto& row : rows) at = std::copy(row.begin(), row.end(), at);
  return a;
}

struct Ask {
  Matrix indices, table;
  int32_t page_size = 64;
  Shard shard{};
  bool compact = false;
  std::vector<int32_t> request{};  ///< empty: absent
};
struct Answer {
  Matrix slots;
  std::vector<int32_t> counts;
  bool operator==(const Answer& o) const { return slots == o.slots && counts == o.counts; }
};

Answer translate(const Ask& ask, topkey::Exec exec, uint64_t* skipped = nullptr) {
  const auto rows = static_cast<int64_t>(ask.indices.size()), width = static_cast<int64_t>(ask.indices.at(0).size());
  const Array indices = array_of(ask.indices, width), request = Array::of(ask.request);
  const Array table = array_of(ask.table, static_cast<int64_t>(ask.table.at(0).size()));
  const Guarded slots(DType::i32, rows, width), counts(DType::i32, rows, -1);
  ToSlots a{};
  a.indices = indices.view();
  if (!ask.request.empty()) a.row_request = request.view();
  a.block_table = table.view();
  a.page_size = ask.page_size;
  a.shard = ask.shard;
  a.compact = ask.compact;
  a.slots = slots.view(true);
  a.counts = counts.view();
  uint64_t stats[topkey::kNumStats] = {};
  exec.stats = stats;
  topkey::support::run(a, exec);
  EXPECT_EQ(slots.touched_outside(), "");
  EXPECT_EQ(counts.touched_outside(), "");
  EXPECT_EQ(stats[topkey::kRows], static_cast<uint64_t>(rows));
  if (skipped != nullptr) *skipped = stats[topkey::kSkippedSlots];
  Answer answer;
  for (int64_t r = 0; r < rows; ++r) {
    answer.slots.emplace_back();
    for (int64_t i = 0; i < width; ++i)
      answer.slots.back().push_back(static_cast<int32_t>(topkey::support::int_at(slots.view(), r, i)));
    answer.counts.push_back(static_cast<int32_t>(topkey::support::int_at(counts.view(), r)));
  }
  return answer;
}

/// The same by listing the rank's own positions in order: the n-th of them is its local position n.
Answer listed(const Ask& ask) {
  int32_t top = 0;
  for (const auto& row : ask.indices) top = std::max(top, *std::max_element(row.begin(), row.end()));
  std::vector<int32_t> own;
  const int32_t world = std::max(ask.shard.world_size, 1), run = std::max(ask.shard.interleave, 1);
  for (int32_t g = 0; g <= top; ++g) {
    if (world == 1 || g / run % world == ask.shard.rank) own.push_back(g);
  }
  Answer answer{ask.indices, {}};
  for (size_t r = 0; r < ask.indices.size(); ++r) {
    const int64_t request = ask.request.empty() ? static_cast<int64_t>(r) : ask.request[r];
    std::vector<int32_t>& row = answer.slots[r];
    for (int32_t& slot : row) {
      const auto found = std::lower_bound(own.begin(), own.end(), slot);
      const bool mine = slot >= 0 && found != own.end() && *found == slot;
      const auto local = static_cast<size_t>(found - own.begin()), column = local / static_cast<size_t>(ask.page_size);
      slot = -1;
      if (!mine || request < 0 || request >= static_cast<int64_t>(ask.table.size())) continue;
      const auto& pages = ask.table[static_cast<size_t>(request)];
      if (column >= pages.size() || pages[column] < 0) continue;
      slot = pages[column] * ask.page_size + static_cast<int32_t>(local) % ask.page_size;
    }
    answer.counts.push_back(static_cast<int32_t>(row.size()) -
                            static_cast<int32_t>(std::count(row.begin(), row.end(), -1)));
    if (ask.compact) std::stable_partition(row.begin(), row.end(), [](int32_t slot) { return slot >= 0; });
  }
  return answer;
}

class SlotsTest : public topkey::testing::BackendTest {};

TEST_P(SlotsTest, OwnersOfCaseB40) {
  Ask ask{{{0, 5, 6, 7, 12, 13}}, {{9}}, 8, Shard{1, 4, 1}};
  EXPECT_EQ(translate(ask, exec()), (Answer{{{-1, 73, -1, -1, -1, 75}}, {2}}));
  ask.compact = true;
  EXPECT_EQ(translate(ask, exec()), (Answer{{{73, 75, -1, -1, -1, -1}}, {2}}));
  Ask wide{{{64, 128, 130, 192}}, {{10, 20}}, 64, Shard{0, 2, 64}};
  EXPECT_EQ(translate(wide, exec()).slots, (Matrix{{-1, 1280, 1282, -1}}));
  wide.shard.rank = 1;
  EXPECT_EQ(translate(wide, exec()).slots, (Matrix{{640, -1, -1, 1280}}));
}

TEST_P(SlotsTest, OtherRanksPositionsAreNoFault) {
  uint64_t skipped = 77;
  translate(Ask{{{0, 5, 6, -1}}, {{9}}, 8, Shard{1, 4, 1}}, exec(), &skipped);
  EXPECT_EQ(skipped, 0u);
}

TEST_P(SlotsTest, UnionOverRanksIsTheWhole) {
  for (const auto& [world, interleave] : {std::pair{4, 1}, std::pair{2, 64}, std::pair{3, 4}}) {
    Matrix all(1);
    for (int32_t g = 0; g < 700; ++g) all[0].push_back(g);
    std::vector<int> found(700);
    for (int32_t rank = 0; rank < world; ++rank) {
      Ask ask{all, {{}}, 16, Shard{rank, world, interleave}};
      for (int32_t page = 0; page < 50; ++page) ask.table[0].push_back(page * 3 + rank);
      const Answer answer = translate(ask, exec());
      EXPECT_EQ(answer, listed(ask));
      for (size_t g = 0; g < 700; ++g) found[g] += answer.slots[0][g] >= 0;
    }
    EXPECT_EQ(found, std::vector<int>(700, 1)) << world << " " << interleave;
  }
}

TEST_P(SlotsTest, RangesAreCutToMinusOneAndCounted) {
  // Beyond the table, an unassigned page, a negative position, requests below and above the table.
  Ask ask{{{0, 7, 8, 12, INT32_MAX}, {-1, -7, INT32_MIN, 3, 4}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}},
          {{2, 5}, {-1, 3}},
          4,
          Shard{},
          false,
          {0, 1, -1, 2}};
  uint64_t skipped = 0;
  const Answer answer = translate(ask, exec(), &skipped);
  EXPECT_EQ(
      answer,
      (Answer{
          {{8, 23, -1, -1, -1}, {-1, -1, -1, -1, 12}, Matrix{{-1, -1, -1, -1, -1}}[0], Matrix{{-1, -1, -1, -1, -1}}[0]},
          {2, 1, 0, 0}}));
  EXPECT_EQ(skipped, 3u + 1u + 5u + 5u)
      << "each position that asked for a slot and found none; negative ones ask for nothing";
}

TEST_P(SlotsTest, SlotsPast31BitsAreNone) {
  EXPECT_EQ(translate(Ask{{{0, 63, 64, 127}}, {{33554431, 33554432}}, 64}, exec()).slots,
            (Matrix{{2147483584, INT32_MAX, -1, -1}}));
}

TEST_P(SlotsTest, InPlaceAndStridedRows) {
  // The slots may be written into a wider buffer than the indices have; the table may be every second column of a
  // matrix.
  Array pages(DType::i32, {2, 6});
  for (int32_t i = 0; i < 12; ++i) pages.as<int32_t>()[i] = i;
  Array indices(DType::i32, {2, 9});
  for (int32_t i = 0; i < 18; ++i) indices.as<int32_t>()[i] = i % 9;
  const Guarded slots(DType::i32, 2, 4, 5);
  ToSlots a{};
  a.indices = topkey::tensor(indices.view().data, DType::i32, {2, 4}, {9, 1});
  a.block_table = topkey::tensor(pages.view().data, DType::i32, {2, 3}, {6, 2});
  a.page_size = 2;
  a.slots = slots.view(true);
  topkey::support::run(a, exec());
  EXPECT_EQ(slots.touched_outside(), "");
  const Matrix want = {{0, 1, 4, 5}, {12, 13, 16, 17}};
  for (int64_t r = 0; r < 2; ++r) {
    for (int64_t i = 0; i < 4; ++i)
      EXPECT_EQ(topkey::support::int_at(slots.view(), r, i), want[static_cast<size_t>(r)][static_cast<size_t>(i)]);
  }
}

TEST_P(SlotsTest, StrictRaisesBeforeWriting) {
  const Array indices = array_of({{0, 1}, {2, 99}}, 2), table = array_of({{1}, {2}}, 1);
  const Guarded slots(DType::i32, 2, 2), counts(DType::i32, 2, -1);
  ToSlots a{};
  a.indices = indices.view();
  a.block_table = table.view();
  a.page_size = 4;
  a.slots = slots.view();
  a.counts = counts.view();
  topkey::Exec strict = exec();
  strict.strict = true;
  if (topkey::to_slots_unsupported(a, strict) != nullptr) GTEST_SKIP() << "strict is not offered here";
  EXPECT_THROW(topkey::support::run(a, strict), topkey::Error);
  EXPECT_TRUE(slots.untouched() && counts.untouched());
}

TEST_P(SlotsTest, EmptyRowsAndEmptyColumns) {
  const Array table = array_of({{1}}, 1);
  for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{0, 4}, {3, 0}, {0, 0}}) {
    const Array indices(DType::i32, {rows, width}),
        request = Array::of(std::vector<int32_t>(static_cast<size_t>(rows)));
    const Guarded slots(DType::i32, rows, width), counts(DType::i32, rows, -1);
    ToSlots a{};
    a.indices = indices.view();
    a.row_request = request.view();
    a.block_table = table.view();
    a.page_size = 4;
    a.slots = slots.view();
    a.counts = counts.view();
    topkey::support::run(a, exec());
    EXPECT_EQ(slots.touched_outside(), "");
    for (int64_t r = 0; r < rows; ++r) EXPECT_EQ(topkey::support::int_at(counts.view(), r), 0);
  }
}

TEST_P(SlotsTest, ListedFormulationAgrees) {
  topkey::testing::property("to_slots equals listing the rank's own positions", 300, [this] {
    topkey::support::Random random(static_cast<uint64_t>(topkey::testing::draw(0, UINT32_MAX)));
    Ask ask;
    ask.page_size = static_cast<int32_t>(random.between(1, 70));
    if (random.chance(0.6)) {
      ask.shard.world_size = static_cast<int32_t>(random.between(1, 5));
      ask.shard.rank = static_cast<int32_t>(random.below(static_cast<uint64_t>(ask.shard.world_size)));
      ask.shard.interleave = static_cast<int32_t>(random.below(70));
    }
    ask.compact = random.chance(0.5);
    const int64_t rows = random.between(1, 5), width = random.between(1, 12), pages = random.between(1, 8);
    for (int64_t r = 0; r < rows; ++r) {
      ask.indices.emplace_back();
      for (int64_t i = 0; i < width; ++i) ask.indices.back().push_back(static_cast<int32_t>(random.between(-2, 500)));
      ask.table.emplace_back();
      for (int64_t i = 0; i < pages; ++i) ask.table.back().push_back(static_cast<int32_t>(random.between(-1, 1000)));
    }
    for (int64_t r = 0; r < rows && random.chance(0.9); ++r)
      ask.request.push_back(static_cast<int32_t>(random.between(-1, rows)));
    if (static_cast<int64_t>(ask.request.size()) < rows) ask.request.clear();
    RC_ASSERT(translate(ask, exec()) == listed(ask));
  });
}

/// The slot that expand_rows tells store_k to write a key to is the slot that to_slots finds for its position, on the
/// owner alone.
TEST_P(SlotsTest, ReadersFindWhatWritersWrote) {
  for (const Shard& shape : {Shard{}, Shard{0, 2, 1}, Shard{0, 2, 64}, Shard{0, 3, 4}, Shard{0, 4, 7}}) {
    for (int32_t rank = 0; rank < std::max(shape.world_size, 1); ++rank) {
      const Shard shard{rank, shape.world_size, shape.interleave};
      Ask ask{{{}}, {{}}, 16, shard};
      for (int32_t page = 0; page < 20; ++page) ask.table[0].push_back((page * 7 + 3) % 20);
      for (int32_t g = 0; g < 300; ++g) ask.indices[0].push_back(g);
      const Answer answer = translate(ask, exec());
      const Array starts = Array::of({0, 600}), seq = Array::of({600}), table = array_of(ask.table, 20);
      const Guarded written(DType::i64, 600, -1);
      topkey::ExpandRows a{};
      a.query_start = starts.view();
      a.seq_lens = seq.view();
      a.ratio = 2;
      a.shard = shard;
      a.block_table = table.view();
      a.page_size = 16;
      a.capacity = 600;
      a.slots = written.view();
      topkey::support::run(a, exec());
      for (int32_t g = 0; g < 300; ++g) {
        ASSERT_EQ(topkey::support::int_at(written.view(), 2 * g), -1);
        ASSERT_EQ(topkey::support::int_at(written.view(), 2 * g + 1), answer.slots[0][static_cast<size_t>(g)])
            << "key row " << g << ", rank " << rank << " of " << shape.world_size << ", interleave "
            << shape.interleave;
      }
    }
  }
}

TOPKEY_ON_EVERY_BACKEND(SlotsTest);

}  // namespace
