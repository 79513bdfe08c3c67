// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Selection strategies that can be forced. A forced one also cuts the smallest of slices, so that shared thresholds and
// the merges of slices, which calls this small would never come to, meet every option: outputs and statistics are those
// of one thread, bit for bit, and the other stage tests compare that one with the oracle.
#include <algorithm>

#include "tests/draw.h"
#include "tests/work.h"

namespace topkey::testing {
namespace {

constexpr const char* kForced[] = {"radix.rows", "radix.team"};

/// `other` holds `args.out`, `one` the same outputs elsewhere. Empty, or what differs between one thread and a forced
/// strategy on several.
template <class Args>
std::string difference(Args args, const Outputs& one, Outputs& other, int64_t rows, int64_t topk, bool counted) {
  uint64_t expected[kNumStats] = {};
  args.out = one.selection();
  run(args, on("cpu", counted ? expected : nullptr));
  args.out = other.selection();
  for (const char* strategy : kForced) {
    for (const int32_t threads : {2, 5}) {
      uint64_t stats[kNumStats] = {};
      other.reset();
      Exec exec = on("cpu", counted ? stats : nullptr);
      exec.strategy = strategy, exec.threads = threads;
      run(args, exec);
      const std::string what = std::string(strategy) + " on " + std::to_string(threads) + " threads: ";
      const ::testing::AssertionResult same = same_outputs(one.selection(), args.out, rows, topk);
      if (!same) return what + same.message();
      if (!std::equal(stats, stats + kNumStats, expected)) return what + "other statistics";
      if (const std::string touched = other.touched_outside(); !touched.empty()) return what + touched;
    }
  }
  return {};
}

TEST(Strategy, DrawnSearchesAreTheSame) {
  for (const bool paged : {false, true}) {
    property(paged ? "forced strategies, paged" : "forced strategies, dense", 200, [&] {
      ProblemSpec spec = draw_spec(paged);
      if (draw_flag()) spec.keys = draw(100, 700);  // more slices
      const Problem p = make_problem(spec);
      Random random(p.spec.seed);
      Borrowed borrowed;
      const auto topk = static_cast<int32_t>(draw(1, draw_flag(4) ? 200 : 30));
      const Want want =
          draw_want(borrowed, random, p.count(), p.spec.keys, std::max<int64_t>(p.spec.requests + 6, p.count()));
      const Outputs one(p.count(), topk, want);
      Outputs other(p.count(), topk, want);
      const Admit admit = draw_admit(borrowed, random, p.count(), p.spec.keys, !paged);
      const bool counted = draw_flag();
      RC_LOG() << p.text() << " topk " << topk;
      if (spec.format == KeyFormat::mxfp4) return;
      if (paged) {
        PagedMqaTopk args = p.paged_search(topk, one.selection());
        args.admit = admit;
        const std::string differs = difference(args, one, other, p.count(), topk, counted);
        if (!differs.empty()) RC_FAIL(differs);
      } else {
        MqaTopk args = p.dense_search(topk, one.selection());
        args.admit = admit;
        const std::string differs = difference(args, one, other, p.count(), topk, counted);
        if (!differs.empty()) RC_FAIL(differs);
      }
    });
  }
}

/// Rows so long that parts overflow, shrink and tell each other their thresholds; every pattern; k small, k large, all
/// but a few keys.
TEST(Strategy, LongRowsOfEveryPatternAreTheSame) {
  constexpr int64_t kColumns = 30000;
  for (const Pattern pattern : all_patterns()) {
    for (const int32_t topk : {5, 3000, 29990}) {
      const Array scores(DType::f32, {2, kColumns});
      for (int64_t r = 0; r < 2; ++r) {
        fill_scores(pattern, scores.as<float>() + r * kColumns, kColumns, topk, static_cast<uint64_t>(topk + r));
      }
      Want want;
      want.scores = want.counts = true, want.blocks = 100, want.block_size = 8;
      const Outputs one(2, topk, want);
      Outputs other(2, topk, want);
      Topk args{};
      args.scores = scores.view(), args.rows.count = 2, args.topk = topk;
      for (const bool plain : {true, false}) {
        args.admit.force_first = args.admit.force_last = plain ? 0 : 7;
        EXPECT_EQ(difference(args, one, other, 2, topk, !plain), "")
            << pattern_name(pattern) << ", topk " << topk << (plain ? "" : ", forced keys and statistics");
      }
    }
  }
}

/// A caller's threads merge together as OpenMP's do.
TEST(Strategy, CallersTeamIsTheSame) {
  for (const Work& w : all_work()) {
    for (const char* strategy : kForced) {
      Exec exec = on("cpu");
      const Room room(workspace_of(w, exec));
      room.give(exec);
      exec.threads = 1;
      poison(w);
      launch_work(w, exec);
      const std::vector<uint8_t> one = snapshot(w);
      exec.strategy = strategy;
      for (const int32_t members : {2, 5}) {
        poison(w);
        Crew crew(members);
        run_crew(
            crew, [&](const Exec& e) { launch_work(w, e); }, exec);
        EXPECT_TRUE(snapshot(w) == one) << w.name << ", " << strategy << ", a team of " << members;
        EXPECT_TRUE(room.kept()) << w.name;
      }
    }
  }
}

}  // namespace
}  // namespace topkey::testing
