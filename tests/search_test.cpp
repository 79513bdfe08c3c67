// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `search`, the product: fused equals unfused bit for bit with every option, exact inputs give every backend
// the oracle's answer, paged equals dense over the gathered keys. Shards, wild values and `strict` are in
// search_faults_test.cpp.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "tests/draw.h"

namespace topkey::testing {
namespace {

/// Logits that the unfused way starts from: all live scores, without mask, whatever max_len (it cuts keys, not scores).
Logits logits_for(const Problem& p, const Exec& exec) {
  Problem all = p;
  all.spec.max_len = 0;
  Logits logits(DType::f32, p.count(), all.width());
  if (p.spec.paged) {
    run(all.paged_logits(logits.view()), exec);
  } else {
    run(all.dense_logits(logits.view()), exec);
  }
  return logits;
}

/// Operation `topk` on the logits gives the same bits, where no visible key is unreadable (it cannot know of pages).
template <class Args>
void follow_with_topk(const Args& search, const Problem& p, const Tensor& logits, const Exec& exec) {
  if (p.spec.paged && p.spec.windows == Windows::wild) return;
  Want want;
  want.indices = search.out.indices.data != nullptr;
  want.slots =
      search.out.slots.data != nullptr && !p.spec.paged;  // of pages: by position; of given scores: by position - start
  if (!want.indices && !want.slots) return;
  want.scores = search.out.scores.data != nullptr, want.counts = search.out.counts.data != nullptr;
  want.blocks = search.out.blocks.data != nullptr ? search.out.blocks.shape[1] : 0,
  want.block_size = search.out.block_size;
  want.order = search.out.order, want.fill = search.out.fill, want.fill_value = search.out.fill_value;
  want.index_base = search.out.index_base, want.slot_map = search.out.slot_map;
  const Outputs outputs(p.count(), search.topk, want);
  Topk args{};
  args.scores = logits, args.rows = search.rows, args.admit = search.admit, args.topk = search.topk;
  args.out = outputs.selection();
  run(args, exec);
  const ::testing::AssertionResult same = same_outputs(search.out, args.out, p.count(), search.topk);
  if (!same) RC_FAIL(std::string("topk on the logits: ") + same.message());
}

template <class Args>
void check_search(const Args& args, const Problem& p, const Outputs& outputs, const std::string& backend,
                  Tally& tally) {
  RC_LOG() << p.text() << " topk " << args.topk;
  if (!tally.runs(args, on(backend), label_of(backend, p.spec))) return;
  const Logits logits = logits_for(p, on(backend));
  uint64_t stats[kNumStats] = {};
  run(args, on(backend, stats));
  require(compare_selection(args, logits.view(), stats));
  require_inside(outputs);
  follow_with_topk(args, p, logits.view(), on(backend));
  Rows all = args.rows;
  all.max_len = 0;
  const Truth truth = truth_of(args.q, args.keys, all, false);
  if (p.spec.exact) {
    require(compare_selection(args, truth.ref.view(), stats));
  } else if (p.spec.pattern == Pattern::normal && args.out.indices.data != nullptr && args.admit.mask.data == nullptr) {
    require(compare_sets(args, truth, arithmetic(backend.c_str(), p.spec.format, query_dtype(p.spec))));
  }
}

TEST(Search, DenseFusedEqualsUnfused) {
  Tally tally("mqa_topk, drawn");
  for (const std::string& backend : every_backend()) {
    property("mqa_topk equals mqa_logits and a full sort", 1500, [&] {
      const Problem p = make_problem(draw_spec(false));
      Random random(p.spec.seed);
      Borrowed borrowed;
      const auto topk = static_cast<int32_t>(draw(1, draw_flag(4) ? 200 : 30));
      const Outputs outputs(p.count(), topk, draw_want(borrowed, random, p.count(), p.spec.keys, p.count()));
      MqaTopk args = p.dense_search(topk, outputs.selection());
      args.admit = draw_admit(borrowed, random, p.count(), p.spec.keys, true);
      check_search(args, p, outputs, backend, tally);
    });
  }
}

TEST(Search, PagedFusedEqualsUnfused) {
  Tally tally("paged_mqa_topk, drawn");
  for (const std::string& backend : every_backend()) {
    property("paged_mqa_topk equals paged_mqa_logits and a full sort", 2000, [&] {
      const Problem p = make_problem(draw_spec(true));
      Random random(p.spec.seed);
      Borrowed borrowed;
      const auto topk = static_cast<int32_t>(draw(1, draw_flag(4) ? 200 : 30));
      // Lines for every request; with request addressing the library wants one a row.
      const int64_t lines = std::max<int64_t>(p.spec.requests + 6, p.count());
      const Outputs outputs(p.count(), topk, draw_want(borrowed, random, p.count(), p.spec.keys, lines));
      PagedMqaTopk args = p.paged_search(topk, outputs.selection());
      args.admit = draw_admit(borrowed, random, p.count(), p.spec.keys, false);
      check_search(args, p, outputs, backend, tally);
    });
  }
}

/// Every pattern, exact and random, at a size where rows are long compared with topk.
TEST(Search, EveryPattern) {
  Tally tally("mqa_topk, patterns");
  for (const std::string& backend : every_backend()) {
    for (const Pairing& pairing : all_pairings()) {
      for (const Pattern pattern : all_patterns()) {
        ProblemSpec spec;
        spec.format = pairing.format, spec.q_dtype = pairing.q, spec.pattern = pattern;
        spec.rows = 3, spec.keys = 700, spec.heads = 3,
        spec.exact = static_cast<int>(pattern) % 2 == static_cast<int>(pairing.format) % 2;
        spec.windows = Windows::causal;
        const Problem p = make_problem(spec);
        Want want;
        want.scores = want.counts = true, want.order = Order::score;
        const Outputs outputs(p.count(), 128, want);
        const MqaTopk args = p.dense_search(128, outputs.selection());
        if (!tally.runs(args, on(backend), label_of(backend, spec))) continue;
        const Logits logits = logits_for(p, on(backend));
        uint64_t stats[kNumStats] = {};
        run(args, on(backend, stats));
        EXPECT_TRUE(good(compare_selection(args, logits.view(), stats))) << p.text();
        if (spec.exact) {
          const Truth truth = truth_of(args.q, args.keys, args.rows, false);
          EXPECT_TRUE(good(compare_selection(args, truth.ref.view(), stats)))
              << p.text() << ", against the oracle's scores";
        }
      }
    }
  }
}

TEST(Search, PagedEqualsDenseOverGatheredKeys) {
  Tally tally("paged_mqa_topk, against dense");
  for (const std::string& backend : every_backend()) {
    property("paged_mqa_topk equals mqa_topk on the gathered keys", 500, [&] {
      ProblemSpec spec = draw_spec(true);
      spec.max_len = 0;
      // Beyond its length a request still has the rest of its last page, which the gathered matrix has not.
      if (spec.windows == Windows::wild) spec.windows = Windows::random;
      const Problem p = make_problem(spec);
      const auto topk = static_cast<int32_t>(draw(1, 40));
      Want want;
      want.scores = want.counts = true;
      want.order = draw_of({Order::score, Order::position});
      want.blocks = 3, want.block_size = 8;
      const Outputs outputs(p.count(), topk, want);
      const PagedMqaTopk args = p.paged_search(topk, outputs.selection());
      RC_LOG() << p.text() << " topk " << topk;
      if (!tally.runs(args, on(backend), label_of(backend, spec))) return;
      run(args, on(backend));
      for (int32_t b = 0; b < spec.requests; ++b) {
        std::vector<int64_t> rows;
        const Problem dense = dense_of(p, b, &rows);
        const Outputs own(dense.count(), topk, want);
        run(dense.dense_search(topk, own.selection()), on(backend));
        const Selection a = args.out, d = own.selection();
        for (size_t i = 0; i < rows.size(); ++i) {
          const auto j = static_cast<int64_t>(i);
          RC_ASSERT(int_at(a.counts, rows[i]) == int_at(d.counts, j));
          for (int64_t c = 0; c < topk; ++c) {
            RC_ASSERT(int_at(a.indices, rows[i], c) == int_at(d.indices, j, c));
            RC_ASSERT(bits_of(float_at(a.scores, rows[i], c)) == bits_of(float_at(d.scores, j, c)));
          }
          for (int64_t c = 0; c < want.blocks; ++c) RC_ASSERT(int_at(a.blocks, rows[i], c) == int_at(d.blocks, j, c));
        }
      }
    });
  }
}

/// A row alone equals the row in a batch; a second call equals the first; threads and max_sms are no inputs.
TEST(Search, NothingButTheArgumentsMatters) {
  Tally tally("paged_mqa_topk, repeats");
  for (const std::string& backend : every_backend()) {
    property("same bits on every call", 300, [&] {
      const Problem p = make_problem(draw_spec(true));
      const auto topk = static_cast<int32_t>(draw(1, 40));
      Want want;
      want.scores = want.counts = true;
      const Outputs first(p.count(), topk, want), again(p.count(), topk, want);
      const PagedMqaTopk args = p.paged_search(topk, first.selection());
      RC_LOG() << p.text() << " topk " << topk;
      if (!tally.runs(args, on(backend), label_of(backend, p.spec))) return;
      run(args, on(backend));
      for (const int32_t threads : {1, 2, 3}) {
        Exec exec = on(backend);
        exec.threads = threads, exec.max_sms = threads;
        run(p.paged_search(topk, again.selection()), exec);
        RC_ASSERT(same_outputs(first.selection(), again.selection(), p.count(), topk));
      }
      for (int64_t r = 0; r < p.count(); ++r) {
        const Problem one = rows_of(p, {r});
        const Outputs alone(1, topk, want);
        run(one.paged_search(topk, alone.selection()), on(backend));
        for (int64_t c = 0; c < topk; ++c) {
          RC_ASSERT(int_at(alone.selection().indices, 0, c) == int_at(first.selection().indices, r, c));
          RC_ASSERT(bits_of(float_at(alone.selection().scores, 0, c)) ==
                    bits_of(float_at(first.selection().scores, r, c)));
        }
      }
    });
  }
}

/// live <= topk: all live positions, and no key scored unless scores, score order or blocks are asked for.
TEST(Search, ShortRowsAreScoredOnlyIfNeeded) {
  Tally tally("mqa_topk, short rows");
  for (const std::string& backend : every_backend()) {
    ProblemSpec spec;
    spec.rows = 4, spec.keys = 30, spec.pattern = Pattern::nans;
    const Problem p = make_problem(spec);
    for (const int32_t topk : {29, 30, 31}) {
      for (int option = 0; option < 4; ++option) {
        Want want;
        want.scores = option == 1;
        want.order = option == 2 ? Order::score : Order::position;
        want.blocks = option == 3 ? 2 : 0, want.block_size = 4;
        const Outputs outputs(p.count(), topk, want);
        const MqaTopk args = p.dense_search(topk, outputs.selection());
        uint64_t stats[kNumStats] = {};
        if (!tally.runs(args, on(backend), backend)) continue;
        run(args, on(backend, stats));
        EXPECT_EQ(stats[kScoredKeys], option > 0 || topk < 30 ? 120u : 0u) << topk << " " << option;
        EXPECT_TRUE(good(compare_selection(args, logits_for(p, on(backend)).view(), stats))) << topk << " " << option;
      }
    }
  }
}

/// Two levels: published blocks as candidates of a second search give the dense answer with the other blocks masked.
TEST(Search, PublishedBlocksAdmitTheirKeys) {
  Tally tally("mqa_topk, two levels");
  for (const std::string& backend : every_backend()) {
    property("blocks as candidates equal a mask", 300, [&] {
      ProblemSpec spec = draw_spec(false);
      if (spec.windows == Windows::wild || spec.windows == Windows::random) spec.windows = Windows::causal;
      spec.max_len = 0;
      const Problem p = make_problem(spec);
      RC_LOG() << p.text();
      Want want;
      want.blocks = draw(1, 6), want.block_size = static_cast<int32_t>(draw(1, 12));
      const Outputs source(p.count(), 5, want);
      const MqaTopk first = p.dense_search(5, source.selection());
      if (!tally.runs(first, on(backend), label_of(backend, spec))) return;
      run(first, on(backend));
      const Array mask(DType::b8, {p.count(), spec.keys});
      for (int64_t r = 0; r < p.count(); ++r) {
        for (int64_t c = 0; c < want.blocks; ++c) {
          const int64_t id = int_at(first.out.blocks, r, c);
          for (int64_t n = id * want.block_size; id >= 0 && n < std::min(spec.keys, (id + 1) * want.block_size); ++n) {
            mask.as<uint8_t>()[r * spec.keys + n] = 1;
          }
        }
      }
      Want both;
      both.scores = both.counts = true, both.order = Order::score;
      const Outputs by_blocks(p.count(), 20, both), by_mask(p.count(), 20, both);
      MqaTopk second = p.dense_search(20, by_blocks.selection());
      second.admit.candidates = first.out.blocks, second.admit.candidate_block_size = want.block_size;
      run(second, on(backend));
      second.admit = {}, second.admit.mask = mask.view(), second.out = by_mask.selection();
      run(second, on(backend));
      RC_ASSERT(same_outputs(by_blocks.selection(), by_mask.selection(), p.count(), 20));
    });
  }
}

}  // namespace
}  // namespace topkey::testing
