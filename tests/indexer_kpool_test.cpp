// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The layer over k-pools: it equals its three stages apart; what is optional (gate, ape, positions, slots alone, short
// contexts), which rows and columns of the buffer it touches, a step that is refused has written nothing, teams,
// workspace. Days of serving are in serving_pools_test.cpp.
#include <algorithm>

#include "tests/backend_test.h"
#include "tests/pools.h"
#include "tests/work.h"

namespace topkey::testing {
namespace {

constexpr int32_t kPool = 4, kTopk = 12, kHeads = 4, kDim = 32;
constexpr int64_t kRows = 7, kPools = 30, kColumns = kTopk + kPool - 1, kPadded = kColumns + 5;

/// Two requests of 100 and 50 tokens, their older pools in the cache; rows: four tokens of the first, two of the
/// second, one of padding.
struct Step {
  Array k, gate, ape, positions, slots, tail, tail_slots, pages, q, weights, request, ends, table, token_table;
  Guarded indices{DType::i32, 9, kPadded}, token_slots{DType::i32, 9, kPadded}, counts{DType::i32, 9, -1};
  IndexerConfig config{};
  IndexerStep args{};

  explicit Step(uint64_t seed = 1) {
    Random random(seed);
    config.heads = kHeads, config.head_dim = kDim, config.topk = kTopk, config.pool_size = kPool;
    k = normals(DType::bf16, {kRows, kDim}, random), gate = normals(DType::bf16, {kRows, kDim}, random);
    ape = normals(DType::f32, {kPool, kDim}, random), tail = normals(DType::bf16, {2, 2, 8, kDim}, random);
    std::vector<int64_t> at{96, 97, 98, 99, 50, 51, -1}, to(kRows, -1), tails;
    std::vector<int32_t> ends_{24, 24, 24, 25, 12, 13, 0}, table_;
    for (size_t r = 0; r < at.size(); ++r) {
      const int64_t b = r < 4 ? 0 : 1;
      tails.push_back(at[r] < 0 ? -1 : b * 8 + at[r] % 8);
      if (at[r] >= 0 && (at[r] + 1) % kPool == 0) to[r] = b * 32 + at[r] / kPool;
    }
    positions = longs_of(at), slots = longs_of(to), tail_slots = longs_of(tails), ends = Array::of(ends_);
    request = Array::of({0, 0, 0, 0, 1, 1, -1});
    const KeyCache cache = cache_of(pages, KeyFormat::fp8, 8, kDim, 8);
    table = Array(DType::i32, {2, 4});
    for (int32_t i = 0; i < 8; ++i) table.as<int32_t>()[i] = i;
    fill_cache(cache, random);
    token_table = Array(DType::i32, {2, 100});
    for (int32_t i = 0; i < 200; ++i) token_table.as<int32_t>()[i] = 3 * i;
    const Array raw = normals(DType::bf16, {kRows, kHeads, kDim}, random),
                w = normals(DType::f32, {kRows, kHeads}, random);
    q = Array(DType::f8_e4m3fn, {kRows, kHeads, kDim}), weights = Array(DType::f32, {kRows, kHeads});
    QuantizeQ quantize{};
    quantize.q = raw.view(), quantize.weights = w.view(), quantize.q_out = q.view(),
    quantize.weights_out = weights.view(), quantize.rule = QuantRule::kpool_query, quantize.hadamard = true;
    run(quantize, on("ref"));
    args.k = k.view(), args.gate = gate.view(), args.ape = ape.view(), args.positions = positions.view();
    args.slot_mapping = slots.view(), args.tail = tail.view(), args.tail_slots = tail_slots.view();
    args.q = {q.view(), {}, weights.view()};
    args.keys.cache = cache, args.keys.block_table = table.view();
    args.rows.count = kRows, args.rows.end = ends.view(), args.rows.request = request.view();
    args.num_decode_rows = kRows;
    args.out.indices = indices.view(), args.out.slots = token_slots.view(), args.out.counts = counts.view();
    args.out.slot_map = {token_table.view(), false, 1};
  }
  static void fill_cache(const KeyCache& cache, Random& random) {
    const Array keys = normals(DType::f32, {64, kDim}, random);
    std::vector<int64_t> all;
    for (int64_t i = 0; i < 64; ++i) all.push_back(i);
    const Array mapping = longs_of(all);
    StoreK store{};
    store.k = keys.view(), store.slot_mapping = mapping.view(), store.cache = cache;
    run(store, on("ref"));
  }
  void forward(Exec exec) const {
    const SparseAttnIndexerKpool layer(config);
    const size_t bytes = layer.workspace_bytes({0, kRows, 2, 32, 4}, exec);
    const auto room = aligned_bytes(bytes);
    exec.workspace = room.get(), exec.workspace_bytes = bytes;
    forward_on_device(layer, args, exec);
  }
  std::vector<int64_t> row(int64_t r) const {
    std::vector<int64_t> cells;
    for (int64_t c = 0; c < kPadded; ++c) cells.push_back(int_at(indices.view(), r, c));
    return cells;
  }
};

class IndexerKpool : public BackendTest {};

TEST_P(IndexerKpool, IsItsStagesApart) {
  const Step whole, apart;
  whole.forward(exec());
  const IndexerStep& s = apart.args;
  PoolK pool{};
  pool.k = s.k, pool.gate = s.gate, pool.ape = s.ape, pool.positions = s.positions, pool.request = s.rows.request;
  pool.slot_mapping = s.slot_mapping, pool.tail = s.tail, pool.tail_slots = s.tail_slots, pool.pool_size = kPool;
  pool.cache = s.keys.cache;
  run(pool, exec());
  const Array chosen(DType::i32, {kRows, kTopk / kPool}), want(DType::i32, {kRows, kColumns}),
      want_slots(DType::i32, {kRows, kColumns}), counts(DType::i32, {kRows}), seen(DType::i32, {kRows});
  PagedMqaTopk search{};
  search.q = s.q, search.keys = s.keys, search.rows = s.rows, search.topk = kTopk / kPool;
  search.out.indices = chosen.view();
  run(search, exec());
  for (int64_t r = 0; r < kRows; ++r) {
    seen.as<int32_t>()[r] = static_cast<int32_t>(apart.positions.as<int64_t>()[r]) + 1;
  }
  ExpandPools expand{};
  expand.pools = chosen.view(), expand.rows.count = kRows, expand.rows.end = seen.view(), expand.pool_size = kPool;
  expand.rows.request = s.rows.request;
  expand.out.indices = want.view(), expand.out.slots = want_slots.view(), expand.out.counts = counts.view();
  expand.out.slot_map = s.out.slot_map;
  run(expand, exec());
  EXPECT_TRUE(same_bytes(whole.pages, apart.pages));
  EXPECT_TRUE(same_bytes(whole.tail, apart.tail));
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t c = 0; c < kPadded; ++c) {
      EXPECT_EQ(int_at(whole.indices.view(), r, c), c < kColumns ? int_at(want.view(), r, c) : -1) << r << " " << c;
      EXPECT_EQ(int_at(whole.token_slots.view(), r, c), c < kColumns ? int_at(want_slots.view(), r, c) : -1);
    }
    EXPECT_EQ(int_at(whole.counts.view(), r), int_at(counts.view(), r));
  }
  // Rows of the buffer that are none of the step's.
  EXPECT_EQ(whole.indices.touched_outside(kRows, kPadded), "");
  EXPECT_EQ(whole.token_slots.touched_outside(kRows, kPadded), "");
  // The open pool is always there: tokens 96..98 for the row at 98, nothing for the row that completes its pool.
  EXPECT_EQ(whole.row(2)[kTopk], 96);
  EXPECT_EQ(whole.row(2)[kTopk + 2], 98);
  EXPECT_EQ(whole.row(3)[kTopk], -1);
  EXPECT_EQ(whole.row(6), std::vector<int64_t>(kPadded, -1));
}

