// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What goes wrong between ranks: one that raises, one that leaves, one that never comes, ranks that disagree. Nobody
// waits for ever, and every rank is told who and why.
#include <gmock/gmock.h>

#include "tests/cluster.h"

namespace topkey::testing {
namespace {

using ::testing::HasSubstr;

/// Three ranks of a context with one request of 30 tokens each step.
struct Scene {
  explicit Scene(double seconds = 0) : comms(local_communicators(3, seconds)) {
    spec.world = 3;
    for (uint64_t t = 0; t < 200; ++t) tokens.push_back(t + 1);
    data = step_data(spec, {{0, 0, 30, false, &tokens}}, 1);
    for (int32_t r = 0; r < 3; ++r) {
      replicas.push_back(replica_of(spec, r));
      replicas.back().make_room(data);
    }
  }
  Answer answer(int32_t rank, const ClusterSpec& own, const Exec& exec = Exec{}) {
    const auto r = static_cast<size_t>(rank);
    return answer_rank(own, replicas[r], data, rank, {comms[r].get(), nullptr}, exec);
  }
  ClusterSpec spec;
  std::vector<uint64_t> tokens;
  StepData data;
  std::vector<Replica> replicas;
  std::vector<std::unique_ptr<Communicator>> comms;
};

TEST(ShardFaults, ARankThatRaisesTellsItsPeers) {
  Scene scene;
  const auto thrown = run_ranks(3, [&](int32_t rank) {
    Exec exec{};
    if (rank == 1) exec.backend = "no such backend";
    scene.answer(rank, scene.spec, exec);
  });
  EXPECT_EQ(thrown[1].status, Status::unsupported) << thrown[1].sentence;
  for (const size_t r : {size_t{0}, size_t{2}}) {
    EXPECT_EQ(thrown[r].status, Status::peer_error) << thrown[r].sentence;
    EXPECT_THAT(thrown[r].sentence, HasSubstr("rank 1 failed"));
    EXPECT_THAT(thrown[r].sentence, HasSubstr("no such backend"));
  }
  // The group is of no more use, and says so at once.
  const auto again = run_ranks(3, [&](int32_t rank) { scene.answer(rank, scene.spec); });
  for (const Thrown& t : again) EXPECT_THAT(t.sentence, HasSubstr("rank 1 failed"));
}

/// Halfway: the first exchange is over when rank 2 meets a wild page under strict.
TEST(ShardFaults, ARankThatRaisesBetweenExchanges) {
  Scene scene;
  for (const Thrown& t : run_ranks(3, [&](int32_t rank) { scene.answer(rank, scene.spec); })) {
    ASSERT_EQ(t.status, Status::ok) << t.sentence;
  }
  const auto thrown = run_ranks(3, [&](int32_t rank) {
    Exec exec{};
    exec.strict = true;
    if (rank == 2) scene.replicas[2].lose_pages();
    scene.answer(rank, scene.spec, exec);
  });
  EXPECT_EQ(thrown[2].status, Status::invalid_argument) << thrown[2].sentence;
  for (const size_t r : {size_t{0}, size_t{1}}) {
    EXPECT_EQ(thrown[r].status, Status::peer_error) << thrown[r].sentence;
    EXPECT_THAT(thrown[r].sentence, HasSubstr("rank 2 failed"));
  }
}

TEST(ShardFaults, ARankThatLeaves) {
  Scene scene;
  const auto thrown = run_ranks(3, [&](int32_t rank) {
    if (rank == 2) {
      scene.comms[2].reset();
    } else {
      scene.answer(rank, scene.spec);
    }
  });
  for (const size_t r : {size_t{0}, size_t{1}}) {
    EXPECT_EQ(thrown[r].status, Status::peer_error);
    EXPECT_THAT(thrown[r].sentence, HasSubstr("rank 2 has left"));
  }
}

TEST(ShardFaults, ARankThatNeverComes) {
  Scene scene(0.05);
  const auto thrown = run_ranks(3, [&](int32_t rank) {
    if (rank == 1) scene.answer(rank, scene.spec);
  });
  EXPECT_EQ(thrown[1].status, Status::peer_error);
  EXPECT_THAT(thrown[1].sentence, HasSubstr("rank 0, 2 did not come within 0.05"));
}

/// Every rank raises, and names what differs, both values, and who has them.
TEST(ShardFaults, RanksThatDisagree) {
  const auto sentences = [](const std::function<void(ClusterSpec&)>& change, const char* backend = nullptr) {
    Scene scene;
    std::vector<std::string> all;
    const auto thrown = run_ranks(3, [&](int32_t rank) {
      ClusterSpec own = scene.spec;
      Exec exec{};
      if (rank == 2) change(own), exec.backend = backend;
      const Replica replica(own, {rank, 3, own.interleave}, 1);
      Replica copy = replica;
      copy.make_room(scene.data);
      answer_rank(own, copy, scene.data, rank, {scene.comms[static_cast<size_t>(rank)].get(), nullptr}, exec);
    });
    for (const Thrown& t : thrown) {
      EXPECT_EQ(t.status, Status::peer_error) << t.sentence;
      EXPECT_EQ(t.sentence, thrown[0].sentence);
    }
    return thrown[0].sentence;
  };
  EXPECT_THAT(sentences([](ClusterSpec& s) { s.interleave = 4; }),
              HasSubstr("context.interleave must be the same on every rank, got 1 on rank 0 and 4 on rank 2"));
  EXPECT_THAT(sentences([](ClusterSpec& s) { s.topk = 13; }),
              HasSubstr("topk must be the same on every rank, got 12 on rank 0 and 13 on rank 2"));
  EXPECT_THAT(sentences([](ClusterSpec& s) { s.role = CandidateRole::source; }), HasSubstr("role must be the same"));
  EXPECT_THAT(sentences([](ClusterSpec& s) { s.exchange_limit = 1000; }), HasSubstr("exchange_limit must be the same"));
  // Another backend has another arithmetic: the answers would not be those of one rank.
  EXPECT_THAT(sentences([](ClusterSpec&) {}, "ref"), HasSubstr("arithmetic must be the same on every rank, got"));
}

TEST(ShardFaults, ASpecThatIsNotTheCommunicators) {
  Scene scene;
  const auto thrown = run_ranks(3, [&](int32_t rank) {
    ClusterSpec own = scene.spec;
    if (rank == 0) own.world = 4;
    Replica replica(own, {rank, own.world, 1}, 1);
    replica.make_room(scene.data);
    answer_rank(own, replica, scene.data, rank, {scene.comms[static_cast<size_t>(rank)].get(), nullptr}, Exec{});
  });
  EXPECT_EQ(thrown[0].status, Status::invalid_argument);
  EXPECT_THAT(thrown[0].sentence, HasSubstr("context must be rank 0 of 3 as the communicator says, got rank 0 of 4"));
  EXPECT_THAT(thrown[1].sentence, HasSubstr("rank 0 failed"));
  EXPECT_EQ(thrown[2].status, Status::peer_error);
}

/// Ranks agree over every communicator that is given, also where no cut uses it.
TEST(ShardFaults, ACommunicatorThatNoCutUsesIsChecked) {
  topkey_communicator empty{};
  for (const bool prefill : {false, true}) {
    const topkey_indexer_config config{};
    const topkey_indexer_step step{};
    const topkey_shard_spec spec{};
    const topkey_exec exec{};
    topkey_shard_step shard{};
    (prefill ? shard.prefill_comm : shard.comm) = &empty;
    for (const auto& forward : {topkey_indexer_forward_sharded, topkey_indexer_kpool_forward_sharded}) {
      EXPECT_EQ(forward(&config, &step, &spec, &shard, &exec), TOPKEY_INVALID_ARGUMENT);
      EXPECT_THAT(topkey_last_error(), HasSubstr(prefill ? "prefill_comm.size must be" : ": comm.size must be"));
    }
  }
}

TEST(ShardFaults, SizesThatDiffer) {
  const auto comms = local_communicators(2);
  const auto thrown = run_ranks(2, [&](int32_t rank) {
    char own[8] = {}, all[16] = {};
    comms[static_cast<size_t>(rank)]->all_gather(own, all, rank == 0 ? 4 : 8, nullptr);
  });
  for (const Thrown& t : thrown) {
    EXPECT_EQ(t.status, Status::peer_error);
    EXPECT_THAT(t.sentence,
                HasSubstr("bytes of rank 0 must be the same to every rank, got 4 on rank 0 and 8 on rank 1"));
  }
}

/// A caller's transport over another one, which counts its calls and can break.
class Counted final : public Communicator {
 public:
  explicit Counted(Communicator& to) : Communicator(to.rank(), to.size()), to_(to) {}
  void all_gather(const void* send, void* receive, size_t bytes, void* stream) override {
    if (++calls == breaks_at) throw std::runtime_error("the cable is out");
    to_.all_gather(send, receive, bytes, stream);
  }
  void all_gatherv(const void* send, void* receive, const size_t* bytes, void* stream) override {
    to_.all_gatherv(send, receive, bytes, stream);
  }
  void fail(const char* sentence) noexcept override { to_.fail(sentence); }
  int calls = 0, breaks_at = 0;

