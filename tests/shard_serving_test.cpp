// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A serving day on several ranks: requests arrive, are prefilled in chunks, decode with drafts that are partly
// rejected, are preempted and give their pages to others, finish. Each step every rank's layer answers from its own
// cache, and the layer of one rank with everything from its own: equal, bit for bit, under each kind of sharding.
// (That the one rank is right is what serving_test.cpp shows.)
#include <algorithm>

#include "tests/backend_test.h"
#include "tests/cluster.h"

namespace topkey::testing {
namespace {

struct Request {
  uint64_t id;
  int64_t prompt, finish, cached = 0, rows = 0;
  std::vector<uint64_t> tokens;
  bool decodes() const { return cached + 1 >= prompt; }
};

class Day {
 public:
  Day(const ClusterSpec& spec, std::string backend)
      : spec_(spec),
        backend_(std::move(backend)),
        random_(spec.seed),
        alone_(spec, Shard{}, spec.seed),
        comms_(local_communicators(spec.world)),
        prefill_(local_communicators(spec.world)) {
    for (int32_t r = 0; r < spec.world; ++r) replicas_.push_back(replica_of(spec, r));
  }

  void step() {
    arrive();
    StepData data = schedule();
    while (!has_room(data)) {
      preempt();
      data = schedule();
    }
    const Answer want = answer_alone(spec_, alone_, data, on(backend_));
    std::vector<std::string> differences(replicas_.size());
    const auto thrown = run_ranks(spec_.world, [&](int32_t rank) {
      const auto r = static_cast<size_t>(rank);
      Exec exec = on(backend_);
      exec.threads = 1;
      // Nothing is wild, so that strict changes nothing. A GPU's backend does not have it.
      exec.strict = exec.device == Device::cpu && data.rows.size() % 2 == 0;
      differences[r] =
          difference(want, answer_rank(spec_, replicas_[r], data, rank, {comms_[r].get(), prefill_[r].get()}, exec));
    });
    for (size_t r = 0; r < differences.size(); ++r) {
      ASSERT_EQ(thrown[r].status, Status::ok) << "rank " << r << ": " << thrown[r].sentence;
      ASSERT_EQ(differences[r], "") << "rank " << r;
    }
    answered += static_cast<int64_t>(data.rows.size());
    mixed += data.decode_rows > 0 && data.decode_rows < static_cast<int64_t>(data.rows.size());
    advance();
  }
  int64_t answered = 0, mixed = 0, preempted = 0, finished = 0, rejected = 0;

 private:
  void arrive() {
    while (running_.size() < 6 && random_.chance(0.4)) {
      Request r{};
      r.id = next_id_++;
      r.prompt = random_.between(1, spec_.max_tokens * 3 / 4);
      r.finish = std::min(spec_.max_tokens - 4, r.prompt + random_.between(1, 40));
      for (int64_t t = 0; t < spec_.max_tokens; ++t) r.tokens.push_back(random_.next());
      running_.push_back(std::move(r));
    }
  }
  StepData schedule() {
    std::stable_sort(running_.begin(), running_.end(),
                     [](const Request& a, const Request& b) { return a.decodes() > b.decodes(); });
    std::vector<Turn> turns;
    for (Request& r : running_) {
      r.rows = r.decodes() ? random_.between(1, 3) : std::min(r.prompt - r.cached, random_.between(0, 25));
      turns.push_back({r.id, r.cached, r.rows, r.decodes(), &r.tokens});
    }
    return step_data(spec_, turns, random_.next());
  }
  bool has_room(const StepData& data) {
    bool all = alone_.make_room(data);
    for (Replica& r : replicas_) all = r.make_room(data) && all;
    return all;
  }
  void forget(uint64_t id) {
    alone_.forget(id);
    for (Replica& r : replicas_) r.forget(id);
  }
  /// The last one gives its pages back and starts over.
  void preempt() {
    Request& last = running_.back();
    forget(last.id);
    if (last.cached == 0) {
      running_.pop_back();
    } else {
      last.prompt = std::max(last.prompt, last.cached), last.cached = 0;
    }
    ++preempted;
  }
  void advance() {
    std::vector<Request> kept;
    for (Request& r : running_) {
      const int64_t accepted = r.decodes() && r.rows > 0 ? random_.between(1, r.rows) : r.rows;
      rejected += r.rows - accepted;
      // A rejected draft's key stays as rubbish until the token that comes instead is written over it.
      for (int64_t t = r.cached + accepted; t < r.cached + r.rows; ++t)
        r.tokens[static_cast<size_t>(t)] = random_.next();
      r.cached += accepted;
      if (r.cached < r.finish) {
        kept.push_back(std::move(r));
      } else {
        forget(r.id), ++finished;
      }
    }
    running_ = std::move(kept);
  }

