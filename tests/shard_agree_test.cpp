// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A step that one rank has otherwise than its peers: what it stores, how many rows, how long, cut how. All ranks are told
// what and who, in the first step of a communicator and in any later one, and no cache has been written then.
#include <gmock/gmock.h>

#include <cstring>

#include "tests/cluster.h"

namespace topkey::testing {
namespace {

using ::testing::HasSubstr;

/// One request of 30 tokens for ranks of one kind.
class Ranks {
 public:
  Ranks(const ClusterSpec& spec, int32_t world)
      : spec_(spec), comms_(local_communicators(world)), prefill_(local_communicators(world)) {
    spec_.world = world;
    for (uint64_t t = 0; t < 200; ++t) tokens_.push_back(t + 1);
    data_ = step_data(spec_, {{0, 0, 30, false, &tokens_}}, 1);
    for (int32_t r = 0; r < world; ++r) {
      replicas_.push_back(replica_of(spec_, r));
      replicas_.back().make_room(data_);
    }
  }

  /// The last rank's step is changed.
  std::vector<Thrown> step(void (*change)(IndexerStep&), void (*change_shard)(ShardStep&)) {
    const int32_t world = spec_.world;
    return run_ranks(world, [&](int32_t rank) {
      const auto r = static_cast<size_t>(rank);
      ClusterSpec own = spec_;
      if (rank == world - 1) own.change = change, own.change_rank = change_shard;
      answer_rank(own, replicas_[r], data_, rank, {comms_[r].get(), prefill_[r].get()}, Exec{});
    });
  }

  /// Pages and tails of all ranks.
  std::vector<uint8_t> caches() const {
    std::vector<uint8_t> all;
    for (const Replica& replica : replicas_) {
      for (const Tensor& t : {replica.cache().pages, replica.tail().view()}) {
        if (t.data == nullptr) continue;
        int64_t bytes = support::dtype_bytes(t.dtype);
        for (int32_t d = 0; d < t.ndim; ++d) bytes *= t.shape[d];
        const auto* data = static_cast<const uint8_t*>(t.data);
        all.insert(all.end(), data, data + bytes);
      }
    }
    return all;
  }

