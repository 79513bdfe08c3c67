// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// support/scaling.h against what runs: the bytes that it says a rank receives are those that the communicators counted.
#include "support/scaling.h"

#include "tests/cluster.h"

namespace topkey::testing {
namespace {

/// Bytes of each rank by which a step begins, and of a communicator's first exchange, in which the ranks compare what they
/// must agree on.
constexpr int64_t kHashes = 16, kAgreement = 2048;

TEST(Scaling, BytesOfAContextStep) {
  std::vector<uint64_t> tokens;
  for (uint64_t t = 0; t < 200; ++t) tokens.push_back(t + 1);
  for (const int32_t world : {2, 3, 8}) {
    for (const CandidateRole role : {CandidateRole::none, CandidateRole::source}) {
      for (const size_t limit : {size_t{0}, size_t{3000}}) {
        ClusterSpec spec;
        spec.world = world, spec.role = role, spec.exchange_limit = limit;
        const StepData data = step_data(spec, {{0, 0, 40, false, &tokens}, {1, 0, 13, false, &tokens}}, 1);
        const auto comms = local_communicators(world);
        const auto thrown = run_ranks(world, [&](int32_t rank) {
          Replica replica = replica_of(spec, rank);
          replica.make_room(data);
          answer_rank(spec, replica, data, rank, {comms[static_cast<size_t>(rank)].get(), nullptr}, Exec{});
        });
        Scale s;
        s.ranks = world, s.rows = 53, s.requests = 2, s.topk = spec.topk;
        s.blocks = role == CandidateRole::source ? spec.blocks : 0;
        if (limit > 0) s.exchange_limit = static_cast<int64_t>(limit);
        for (size_t r = 0; r < comms.size(); ++r) {
          ASSERT_EQ(thrown[r].status, Status::ok) << thrown[r].sentence;
          EXPECT_EQ(static_cast<int64_t>(comms[r]->received_bytes()),
                    cost_of(s).received_bytes + (world - 1) * (kHashes + kAgreement));
        }
        EXPECT_EQ(cost_of(s).exchanges > 1, limit > 0);
      }
    }
  }
}

TEST(Scaling, BytesOfExchangedRows) {
  const int64_t topk = 7;
  const std::vector<int64_t> sizes{5, 5, 5, 5};
  const auto comms = local_communicators(4);
  const auto thrown = run_ranks(4, [&](int32_t rank) {
    const Array buffer(DType::i32, {20, topk});
    ExchangeRows e{};
    e.buffer = buffer.view(), e.width = topk, e.row_shard_sizes = sizes.data();
    exchange_rows(e, *comms[static_cast<size_t>(rank)], Exec{});
  });
  Scale s;
  s.cut = Cut::rows, s.ranks = 4, s.rows = 20, s.topk = topk;
  for (size_t r = 0; r < comms.size(); ++r) {
    ASSERT_EQ(thrown[r].status, Status::ok) << thrown[r].sentence;
    EXPECT_EQ(static_cast<int64_t>(comms[r]->received_bytes()), cost_of(s).received_bytes);
  }
}

TEST(Scaling, BytesOfGatheredKeys) {
  ProblemSpec spec;
  spec.paged = true, spec.rows = 1, spec.keys = 70;
  const Problem whole = make_problem(spec);
  const Array indptr = Array::of({0, 70});
  for (const int32_t interleave : {1, 16, 64}) {
    const auto comms = local_communicators(3);
    const auto thrown = run_ranks(3, [&](int32_t rank) {
      const Problem part = shard_of(whole, {rank, 3, interleave});
      const Array values(DType::u8, {70, spec.head_dim}), scales(DType::f32, {70});
      GatherK a{};
      a.keys = part.paged_keys(), a.indptr = indptr.view(), a.total = 70;
      a.out = {values.view(), scales.view(), spec.format};
      Exec exec{};
      exec.workspace_bytes = gather_k_sharded_workspace_bytes(a, exec);
      const std::shared_ptr<uint8_t> room = aligned_bytes(exec.workspace_bytes + 1);
      exec.workspace = room.get();
      gather_k_sharded(a, *comms[static_cast<size_t>(rank)], exec);
    });
    Scale s;
    s.cut = Cut::gathered, s.ranks = 3, s.interleave = interleave, s.context = 70, s.token_bytes = 0;
    s.key_bytes = row_bytes(spec.format, spec.head_dim);
    for (size_t r = 0; r < comms.size(); ++r) {
      ASSERT_EQ(thrown[r].status, Status::ok) << thrown[r].sentence;
      EXPECT_EQ(static_cast<int64_t>(comms[r]->received_bytes()), cost_of(s).received_bytes) << interleave;
    }
  }
}

/// New tokens of prefill ranks, also beside the keys that are gathered for the search.
TEST(Scaling, BytesOfNewTokens) {
  std::vector<uint64_t> tokens;
  for (uint64_t t = 0; t < 200; ++t) tokens.push_back(t + 1);
  for (const bool pools : {false, true}) {
    for (const size_t limit : {size_t{0}, size_t{3000}}) {
      ClusterSpec spec;
      spec.kind = Kind::prefill, spec.world = 3, spec.pools = pools, spec.ratio = pools ? 4 : 1;
      spec.exchange_limit = limit;
      const StepData data = step_data(spec, {{0, 0, 40, false, &tokens}, {1, 0, 14, false, &tokens}}, 1);
      const auto comms = local_communicators(3), prefill = local_communicators(3);
      const auto thrown = run_ranks(3, [&](int32_t rank) {
        Replica replica = replica_of(spec, rank);
        replica.make_room(data);
        const auto r = static_cast<size_t>(rank);
        answer_rank(spec, replica, data, rank, {comms[r].get(), prefill[r].get()}, Exec{});
      });
      const Tensor k = data.k.view();
      Scale s;
      s.cut = Cut::tokens, s.ranks = 3, s.rows = 54, s.requests = 2, s.context = 40;
      s.token_bytes = k.shape[1] * dtype_bytes(k.dtype) * (pools ? 2 : 1);
      for (size_t r = 0; r < comms.size(); ++r) {
        ASSERT_EQ(thrown[r].status, Status::ok) << thrown[r].sentence;
        EXPECT_EQ(static_cast<int64_t>(prefill[r]->received_bytes()),
                  cost_of(s).received_bytes + 2 * (kHashes + kAgreement));
      }
      const int64_t keys = cost_of(s).received_bytes;
      s.cut = Cut::gathered;
      Scale twice = s;
      twice.token_bytes *= 2;
      EXPECT_EQ(cost_of(twice).received_bytes - cost_of(s).received_bytes, keys);
    }
  }
}

/// Two H200, NVLink, NCCL: microseconds of an all-gather in a graph, so many KiB of each rank. docs/scaling.md.
TEST(Scaling, CollectivesTakeWhatWasMeasured) {
  const std::pair<double, double> measured[] = {{256, 10.5}, {1024, 18.5}, {2048, 27},
                                                {8192, 57},  {32768, 159}, {67584, 302}};
  for (const auto& [kib, us] : measured) EXPECT_NEAR(collective(Scale{}, kib * 1024) * 1e6 / us, 1, 0.06) << kib;
}

/// What any such model must say: one rank exchanges nothing, work shrinks with ranks, bytes do not depend on speeds.
TEST(Scaling, TheShapeOfTheModel) {
  for (const Cut cut : {Cut::context, Cut::rows, Cut::tokens, Cut::gathered}) {
    Scale s;
    s.cut = cut, s.rows = 4096, s.context = 131072;
    const Cost one = cost_of(s);
    EXPECT_EQ(one.received_bytes, 0);
    EXPECT_EQ(one.seconds(), one.local);
    double before = one.local;
    for (s.ranks = 2; s.ranks <= 64; s.ranks *= 2) {
      const Cost c = cost_of(s);
      EXPECT_LT(c.local, before);
      EXPECT_GT(c.received_bytes, 0);
      before = c.local;
    }
  }
}

}  // namespace
}  // namespace topkey::testing