TEST_P(IndexerKpool, ClearedBuffersAndSkippedSteps) {
  Step s;
  s.args.cleared = true;
  s.forward(exec());
  EXPECT_EQ(s.indices.touched_outside(kRows, kColumns), "") << "columns beyond the answer";
  Step skipped;
  skipped.args.skip_step = true;
  const Array before = skipped.pages.clone(), tail = skipped.tail.clone();
  skipped.forward(exec());
  EXPECT_TRUE(skipped.indices.untouched());
  EXPECT_TRUE(same_bytes(skipped.pages, before));
  EXPECT_TRUE(same_bytes(skipped.tail, tail));
}

/// Without gate or ape (or k) nothing is stored; the rows are answered all the same.
TEST_P(IndexerKpool, WithoutGateOrApeOnlyTheCacheIsAsItWas) {
  for (Tensor IndexerStep::*missing : {&IndexerStep::gate, &IndexerStep::ape, &IndexerStep::k}) {
    Step s, searched;
    s.args.*missing = Tensor{};
    if (missing == &IndexerStep::k) s.args.slot_mapping = Tensor{};
    const Array before = s.pages.clone(), tail = s.tail.clone();
    s.forward(exec());
    EXPECT_TRUE(same_bytes(s.pages, before));
    EXPECT_TRUE(same_bytes(s.tail, tail));
    EXPECT_GE(s.row(0)[0], 0);
    EXPECT_EQ(s.row(2)[kTopk + 2], 98);
  }
}

