// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Threads of a call, for every operation: the caller's team, OpenMP and one thread give the same bits and statistics;
// a caller's team starts no thread; errors reach every member that they should. The layer likewise.
#include <dirent.h>

#include "tests/work.h"

namespace topkey::testing {
namespace {

int tasks() {
  DIR* dir = opendir("/proc/self/task");
  int n = 0;
  while (dir != nullptr && readdir(dir) != nullptr) ++n;
  if (dir != nullptr) closedir(dir);
  return n - 2;
}

struct Result {
  std::vector<uint8_t> bytes;
  std::vector<uint64_t> stats;
  bool operator==(const Result& o) const { return bytes == o.bytes && stats == o.stats; }
};
Result run_threads(const Work& w, const std::string& backend, int32_t threads) {
  std::vector<uint64_t> stats(kNumStats);
  Exec exec = on(backend, stats.data());
  const Room room(workspace_of(w, exec));
  room.give(exec);
  exec.threads = threads;
  poison(w);
  launch_work(w, exec);
  EXPECT_TRUE(room.kept()) << w.name;
  return {snapshot(w), stats};
}
Result run_team(const Work& w, const std::string& backend, int32_t members) {
  std::vector<uint64_t> stats(kNumStats);
  Exec exec = on(backend, stats.data());
  const Room room(workspace_of(w, exec));
  room.give(exec);
  poison(w);
  Crew crew(members);
  run_crew(
      crew, [&](const Exec& e) { launch_work(w, e); }, exec);
  EXPECT_TRUE(room.kept()) << w.name;
  for (const Thrown& t : crew.thrown) EXPECT_EQ(t.status, Status::ok) << w.name << ": " << t.sentence;
  return {snapshot(w), stats};
}

/// First, before OpenMP has threads of its own that come and go.
TEST(Team, StartsNoThread) {
  for (const std::string& backend : host_backends()) {
    for (const Work& w : all_work()) {
      Exec exec = on(backend);
      const Room room(workspace_of(w, exec));
      room.give(exec);
      Crew crew(3);
      const int before = tasks();
      std::atomic<int> most{0};
      crew.at_barrier = [&] {
        const int now = tasks();
        for (int seen = most; now > seen && !most.compare_exchange_weak(seen, now);) continue;
      };
      run_crew(
          crew, [&](const Exec& e) { launch_work(w, e); }, exec);
      EXPECT_EQ(most, before + 3) << backend << " " << w.name;
      EXPECT_EQ(tasks(), before) << backend << " " << w.name;
    }
  }
}

TEST(Team, EqualsOpenMpThreadsBitForBit) {
  for (const std::string& backend : host_backends()) {
    for (const Work& w : all_work()) {
      const Result one = run_threads(w, backend, 1);
      for (const int32_t n : {1, 2, 3, 4, 5}) {
        const Result team = run_team(w, backend, n);
        EXPECT_TRUE(team.bytes == one.bytes) << backend << " " << w.name << ", a team of " << n;
        EXPECT_EQ(team.stats, one.stats) << backend << " " << w.name << ", a team of " << n;
        EXPECT_TRUE(run_threads(w, backend, n) == team) << backend << " " << w.name << ", " << n << " threads";
      }
    }
  }
}

/// In the workspace that is asked for, which does not depend on the threads; more of them than it has room for are
/// idle.
TEST(Team, AnyNumberOfThreadsFitsTheWorkspace) {
  for (const std::string& backend : host_backends()) {
    for (const Work& w : all_work()) {
      const Result one = run_threads(w, backend, 1);
      for (const int32_t n : {2, 3, 8, 33}) {
        EXPECT_TRUE(run_threads(w, backend, n) == one) << backend << " " << w.name << ", " << n << " threads";
      }
      EXPECT_TRUE(run_team(w, backend, 19) == one) << backend << " " << w.name << ", a team of 19";
    }
  }
}

struct LayerRun {
  std::vector<uint8_t> buffer, cache;
};

/// One step: long rows with keys to store; or short rows without, which are answered before the search's first
/// barrier. 0 members: no team.
LayerRun run_layer(const std::string& backend, bool stores, int32_t members) {
  ProblemSpec spec;
  spec.paged = true, spec.requests = 3, spec.rows = stores ? 40 : 300, spec.keys = stores ? 900 : 40;
  const Problem p = make_problem(spec);
  IndexerConfig config{};
  config.heads = spec.heads, config.head_dim = spec.head_dim, config.topk = 50, config.format = spec.format;
  const SparseAttnIndexer layer(config);
  // Columns that make the clearing slow.
  const Array k = floats({spec.rows, spec.head_dim}, DType::bf16, 3), buffer(DType::i32, {spec.rows, 2000});
  std::vector<int32_t> slots;  // of keys that the rows see
  for (size_t r = 0; stores && r < 40; ++r) slots.push_back(p.page_ids[0][r] * spec.page_size);
  const Array mapping = Array::of(slots);
  IndexerStep step{};
  if (stores) step.k = k.view(), step.slot_mapping = mapping.view();
  step.q = p.query(), step.keys = p.paged_keys(), step.rows = p.rows(), step.out.indices = buffer.view();
  Exec exec = on(backend);
  const Room room(layer.workspace_bytes({0, spec.rows, spec.requests, 2000, 1}, exec));
  room.give(exec);
  if (members == 0) layer.forward(step, exec);
  Crew crew(std::max(members, 1));
  if (members > 0)
    run_crew(
        crew, [&](const Exec& e) { layer.forward(step, e); }, exec);
  for (const Thrown& t : crew.thrown) EXPECT_EQ(t.status, Status::ok) << t.sentence;
  return {{buffer.as<uint8_t>(), buffer.as<uint8_t>() + buffer.bytes()},
          {p.pages.as<uint8_t>(), p.pages.as<uint8_t>() + p.pages.bytes()}};
}

/// One member clears, all store, all search: a late clear or an early search would show, if not every time.
TEST(Team, LayerEqualsOneThread) {
  for (const std::string& backend : host_backends()) {
    for (const bool stores : {false, true}) {
      const LayerRun alone = run_layer(backend, stores, 0);
      for (int32_t i = 0; i < 20; ++i) {
        const LayerRun team = run_layer(backend, stores, i % 5 + 1);
        ASSERT_TRUE(team.buffer == alone.buffer) << backend << ", a team of " << i % 5 + 1;
        ASSERT_TRUE(team.cache == alone.cache) << backend << ", a team of " << i % 5 + 1;
      }
    }
  }
}

// ---- errors under a team -------------------------------------------------------------------------------------------

TEST(Team, WrongArgumentsThrowOnEveryMember) {
  for (const std::string& backend : host_backends()) {
    Work w = dense_work("mqa_topk", 3, 50, Pattern::normal);
    std::get<MqaTopk>(w.args).topk = 0;
    poison(w);
    Crew crew(3);
    run_crew(
        crew, [&](const Exec& e) { launch_work(w, e); }, on(backend));
    for (const Thrown& t : crew.thrown) EXPECT_EQ(t.status, Status::invalid_argument) << backend;
    EXPECT_TRUE(poisoned(w));
  }
}

/// The first page of every request.
void spoil_pages(const Work& w) {
  const Tensor& table = w.problem.block_table.view();
  const int32_t wild = 100000;
  for (int64_t line = 0; line < table.shape[0]; ++line) std::memcpy(element(table, line, 0), &wild, sizeof wild);
}

/// Calls with wild device values.
std::vector<Work> wild_work() {
  std::vector<Work> list;
  list.push_back(paged_work("paged_mqa_topk", 5, 300, Pattern::normal));
  spoil_pages(list.back());
  list.push_back(logits_work(true));
  spoil_pages(list.back());
  list.push_back(dense_work("mqa_topk", 5, 300, Pattern::normal));
  list.back().problem.end.as<int32_t>()[2] = 301;
  list.push_back(gather_work());
  spoil_pages(list.back());
  list.push_back(store_work(false));
  static_cast<int32_t*>(std::get<StoreK>(list.back().args).slot_mapping.data)[7] = 600 * 16;
  list.push_back(rows_work(true));
  static_cast<int32_t*>(std::get<ToSlots>(list.back().args).indices.data)[7] = 1 << 20;
  list.push_back(rows_work(false));
  std::get<ExpandRows>(list.back().args).block_table.shape[1] = 1;
  list.push_back(merge_work());
  std::get<MergeTopk>(list.back().args).out.slot_map.block_table.shape[1] = 0;
  list.push_back(pool_work(false, 4096, 128));
  static_cast<int32_t*>(std::get<PoolK>(list.back().args).slot_mapping.data)[7] = 1 << 20;
  list.push_back(pool_work(true, 4096, 128));
  static_cast<int32_t*>(std::get<CompressK>(list.back().args).state_slots.data)[7] = 8;
  list.push_back(expand_work());
  return list;
}

/// `cpu`: on every member. `ref`, one thread: on rank 0 alone.
TEST(Team, StrictRaisesWhereTheHeaderSays) {
  for (const std::string& backend : host_backends()) {
    for (const Work& w : wild_work()) {
      std::vector<uint64_t> stats(kNumStats);
      Exec exec = on(backend, stats.data());
      const Room room(workspace_of(w, exec));
      room.give(exec);
      exec.strict = true;
      poison(w);
      Crew crew(4);
      run_crew(
          crew, [&](const Exec& e) { launch_work(w, e); }, exec);
      for (size_t rank = 0; rank < crew.thrown.size(); ++rank) {
        const Status want = backend == "ref" && rank > 0 ? Status::ok : Status::invalid_argument;
        EXPECT_EQ(crew.thrown[rank].status, want) << backend << " " << w.name << ", rank " << rank;
        EXPECT_EQ(crew.thrown[rank].sentence, want == Status::ok ? "" : crew.thrown[0].sentence) << w.name;
      }
      EXPECT_TRUE(poisoned(w)) << backend << " " << w.name;
      EXPECT_EQ(stats, std::vector<uint64_t>(kNumStats)) << backend << " " << w.name;
    }
  }
}

}  // namespace
}  // namespace topkey::testing
