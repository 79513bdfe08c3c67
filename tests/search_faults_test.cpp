// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `search` where things go wrong or apart: wild page ids, requests and lengths are not live and counted,
// `strict` raises before anything is written, and the selections of shards merge to that of the whole.
#include <algorithm>
#include <cstring>

#include "tests/draw.h"

namespace topkey::testing {
namespace {

/// Some entries of the block table replaced by ids that name no page; the table is the problem's own copy.
void corrupt_table(Problem& p, Random& random) {
  const Tensor& t = p.block_table.view();
  for (int64_t line = 0; line < t.shape[0]; ++line) {
    for (int64_t c = 0; c < t.shape[1]; ++c) {
      if (!random.chance(0.3)) continue;
      const int32_t wild[] = {-1, static_cast<int32_t>(p.pages.view().shape[0]), 1000000000, -2147483647, 2147483647};
      std::memcpy(element(t, line, c), &wild[random.below(5)], sizeof(int32_t));
    }
  }
}

TEST(SearchFaults, WildPageIdsAreNotLiveAndCounted) {
  Tally tally("paged_mqa_topk, wild pages");
  for (const std::string& backend : every_backend()) {
    property("wild page ids are skipped and counted", 1000, [&] {
      ProblemSpec spec = draw_spec(true);
      spec.max_len = 0;
      Problem p = make_problem(spec);
      Random random(spec.seed);
      corrupt_table(p, random);
      Borrowed borrowed;
      const auto topk = static_cast<int32_t>(draw(1, 40));
      const Outputs outputs(p.count(), topk,
                            draw_want(borrowed, random, p.count(), spec.keys, std::max<int64_t>(p.count(), 12)));
      PagedMqaTopk args = p.paged_search(topk, outputs.selection());
      args.admit = draw_admit(borrowed, random, p.count(), spec.keys, false);
      RC_LOG() << p.text() << " topk " << topk;
      if (!tally.runs(args, on(backend), label_of(backend, spec))) return;
      const Logits logits(DType::f32, p.count(), p.width());
      const PagedMqaLogits score = p.paged_logits(logits.view());
      run(score, on(backend));
      require(compare_scores(score, truth_of(score.q, score.keys, score.rows, false),
                             spec.exact ? "ref" : arithmetic(backend.c_str(), spec.format, query_dtype(spec)), 0));
      uint64_t stats[kNumStats] = {};
      run(args, on(backend, stats));
      require(compare_selection(args, logits.view(), stats));
      require_inside(outputs);
    });
  }
}

/// A small paged problem that nothing is wrong with, 64 keys in pages of 16.
Problem sound_problem(bool wide_windows = false) {
  ProblemSpec spec;
  spec.paged = true, spec.requests = 2, spec.rows = 4, spec.keys = 64, spec.page_size = 16;
  spec.windows = wide_windows ? Windows::full : Windows::causal;
  return make_problem(spec);
}

struct Fault {
  const char* name;
  std::function<void(Problem&, PagedMqaTopk&)> make;
};

const std::vector<Fault>& faults() {
  static const std::vector<Fault> all = {
      {"page id beyond the cache", [](Problem& p, PagedMqaTopk&) { p.block_table.as<int32_t>()[0] = 1000; }},
      {"negative page id", [](Problem& p, PagedMqaTopk&) { p.block_table.as<int32_t>()[0] = -1; }},
      {"request beyond the table", [](Problem& p, PagedMqaTopk&) { p.request.as<int32_t>()[1] = 2; }},
      {"length beyond the table", [](Problem& p, PagedMqaTopk&) { p.end.as<int32_t>()[0] = 16 * 5 + 1; }},
      {"length beyond max_len", [](Problem&, PagedMqaTopk& a) { a.rows.max_len = 7; }},
  };
  return all;
}

/// Row 0 belongs to request 0 (64 keys), so that every fault above meets a live key.
Problem faulty_problem() {
  Problem p = sound_problem();
  p.request = Array::of({0, 0, 1, 1});
  p.end = Array::of({64, 64, 1, 1});
  p.row_request = {0, 0, 1, 1};
  return p;
}

TEST(SearchFaults, StrictRaisesBeforeAnythingIsWritten) {
  Tally tally("paged_mqa_topk, strict");
  for (const std::string& backend : every_backend()) {
    for (const Fault& fault : faults()) {
      Problem p = faulty_problem();
      Want want;
      want.scores = want.counts = true;
      want.blocks = 2, want.block_size = 8;
      const Outputs outputs(p.count(), 70, want);
      PagedMqaTopk args = p.paged_search(70, outputs.selection());
      fault.make(p, args);
      uint64_t stats[kNumStats] = {};
      Exec exec = on(backend, stats);
      exec.strict = true;
      if (!tally.runs(args, exec, backend)) continue;
      const Thrown thrown = thrown_by([&] { run(args, exec); });
      EXPECT_EQ(thrown.status, Status::invalid_argument) << fault.name;
      EXPECT_EQ(thrown.sentence.rfind("paged_mqa_topk: ", 0), 0u) << fault.name << ": " << thrown.sentence;
      EXPECT_TRUE(outputs.untouched()) << fault.name;
      EXPECT_TRUE(std::all_of(stats, stats + kNumStats, [](uint64_t word) { return word == 0; })) << fault.name;
      exec.strict = false;
      run(args, exec);
      EXPECT_GT(stats[kSkippedPages], 0u) << fault.name;
    }
  }
}

TEST(SearchFaults, StrictLogitsRaiseBeforeAnythingIsWritten) {
  Tally tally("paged_mqa_logits, strict");
  for (const std::string& backend : every_backend()) {
    for (size_t i = 0; i < 4; ++i) {  // max_len is an argument of its own below
      Problem p = faulty_problem();
      PagedMqaTopk unused{};
      const Logits logits(DType::f32, p.count(), p.width());
      const PagedMqaLogits args = p.paged_logits(logits.view());
      faults()[i].make(p, unused);
      Exec exec = on(backend);
      exec.strict = true;
      if (!tally.runs(args, exec, backend)) continue;
      EXPECT_EQ(thrown_by([&] { run(args, exec); }).status, Status::invalid_argument) << faults()[i].name;
      EXPECT_TRUE(logits.memory.untouched()) << faults()[i].name;
    }
  }
}

TEST(SearchFaults, StrictDenseAndTopk) {
  Tally tally("mqa_topk and topk, strict");
  for (const std::string& backend : every_backend()) {
    ProblemSpec spec;
    spec.rows = 2, spec.keys = 20;
    const Problem p = make_problem(spec);
    const Array ends = Array::of({20, 21}), starts = Array::of({0, -1});
    for (const bool by_start : {false, true}) {
      const Outputs outputs(2, 30, Want{});
      MqaTopk args = p.dense_search(30, outputs.selection());
      (by_start ? args.rows.start : args.rows.end) = by_start ? starts.view() : ends.view();
      Exec exec = on(backend);
      exec.strict = true;
      if (!tally.runs(args, exec, backend)) continue;
      EXPECT_EQ(thrown_by([&] { run(args, exec); }).status, Status::invalid_argument) << by_start;
      const Array scores(DType::f32, {2, 20});
      Topk select{};
      select.scores = scores.view(), select.rows = args.rows, select.topk = 30, select.out = args.out;
      EXPECT_EQ(thrown_by([&] { run(select, exec); }).status, Status::invalid_argument) << by_start;
      EXPECT_TRUE(outputs.untouched());
    }
  }
}

TEST(SearchFaults, StrictAcceptsWhatIsSound) {
  Tally tally("paged_mqa_topk, strict and sound");
  for (const std::string& backend : every_backend()) {
    const Problem p = sound_problem(true);
    const Outputs outputs(p.count(), 9, Want{});
    const PagedMqaTopk args = p.paged_search(9, outputs.selection());
    Exec exec = on(backend);
    exec.strict = true;
    if (!tally.runs(args, exec, backend)) continue;
    const Thrown thrown = thrown_by([&] { run(args, exec); });
    EXPECT_EQ(thrown.status, Status::ok) << thrown.sentence;
  }
}

/// A shape that is wrong on the host raises without a byte written, strict or not.
TEST(SearchFaults, WrongShapesRaise) {
  Tally tally("paged_mqa_topk, wrong shape");
  for (const std::string& backend : every_backend()) {
    const Problem p = sound_problem();
    const Outputs outputs(p.count(), 9, Want{});
    PagedMqaTopk args = p.paged_search(9, outputs.selection());
    if (!tally.runs(args, on(backend), backend)) continue;
    args.topk = 10;  // wider than the output
    const Thrown thrown = thrown_by([&] { launch(args, on(backend)); });
    EXPECT_EQ(thrown.status, Status::invalid_argument);
    EXPECT_NE(thrown.sentence.find("out.indices"), std::string::npos) << thrown.sentence;
    EXPECT_TRUE(outputs.untouched());
  }
}

/// The parts of `world` ranks side by side, as an all-gather leaves them.
struct Gathered {
  Array scores, indices;
};

Gathered search_shards(const Problem& whole, int32_t world, int32_t interleave, int32_t topk,
                       const std::string& backend) {
  Gathered parts{Array(DType::f32, {world, whole.count(), topk}), Array(DType::i32, {world, whole.count(), topk})};
  for (int32_t rank = 0; rank < world; ++rank) {
    const Problem part = shard_of(whole, {rank, world, interleave});
    Want want;
    want.scores = true;
    want.order = rank % 2 == 0 ? Order::score : Order::position;
    const Outputs outputs(part.count(), topk, want);
    const PagedMqaTopk args = part.paged_search(topk, outputs.selection());
    uint64_t stats[kNumStats] = {};
    run(args, on(backend, stats));
    Logits logits(DType::f32, part.count(), part.width());
    run(part.paged_logits(logits.view()), on(backend));
    require(compare_selection(args, logits.view(), stats));
    require_inside(outputs);
    for (int64_t r = 0; r < whole.count(); ++r) {
      for (int64_t c = 0; c < topk; ++c) {
        const int64_t at = (rank * whole.count() + r) * topk + c;
        parts.indices.as<int32_t>()[at] = static_cast<int32_t>(int_at(args.out.indices, r, c));
        parts.scores.as<float>()[at] = float_at(args.out.scores, r, c);
      }
    }
  }
  return parts;
}

TEST(SearchShards, MergedShardsEqualTheWhole) {
  Tally tally("paged_mqa_topk under a shard, merge_topk");
  for (const std::string& backend : every_backend()) {
    property("merged shards equal the whole", 500, [&] {
      ProblemSpec spec = draw_spec(true);
      if (spec.windows == Windows::random || spec.windows == Windows::wild) spec.windows = Windows::causal;  // no start
      spec.max_len = 0;
      const Problem p = make_problem(spec);
      const auto topk = static_cast<int32_t>(draw(1, 50));
      const auto world = static_cast<int32_t>(draw(1, 8));
      const int32_t interleave = draw_of({1, 4, 64, 0});
      RC_LOG() << p.text() << " topk " << topk << " world " << world << " interleave " << interleave;
      Want want;
      want.scores = want.counts = true;
      want.order = draw_of({Order::score, Order::position});
      const Outputs whole(p.count(), topk, want), merged(p.count(), topk, want);
      const PagedMqaTopk args = p.paged_search(topk, whole.selection());
      if (!tally.runs(args, on(backend), label_of(backend, spec))) return;
      run(args, on(backend));
      const Gathered parts = search_shards(p, world, interleave, topk, backend);
      MergeTopk merge{};
      merge.scores = parts.scores.view(), merge.indices = parts.indices.view(), merge.topk = topk;
      merge.rows.count = p.count(), merge.out = merged.selection();
      run(merge, on(backend));
      RC_ASSERT(same_outputs(whole.selection(), merged.selection(), p.count(), topk));
    });
  }
}

}  // namespace
}  // namespace topkey::testing
