// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The layer on several ranks, threads of one process: under every cut, world size, interleave and batch the answers are
// those of one rank, bit for bit, and the same on all ranks. And the collectives below it by themselves.
#include <algorithm>
#include <numeric>

#include "tests/backend_test.h"
#include "tests/cluster.h"

namespace topkey::testing {
namespace {

/// The requests of some steps: their tokens, and who has how many of them by now.
struct Batch {
  std::vector<std::vector<uint64_t>> tokens;
  std::vector<int64_t> cached;

  Batch(size_t requests, int64_t max_tokens, Random& random) : cached(requests, 0) {
    for (size_t b = 0; b < requests; ++b) {
      tokens.emplace_back();
      for (int64_t t = 0; t < max_tokens; ++t) tokens.back().push_back(random.next());
    }
  }
  std::vector<Turn> turns(const std::vector<int64_t>& rows, size_t decodes) {
    std::vector<Turn> all;
    for (size_t b = 0; b < rows.size(); ++b) {
      all.push_back({b, cached[b], rows[b], b < decodes, &tokens[b]});
      cached[b] += rows[b];
    }
    return all;
  }
};

/// A prompt step, then steps in which the first requests decode and the others go on with their prompts.
void run_steps(ClusterSpec spec, const std::string& backend, Random& random,
               const std::function<void(const std::string&)>& fail) {
  spec.suit(backend);
  const auto requests = static_cast<size_t>(random.between(1, 4)), decodes = random.below(requests + 1);
  Batch batch(requests, spec.max_tokens, random);
  Replica alone(spec, Shard{}, spec.seed);
  std::vector<Replica> replicas;
  for (int32_t r = 0; r < spec.world; ++r) replicas.push_back(replica_of(spec, r));
  const auto comms = local_communicators(spec.world), prefill = local_communicators(spec.world);
  for (int step = 0; step < 3; ++step) {
    std::vector<int64_t> rows;
    for (size_t b = 0; b < requests; ++b) {
      const int64_t most = step == 0 ? 60 : b < decodes ? 3 : 12;
      rows.push_back(random.chance(0.15) ? 0 : random.between(0, most));
    }
    const StepData data = step_data(spec, batch.turns(rows, step == 0 ? 0 : decodes), random.next());
    if (!alone.make_room(data)) return fail("the pool is too small");
    const Answer want = answer_alone(spec, alone, data, on(backend));
    std::vector<std::string> differences(static_cast<size_t>(spec.world));
    const auto thrown = run_ranks(spec.world, [&](int32_t rank) {
      const auto r = static_cast<size_t>(rank);
      if (!replicas[r].make_room(data)) throw std::logic_error("the pool is too small");
      Exec exec = on(backend);
      exec.threads = 1;
      differences[r] =
          difference(want, answer_rank(spec, replicas[r], data, rank, {comms[r].get(), prefill[r].get()}, exec));
    });
    for (size_t r = 0; r < differences.size(); ++r) {
      const std::string where = "step " + std::to_string(step) + ", rank " + std::to_string(r) + ": ";
      if (thrown[r].status != Status::ok) return fail(where + thrown[r].sentence);
      if (!differences[r].empty()) return fail(where + differences[r]);
    }
  }
}

ClusterSpec draw_cluster(Kind kind) {
  ClusterSpec s;
  s.kind = kind;
  s.world = static_cast<int32_t>(draw(1, 8)), s.interleave = draw_of({1, 2, 3, 4, 16, 64, 256});
  s.format = draw_of({KeyFormat::fp8, KeyFormat::bf16, KeyFormat::f16, KeyFormat::f32, KeyFormat::q8_0});
  s.topk = static_cast<int32_t>(draw(1, 40)), s.ratio = draw_of({1, 2, 4}), s.page_size = draw_of({16, 1, 5, 64});
  s.pool_pages = 900 / s.page_size + 8;
  s.role = draw_of({CandidateRole::none, CandidateRole::source, CandidateRole::consumer});
  s.block_size = static_cast<int32_t>(draw(1, 9)), s.blocks = static_cast<int32_t>(draw(1, 12));
  if (draw_flag(3)) s.force_first = static_cast<int32_t>(draw(0, 9));
  if (draw_flag(3)) s.force_last = static_cast<int32_t>(draw(0, 9));
  s.rope = draw_flag(), s.order = draw_of({Order::position, Order::score});
  s.starts = kind != Kind::prefill_context && draw_flag(3);
  s.shard_decode = (kind == Kind::prefill || kind == Kind::prefill_context) && draw_flag(3);
  // Chunks of a few rows, of one, of all.
  s.exchange_limit = draw_of<size_t>({0, 1, 4000});
  s.seed = static_cast<uint64_t>(draw(1, 1000000));
  return s;
}

/// Pools of `ratio` tokens: a production size, or any small one.
ClusterSpec draw_pools(Kind kind) {
  ClusterSpec s = draw_cluster(kind);
  s.pools = true, s.rope = s.starts = false;
  s.ratio = draw_of({1, 2, 4, 16}), s.interleave = draw_of({1, 2, 3, 4, 16, 64});
  s.topk = s.ratio * static_cast<int32_t>(draw(1, 40 / s.ratio));
  s.format = draw_of({KeyFormat::fp8, KeyFormat::mxfp4, KeyFormat::bf16});
  s.padding = draw_flag() ? 0 : draw(1, 3);
  return s;
}

class ShardLayer : public BackendTest {
 protected:
  /// Fewer on a GPU, where a rank's step is a copy there and back.
  int cases(int all) const { return exec().device == Device::cpu ? all : all / 6; }
};

/// Decode rows without rows.request: of each request one row or a few, chunks of whole requests.
TEST_P(ShardLayer, RowsWithoutRequests) {
  std::vector<uint64_t> tokens;
  for (uint64_t t = 0; t < 200; ++t) tokens.push_back(t + 1);
  for (const bool pools : {false, true}) {
    for (const int64_t each : {1, 3}) {
      for (const size_t limit : {size_t{0}, size_t{1}, size_t{700}}) {
        ClusterSpec spec;
        spec.suit(GetParam());
        spec.world = 3, spec.interleave = 4, spec.pools = pools, spec.ratio = pools ? 2 : 1,
        spec.exchange_limit = limit;
        std::vector<Turn> turns;
        for (uint64_t b = 0; b < 5; ++b) turns.push_back({b, 0, each, true, &tokens});
        const StepData data = step_data(spec, turns, 1);
        Replica alone(spec, Shard{}, spec.seed);
        ASSERT_TRUE(alone.make_room(data));
        const Answer want = answer_alone(spec, alone, data, exec());
        spec.change = each == 1 ? [](IndexerStep& s) { s.rows.request = Tensor{}; }
                                : [](IndexerStep& s) { s.rows.request = Tensor{}, s.rows.next_n = 3; };
        const auto comms = local_communicators(3);
        std::vector<std::string> differences(3);
        const auto thrown = run_ranks(3, [&](int32_t rank) {
          const auto r = static_cast<size_t>(rank);
          Replica replica = replica_of(spec, rank);
          replica.make_room(data);
          Exec one = exec();
          one.threads = 1;
          differences[r] = difference(want, answer_rank(spec, replica, data, rank, {comms[r].get(), nullptr}, one));
        });
        for (size_t r = 0; r < differences.size(); ++r) {
          EXPECT_EQ(thrown[r].status, Status::ok) << thrown[r].sentence;
          EXPECT_EQ(differences[r], "") << "pools " << pools << ", " << each << " rows, limit " << limit;
        }
      }
    }
  }
}

TEST_P(ShardLayer, EveryCutEqualsOneRank) {
  for (const Kind kind : {Kind::context, Kind::rows, Kind::prefill, Kind::prefill_context}) {
    property(std::string("the layer on ranks equals one rank: ") + kind_name(kind), cases(120), [&] {
      const ClusterSpec spec = draw_cluster(kind);
      RC_LOG() << spec.text();
      Random random(spec.seed);
      run_steps(spec, GetParam(), random, [](const std::string& what) { RC_FAIL(what); });
    });
  }
}

TEST_P(ShardLayer, EveryCutOfPoolsEqualsOneRank) {
  for (const Kind kind : {Kind::context, Kind::rows, Kind::prefill, Kind::prefill_context}) {
    property(std::string("the layer over k-pools on ranks equals one rank: ") + kind_name(kind), cases(200), [&] {
      const ClusterSpec spec = draw_pools(kind);
      RC_LOG() << spec.text();
      Random random(spec.seed);
      run_steps(spec, GetParam(), random, [](const std::string& what) { RC_FAIL(what); });
    });
  }
}

/// The geometries of production, narrow but in what a selection sees of them: topk, ratio, blocks.
TEST_P(ShardLayer, ProductionGeometries) {
  ClusterSpec v32, v4, v41, glm, pools;
  v32.topk = 2048, v32.page_size = 64, v32.interleave = 64;
  v4.topk = 512, v4.ratio = 4, v4.page_size = 64;
  v41.topk = 512, v41.role = CandidateRole::source, v41.block_size = 8, v41.blocks = 2048, v41.interleave = 8;
  glm.topk = 64, glm.format = KeyFormat::bf16, glm.interleave = 16;
  pools.pools = true, pools.topk = 2048, pools.ratio = 4, pools.page_size = 32, pools.interleave = 16;
  for (ClusterSpec spec : {v32, v4, v41, glm, pools}) {
    for (const Kind kind : {Kind::context, Kind::rows, Kind::prefill, Kind::prefill_context}) {
      spec.kind = kind, spec.world = 4, spec.heads = 8, spec.pool_pages = 200;
      SCOPED_TRACE(spec.text());
      Random random(spec.seed);
      run_steps(spec, GetParam(), random, [](const std::string& what) { ADD_FAILURE() << what; });
    }
  }
}

/// A step whose contexts are shorter than topk sends smaller rows, more of them at a time.
TEST(ShardCollectives, TheWorkspaceServesShorterContexts) {
  IndexerConfig config{};
  config.heads = 2, config.head_dim = 32, config.topk = 2048, config.format = KeyFormat::fp8;
  ShardSpec cut{};
  cut.context.world_size = 2, cut.context.interleave = 1, cut.exchange_limit = 65000;
  const SparseAttnIndexer indexer(config);
  const IndexerLimits limits{0, 16, 16, 4096, 1};
  // Two ranks' rows of 512 entries, 8 bytes each: seven fit the limit. Of 2,048 entries one does.
  EXPECT_GE(sharded_workspace_bytes(indexer, limits, cut, on("ref")), size_t{7} * 2 * 512 * 8);
}

/// New keys may come in fewer bytes than the most, so that more of them fit the limit; and no limit is too large.
TEST(ShardCollectives, TheWorkspaceServesSmallerKeys) {
  IndexerConfig config{};
  config.heads = 2, config.head_dim = 128, config.topk = 8, config.format = KeyFormat::fp8;
  ShardSpec cut{};
  cut.prefill_size = 2, cut.exchange_limit = 2063;
  const SparseAttnIndexer indexer(config);
  const IndexerLimits limits{0, 64, 4, 4096, 1};
  // Two ranks' rows of 128 bf16: four fit the limit, and wait to be sent. Of f32 one and a half would.
  EXPECT_GE(sharded_workspace_bytes(indexer, limits, cut, on("ref")), size_t{3} * 4 * 256 + 4 * 256);
  cut.exchange_limit = SIZE_MAX;
  EXPECT_GE(sharded_workspace_bytes(indexer, limits, cut, on("ref")), size_t{3} * 64 * 256);
}

/// exchange_rows by itself: any dtype, strided and contiguous, ranks without rows, nothing else touched.
TEST(ShardCollectives, ExchangeRowsPutsSlicesIntoGlobalOrder) {
  property("exchange_rows gives every rank every slice", 200, [] {
    const auto world = static_cast<int32_t>(draw(1, 6));
    std::vector<int64_t> sizes;
    for (int32_t r = 0; r < world; ++r) sizes.push_back(draw_flag(3) ? 0 : draw(0, 5));
    const int64_t first = draw(0, 3), width = draw(1, 5), pad = draw_flag() ? 0 : draw(1, 3);
    const int64_t rows = first + std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    const auto comms = local_communicators(world);
    std::vector<Guarded> buffers;
    for (int32_t r = 0; r < world; ++r) buffers.emplace_back(DType::i32, rows + 1, width, pad);
    const auto thrown = run_ranks(world, [&](int32_t rank) {
      const Tensor t = buffers[static_cast<size_t>(rank)].view();
      const int64_t own = std::accumulate(sizes.begin(), sizes.begin() + rank, first);
      for (int64_t r = own; r < own + sizes[static_cast<size_t>(rank)]; ++r) {
        for (int64_t c = 0; c < width; ++c)
          *reinterpret_cast<int32_t*>(element(t, r, c)) = static_cast<int32_t>(r * 10 + c);
      }
      ExchangeRows e{};
      e.buffer = t, e.width = width, e.first_row = first, e.row_shard_sizes = sizes.data();
      Communicator& comm = *comms[static_cast<size_t>(rank)];
      Exec exec{};
      exec.workspace_bytes = exchange_rows_workspace_bytes(e, comm, exec);
      const std::shared_ptr<uint8_t> memory = aligned_bytes(exec.workspace_bytes + 1);
      exec.workspace = memory.get();
      exchange_rows(e, comm, exec);
    });
    for (int32_t r = 0; r < world; ++r) {
      if (thrown[static_cast<size_t>(r)].status != Status::ok) RC_FAIL(thrown[static_cast<size_t>(r)].sentence);
      const Guarded& buffer = buffers[static_cast<size_t>(r)];
      for (int64_t row = first; row < rows; ++row) {
        for (int64_t c = 0; c < width; ++c) RC_ASSERT(int_at(buffer.view(), row, c) == row * 10 + c);
      }
      for (int64_t row = 0; row < first; ++row) RC_ASSERT(buffer.poisoned(row, 0));
      RC_ASSERT(buffer.poisoned(rows, 0));
      RC_ASSERT(buffer.touched_outside(rows, width).empty());
    }
  });
}

/// gather_k over ranks gives the rows that gather_k gives of the whole, and touches no row behind them.
TEST(ShardCollectives, GatheredKeysAreInGlobalOrder) {
  property("gather_k over ranks equals gather_k", 150, [] {
    ProblemSpec spec;
    spec.paged = true, spec.rows = 1, spec.requests = static_cast<int32_t>(draw(1, 4)), spec.keys = draw(0, 90);
    spec.format = draw_of({KeyFormat::fp8, KeyFormat::bf16, KeyFormat::q8_0});
    spec.page_size = draw_of({16, 1, 64}), spec.seed = static_cast<uint64_t>(draw(1, 100000));
    const Problem whole = make_problem(spec);
    const auto world = static_cast<int32_t>(draw(2, 8));
    const int32_t interleave = draw_of({1, 4, 64, 256});
    std::vector<int32_t> indptr{0};
    for (const int64_t n : whole.lens) indptr.push_back(indptr.back() + static_cast<int32_t>(n));
    const Array starts = Array::of(indptr);
    const int64_t total = indptr.back() + draw(0, 3);
    const DType dtype = spec.format == KeyFormat::bf16 ? DType::bf16 : DType::u8;
    const int64_t width = spec.format == KeyFormat::bf16 ? spec.head_dim : value_bytes(spec.format, spec.head_dim);
    const bool scaled = spec.format == KeyFormat::fp8;
    const auto gather = [&](const Problem& p, const Guarded& values, const Guarded& scales) {
      GatherK a{};
      a.keys = p.paged_keys(), a.indptr = starts.view(), a.total = total;
      a.out = {values.view(), scaled ? scales.view() : Tensor{}, spec.format};
      return a;
    };
    const auto memory = [&] { return std::make_pair(Guarded(dtype, total, width), Guarded(DType::f32, total, -1)); };
    const auto want = memory();
    run(gather(whole, want.first, want.second), Exec{});
    const auto comms = local_communicators(world);
    std::vector<std::pair<Guarded, Guarded>> got;
    for (int32_t r = 0; r < world; ++r) got.push_back(memory());
    const auto thrown = run_ranks(world, [&](int32_t rank) {
      const auto& [values, scales] = got[static_cast<size_t>(rank)];
      const Problem part = shard_of(whole, {rank, world, interleave});
      const GatherK a = gather(part, values, scales);
      Exec exec{};
      exec.workspace_bytes = gather_k_sharded_workspace_bytes(a, exec);
      const std::shared_ptr<uint8_t> room = aligned_bytes(exec.workspace_bytes + 1);
      exec.workspace = room.get();
      gather_k_sharded(a, *comms[static_cast<size_t>(rank)], exec);
    });
    for (int32_t r = 0; r < world; ++r) {
      if (thrown[static_cast<size_t>(r)].status != Status::ok) RC_FAIL(thrown[static_cast<size_t>(r)].sentence);
      const auto& [values, scales] = got[static_cast<size_t>(r)];
      RC_ASSERT(values.touched_outside(indptr.back(), width).empty());
      for (int64_t row = 0; row < indptr.back(); ++row) {
        const auto bytes = static_cast<size_t>(width) * dtype_bytes(dtype);
        RC_ASSERT(std::memcmp(element(values.view(), row), element(want.first.view(), row), bytes) == 0);
        if (scaled) RC_ASSERT(bits_of(float_at(scales.view(), row)) == bits_of(float_at(want.second.view(), row)));
      }
    }
  });
}

/// Bounds that are negative, lie past the output or do not ascend: no byte outside the output is touched, and where they
/// ascend each row that some request has is that of one rank.
TEST(ShardCollectives, WildBoundsOfGatheredKeys) {
  ProblemSpec spec;
  spec.paged = true, spec.rows = 1, spec.requests = 3, spec.keys = 40, spec.format = KeyFormat::f32;
  const Problem whole = make_problem(spec);
  const std::vector<std::vector<int32_t>> bounds = {{-7, 5, 20, 33}, {0, 5, 5, 2000000000}, {-2000000000, -5, -1, 9},
                                                    {2, 30, 10, 31}, {30, 20, 10, 0},       {50, 60, 70, 80}};
  for (const std::vector<int32_t>& list : bounds) {
    const Array indptr = Array::of(list);
    const bool ascends = std::is_sorted(list.begin(), list.end());
    const Guarded want(DType::f32, 35, spec.head_dim);
    const auto gather = [&](const Problem& p, const Guarded& values) {
      GatherK a{};
      a.keys = p.paged_keys(), a.indptr = indptr.view(), a.total = 35;
      a.out = {values.view(), {}, spec.format};
      return a;
    };
    run(gather(whole, want), on("ref"));
    const auto comms = local_communicators(3);
    for (const Thrown& t : run_ranks(3, [&](int32_t rank) {
           const Problem part = shard_of(whole, {rank, 3, 4});
           const Guarded values(DType::f32, 35, spec.head_dim);
           const GatherK a = gather(part, values);
           Exec exec{};
           exec.workspace_bytes = gather_k_sharded_workspace_bytes(a, exec);
           const std::shared_ptr<uint8_t> room = aligned_bytes(exec.workspace_bytes + 1);
           exec.workspace = room.get();
           gather_k_sharded(a, *comms[static_cast<size_t>(rank)], exec);
           EXPECT_TRUE(values.touched_outside(35, spec.head_dim).empty());
           // A request of more keys than its table has pages: what stands there is NaN of whichever rank.
           for (int64_t row = 0; ascends && row < 35; ++row) {
             for (int64_t d = 0; d < spec.head_dim; ++d) {
               const float x = float_at(want.view(), row, d), y = float_at(values.view(), row, d);
               EXPECT_TRUE(bits_of(x) == bits_of(y) || (x != x && y != y)) << row;
             }
           }
         })) {
      EXPECT_EQ(t.status, Status::ok) << t.sentence;
    }
  }
}

TOPKEY_ON_EVERY_BACKEND(ShardLayer);

}  // namespace
}  // namespace topkey::testing
