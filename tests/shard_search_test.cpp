// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Searches of one rank's keys, merged: equal, bit for bit, to the search of the whole, with starts, candidates, forced
// keys and published blocks, any world size, interleave and lengths. Transports and the layer have tests of their own.
#include "tests/draw.h"

namespace topkey::testing {
namespace {

/// What the ranks send, side by side.
struct Parts {
  Array scores, indices, block_scores, block_ids;
};

struct Cut {
  int32_t world, interleave;
};

Tensor part_of(const Array& parts, int64_t rank) {
  Tensor t = parts.view();
  t.data = element(t, rank);
  return tensor(t.data, t.dtype, {t.shape[1], t.shape[2]});
}

Parts search_parts(const Problem& whole, const PagedMqaTopk& asked, Cut cut, const std::string& backend) {
  const int64_t rows = whole.count(), blocks = asked.out.blocks.shape[1];
  Parts parts{
      Array(DType::f32, {cut.world, rows, asked.topk}), Array(DType::i32, {cut.world, rows, asked.topk}), {}, {}};
  const bool publishes = asked.out.blocks.data != nullptr;
  if (publishes) {
    parts.block_scores = Array(DType::f32, {cut.world, rows, blocks});
    parts.block_ids = Array(DType::i32, {cut.world, rows, blocks});
  }
  for (int32_t rank = 0; rank < cut.world; ++rank) {
    const Problem part = shard_of(whole, {rank, cut.world, cut.interleave});
    PagedMqaTopk a = part.paged_search(asked.topk, Selection{});
    a.admit = asked.admit;
    a.out.indices = part_of(parts.indices, rank), a.out.scores = part_of(parts.scores, rank);
    a.whole_start = part.whole_start.view(), a.whole_end = part.whole_end.view();
    if (publishes) {
      a.out.blocks = part_of(parts.block_ids, rank), a.out.block_size = asked.out.block_size;
      a.block_scores = part_of(parts.block_scores, rank);
    }
    Exec exec = on(backend);
    exec.threads = static_cast<int32_t>(draw(0, 3));
    if (whole.spec.keys > 1000) {
      run(a, exec);
      continue;
    }
    uint64_t stats[kNumStats] = {};
    exec.stats = stats;
    run(a, exec);
    Logits logits(DType::f32, part.count(), part.width());
    run(part.paged_logits(logits.view()), on(backend));
    require(compare_selection(a, logits.view(), stats));
  }
  return parts;
}

void merge_parts(const Problem& whole, const PagedMqaTopk& asked, const Parts& parts, const Selection& out,
                 const std::string& backend) {
  MergeTopk m{};
  m.scores = parts.scores.view(), m.indices = parts.indices.view(), m.topk = asked.topk;
  m.rows = asked.rows;
  // The merge knows no default end, and wants one only for keys forced at the end.
  std::vector<int32_t> request(whole.row_request.begin(), whole.row_request.end());
  const Array requests = Array::of(request);
  m.rows.request = requests.view(), m.rows.q_indptr = {};
  m.force_first = asked.admit.force_first, m.force_last = asked.admit.force_last;
  m.block_scores = parts.block_scores.view(), m.block_ids = parts.block_ids.view();
  m.out = out;
  uint64_t stats[kNumStats] = {};
  run(m, on(backend, stats));
  require(compare_selection(m, stats));
}

void check_drawn(const std::string& backend, int64_t longest, Tally& tally) {
  ProblemSpec spec = draw_spec(true);
  if (spec.windows == Windows::wild) spec.windows = Windows::random;
  spec.max_len = 0;
  if (longest > 0) spec.keys = draw(longest / 2, longest), spec.rows = draw(1, 3), spec.heads = 1, spec.requests = 1;
  const Problem whole = make_problem(spec);
  const auto topk = static_cast<int32_t>(draw(1, longest > 0 ? 2100 : 50));
  const Cut cut{static_cast<int32_t>(draw(2, 8)), draw_of({1, 2, 4, 7, 16, 64, 256, 0})};
  Random random(spec.seed);
  Borrowed borrowed;
  PagedMqaTopk args = whole.paged_search(topk, Selection{});
  args.admit = draw_admit(borrowed, random, whole.count(), spec.keys, false);
  Want want = draw_want(borrowed, random, whole.count(), spec.keys, spec.requests);
  want.scores = true;
  const Outputs direct(whole.count(), topk, want), merged(whole.count(), topk, want);
  args.out = direct.selection();
  RC_LOG() << whole.text() << " topk " << topk << " world " << cut.world << " interleave " << cut.interleave
           << " force " << args.admit.force_first << "/" << args.admit.force_last << " candidates "
           << args.admit.candidates.shape[1] << "x" << args.admit.candidate_block_size << " blocks " << want.blocks
           << "x" << want.block_size;
  if (!tally.runs(args, on(backend), label_of(backend, spec))) return;
  run(args, on(backend));
  merge_parts(whole, args, search_parts(whole, args, cut, backend), merged.selection(), backend);
  require_inside(merged);
  RC_ASSERT(same_outputs(direct.selection(), merged.selection(), whole.count(), topk));
}

TEST(ShardSearch, MergedPartsEqualTheWhole) {
  Tally tally("paged_mqa_topk under a shard with all arguments, merge_topk");
  for (const std::string& backend : every_backend()) {
    property("merged parts with all arguments equal the whole", 1500, [&] { check_drawn(backend, 0, tally); });
    // Long enough that a backend cuts a row's keys into slices, which must not cut a block.
    if (backend != "ref")
      property("merged long parts equal the whole", 40, [&] { check_drawn(backend, 60000, tally); });
  }
}

/// Every rank publishes the newest block, also one that owns nothing of it, and says so by a NaN.
TEST(ShardSearch, RanksWithoutKeysPublishTheNewestBlock) {
  Tally tally("blocks of a rank without keys");
  for (const std::string& backend : every_backend()) {
    ProblemSpec spec;
    spec.paged = true, spec.exact = true, spec.rows = 1, spec.keys = 5;
    const Problem whole = make_problem(spec);
    const Problem part = shard_of(whole, {2, 3, 4});
    ASSERT_EQ(part.lens[0], 0);
    Want want;
    want.scores = true, want.blocks = 3, want.block_size = 2;
    const Outputs out(1, 4, want);
    PagedMqaTopk a = part.paged_search(4, out.selection());
    a.whole_end = part.whole_end.view();
    const Guarded scores(DType::f32, 1, 3);
    a.block_scores = scores.view();
    if (!tally.runs(a, on(backend), backend)) continue;
    run(a, on(backend));
    EXPECT_EQ(int_at(a.out.indices, 0, 0), -1);
    EXPECT_EQ(int_at(a.out.blocks, 0, 0), 2);
    EXPECT_EQ(int_at(a.out.blocks, 0, 1), -1);
    EXPECT_EQ(bits_of(float_at(a.block_scores, 0, 0)), bits_of(canonical_nan()));
    EXPECT_EQ(float_at(a.block_scores, 0, 1), -std::numeric_limits<float>::infinity());
    EXPECT_EQ(scores.touched_outside(), "");
  }
}

TEST(ShardSearch, WhatTheWholeWindowMustSay) {
  ProblemSpec spec;
  spec.paged = true, spec.rows = 4, spec.requests = 2, spec.addressing = Addressing::next_n, spec.next_n = 2;
  spec.windows = Windows::causal;
  const Problem whole = make_problem(spec), part = shard_of(whole, {1, 2, 1});
  Want want;
  want.blocks = 2, want.block_size = 4;
  const Outputs out(4, 4, want);
  const auto refused = [&](const PagedMqaTopk& a) {
    const Thrown thrown = thrown_by([&] { launch(a, Exec{}); });
    EXPECT_EQ(thrown.status, Status::invalid_argument) << thrown.sentence;
    EXPECT_TRUE(out.untouched());
    return thrown.sentence;
  };
  PagedMqaTopk a = part.paged_search(4, out.selection());
  EXPECT_NE(refused(a).find("whole_end must be given under a shard with blocks or force_last"), std::string::npos);
  a.out.blocks = {};
  a.admit.force_last = 1;
  EXPECT_NE(refused(a).find("whole_end must be given"), std::string::npos);
  a.whole_end = part.whole_end.view(), a.rows.start = part.whole_start.view(), a.admit.force_first = 1;
  EXPECT_NE(refused(a).find("whole_start must be given"), std::string::npos);
  a.admit = {}, a.keys.shard = {};
  EXPECT_NE(refused(a).find("whole_end must be absent without a shard"), std::string::npos);
  a = part.paged_search(4, out.selection());
  a.out.blocks = {}, a.rows.end.shape[0] = 2, a.rows.request = {}, a.rows.next_n = 2;
  EXPECT_NE(refused(a).find("rows.end must be i32 [4] under a shard"), std::string::npos);
}

}  // namespace
}  // namespace topkey::testing
