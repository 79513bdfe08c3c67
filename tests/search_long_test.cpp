// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `search` where the sizes of a fast backend's buffers matter: rows of thousands of keys (winners thrown away,
// rising thresholds, slices for several threads), many rows, the geometry of production. Held against the backend's own
// logits and a full sort.
#include <algorithm>
#include <cstring>

#include "tests/draw.h"

namespace topkey::testing {
namespace {

ProblemSpec draw_long_spec(bool paged) {
  ProblemSpec spec = draw_spec(paged);
  spec.heads = draw_of({1, 5, 32});  // 32 x 32: enough work for a backend to wake several threads
  spec.head_dim = 32;
  spec.rows = draw(1, 5);
  spec.keys = draw(2000, 9000);
  spec.requests = static_cast<int32_t>(draw(1, 2));
  spec.next_n = static_cast<int32_t>(draw(1, 2));
  spec.page_size = draw_of({64, 1, 16, 48, 256});
  spec.layout = draw_of({Layout::planar, Layout::interleaved});
  spec.page_stride = 0;
  spec.max_len = draw_flag(5) ? draw(1000, 9000) : 0;
  return spec;
}

Logits all_logits(const Problem& p, const Exec& exec) {
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

MqaTopk search_of(const Problem& p, int32_t topk, const Selection& out, MqaTopk*) { return p.dense_search(topk, out); }
PagedMqaTopk search_of(const Problem& p, int32_t topk, const Selection& out, PagedMqaTopk*) {
  return p.paged_search(topk, out);
}

template <class Args>
void check_drawn(const std::string& backend, bool paged, Tally& tally) {
  const Problem p = make_problem(draw_long_spec(paged));
  Random random(p.spec.seed);
  Borrowed borrowed;
  const auto topk = static_cast<int32_t>(draw(1, draw_of({5, 300, 3000})));
  const int64_t lines = std::max<int64_t>(p.spec.requests + 6, p.count());
  const Want want = draw_want(borrowed, random, p.count(), p.spec.keys, lines);
  const Outputs outputs(p.count(), topk, want), threaded(p.count(), topk, want);
  Args args = search_of(p, topk, outputs.selection(), static_cast<Args*>(nullptr));
  args.admit = draw_admit(borrowed, random, p.count(), p.spec.keys, !paged);
  RC_LOG() << p.text() << " topk " << topk;
  if (!tally.runs(args, on(backend), label_of(backend, p.spec))) return;
  Exec threaded_exec = on(backend);
  threaded_exec.threads = static_cast<int32_t>(draw(2, 5));
  const Logits logits = all_logits(p, on(backend)), threaded_logits = all_logits(p, threaded_exec);
  for (int64_t r = 0; r < p.count(); ++r) {
    const size_t bytes = static_cast<size_t>(logits.view().shape[1]) * sizeof(float);
    RC_ASSERT(std::memcmp(element(logits.view(), r), element(threaded_logits.view(), r), bytes) == 0);
  }
  uint64_t stats[kNumStats] = {}, threaded_stats[kNumStats] = {};
  Exec exec = on(backend, stats);
  exec.threads = 1;
  run(args, exec);
  require(compare_selection(args, logits.view(), stats));
  require_inside(outputs);
  args.out = threaded.selection();
  threaded_exec.stats = threaded_stats;
  run(args, threaded_exec);
  RC_ASSERT(same_outputs(outputs.selection(), threaded.selection(), p.count(), topk));
  require(compare_selection(args, logits.view(), threaded_stats));
}

TEST(SearchLong, DenseRowsEqualAFullSort) {
  Tally tally("mqa_topk, long rows");
  for (const std::string& backend : host_backends()) {
    property("mqa_topk of long rows", backend == "ref" ? 10 : 150,
             [&] { check_drawn<MqaTopk>(backend, false, tally); });
  }
}

TEST(SearchLong, PagedRowsEqualAFullSort) {
  Tally tally("paged_mqa_topk, long rows");
  for (const std::string& backend : host_backends()) {
    property("paged_mqa_topk of long rows", backend == "ref" ? 10 : 150,
             [&] { check_drawn<PagedMqaTopk>(backend, true, tally); });
  }
}

/// Slices for several threads end where a block ends, whatever the block's size: no block is published twice.
TEST(SearchLong, SlicesCutNoBlock) {
  ProblemSpec spec;
  spec.rows = 3, spec.keys = 4000, spec.heads = 32, spec.head_dim = 32, spec.pattern = Pattern::all_equal;
  const Problem p = make_problem(spec);
  for (const std::string& backend : host_backends()) {
    for (int32_t block_size = 1; block_size <= 17; ++block_size) {
      Want want;
      want.block_size = block_size, want.blocks = 4000 / block_size + 1;
      const Outputs outputs(p.count(), 1, want);
      const MqaTopk args = p.dense_search(1, outputs.selection());
      Exec exec = on(backend);
      exec.threads = 3;
      run(args, exec);
      EXPECT_TRUE(good(compare_selection(args, all_logits(p, on(backend)).view()))) << backend << ' ' << block_size;
    }
  }
}

TEST(SearchLong, ManyRows) {
  Tally tally("paged_mqa_topk, many rows");
  ProblemSpec spec;
  spec.paged = true, spec.requests = 40, spec.rows = 9001, spec.keys = 30, spec.heads = 1,
  spec.windows = Windows::random;
  const Problem p = make_problem(spec);
  for (const std::string& backend : host_backends()) {
    Want want;
    want.scores = want.counts = true;
    const Outputs outputs(p.count(), 4, want);
    const PagedMqaTopk args = p.paged_search(4, outputs.selection());
    uint64_t stats[kNumStats] = {};
    if (!tally.runs(args, on(backend), label_of(backend, spec))) continue;
    run(args, on(backend, stats));
    EXPECT_TRUE(good(compare_selection(args, all_logits(p, on(backend)).view(), stats)));
    EXPECT_TRUE(inside(outputs));
  }
}

/// H = 64 (and 32), D = 128, topk 2048 over 3000 keys, exact inputs: every backend gives the oracle's bits.
TEST(SearchLong, ProductionGeometryOnExactInputs) {
  Tally tally("mqa_topk, 64 x 128");
  for (const Pairing& pairing : all_pairings()) {
    ProblemSpec spec;
    spec.format = pairing.format, spec.q_dtype = pairing.q, spec.heads = pairing.format == KeyFormat::fp8 ? 64 : 32;
    spec.head_dim = 128, spec.rows = 1, spec.keys = 3000, spec.exact = true;
    const Problem p = make_problem(spec);
    const Truth truth = truth_of(p.query(), p.dense_keys(), p.rows(), false);
    for (const std::string& backend : host_backends()) {
      Want want;
      want.scores = true, want.order = Order::score;
      const Outputs outputs(p.count(), 2048, want);
      const MqaTopk args = p.dense_search(2048, outputs.selection());
      if (!tally.runs(args, on(backend), label_of(backend, spec))) continue;
      run(args, on(backend));
      EXPECT_TRUE(good(compare_selection(args, truth.ref.view()))) << p.text();
    }
  }
}

}  // namespace
}  // namespace topkey::testing
