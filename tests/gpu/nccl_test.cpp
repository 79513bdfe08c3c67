// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Ranks over NCCL: two threads of this process with a GPU each. The collectives in device and host memory, a sharded step
// of the layer eagerly and as a replayed graph, equal to one GPU bit for bit, and what happens when ranks disagree or do
// not come. Fails where there are not two GPUs: scripts/gpu_check runs it (part nccl), nothing else does.
#include <nccl.h>

#include <barrier>
#include <exception>
#include <memory>
#include <thread>

#include "tests/cluster.h"
#include "tests/gpu/on_gpu.h"

namespace topkey::testing {
namespace {

constexpr int kRanks = 2;
constexpr double kSeconds = 20;

void must_nccl(ncclResult_t code) { ASSERT_EQ(code, ncclSuccess) << ncclGetErrorString(code); }

/// One communicator a rank, on its own GPU.
struct Ranks {
  explicit Ranks(bool blocking = true, double seconds = kSeconds) {
    int gpus = 0;
    must(cudaGetDeviceCount(&gpus));
    if (gpus < kRanks) throw std::runtime_error("these tests need two GPUs, got " + std::to_string(gpus));
    ncclUniqueId id{};
    must_nccl(ncclGetUniqueId(&id));
    each([&](int rank) {
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = blocking ? 1 : 0;
      ncclResult_t state = ncclCommInitRankConfig(&comms[rank], kRanks, id, rank, &config);
      while (state == ncclInProgress) must_nccl(ncclCommGetAsyncError(comms[rank], &state));
      must_nccl(state);
      ranks[rank] = nccl_communicator(comms[rank], seconds);
      prepare(Device::cuda, rank);
    });
  }
  ~Ranks() {
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks[rank].reset();
      cudaSetDevice(rank);
      if (!aborted[rank]) ncclCommAbort(comms[rank]);
    }
    cudaSetDevice(0);
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  /// body(rank) on a thread of each rank with its GPU current; what one throws is thrown here.
  template <class Body>
  static void each(Body&& body) {
    std::exception_ptr thrown[kRanks];
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          must(cudaSetDevice(rank));
          body(rank);
        } catch (...) {
          thrown[rank] = std::current_exception();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& one : thrown) {
      if (one != nullptr) std::rethrow_exception(one);
    }
  }

