// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `plan`: the golden values of REFERENCE A.9 and A.10, the split rules of 9.1, row shards of 11, the planner's
// part of CASES B39, and what every plan must keep. That plans on bounds too high change no answer is in
// plan_run_test.cpp.
#include <algorithm>
#include <numeric>

#include "tests/testing.h"

namespace topkey::testing {
namespace {

using Longs = std::vector<int64_t>;

/// A step with the memory it points to.
struct Batch {
  Longs query_lens, seq_lens;
  std::vector<uint8_t> prefilling{};
  PlanStep step() const {
    PlanStep s{};
    s.num_requests = static_cast<int64_t>(query_lens.size());
    s.query_lens = query_lens.data();
    s.seq_lens = seq_lens.data();
    s.prefilling = prefilling.empty() ? nullptr : prefilling.data();
    return s;
  }
};

/// Chunks as lines, so that a difference reads well: "requests 0-2 rows 0-30 keys 300".
std::vector<std::string> lines(const std::vector<PrefillChunk>& chunks) {
  std::vector<std::string> all;
  for (const PrefillChunk& c : chunks) {
    all.push_back("requests " + std::to_string(c.first_request) + "-" + std::to_string(c.last_request) + " rows " +
                  std::to_string(c.first_row) + "-" + std::to_string(c.last_row) + " keys " +
                  std::to_string(c.total_keys) + (c.skip_gather ? " skip" : ""));
  }
  return all;
}
using Lines = std::vector<std::string>;

std::vector<std::pair<int64_t, int64_t>> pairs(const std::vector<Range>& ranges) {
  std::vector<std::pair<int64_t, int64_t>> all;
  for (const Range& r : ranges) all.emplace_back(r.first, r.last);
  return all;
}
using Pairs = std::vector<std::pair<int64_t, int64_t>>;

// ---- chunks --------------------------------------------------------------------------------------------------------

/// The 650 rows of A.9 are too few for request 3, which the reference gathers all the same; here 1000 do, with the
/// same cuts.
TEST(Plan, PrefillChunksOfReferenceA9) {
  const Batch batch{{10, 20, 30, 400}, {100, 200, 300, 1000}};
  PlanStep step = batch.step();
  step.gather_rows = 1000, step.logits_bytes = 4 * 12000;
  Lines want{"requests 0-2 rows 0-30 keys 300", "requests 2-3 rows 30-60 keys 300"};
  for (int64_t at = 0; at < 400; at += 12) {
    want.push_back("requests 3-4 rows " + std::to_string(60 + at) + "-" +
                   std::to_string(60 + std::min<int64_t>(400, at + 12)) + " keys 1000" + (at > 0 ? " skip" : ""));
  }
  EXPECT_EQ(lines(prefill_chunks(step)), want);
  EXPECT_EQ(want.size(), 2u + 34u);
  EXPECT_EQ(want.back(), "requests 3-4 rows 456-460 keys 1000 skip");
  EXPECT_EQ(lines(plan_step(step).chunks), want);
}

TEST(Plan, LongRequestOfReferenceA9) {
  const Batch batch{{8192}, {163840}};
  PlanStep step = batch.step();
  step.logits_bytes = int64_t{512} << 20;
  const std::vector<PrefillChunk> chunks = prefill_chunks(step);
  ASSERT_EQ(chunks.size(), 11u);
  for (const PrefillChunk& c : chunks) EXPECT_LE(c.last_row - c.first_row, 819);
  EXPECT_EQ(chunks[0].last_row, 819);
  EXPECT_EQ(chunks[10].last_row - chunks[10].first_row, 2);
}

/// CASES B39: rows are counted in key rows, as the buffer is.
TEST(Plan, CompressedRowsAreCountedAsTheBufferCountsThem) {
  const Batch batch{{100, 100, 100}, {40000, 40000, 40000}};
  PlanStep step = batch.step();
  step.ratio = 4, step.gather_rows = 16384;
  EXPECT_EQ(lines(prefill_chunks(step)),
            (Lines{"requests 0-1 rows 0-100 keys 10000", "requests 1-2 rows 100-200 keys 10000",
                   "requests 2-3 rows 200-300 keys 10000"}));
  step.gather_rows = 20000;
  EXPECT_EQ(lines(prefill_chunks(step)),
            (Lines{"requests 0-2 rows 0-200 keys 20000", "requests 2-3 rows 200-300 keys 10000"}));
}

TEST(Plan, RequestThatTheGatherBufferCannotHoldIsRefused) {
  const Batch batch{{100, 100}, {400, 1001}};
  PlanStep step = batch.step();
  step.gather_rows = 1000;
  for (const auto& call : std::vector<std::function<void()>>{[&] { prefill_chunks(step); }, [&] { plan_step(step); }}) {
    const Thrown thrown = thrown_by(call);
    EXPECT_EQ(thrown.status, Status::invalid_argument);
    EXPECT_EQ(thrown.sentence, "prefill_chunks: gather_rows must be enough for the longest request, 1001, got 1000");
  }
  step.gather_rows = 1001;
  EXPECT_EQ(prefill_chunks(step).size(), 2u);
}

/// Rows without keys have nothing to select and nothing to gather; a request without rows needs no gather of its own.
TEST(Plan, ChunksWithoutKeysOrRowsAreDropped) {
  const Batch empty{{5, 7}, {0, 0}};
  EXPECT_TRUE(prefill_chunks(empty.step()).empty());
  const Batch short_of_one{{3}, {3}};
  PlanStep step = short_of_one.step();
  step.ratio = 4;
  EXPECT_TRUE(prefill_chunks(step).empty());
  const Batch no_rows{{5, 0}, {10, 20}};
  step = no_rows.step();
  step.gather_rows = 20;
  EXPECT_EQ(lines(prefill_chunks(step)), (Lines{"requests 0-1 rows 0-5 keys 10"}));
}

TEST(Plan, OnlySplitRequestsSkipTheirGather) {
  const Batch batch{{6, 6, 2}, {100, 100, 100}};
  PlanStep step = batch.step();
  step.logits_bytes = 4 * 250;
  EXPECT_EQ(lines(prefill_chunks(step)),
            (Lines{"requests 0-1 rows 0-2 keys 100", "requests 0-1 rows 2-4 keys 100 skip",
                   "requests 0-1 rows 4-6 keys 100 skip", "requests 1-2 rows 6-8 keys 100",
                   "requests 1-2 rows 8-10 keys 100 skip", "requests 1-2 rows 10-12 keys 100 skip",
                   "requests 2-3 rows 12-14 keys 100"}));
  // A budget below one row still makes progress.
  step.logits_bytes = 3;
  EXPECT_EQ(prefill_chunks(step).size(), 14u);
}

/// A drawn step in which nothing is refused.
Batch draw_batch(PlanStep* step, int64_t requests) {
  Batch batch;
  for (int64_t b = 0; b < requests; ++b) {
    batch.query_lens.push_back(draw_flag(5) ? 0 : draw(1, 60));
    batch.seq_lens.push_back(draw_flag(5) ? draw(0, 3) : batch.query_lens.back() + draw(0, 500));
    batch.prefilling.push_back(draw_flag());
  }
  *step = batch.step();
  step->ratio = draw_of({0, 1, 4});
  step->decode_threshold = draw(0, 4);
  step->require_uniform = draw_flag(), step->extends_prefill = draw_flag();
  step->gather_rows = draw_flag(3) ? 0 : draw(600, 1500);
  step->logits_bytes = draw_flag(3) ? 0 : draw(1, 40000);
  return batch;
}

int64_t keys_of(const PlanStep& step, int64_t b) { return step.seq_lens[b] / std::max(1, step.ratio); }

void check_budgets(const PlanStep& step, const PrefillChunk& c) {
  const int64_t rows = c.last_row - c.first_row;
  RC_ASSERT(step.gather_rows == 0 || c.total_keys <= step.gather_rows);
  RC_ASSERT(step.logits_bytes == 0 || rows == 1 || 4 * rows * c.total_keys <= step.logits_bytes);
}

/// Each prefill row of a request with keys once, in order; requests of a chunk are those whose rows it has.
void check_cover(const PlanStep& step, const StepPlan& plan) {
  std::vector<int64_t> request_of, seen;
  for (int64_t b = 0; b < step.num_requests; ++b)
    request_of.insert(request_of.end(), static_cast<size_t>(step.query_lens[b]), b);
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    const PrefillChunk& c = plan.chunks[i];
    check_budgets(step, c);
    int64_t keys = 0;
    for (int64_t b = c.first_request; b < c.last_request; ++b) keys += keys_of(step, b);
    RC_ASSERT(keys == c.total_keys);
    RC_ASSERT(keys > 0);
    RC_ASSERT(c.first_request >= plan.num_decode_requests);
    for (int64_t r = c.first_row; r < c.last_row; ++r) {
      const int64_t b = request_of[static_cast<size_t>(r)];
      RC_ASSERT(b >= c.first_request && b < c.last_request);
      if (keys_of(step, b) > 0) seen.push_back(r);
    }
    const bool same = i > 0 && plan.chunks[i - 1].first_request == c.first_request;
    RC_ASSERT(c.skip_gather == same);
    // RC_ASSERT looks at both sides of an ||, so the guard stands outside.
    if (same) RC_ASSERT(plan.chunks[i - 1].last_request == c.last_request);
  }
  std::vector<int64_t> want;
  for (auto r = plan.num_decode_rows; r < static_cast<int64_t>(request_of.size()); ++r) {
    if (keys_of(step, request_of[static_cast<size_t>(r)]) > 0) want.push_back(r);
  }
  RC_ASSERT(seen == want);
}

TEST(Plan, ChunksCoverThePrefillRowsInOrder) {
  property("chunks cover what has keys, within the budgets", 1500, [] {
    PlanStep step{};
    const Batch batch = draw_batch(&step, draw(0, 9));
    const StepPlan plan = plan_step(step);
    check_cover(step, plan);
    RC_ASSERT(plan.num_decode_rows + plan.num_prefill_rows ==
              std::accumulate(batch.query_lens.begin(), batch.query_lens.end(), int64_t{0}));
  });
}

/// Greedy: two neighbouring chunks of whole requests would not have fitted together.
TEST(Plan, ChunksAreAsLargeAsFits) {
  property("no two neighbouring chunks fit together", 700, [] {
    PlanStep step{};
    const Batch batch = draw_batch(&step, draw(2, 9));
    const std::vector<PrefillChunk> chunks = prefill_chunks(step);
    for (size_t i = 1; i < chunks.size(); ++i) {
      const PrefillChunk &a = chunks[i - 1], &b = chunks[i];
      if (b.skip_gather || a.skip_gather || a.last_request != b.first_request) continue;
      const int64_t next = b.first_request, rows = a.last_row - a.first_row + step.query_lens[next],
                    keys = a.total_keys + keys_of(step, next);
      RC_ASSERT((step.gather_rows > 0 && keys > step.gather_rows) ||
                (step.logits_bytes > 0 && rows * keys > step.logits_bytes / 4));
    }
  });
}

// ---- decode slices -------------------------------------------------------------------------------------------------

TEST(Plan, DecodeChunksOfReferenceA10) {
  EXPECT_EQ(pairs(decode_chunks(100, 1000, 96000)), (Pairs{{0, 48}, {48, 80}, {80, 100}}));
  EXPECT_EQ(pairs(decode_chunks(33, 1000, 32000)), (Pairs{{0, 16}, {16, 32}, {32, 33}}));
  EXPECT_TRUE(decode_chunks(0, 1000, 1).empty());
  EXPECT_TRUE(decode_chunks(100, 1000, 0).empty());
  EXPECT_TRUE(decode_chunks(100, 1000, 200000).empty());
  EXPECT_EQ(decode_chunks(100, 1000, 199999).size(), 2u);
}

TEST(Plan, DecodeChunksRefuse) {
  EXPECT_EQ(thrown_by([] { decode_chunks(100, 1000, -1); }).sentence,
            "decode_chunks: budget must be nonnegative, got -1");
  EXPECT_EQ(thrown_by([] { decode_chunks(100, 1000, 31999); }).sentence,
            "decode_chunks: budget must be enough for 16 bf16 rows, got 31999");
  EXPECT_EQ(thrown_by([] { decode_chunks(-1, 1000, 1); }).status, Status::invalid_argument);
  EXPECT_EQ(thrown_by([] { decode_chunks(1, -1, 1); }).status, Status::invalid_argument);
}

TEST(Plan, DecodeChunksAreEvenAndFit) {
  property("decode slices", 1500, [] {
    const int64_t rows = draw(0, 700), width = draw(1, 5000), budget = draw(32 * width, 64 * 20 * width);
    const std::vector<Range> ranges = decode_chunks(rows, width, budget);
    const int64_t most = budget / (2 * width) / 16;
    RC_ASSERT(ranges.empty() == (2 * rows * width <= budget));
    if (ranges.empty()) return;
    RC_ASSERT(static_cast<int64_t>(ranges.size()) == ((rows + 15) / 16 + most - 1) / most);
    int64_t at = 0, last_size = most * 16;
    for (const Range& r : ranges) {
      RC_ASSERT(r.first == at);
      RC_ASSERT(r.last > r.first);
      RC_ASSERT(r.last - r.first <= last_size);
      RC_ASSERT(r.last == rows || (r.last - r.first) % 16 == 0);
      RC_ASSERT(2 * (r.last - r.first) * width <= budget);
      at = r.last, last_size = r.last - r.first;
    }
    RC_ASSERT(at == rows);
    RC_ASSERT((ranges[0].last - ranges[0].first + 15) / 16 - (last_size + 15) / 16 <= 1);
  });
}

// ---- split ---------------------------------------------------------------------------------------------------------

struct Split {
  const char* rule;
  Longs query_lens;
  int64_t threshold;
  bool uniform;
  std::vector<uint8_t> prefilling;
  bool extends_prefill;
  int64_t decodes;
  bool decode_uniform;
};

const std::vector<Split>& splits() {
  static const std::vector<Split> all = {
      {"all short", {1, 1, 1}, 1, false, {}, false, 3, true},
      {"the zero threshold is 1", {1, 1, 2}, 0, false, {}, false, 2, true},
      {"fast path keeps ragged decodes", {1, 3, 2}, 3, false, {}, false, 3, false},
      {"fast path: threshold 1 needs no uniformity", {1, 0, 1}, 1, true, {}, false, 3, true},
      {"first longer than threshold: all prefill", {4, 1, 1}, 3, false, {}, false, 0, true},
      {"from the first longer one", {2, 1, 9, 1}, 3, false, {}, false, 2, false},
      {"uniform: equal to the first or 0", {2, 2, 0, 2, 0}, 3, true, {}, false, 5, true},
      {"uniform: from the first other length", {2, 2, 1, 2}, 3, true, {}, false, 2, true},
      {"uniform: a 0 ends it too, once some length differs", {2, 0, 2, 1}, 3, true, {}, false, 1, true},
      {"uniform: long requests behind", {3, 3, 40, 3}, 3, true, {}, false, 2, true},
      {"short extends decode", {2, 2, 2, 90}, 3, false, {0, 1, 1, 1}, false, 3, true},
      {"short extends excluded", {2, 2, 2, 90}, 3, false, {0, 1, 1, 1}, true, 1, true},
      {"excluded, but none is prefilling", {2, 2}, 3, false, {0, 0}, true, 2, true},
      {"excluded, but nothing is known", {2, 2}, 3, false, {}, true, 2, true},
      {"no requests", {}, 3, true, {}, true, 0, true},
      {"none has rows", {0, 0}, 3, true, {}, false, 2, true},
  };
  return all;
}

TEST(Plan, SplitRulesOfReference91) {
  for (const Split& s : splits()) {
    SCOPED_TRACE(s.rule);
    Batch batch{s.query_lens, Longs(s.query_lens.size(), 1000), s.prefilling};
    PlanStep step = batch.step();
    step.decode_threshold = s.threshold, step.require_uniform = s.uniform, step.extends_prefill = s.extends_prefill;
    const StepPlan plan = plan_step(step);
    EXPECT_EQ(plan.num_decode_requests, s.decodes);
    EXPECT_EQ(plan.decode_uniform, s.decode_uniform);
    const auto cut = s.query_lens.begin() + static_cast<std::ptrdiff_t>(s.decodes);
    EXPECT_EQ(plan.num_decode_rows, std::accumulate(s.query_lens.begin(), cut, int64_t{0}));
    EXPECT_EQ(plan.num_prefill_rows, std::accumulate(cut, s.query_lens.end(), int64_t{0}));
    EXPECT_EQ(plan.max_next_n, cut == s.query_lens.begin() ? 0 : *std::max_element(s.query_lens.begin(), cut));
  }
}

/// Lengths are key rows, of their own side of the split.
TEST(Plan, MaximaCountKeyRows) {
  const Batch batch{{1, 1, 50, 50}, {1003, 7, 5000, 401}};
  PlanStep step = batch.step();
  EXPECT_EQ(plan_step(step).max_decode_len, 1003);
  EXPECT_EQ(plan_step(step).max_prefill_len, 5000);
  step.ratio = 4;
  EXPECT_EQ(plan_step(step).max_decode_len, 250);
  EXPECT_EQ(plan_step(step).max_prefill_len, 1250);
}

TEST(Plan, NothingToDo) {
  const Batch none, idle{{0, 0}, {0, 0}};
  for (const Batch& batch : {none, idle}) {
    PlanStep step = batch.step();
    step.row_shards = 4, step.gather_rows = 10, step.logits_bytes = 10;
    const StepPlan plan = plan_step(step);
    EXPECT_EQ(plan.num_decode_rows + plan.num_prefill_rows + plan.max_next_n, 0);
    EXPECT_EQ(plan.max_decode_len + plan.max_prefill_len, 0);
    EXPECT_TRUE(plan.chunks.empty());
    EXPECT_TRUE(plan.row_shard_sizes.empty());
  }
}

struct Fault {
  const char* sentence;
  std::function<void(PlanStep&)> make;
};

TEST(Plan, WrongArgumentsAreRefusedInWords) {
  static const int64_t negative[] = {1, -1};
  const Fault faults[] = {
      {"num_requests must be from 0 to 2147483647, got -1", [](PlanStep& s) { s.num_requests = -1; }},
      {"query_lens must be given, got null", [](PlanStep& s) { s.query_lens = nullptr; }},
      {"seq_lens must be given, got null", [](PlanStep& s) { s.seq_lens = nullptr; }},
      {"query_lens must be from 0 to 2147483647, got -1", [](PlanStep& s) { s.query_lens = negative; }},
      {"seq_lens must be from 0 to 2147483647, got -1", [](PlanStep& s) { s.seq_lens = negative; }},
      {"decode_threshold must be from 0 to 2147483647, got -3", [](PlanStep& s) { s.decode_threshold = -3; }},
      {"ratio must be from 0 to 2147483647, got -4", [](PlanStep& s) { s.ratio = -4; }},
      {"gather_rows must be from 0 to 9223372036854775807, got -5", [](PlanStep& s) { s.gather_rows = -5; }},
      {"logits_bytes must be from 0 to 9223372036854775807, got -6", [](PlanStep& s) { s.logits_bytes = -6; }},
      {"row_shards must be from 0 to 1048576, got -7", [](PlanStep& s) { s.row_shards = -7; }},
      {"min_shard_rows must be from 0 to 2147483647, got -8", [](PlanStep& s) { s.min_shard_rows = -8; }},
  };
  for (const Fault& fault : faults) {
    const Batch batch{{1, 1}, {5, 5}};
    PlanStep step = batch.step();
    fault.make(step);
    const Thrown thrown = thrown_by([&] { plan_step(step); });
    EXPECT_EQ(thrown.status, Status::invalid_argument) << fault.sentence;
    EXPECT_EQ(thrown.sentence, std::string("plan_step: ") + fault.sentence);
    EXPECT_EQ(thrown_by([&] { prefill_chunks(step); }).status, Status::invalid_argument) << fault.sentence;
  }
}

// ---- row shards ----------------------------------------------------------------------------------------------------

/// Cost of each prefill row, counted as REFERENCE 11 says.
Longs row_costs(const PlanStep& step, int64_t first_request) {
  Longs costs;
  for (int64_t b = first_request; b < step.num_requests; ++b) {
    for (int64_t j = 0; j < step.query_lens[b]; ++j) {
      costs.push_back(std::max<int64_t>(0, step.seq_lens[b] - step.query_lens[b] + 1 + j) / std::max(1, step.ratio));
    }
  }
  return costs;
}
int64_t dearest(const Longs& costs, const Longs& sizes) {
  int64_t most = 0;
  auto at = costs.begin();
  for (int64_t size : sizes) {
    most = std::max(most, std::accumulate(at, at + size, int64_t{0}));
    at += size;
  }
  return most;
}
Longs equal_rows(int64_t rows, int64_t shards) {
  Longs sizes(static_cast<size_t>(shards), rows / shards);
  for (int64_t s = 0; s < rows % shards; ++s) ++sizes[static_cast<size_t>(s)];
  return sizes;
}

TEST(Plan, RowShardsShareTheCostOfLongBatches) {
  const Batch batches[] = {{{8192}, {8192}},
                           {{1, 1, 4096, 3000}, {9000, 300, 70000, 3000}},
                           {{1, 2000, 2000, 2000, 2000}, {1, 65000, 2000, 9000, 40000}}};
  for (const Batch& batch : batches) {
    for (const int32_t shards : {2, 3, 8}) {
      PlanStep step = batch.step();
      step.row_shards = shards, step.ratio = shards == 3 ? 4 : 1;
      const StepPlan plan = plan_step(step);
      const Longs costs = row_costs(step, plan.num_decode_requests), &sizes = plan.row_shard_sizes;
      ASSERT_EQ(sizes.size(), static_cast<size_t>(shards));
      const double mean = static_cast<double>(std::accumulate(costs.begin(), costs.end(), int64_t{0})) / shards;
      EXPECT_LT(static_cast<double>(dearest(costs, sizes)) / mean, 1.02);
      EXPECT_LE(dearest(costs, sizes), dearest(costs, equal_rows(plan.num_prefill_rows, shards)));
    }
  }
}

TEST(Plan, RowShardsCoverThePrefillRows) {
  property("row shards", 1500, [] {
    PlanStep step{};
    const Batch batch = draw_batch(&step, draw(0, 9));
    step.row_shards = static_cast<int32_t>(draw(0, 9)), step.min_shard_rows = draw(0, 12);
    const StepPlan plan = plan_step(step);
    const Longs& sizes = plan.row_shard_sizes;
    const int64_t wanted = step.row_shards * std::max<int64_t>(1, step.min_shard_rows);
    RC_ASSERT(sizes.empty() == (step.row_shards <= 1 || plan.num_prefill_rows < wanted));
    if (sizes.empty()) return;
    RC_ASSERT(static_cast<int64_t>(sizes.size()) == step.row_shards);
    RC_ASSERT(*std::min_element(sizes.begin(), sizes.end()) >= 1);
    RC_ASSERT(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == plan.num_prefill_rows);
    // Over all ranks and chunks each row of a chunk comes once, and narrowing never leaves the chunk.
    for (const PrefillChunk& chunk : plan.chunks) {
      int64_t at = chunk.first_row;
      for (int32_t rank = 0; rank < step.row_shards; ++rank) {
        const Range part = RowShard::of(plan, rank).narrow(chunk);
        if (part.first == part.last) continue;
        RC_ASSERT(part.first == at);
        at = part.last;
      }
      RC_ASSERT(at == chunk.last_row);
    }
  });
}

/// Of batches of any size: whoever shards rows by cost loses nothing by it.
TEST(Plan, RowShardsAreNeverWorseThanEqualRows) {
  property("row shards against equal rows", 1500, [] {
    PlanStep step{};
    const Batch batch = draw_batch(&step, draw(1, 9));
    step.row_shards = static_cast<int32_t>(draw(2, 9));
    const StepPlan plan = plan_step(step);
    if (plan.row_shard_sizes.empty()) return;
    const Longs costs = row_costs(step, plan.num_decode_requests);
    RC_LOG() << "costs " << ::testing::PrintToString(costs) << " sizes "
             << ::testing::PrintToString(plan.row_shard_sizes);
    RC_ASSERT(dearest(costs, plan.row_shard_sizes) <=
              dearest(costs, equal_rows(plan.num_prefill_rows, step.row_shards)));
  });
}

TEST(Plan, NarrowIsAnIntersection) {
  StepPlan plan{};
  plan.num_decode_rows = 10, plan.row_shard_sizes = {5, 7, 3};
  EXPECT_EQ(RowShard::of(plan, 0).first_row, 10);
  const RowShard shard = RowShard::of(plan, 1);
  EXPECT_EQ(shard.first_row, 15);
  EXPECT_EQ(shard.last_row, 22);
  const auto narrowed = [&](int64_t first, int64_t last) {
    const Range r = shard.narrow({0, 1, first, last, 9, false});
    return std::make_pair(r.first, r.last);
  };
  EXPECT_EQ(narrowed(10, 30), std::make_pair(int64_t{15}, int64_t{22}));
  EXPECT_EQ(narrowed(16, 18), std::make_pair(int64_t{16}, int64_t{18}));
  EXPECT_EQ(narrowed(12, 16), std::make_pair(int64_t{15}, int64_t{16}));
  EXPECT_EQ(narrowed(21, 40), std::make_pair(int64_t{21}, int64_t{22}));
  for (const auto& [first, last] : Pairs{{10, 15}, {22, 30}}) {
    const auto [from, to] = narrowed(first, last);
    EXPECT_EQ(from, to) << first;
  }
}

}  // namespace
}  // namespace topkey::testing