TEST_P(IndexerKpool, WithoutPositionsThereAreNoTailColumns) {
  Step s;
  s.args.positions = Tensor{}, s.args.cleared = true;
  const Array before = s.pages.clone();
  s.forward(exec());
  EXPECT_TRUE(same_bytes(s.pages, before)) << "no position, no pool";
  EXPECT_EQ(s.indices.touched_outside(kRows, kTopk), "");
  EXPECT_GE(s.row(2)[0], 0);
}

TEST_P(IndexerKpool, SlotsAloneAreTheSameSlots) {
  Step both, alone;
  both.forward(exec());
  alone.args.out.indices = Tensor{};
  alone.forward(exec());
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t c = 0; c < kPadded; ++c)
      EXPECT_EQ(int_at(alone.token_slots.view(), r, c), int_at(both.token_slots.view(), r, c));
  }
  EXPECT_TRUE(alone.indices.untouched());
}

/// Every pool fits: all tokens are given, in order, and nothing is scored.
TEST_P(IndexerKpool, AShortContextIsGivenInWholeWithoutAScore) {
  Step s;
  const Array short_ends = Array::of({2, 2, 2, 3, 0, 1, 0});
  s.positions = longs_of({8, 9, 10, 11, 2, 3, -1}), s.tail_slots = longs_of({0, 1, 2, 3, 10, 11, -1});
  s.args.positions = s.positions.view(), s.args.tail_slots = s.tail_slots.view(), s.args.rows.end = short_ends.view();
  uint64_t stats[kNumStats] = {};
  Exec e = exec();
  e.stats = stats;
  s.forward(e);
  EXPECT_EQ(stats[kScoredKeys], 0u);
  for (const auto& [r, seen] : std::map<int64_t, int64_t>{{0, 9}, {2, 11}, {3, 12}, {4, 3}, {5, 4}, {6, 0}}) {
    std::vector<int64_t> tokens;
    for (const int64_t token : s.row(r)) {
      if (token >= 0) tokens.push_back(token);
    }
    ASSERT_EQ(static_cast<int64_t>(tokens.size()), seen) << "row " << r;
    for (int64_t t = 0; t < seen; ++t) EXPECT_EQ(tokens[static_cast<size_t>(t)], t) << "row " << r;
  }
}

