// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The layer over k-pools on several ranks, what is particular to it (that it equals one rank is shown beside the layer
// over keys, in shard_layer_test.cpp and shard_serving_test.cpp): what is refused, and that nothing was written; what the
// ranks compare; bytes on the wire; absent parts of a step.
#include <gmock/gmock.h>

#include <cmath>
#include <cstring>

#include "tests/backend_test.h"
#include "tests/cluster.h"

namespace topkey::testing {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kWorld = 3, kSize = 4;

/// Two requests, one decoding: 3 and 30 rows.
struct Scene {
  explicit Scene(const ClusterSpec& wanted)
      : spec(wanted), comms(local_communicators(wanted.world)), prefill(local_communicators(wanted.world)) {
    for (uint64_t t = 0; t < 200; ++t) tokens.push_back(t + 1);
    data = step_data(spec, {{0, 0, 3, true, &tokens}, {1, 0, 30, false, &tokens}}, 1);
    for (int32_t r = 0; r < spec.world; ++r) {
      replicas.push_back(replica_of(spec, r));
      replicas.back().make_room(data);
    }
  }
  static ClusterSpec pools(Kind kind) {
    ClusterSpec s;
    s.pools = true, s.kind = kind, s.world = kWorld, s.ratio = kSize, s.topk = 8;
    return s;
  }
  std::vector<Thrown> run(const std::function<void(int32_t, ClusterSpec&)>& change = {}) {
    return run_ranks(spec.world, [&](int32_t rank) {
      const auto r = static_cast<size_t>(rank);
      ClusterSpec own = spec;
      if (change) change(rank, own);
      answer_rank(own, replicas[r], data, rank, {comms[r].get(), prefill[r].get()}, Exec{});
    });
  }
  /// Neither pages nor tails of any rank.
  bool written() const {
    for (const Replica& r : replicas) {
      const Tensor pages = r.cache().pages;
      const auto* bytes = static_cast<const uint8_t*>(pages.data);
      const auto is_filled = [](uint8_t b) { return b == 0xFF; };
      if (!std::all_of(bytes, bytes + pages.shape[0] * pages.stride[0], is_filled)) return true;
      if (!std::all_of(r.tail().as<uint8_t>(), r.tail().as<uint8_t>() + r.tail().bytes(), is_filled)) return true;
    }
    return false;
  }
  ClusterSpec spec;
  std::vector<std::unique_ptr<Communicator>> comms, prefill;
  std::vector<uint64_t> tokens;
  StepData data;
  std::vector<Replica> replicas;
};

/// What prefill ranks must say of the tokens, and where these may not lie.
TEST(ShardPools, TokensOfPrefillRanksAreChecked) {
  const std::vector<std::pair<void (*)(ShardStep&), const char*>> faults = {
      {[](ShardStep& s) { s.token_order = Tensor{}; }, "token_order must be"},
      {[](ShardStep& s) { s.token_order.dtype = DType::i64; }, "token_order must be"},
      {[](ShardStep& s) { s.token_order.shape[0] -= 1; }, "token_order must be"},
      {[](ShardStep& s) { s.token_positions = Tensor{}; }, "token_positions must be"},
      {[](ShardStep& s) { s.token_request = Tensor{}; }, "token_request must be"},
  };
  for (const Kind kind : {Kind::prefill, Kind::prefill_context}) {
    for (const auto& [change, sentence] : faults) {
      Scene scene(Scene::pools(kind));
      scene.spec.change_rank = change;
      for (const Thrown& t : scene.run()) EXPECT_THAT(t.sentence, HasSubstr(sentence));
      EXPECT_FALSE(scene.written()) << sentence;
    }
  }
}

/// A token that lies nowhere is NaN, and so is its pool; no other memory is read. One rank keeps to the order as many do.
TEST(ShardPools, ATokenThatLiesNowhereIsNaN) {
  for (const int32_t world : {kWorld, 1}) {
    ClusterSpec spec = Scene::pools(Kind::prefill);
    spec.format = KeyFormat::bf16, spec.world = world;
    Scene scene(spec);
    scene.spec.change_rank = [](ShardStep& s) {
      auto* order = static_cast<int32_t*>(s.token_order.data);
      order[4] = -1, order[9] = 1 << 30;  // tokens 1 and 6 of the second request: in its first and second pool
    };
    for (const Thrown& t : scene.run()) ASSERT_EQ(t.status, Status::ok) << t.sentence;
    const Replica& r = scene.replicas[0];
    const PageLayout layout = page_layout(KeyFormat::bf16, Layout::planar, scene.spec.page_size, scene.spec.head_dim);
    for (int64_t pool = 0; pool < 3; ++pool) {
      const int64_t slot = r.slot(1, pool * kSize + kSize - 1);
      const Tensor pages = r.cache().pages;
      const auto* page = static_cast<const uint8_t*>(pages.data) + slot / scene.spec.page_size * pages.stride[0];
      uint16_t value = 0;
      std::memcpy(&value, page + layout.value_offset(slot % scene.spec.page_size), sizeof value);
      EXPECT_EQ(std::isnan(bf16_to_float(value)), pool < 2) << pool << " of " << world;
    }
  }
}

TEST(ShardPools, RanksThatDisagree) {
  for (const Kind kind : {Kind::context, Kind::rows}) {
    Scene size(Scene::pools(kind)), layer(Scene::pools(kind));
    const auto sizes = size.run([](int32_t rank, ClusterSpec& own) { own.topk += rank == 2 ? kSize : 0; });
    for (const Thrown& t : sizes) EXPECT_THAT(t.sentence, HasSubstr("topk must be the same on every rank, got 8"));
    EXPECT_FALSE(size.written());
    // The same keys without pools: the answers would be pools there, tokens here.
    const auto layers = run_ranks(kWorld, [&](int32_t rank) {
      const auto r = static_cast<size_t>(rank);
      ClusterSpec own = layer.spec;
      own.pools = rank != 1;
      const StepData data = step_data(own, {{0, 0, 3, true, &layer.tokens}, {1, 0, 30, false, &layer.tokens}}, 1);
      answer_rank(own, layer.replicas[r], data, rank, {layer.comms[r].get(), nullptr}, Exec{});
    });
    for (const Thrown& t : layers) {
      EXPECT_THAT(t.sentence,
                  HasSubstr("layer must be the same on every rank, got k-pools on rank 0 and keys on rank 1"));
    }
  }
}

/// Of each other rank, two hashes by which a step begins.
constexpr uint64_t kHashes = 16 * (kWorld - 1);

/// What crosses: a score and an id of each of topk / pool_size pools, or ids of those rows that others answered.
TEST(ShardPools, OnlyPoolsAreExchanged) {
  Scene context(Scene::pools(Kind::context)), rows(Scene::pools(Kind::rows));
  for (Scene* scene : {&context, &rows}) {
    for (int step = 0; step < 2; ++step) {
      const uint64_t before = scene->comms[0]->received_bytes();
      for (const Thrown& t : scene->run()) ASSERT_EQ(t.status, Status::ok) << t.sentence;
      if (step == 0) continue;  // with the comparison of what they are
      const uint64_t received = scene->comms[0]->received_bytes() - before - kHashes;
      const uint64_t pools = 8 / kSize;
      if (scene == &context) {
        EXPECT_EQ(received, (kWorld - 1) * 33 * 8 * pools);
      } else {
        EXPECT_GT(received, 0u);
        EXPECT_LE(received, 30 * 4 * pools);
      }
    }
  }
}

/// k and gate of the rows of all ranks, padded to as many on each; what the communicator of the context carries stays.
TEST(ShardPools, PrefillRanksReceiveTokens) {
  Scene scene(Scene::pools(Kind::prefill));
  for (int step = 0; step < 2; ++step) {
    const uint64_t before = scene.prefill[0]->received_bytes();
    for (const Thrown& t : scene.run()) ASSERT_EQ(t.status, Status::ok) << t.sentence;
    if (step == 0) continue;  // with the comparison of what they are
    const uint64_t each = 10, row = 2 * 2 * static_cast<uint64_t>(scene.spec.head_dim);
    EXPECT_EQ(scene.prefill[0]->received_bytes() - before - kHashes, (kWorld - 1) * each * row);
  }
}

/// All shapes are looked at before the first write, the expansion's too.
TEST(ShardPools, AStepThatIsRefusedHasWrittenNothing) {
  const std::vector<std::pair<void (*)(IndexerStep&), const char*>> faults = {
      {[](IndexerStep& s) { s.out.scores = s.out.indices, s.out.scores.dtype = DType::f32; },
       "out.scores must be absent"},
      {[](IndexerStep& s) { s.rows.start = s.rows.end; }, "rows.start must be absent"},
      {[](IndexerStep& s) { s.hadamard = true; }, "norm, rope and hadamard must be absent"},
      {[](IndexerStep& s) { s.out.indices.shape[1] = 10; }, "out.indices must be"},
      {[](IndexerStep& s) { s.q.weights = Tensor{}; }, "q.weights must be"},
      {[](IndexerStep& s) { s.tail.shape[2] = 3; }, "tail must be"},
      {[](IndexerStep& s) { s.rows.request = Tensor{}; }, "rows.request must be"},
      {[](IndexerStep& s) { s.positions.shape[0] = 5; }, "positions must be"},
  };
  for (const Kind kind : {Kind::context, Kind::rows, Kind::prefill, Kind::prefill_context}) {
    for (const auto& [change, sentence] : faults) {
      // Of prefill ranks without a context each answers its own rows, as one rank does.
      if (kind == Kind::prefill && std::string(sentence).find("rows.request") == 0) continue;
      Scene scene(Scene::pools(kind));
      scene.spec.change = change;
      for (const Thrown& t : scene.run()) {
        EXPECT_NE(t.status, Status::ok) << sentence;
        EXPECT_THAT(t.sentence, HasSubstr(sentence));
      }
      EXPECT_FALSE(scene.written()) << sentence;
    }
  }
}

/// Pools, or rows of a buffer that is wider than they are, wait in the workspace for the exchange.
TEST(ShardPools, WithoutAWorkspaceNothingIsWritten) {
  for (const Kind kind : {Kind::context, Kind::rows}) {
    for (const bool pools : {true, false}) {
      Scene scene(Scene::pools(kind));
      scene.spec.pools = pools, scene.spec.without_workspace = true;
      const StepData data = step_data(scene.spec, {{1, 0, 30, false, &scene.tokens}}, 1);
      const auto thrown = run_ranks(kWorld, [&](int32_t rank) {
        const auto r = static_cast<size_t>(rank);
        answer_rank(scene.spec, scene.replicas[r], data, rank, {scene.comms[r].get(), nullptr}, on("ref"));
      });
      for (const Thrown& t : thrown) EXPECT_THAT(t.sentence, HasSubstr("exec.workspace_bytes must be at least"));
      EXPECT_FALSE(scene.written()) << kind_name(kind) << (pools ? ", pools" : ", keys");
    }
  }
}

class ShardPoolsOn : public BackendTest {};

TEST_P(ShardPoolsOn, OptionalPartsOfAStep) {
  const std::vector<void (*)(IndexerStep&)> changes = {
      [](IndexerStep& s) { s.out.indices = Tensor{}; },
      [](IndexerStep& s) { s.out.slots = s.out.counts = Tensor{}, s.out.slot_map = {}; },
      [](IndexerStep& s) { s.positions = Tensor{}; },
      [](IndexerStep& s) { s.gate = Tensor{}; },
      [](IndexerStep& s) { s.k = s.slot_mapping = Tensor{}; },
      [](IndexerStep& s) { s.tail = s.tail_slots = Tensor{}; },
      [](IndexerStep& s) { s.cleared = true; },
      [](IndexerStep& s) { s.skip_step = true; },
      [](IndexerStep& s) { s.rows.max_len = 8; },  // fewer pools than are to be chosen: smaller rows travel
  };
  for (const Kind kind : {Kind::context, Kind::rows, Kind::prefill, Kind::prefill_context}) {
    for (size_t i = 0; i < changes.size(); ++i) {
      ClusterSpec spec = Scene::pools(kind);
      if (i + 1 == changes.size()) spec.topk = 64;
      spec.suit(GetParam());
      Scene scene(spec);
      Replica alone(scene.spec, Shard{}, 1);
      alone.make_room(scene.data);
      scene.spec.change = changes[i];
      const Answer want = answer_alone(scene.spec, alone, scene.data, exec());
      const auto thrown = run_ranks(kWorld, [&](int32_t rank) {
        const auto r = static_cast<size_t>(rank);
        const Answer own = answer_rank(scene.spec, scene.replicas[r], scene.data, rank,
                                       {scene.comms[r].get(), scene.prefill[r].get()}, exec());
        EXPECT_EQ(difference(want, own), "") << kind_name(kind) << ", change " << i << ", rank " << rank;
      });
      for (const Thrown& t : thrown) EXPECT_EQ(t.status, Status::ok) << "change " << i << ": " << t.sentence;
    }
  }
}
TOPKEY_ON_EVERY_BACKEND(ShardPoolsOn);

}  // namespace
}  // namespace topkey::testing