 private:
  Communicator& to_;
};

TEST(ShardFaults, TheCallersTransport) {
  Scene scene;
  std::vector<std::unique_ptr<Counted>> counted;
  for (const auto& comm : scene.comms) counted.push_back(std::make_unique<Counted>(*comm));
  const auto step = [&](int32_t rank) {
    const auto r = static_cast<size_t>(rank);
    answer_rank(scene.spec, scene.replicas[r], scene.data, rank, {counted[r].get(), nullptr}, Exec{});
  };
  // At first the hashes of what ranks compare, what they agree on, and the winners; then hashes and winners.
  for (const int calls : {3, 5, 7}) {
    for (const Thrown& t : run_ranks(3, step)) EXPECT_EQ(t.status, Status::ok) << t.sentence;
    EXPECT_EQ(counted[0]->calls, calls);
  }
  EXPECT_GT(counted[1]->received_bytes(), 0u);
  // What its callback throws comes out as it is; the others get peer_error.
  counted[1]->breaks_at = 9;
  std::string own;
  const auto thrown = run_ranks(3, [&](int32_t rank) {
    try {
      step(rank);
    } catch (const Error&) {
      throw;
    } catch (const std::runtime_error& e) {
      own = e.what();
    }
  });
  EXPECT_EQ(own, "the cable is out");
  for (const size_t r : {size_t{0}, size_t{2}}) {
    EXPECT_EQ(thrown[r].status, Status::peer_error);
    EXPECT_THAT(thrown[r].sentence, HasSubstr("rank 1 failed"));
    EXPECT_THAT(thrown[r].sentence, HasSubstr("the cable is out"));
  }
}

TEST(ShardFaults, TransportsThatThisBuildLacks) {
  EXPECT_EQ(topkey_transport_unusable("local"), nullptr);
  EXPECT_STREQ(topkey_transport_unusable("pigeons"), "this library has no such transport");
  if (const char* why = topkey_transport_unusable("nccl"); why != nullptr) {
    int handle = 0;
    const Thrown thrown = thrown_by([&] { nccl_communicator(&handle); });
    EXPECT_EQ(thrown.status, Status::unsupported);
    EXPECT_THAT(thrown.sentence, HasSubstr(why));
  }
  EXPECT_EQ(thrown_by([] { local_communicators(0); }).status, Status::invalid_argument);
}

}  // namespace
}  // namespace topkey::testing