/// Best pool first, each in whole; forced pools before it. The open pool's columns are where they always are.
TEST_P(IndexerKpool, PoolsInTheOrderOfTheSelection) {
  Step by_position, by_score;
  by_score.args.out.order = Order::score;
  by_position.config.force_first = by_score.config.force_first = 1;
  by_position.forward(exec()), by_score.forward(exec());
  bool moved = false;
  for (int64_t r = 0; r < 6; ++r) {
    std::vector<int64_t> a = by_position.row(r), b = by_score.row(r);
    EXPECT_EQ(b[0], 0) << "the forced pool";
    for (int64_t c = 0; c < kTopk; ++c) EXPECT_EQ(b[static_cast<size_t>(c)] % kPool, c % kPool);
    moved = moved || a != b;
    std::sort(a.begin(), a.begin() + kTopk), std::sort(b.begin(), b.begin() + kTopk);
    EXPECT_EQ(a, b);
  }
  EXPECT_TRUE(moved);
}

/// Candidate blocks count pools: a source publishes them, a consumer keeps to them.
TEST_P(IndexerKpool, CandidateBlocksCountPools) {
  Step source, consumer;
  const Array blocks(DType::i32, {kRows, 2});
  source.config.role = CandidateRole::source, consumer.config.role = CandidateRole::consumer;
  for (Step* s : {&source, &consumer}) {
    s->config.candidate_block_size = 2, s->config.candidate_topk_blocks = 2, s->args.candidates = blocks.view();
    s->forward(exec());
  }
  for (int64_t r = 0; r < 6; ++r) {
    int64_t tokens = 0;
    for (int64_t c = 0; c < kTopk; ++c) {
      const int64_t token = consumer.row(r)[static_cast<size_t>(c)];
      if (token < 0) continue;
      const int64_t block = token / kPool / 2;
      EXPECT_TRUE(block == int_at(blocks.view(), r, 0) || block == int_at(blocks.view(), r, 1)) << r << " " << token;
      ++tokens;
    }
    EXPECT_GT(tokens, 0);
  }
}

TEST_P(IndexerKpool, ARefusedStepHasWrittenNothing) {
  using Change = std::function<void(Step&)>;
  const std::vector<std::pair<std::string, Change>> wrongs = {
      {"expand_pools: out.indices must ", [](Step& s) { s.args.out.indices.shape[1] = kColumns - 1; }},
      {"paged_mqa_topk: q.weights must ", [](Step& s) { s.args.q.weights.shape[0] = 3; }},
      {"pool_k: gate must ", [](Step& s) { s.args.gate.shape[0] = 3; }},
      {"pool_k: tail_slots must ", [](Step& s) { s.args.tail = Tensor{}; }},
      {"indexer_kpool_forward: rows.start must ", [](Step& s) { s.args.rows.start = s.args.rows.end; }},
      {"indexer_kpool_forward: rows.end must be i32 [rows] where a key row is several tokens",
       [](Step& s) { s.args.rows.next_n = 2, s.args.rows.end.shape[0] = s.args.rows.count / 2; }},
      {"indexer_kpool_forward: positions must ", [](Step& s) { s.args.positions.shape[0] = 5; }},
      {"indexer_kpool_forward: out.scores must ", [](Step& s) { s.args.out.scores = s.args.q.weights; }},
      {"indexer_kpool_forward: norm, rope and hadamard must ", [](Step& s) { s.args.hadamard = true; }},
      {"indexer_kpool_forward: keys.cache.head_dim must ", [](Step& s) { s.args.keys.cache.head_dim = 16; }},
  };
  for (const auto& [sentence, change] : wrongs) {
    Step s;
    change(s);
    const Array before = s.pages.clone(), tail = s.tail.clone();
    const Thrown thrown = thrown_by([&] { s.forward(exec()); });
    EXPECT_EQ(thrown.status, Status::invalid_argument) << sentence;
    EXPECT_EQ(thrown.sentence.rfind(sentence, 0), 0u) << thrown.sentence;
    EXPECT_TRUE(s.indices.untouched() && s.token_slots.untouched() && s.counts.untouched()) << sentence;
    EXPECT_TRUE(same_bytes(s.pages, before) && same_bytes(s.tail, tail)) << sentence;
  }
  // A wild slot under strict: the dry run finds it before the first stage writes.
  Step s;
  s.slots.as<int64_t>()[3] = 1 << 20;
  const Array before = s.pages.clone(), tail = s.tail.clone();
  Exec strict = exec();
  strict.strict = true;
  const bool offered = strict.device == Device::cpu;
  EXPECT_EQ(thrown_by([&] { s.forward(strict); }).status, offered ? Status::invalid_argument : Status::unsupported);
  EXPECT_TRUE(s.indices.untouched());
  EXPECT_TRUE(same_bytes(s.pages, before) && same_bytes(s.tail, tail));
}