  ncclComm_t comms[kRanks] = {};
  std::unique_ptr<Communicator> ranks[kRanks];
  bool aborted[kRanks] = {};
};

Exec exec_of(const std::string& backend, int rank, const Stream& stream) {
  Exec exec = on(backend);
  exec.device_id = rank, exec.stream = stream.stream;
  return exec;
}

class Nccl : public ::testing::TestWithParam<std::string> {};

TEST(NcclTransport, GathersInDeviceAndHostMemory) {
  Ranks all;
  const size_t sizes[kRanks] = {3000, 500}, total = sizes[0] + sizes[1];
  Ranks::each([&](int rank) {
    const Stream stream;
    std::vector<uint8_t> own(3000), want;
    for (size_t i = 0; i < own.size(); ++i) own[i] = static_cast<uint8_t>(i * 7 + static_cast<size_t>(rank));
    const auto expected = [&](const size_t* each) {
      std::vector<uint8_t> bytes;
      for (size_t r = 0; r < kRanks; ++r) {
        for (size_t i = 0; i < each[r]; ++i) bytes.push_back(static_cast<uint8_t>(i * 7 + r));
      }
      return bytes;
    };
    const size_t equal[kRanks] = {3000, 3000};
    const GpuBytes send(own.size()), receive(2 * own.size()), uneven(total);
    send.put(own.data(), own.size());
    Communicator& comm = *all.ranks[rank];
    comm.all_gather(send.data(), receive.data(), own.size(), stream.stream);
    comm.all_gatherv(send.data(), uneven.data(), sizes, stream.stream);
    stream.wait();
    EXPECT_EQ(receive.get<uint8_t>(receive.size()), expected(equal)) << rank;
    EXPECT_EQ(uneven.get<uint8_t>(total), expected(sizes)) << rank;
    std::vector<uint8_t> host(2 * own.size()), host_uneven(total);
    comm.all_gather(own.data(), host.data(), own.size(), stream.stream);
    comm.all_gatherv(own.data(), host_uneven.data(), sizes, stream.stream);
    EXPECT_EQ(host, expected(equal)) << rank;
    EXPECT_EQ(host_uneven, expected(sizes)) << rank;
  });
}

TEST(NcclTransport, RowsAreExchangedInPlace) {
  Ranks all;
  for (const int64_t first : {0, 3}) {
    const int64_t sizes[kRanks] = {5, 2 + first}, rows = first + sizes[0] + sizes[1] + 2, width = 9;
    Ranks::each([&](int rank) {
      const Stream stream;
      std::vector<int32_t> own(static_cast<size_t>(rows * width), -7 - rank), want = own;
      for (int64_t r = 0; r < sizes[0] + sizes[1]; ++r) {
        for (int64_t c = 0; c < width; ++c) {
          const auto at = static_cast<size_t>((first + r) * width + c);
          want[at] = static_cast<int32_t>(r * 100 + c);
          if ((r < sizes[0]) == (rank == 0)) own[at] = want[at];
        }
      }
      const GpuBytes buffer(own.size() * 4);
      buffer.put(own.data(), buffer.size());
      ExchangeRows e{};
      e.buffer = tensor(buffer.data(), DType::i32, {rows, width}), e.width = width, e.first_row = first;
      e.row_shard_sizes = sizes;
      exchange_rows(e, *all.ranks[rank], exec_of(gpu_backends().front(), rank, stream));
      stream.wait();
      EXPECT_EQ(buffer.get<int32_t>(want.size()), want) << rank;
    });
  }
}

ProblemSpec whole_spec(int64_t rows, int64_t keys) {
  ProblemSpec spec = decode_spec();
  spec.rows = rows, spec.requests = static_cast<int32_t>(rows), spec.keys = keys, spec.pattern = Pattern::normal;
  return spec;
}

/// Keys of both ranks in host memory, on the CPU, through NCCL.
TEST(NcclTransport, KeysInHostMemoryAreGathered) {
  Ranks all;
  for (const int32_t interleave : {1, 16}) {
    const Problem whole = make_problem(whole_spec(3, 700));
    std::vector<int32_t> starts{0};
    for (const int64_t n : whole.lens) starts.push_back(starts.back() + static_cast<int32_t>(n));
    const Array indptr = Array::of(starts);
    const auto gather_of = [&](const Problem& p, const Array& values, const Array& scales) {
      GatherK g{};
      g.keys = p.paged_keys(), g.indptr = indptr.view(), g.total = starts.back();
      g.out = {values.view(), scales.view(), KeyFormat::fp8};
      return g;
    };
    const Array values(DType::u8, {starts.back(), 128}), scales(DType::f32, {starts.back()});
    run(gather_of(whole, values, scales), on("cpu"));
    Ranks::each([&](int rank) {
      const Stream stream;
      const Problem part = shard_of(whole, {rank, kRanks, interleave});
      const Array own(DType::u8, {starts.back(), 128}), own_scales(DType::f32, {starts.back()});
      const GatherK g = gather_of(part, own, own_scales);
      Exec exec = on("cpu");
      exec.stream = stream.stream;
      exec.workspace_bytes = gather_k_sharded_workspace_bytes(g, exec);
      const std::shared_ptr<uint8_t> room = aligned_bytes(exec.workspace_bytes);
      exec.workspace = room.get();
      gather_k_sharded(g, *all.ranks[rank], exec);
      EXPECT_EQ(std::memcmp(own.as<uint8_t>(), values.as<uint8_t>(), values.bytes()), 0) << rank;
      EXPECT_EQ(std::memcmp(own_scales.as<uint8_t>(), scales.as<uint8_t>(), scales.bytes()), 0) << rank;
    });
  }
}

/// One rank's step of the layer, everything on its GPU.
struct RankStep {
  RankStep(const Problem& part, int32_t topk, int64_t decode_rows, const ShardSpec& cut)
      : problem(part),
        q(part.q),
        weights(part.weights),
        pages(part.pages),
        table(part.block_table),
        end(part.end),
        request(part.request),
        indices(static_cast<size_t>(part.count() * topk * 4)),
        spec(cut) {
    IndexerConfig c{};
    c.heads = part.spec.heads, c.head_dim = part.spec.head_dim, c.topk = topk, c.format = part.spec.format;
    layer = std::make_unique<SparseAttnIndexer>(c);
    step.q = {q.view(), {}, weights.view()};
    step.keys = part.paged_keys();
    step.keys.cache.pages.data =
        pages.view().data != nullptr
            ? static_cast<uint8_t*>(pages.view().data) +
                  (static_cast<uint8_t*>(step.keys.cache.pages.data) - part.pages.as<uint8_t>())
            : nullptr;
    step.keys.block_table.data = table.view().data;
    step.rows.count = part.count(), step.rows.end = end.view(), step.rows.request = request.view();
    step.num_decode_rows = decode_rows;
    step.out.indices = tensor(indices.data(), DType::i32, {part.count(), topk});
    clear();
  }
  void clear() const { must(cudaMemset(indices.data(), 0xFF, indices.size())); }
  void give_room(Exec& exec) {
    const IndexerLimits limits{0, step.rows.count, problem.spec.requests, problem.width(), 1};
    room = std::make_unique<GpuBytes>(sharded_workspace_bytes(*layer, limits, spec, exec));
    exec.workspace = room->data(), exec.workspace_bytes = room->size();
  }
  void forward(Communicator& comm, const int64_t* sizes, const Exec& exec) const {
    ShardStep shard{};
    shard.comm = &comm, shard.row_shard_sizes = sizes;
    forward_sharded(*layer, step, spec, shard, exec);
  }
  std::vector<int32_t> answer() const { return indices.get<int32_t>(indices.size() / 4); }