  ClusterSpec spec_;
  std::string backend_;
  Random random_;
  Replica alone_;
  std::vector<Replica> replicas_;
  std::vector<std::unique_ptr<Communicator>> comms_, prefill_;
  std::vector<Request> running_;
  uint64_t next_id_ = 1;
};

void live_through(ClusterSpec spec, const std::string& backend) {
  spec.suit(backend);
  Day day(spec, backend);
  for (int step = 0; step < 100; ++step) {
    SCOPED_TRACE(spec.text() + ", step " + std::to_string(step));
    day.step();
    if (::testing::Test::HasFailure()) return;
  }
  // A day in which little happened would test little.
  EXPECT_GT(day.answered, 500) << spec.text();
  EXPECT_GT(day.mixed, 15) << spec.text();
  EXPECT_GT(day.finished, 3) << spec.text();
  EXPECT_GT(day.preempted, 3) << spec.text();
  EXPECT_GT(day.rejected, 10) << spec.text();
}

class ShardServing : public BackendTest {};

TEST_P(ShardServing, EveryAnswerOfADayEqualsOneRanks) {
  uint64_t seed = 1;
  for (const Kind kind : {Kind::context, Kind::rows, Kind::prefill, Kind::prefill_context}) {
    for (const int32_t world : {2, 5}) {
      ClusterSpec spec;
      spec.kind = kind, spec.world = world, spec.interleave = world == 2 ? 4 : 1, spec.seed = seed++;
      spec.format = world == 2 ? KeyFormat::fp8 : KeyFormat::bf16, spec.ratio = world == 2 ? 4 : 1;
      spec.pool_pages = world == 2 ? 10 : 26, spec.rope = true, spec.topk = 20;
      if (kind == Kind::context) spec.role = CandidateRole::source;
      live_through(spec, GetParam());
      if (HasFailure()) return;
    }
  }
}

/// Pools of tokens of which some were drafts: a pool is completed again when the draft in it was rejected.
TEST_P(ShardServing, EveryAnswerOfADayOfPoolsEqualsOneRanks) {
  uint64_t seed = 11;
  for (const Kind kind : {Kind::context, Kind::rows, Kind::prefill, Kind::prefill_context}) {
    for (const int32_t size : {1, 2, 4, 16}) {
      ClusterSpec spec;
      spec.pools = true, spec.kind = kind, spec.ratio = size, spec.seed = seed++;
      spec.world = size == 4 ? 8 : size == 16 ? 3 : 2, spec.interleave = size == 2 ? 16 : size == 1 ? 64 : 1;
      spec.format = size == 1 || size == 4 ? KeyFormat::fp8 : KeyFormat::mxfp4;
      spec.page_size = 32 / size, spec.pool_pages = 18, spec.topk = size == 16 ? 32 : 20;
      spec.padding = kind == Kind::context ? 2 : 0;
      spec.shard_decode = kind == Kind::prefill && size == 4;
      if (size == 4 && kind == Kind::context) spec.role = CandidateRole::source, spec.force_last = 1;
      live_through(spec, GetParam());
      if (HasFailure()) return;
    }
  }
}
TOPKEY_ON_EVERY_BACKEND(ShardServing);

}  // namespace
}  // namespace topkey::testing