 private:
  ClusterSpec spec_;
  std::vector<std::unique_ptr<Communicator>> comms_, prefill_;
  std::vector<uint64_t> tokens_;
  StepData data_;
  std::vector<Replica> replicas_;
};

struct Odd {
  Kind kind;
  bool pools;
  void (*change)(IndexerStep&);
  void (*change_shard)(ShardStep&);
  const char *name, *others, *own;  ///< null: some values
};

void expect_told(const Odd& odd, int32_t world, bool first) {
  ClusterSpec spec;
  spec.kind = odd.kind, spec.pools = odd.pools, spec.ratio = odd.pools ? 2 : 1;
  Ranks ranks(spec, world);
  if (!first) {
    for (const Thrown& t : ranks.step(nullptr, nullptr)) ASSERT_EQ(t.status, Status::ok) << t.sentence;
  }
  const std::vector<uint8_t> before = ranks.caches();
  const std::vector<Thrown> thrown = ranks.step(odd.change, odd.change_shard);
  const std::string last = " on rank " + std::to_string(world - 1);
  for (const Thrown& t : thrown) {
    EXPECT_EQ(t.status, Status::peer_error) << t.sentence;
    EXPECT_EQ(t.sentence, thrown[0].sentence);
    EXPECT_THAT(t.sentence, HasSubstr(std::string(odd.name) + " must be the same on every rank, got "));
    const std::string others = odd.others != nullptr ? odd.others : "";
    EXPECT_THAT(t.sentence, HasSubstr(others + " on rank 0"));
    EXPECT_THAT(t.sentence, HasSubstr((odd.own != nullptr ? " and " + std::string(odd.own) : "") + last));
  }
  EXPECT_EQ(ranks.caches(), before) << "written: " << odd.name;
}

void expect_all_told(const std::vector<Odd>& odds) {
  for (const Odd& odd : odds) {
    for (const int32_t world : {2, 3, 4}) {
      for (const bool first : {true, false}) {
        SCOPED_TRACE(std::string(kind_name(odd.kind)) + (odd.pools ? ", pools, " : ", ") + odd.name + ", " +
                     std::to_string(world) + " ranks, " + (first ? "first step" : "second step"));
        expect_told(odd, world, first);
      }
    }
  }
}

/// Without one of them the layer stores nothing: its peers would wait for its keys, or find none of them later.
TEST(ShardAgree, WhatIsStored) {
  std::vector<Odd> odds;
  for (const Kind kind : {Kind::prefill, Kind::context, Kind::rows}) {
    odds.push_back({kind, true, [](IndexerStep& s) { s.gate = Tensor{}; }, nullptr, "gate", "given", "absent"});
    odds.push_back({kind, true, [](IndexerStep& s) { s.ape = Tensor{}; }, nullptr, "ape", "given", "absent"});
    odds.push_back(
        {kind, true, [](IndexerStep& s) { s.positions = Tensor{}; }, nullptr, "positions", "given", "absent"});
    odds.push_back(
        {kind, false, [](IndexerStep& s) { s.k = s.slot_mapping = Tensor{}; }, nullptr, "k", "given", "absent"});
  }
  expect_all_told(odds);
}

TEST(ShardAgree, HowManyKeysARankBrings) {
  const auto fewer = [](IndexerStep& s) { s.slot_mapping.shape[0] -= 12; };  // of 2, 3 or 4 ranks
  expect_all_told(
      {{Kind::prefill, false, fewer, nullptr, "new keys of a rank", nullptr, nullptr},
       {Kind::prefill, true, [](IndexerStep& s) { --s.k.shape[0]; }, nullptr, "new keys of a rank", nullptr, nullptr}});
}

TEST(ShardAgree, RowsAndLengths) {
  const auto fewer = [](IndexerStep& s) { --s.rows.count, --s.rows.end.shape[0]; };
  const auto shorter = [](IndexerStep& s) { s.rows.max_len = 5; };
  const auto total = [](ShardStep& s) { --s.total_keys; };
  const auto requests = [](ShardStep& s) { --s.key_indptr.shape[0]; };
  expect_all_told({{Kind::context, false, fewer, nullptr, "rows.count", "30", "29"},
                   {Kind::context, true, fewer, nullptr, "rows.count", "30", "29"},
                   {Kind::context, false, shorter, nullptr, "rows.max_len (up to topk)", "12", "5"},
                   {Kind::prefill_context, false, shorter, nullptr, "rows.max_len (up to topk)", "12", "5"},
                   {Kind::prefill_context, false, nullptr, total, "total_keys", "33", "32"},
                   {Kind::prefill_context, false, nullptr, requests, "requests of key_indptr", "1", "0"}});
}

TEST(ShardAgree, HowRowsAreCut) {
  static const int64_t sizes[] = {30, 0, 0, 0};
  const auto cut = [](ShardStep& s) { s.row_shard_sizes = sizes; };
  const auto no_scores = [](IndexerStep& s) { s.out.scores = Tensor{}; };
  const auto no_slots = [](IndexerStep& s) { s.out.slots = Tensor{}, s.out.slot_map = {}; };
  expect_all_told({{Kind::rows, false, nullptr, cut, "row_shard_sizes", nullptr, nullptr},
                   {Kind::rows, false, no_scores, nullptr, "out.scores", "given", "absent"},
                   {Kind::rows, false, no_slots, nullptr, "out.slots", "given", "absent"}});
}

/// A row count that all ranks share may be another in each step, and nothing is asked of what is no matter.
TEST(ShardAgree, StepsMayDiffer) {
  ClusterSpec spec;
  Ranks ranks(spec, 3);
  for (int step = 0; step < 3; ++step) {
    // More than topk is as good as topk.
    for (const Thrown& t : ranks.step([](IndexerStep& s) { s.rows.max_len = 30; }, nullptr)) {
      EXPECT_EQ(t.status, Status::ok) << t.sentence;
    }
  }
}

}  // namespace
}  // namespace topkey::testing