  const Problem problem;
  OnGpu q, weights, pages, table, end, request;
  GpuBytes indices;
  std::unique_ptr<GpuBytes> room;
  std::unique_ptr<SparseAttnIndexer> layer;
  IndexerStep step{};
  ShardSpec spec;
};

/// What one GPU answers.
std::vector<int32_t> answer_of(const Problem& whole, int32_t topk, const std::string& backend) {
  const Array out(DType::i32, {whole.count(), topk});
  Selection s{};
  s.indices = out.view();
  run(whole.paged_search(topk, s), on(backend));
  return {out.as<int32_t>(), out.as<int32_t>() + out.size()};
}

TEST_P(Nccl, ContextShardsEqualOneGpuEagerAndReplayed) {
  const struct {
    int64_t rows, keys;
    int32_t topk, interleave;
    bool told;  // which request a row belongs to; else it is the row's number
  } shapes[] = {{6, 3000, 200, 1, true},
                {6, 3000, 200, 64, false},
                {1, 40000, 2048, 16, true},
                {5, 40000, 2048, 64, false},
                {3, 5, 20, 4, false}};
  for (const auto& shape : shapes) {
    Ranks all;
    ProblemSpec spec = whole_spec(shape.rows, shape.keys);
    if (!shape.told) spec.addressing = Addressing::next_n;  // requests in the order of rows, not drawn
    const Problem whole = make_problem(spec);
    const std::vector<int32_t> want = answer_of(whole, shape.topk, GetParam());
    Ranks::each([&](int rank) {
      const Stream stream;
      ShardSpec cut{};
      cut.context = {rank, kRanks, shape.interleave};
      RankStep s(shard_of(whole, cut.context), shape.topk, shape.rows, cut);
      if (!shape.told) s.step.rows.request = Tensor{};
      Exec exec = exec_of(GetParam(), rank, stream);
      s.give_room(exec);
      s.forward(*all.ranks[rank], nullptr, exec);
      stream.wait();
      EXPECT_EQ(s.answer(), want) << "rank " << rank << ", keys " << shape.keys;
      const GraphOf graph(stream, [&] { s.forward(*all.ranks[rank], nullptr, exec); });
      for (int i = 0; i < 3; ++i) {
        s.clear();
        graph.replay();
        EXPECT_EQ(s.answer(), want) << "rank " << rank << ", replay " << i;
      }
    });
  }
}

TEST_P(Nccl, RowShardsEqualOneGpu) {
  Ranks all;
  ProblemSpec spec = whole_spec(90, 4000);
  spec.requests = 3, spec.windows = Windows::causal;
  const Problem whole = make_problem(spec);
  const std::vector<int32_t> want = answer_of(whole, 300, GetParam());
  const int64_t decode = 4, sizes[kRanks] = {50, 36};
  Ranks::each([&](int rank) {
    const Stream stream;
    ShardSpec cut{};
    cut.row_rank = rank, cut.row_shards = kRanks;
    RankStep s(whole, 300, decode, cut);
    Exec exec = exec_of(GetParam(), rank, stream);
    s.give_room(exec);
    s.forward(*all.ranks[rank], sizes, exec);
    stream.wait();
    EXPECT_EQ(s.answer(), want) << "rank " << rank;
  });
}

/// Cleared buffers, stored keys, gathered keys and tokens, columns that are wider than what is exchanged: two steps of either
/// layer under every cut, all of it on the ranks' own GPUs.
TEST_P(Nccl, EveryCutOfBothLayersEqualsOneGpu) {
  std::vector<uint64_t> tokens;
  for (uint64_t t = 0; t < 200; ++t) tokens.push_back(t * 31 + 7);
  for (const Kind kind : {Kind::context, Kind::rows, Kind::prefill, Kind::prefill_context}) {
    for (const bool pools : {false, true}) {
      Ranks context, prefill;
      ClusterSpec spec;
      spec.kind = kind, spec.world = kRanks, spec.interleave = 4, spec.topk = 20, spec.pools = pools;
      spec.ratio = pools ? 4 : 1, spec.exchange_limit = 4000;
      if (kind == Kind::context) spec.role = CandidateRole::source;
      spec.suit(GetParam());
      SCOPED_TRACE(spec.text());
      Replica alone(spec, Shard{}, 1);
      std::vector<Replica> replicas;
      for (int rank = 0; rank < kRanks; ++rank) replicas.push_back(replica_of(spec, rank));
      const std::vector<std::vector<Turn>> steps = {{{0, 0, 50, false, &tokens}, {1, 0, 7, false, &tokens}},
                                                    {{0, 50, 2, true, &tokens}, {1, 7, 30, false, &tokens}}};
      for (size_t i = 0; i < steps.size(); ++i) {
        const StepData data = step_data(spec, steps[i], i + 1);
        ASSERT_TRUE(alone.make_room(data));
        const Answer want = answer_alone(spec, alone, data, on(GetParam()));
        Ranks::each([&](int rank) {
          const Stream stream;
          Replica& own = replicas[static_cast<size_t>(rank)];
          own.make_room(data);
          const Group group{context.ranks[rank].get(), prefill.ranks[rank].get()};
          const Answer answer = answer_rank(spec, own, data, rank, group, exec_of(GetParam(), rank, stream));
          EXPECT_EQ(difference(want, answer), "") << "rank " << rank << ", step " << i;
        });
      }
    }
  }
}

/// In what they are, and in the first step.
TEST_P(Nccl, RanksThatDisagreeAreNamed) {
  const Problem whole = make_problem(whole_spec(2, 300));
  const std::pair<bool, const char*> faults[] = {
      {true, "topk must be the same on every rank, got 20 on rank 0 and 21 on rank 1"},
      {false, "rows.count must be the same on every rank, got 2 on rank 0 and 1 on rank 1"}};
  for (const auto& [topk, sentence] : faults) {
    Ranks all;
    Thrown thrown[kRanks];
    Ranks::each([&, by_topk = topk](int rank) {
      const Stream stream;
      ShardSpec cut{};
      cut.context = {rank, kRanks, 1};
      RankStep s(shard_of(whole, cut.context), by_topk ? 20 + rank : 20, by_topk ? 2 : 1, cut);
      if (!by_topk) s.step.rows.count -= rank;
      Exec exec = exec_of(GetParam(), rank, stream);
      s.give_room(exec);
      thrown[rank] = thrown_by([&] { s.forward(*all.ranks[rank], nullptr, exec); });
    });
    for (const Thrown& one : thrown) {
      EXPECT_EQ(one.status, Status::peer_error);
      EXPECT_NE(one.sentence.find(sentence), std::string::npos) << one.sentence;
    }
  }
}

/// The second rank never comes.
TEST_P(Nccl, AMissingPeerEndsInAnErrorInTime) {
  Ranks all(false, 2);
  const Problem whole = make_problem(whole_spec(2, 300));
  Thrown thrown;
  Ranks::each([&](int rank) {
    if (rank != 0) return;
    const Stream stream;
    ShardSpec cut{};
    cut.context = {rank, kRanks, 1};
    RankStep s(shard_of(whole, cut.context), 20, 2, cut);
    Exec exec = exec_of(GetParam(), rank, stream);
    s.give_room(exec);
    thrown = thrown_by([&] { s.forward(*all.ranks[rank], nullptr, exec); });
  });
  all.aborted[0] = true;
  EXPECT_EQ(thrown.status, Status::peer_error);
  EXPECT_NE(thrown.sentence.find("did not answer within 2"), std::string::npos) << thrown.sentence;
}

INSTANTIATE_TEST_SUITE_P(Backends, Nccl, ::testing::ValuesIn(gpu_backends()), backend_label);

}  // namespace
}  // namespace topkey::testing