TEST_P(IndexerKpool, ATeamGivesTheSameAnswer) {
  const Step alone, together;
  alone.forward(exec());
  const SparseAttnIndexerKpool layer(together.config);
  Exec e = exec();
  const Room room(layer.workspace_bytes({0, kRows, 2, 32, 4}, e));
  room.give(e);
  Crew crew(3);
  run_crew(
      crew, [&](const Exec& member) { layer.forward(together.args, member); }, e);
  if (e.device == Device::cuda) {  // which takes no team, and has written nothing
    for (const Thrown& t : crew.thrown) EXPECT_EQ(t.status, Status::invalid_argument) << t.sentence;
    EXPECT_TRUE(together.indices.untouched());
    return;
  }
  for (const Thrown& t : crew.thrown) EXPECT_EQ(t.sentence, "");
  for (int64_t r = 0; r < kRows; ++r) EXPECT_EQ(together.row(r), alone.row(r));
  EXPECT_TRUE(same_bytes(together.pages, alone.pages) && same_bytes(together.tail, alone.tail));
  EXPECT_TRUE(room.kept());
}

TOPKEY_ON_GENERAL_BACKENDS(IndexerKpool);

TEST(IndexerKpoolConfig, MakesSense) {
  const auto sentence = [](const std::function<void(IndexerConfig&)>& change) {
    IndexerConfig c{};
    c.heads = 4, c.head_dim = 32, c.topk = 12, c.pool_size = 4;
    change(c);
    return thrown_by([&] { SparseAttnIndexerKpool layer(c); }).sentence;
  };
  EXPECT_EQ(sentence([](IndexerConfig&) {}), "");
  EXPECT_EQ(sentence([](IndexerConfig& c) { c.pool_size = 0; }), "");
  EXPECT_EQ(sentence([](IndexerConfig& c) { c.topk = 10; }),
            "indexer_kpool: topk must be a multiple of pool_size 4, got 10");
  EXPECT_EQ(sentence([](IndexerConfig& c) { c.pool_size = -1; }),
            "indexer_kpool: pool_size must be from 0 to 2147483647, got -1");
  EXPECT_EQ(sentence([](IndexerConfig& c) { c.ratio = 4; }), "indexer_kpool: ratio must be from 0 to 1, got 4");
  IndexerConfig plain{};
  plain.heads = 4, plain.head_dim = 32, plain.topk = 12, plain.pool_size = 4;
  EXPECT_EQ(thrown_by([&] { SparseAttnIndexer layer(plain); }).sentence,
            "indexer: pool_size must be from 0 to 0, got 4");
}

TEST(IndexerKpoolWorkspace, NeverShrinksAndStaysSmall) {
  IndexerConfig c{};
  c.heads = 32, c.head_dim = 128, c.topk = 2048, c.pool_size = 4;
  for (const std::string& backend : host_backends()) {
    size_t last = 0;
    for (const int64_t rows : {1, 64, 8192, 1 << 20}) {
      const size_t bytes = SparseAttnIndexerKpool(c).workspace_bytes({0, rows, rows, 1 << 28, 8}, on(backend));
      EXPECT_GE(bytes, last);
      EXPECT_LE(bytes, size_t{64} << 20) << "pools are expanded where they stand";
      last = bytes;
    }
  }
}

}  // namespace
}  // namespace topkey::testing
