// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// CASES chapters 12 and 13, shapes and candidate blocks: every head count, draft length and head size is right or
// refused, heads that only pad change no bit, blocks are cut at the row's own window.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/cases/requests.h"
#include "tests/cases/ways.h"

namespace topkey::cases {
namespace {

// ---- B51: shapes
// ---------------------------------------------------------------------------------------------------------------

const Ints kHeadCounts = {1, 4, 8, 16, 24, 32, 64, 128}, kDrafts = {1, 2, 3, 4, 6, 8}, kDims = {32, 64, 128};

ProblemSpec shape_spec(int32_t heads, int32_t dim, bool exact) {
  ProblemSpec spec;
  spec.heads = heads, spec.head_dim = dim, spec.exact = exact;
  spec.seed = static_cast<uint64_t>(151 + heads * 1000 + dim);
  return spec;
}

// sglang PR #32738, DeepGEMM #222, vllm #43457, DeepGEMM #433 / PR #434: shapes outside the compiled set assert or
// are silently wrong. Every H, next_n and D behind pages: within the bound of the reference, or refused.
TEST_P(Cases, B51_every_paged_shape_is_right_or_refused) {
  topkey::testing::Tally tally("B51 paged");
  for (int32_t heads : kHeadCounts) {
    for (int32_t dim : kDims) {
      for (int32_t next_n : kDrafts) {
        for (bool exact : {false, true}) {
          const Ints lens = full() ? Ints{4096, 100} : Ints{19, 7};
          const Problem p = drafts_of(shape_spec(heads, dim, exact), lens, next_n);
          const Array out(DType::i32, {p.count(), 8});
          PagedMqaTopk a = p.paged_search(8, {});
          a.out.indices = out.view();
          if (tally.runs(a, exec(), GetParam())) expect_right(p, 8, exec());
        }
      }
    }
  }
}

// The same for dense keys.
TEST_P(Cases, B51_every_dense_shape_is_right_or_refused) {
  topkey::testing::Tally tally("B51 dense");
  for (int32_t heads : kHeadCounts) {
    for (int32_t dim : kDims) {
      for (bool exact : {false, true}) {
        ProblemSpec spec = shape_spec(heads, dim, exact);
        spec.rows = full() ? 128 : 5, spec.keys = full() ? 4096 : 37, spec.windows = support::Windows::causal;
        const Problem p = support::make_problem(spec);
        const Array out(DType::i32, {spec.rows, 8});
        MqaTopk a = p.dense_search(8, {});
        a.out.indices = out.view();
        if (tally.runs(a, exec(), GetParam())) expect_right(p, 8, exec());
      }
    }
  }
}

// The same kind: heads that pad H to a compiled size have weight 0 and must not change one bit.
TEST_P(Cases, B51_padding_heads_change_no_bit) {
  for (int32_t heads : kHeadCounts) {
    for (int32_t dim : kDims) {
      ProblemSpec spec = shape_spec(heads, dim, false);
      spec.rows = 3, spec.keys = 40;
      const Problem p = support::make_problem(spec);
      const Array want = logits_of(p, exec());
      const auto taken = [&](const Problem& any) {
        return support::unsupported(any.dense_logits(want.view()), exec()) == nullptr;
      };
      for (int32_t extra : {1, 7, 8, 32}) {
        const Problem more = support::with_zero_heads(p, extra);
        if (taken(p) && !taken(more)) continue;  // more heads than the backend takes: another one's arithmetic
        const Array padded = logits_of(more, exec());
        EXPECT_EQ(std::memcmp(padded.as<float>(), want.as<float>(), want.bytes()), 0)
            << heads << " heads, " << extra << " more, D " << dim;
      }
    }
  }
}

// ---- B55: candidate blocks (ratio 1)
// --------------------------------------------------------------------------------------

// sglang PR #38848: the newest positions of a partly filled block are lost. Of 21 tokens block 2 is {16..20}, no less
// and no more.
TEST_P(Cases, B55_the_last_block_is_cut_at_the_window) {
  for (bool exact : {false, true}) {
    ProblemSpec spec;
    spec.exact = exact, spec.page_size = 8, spec.seed = 155;
    const Problem p = requests_of(spec, {48}, {0}, {21});
    const Array only = ints({{2}});
    PagedMqaTopk a = p.paged_search(8, {});
    a.admit.candidates = only.view(), a.admit.candidate_block_size = 8;
    const Picked picked = pick(a, exec());
    EXPECT_EQ(picked.counts[0], 5);
    EXPECT_EQ(picked.indices[0], (Ints{16, 17, 18, 19, 20, -1, -1, -1}));
  }
}

/// Blocks published beside a selection of 21 descending scores, so that the newest block is the worst.
Ints published(int64_t count, const Exec& exec) {
  Floats scores;
  for (int i = 0; i < 21; ++i) scores.push_back(static_cast<float>(-i));
  const Array given = floats({scores}), indices(DType::i32, {1, 4});
  const Guarded beside(DType::i32, 1, count), alone(DType::i32, 1, count);
  Topk a{};
  a.scores = given.view(), a.rows.count = 1, a.topk = 4;
  a.out.indices = indices.view(), a.out.blocks = beside.view(), a.out.block_size = 8;
  support::run(a, exec);
  SelectBlocks b{};
  b.scores = given.view(), b.rows.count = 1, b.block_size = 8, b.blocks = alone.view();
  support::run(b, exec);
  EXPECT_EQ(beside.touched_outside() + alone.touched_outside(), "");
  EXPECT_EQ(row_of<int32_t>(beside.view(), 0), row_of<int32_t>(alone.view(), 0));
  return row_of<int32_t>(alone.view(), 0);
}

// The same source: the newest block is always kept, exactly once, even with the lowest score; ids ascend.
TEST_P(Cases, B55_the_newest_block_is_published_once) {
  EXPECT_EQ(published(1, exec()), (Ints{2}));
  EXPECT_EQ(published(2, exec()), (Ints{0, 2}));
  EXPECT_EQ(published(3, exec()), (Ints{0, 1, 2}));
  EXPECT_EQ(published(5, exec()), (Ints{0, 1, 2, -1, -1}));
}

/// b8 [R, N] that hides all but the blocks of each row.
Array mask_of(const std::vector<Ints>& blocks, int32_t size, int64_t keys) {
  const Array mask(DType::b8, {static_cast<int64_t>(blocks.size()), keys});
  for (size_t r = 0; r < blocks.size(); ++r) {
    for (int32_t id : blocks[r]) {
      for (int64_t n = int64_t{id} * size; id >= 0 && n < std::min<int64_t>(keys, (id + 1) * size); ++n) {
        mask.as<uint8_t>()[static_cast<int64_t>(r) * keys + n] = 1;
      }
    }
  }
  return mask;
}

/// Publishes the five best blocks of 8 of each row.
std::vector<Ints> blocks_of(const Problem& p, const Exec& exec) {
  const Array indices(DType::i32, {p.count(), 8});
  const Guarded blocks(DType::i32, p.count(), 5);
  PagedMqaTopk source = p.paged_search(8, {});
  source.out.indices = indices.view(), source.out.blocks = blocks.view(), source.out.block_size = 8;
  support::run(source, exec);
  EXPECT_EQ(blocks.touched_outside(), "");
  std::vector<Ints> ids;
  for (int64_t r = 0; r < p.count(); ++r) ids.push_back(row_of<int32_t>(blocks.view(), r));
  return ids;
}

// The same end to end: one search publishes blocks, the next is kept to them. It equals the dense search under a
// mask, also where fewer keys than topk are admitted.
TEST_P(Cases, B55_candidates_equal_a_mask) {
  for (bool exact : {false, true}) {
    ProblemSpec spec;
    spec.exact = exact, spec.seed = 156;
    const Problem p = requests_of(spec, {125}, {0, 0, 0, 0}, {122, 123, 124, 125});
    std::vector<int64_t> rows;
    const Problem dense = support::dense_of(p, 0, &rows);
    const std::vector<Ints> ids = blocks_of(p, exec());
    for (const Ints& row : ids) {
      EXPECT_TRUE(std::is_sorted(row.begin(), row.end()));
      EXPECT_EQ(invalid(row, 5, 0, 16), "");
      EXPECT_EQ(row.back(), 15) << "the newest block";
    }
    const Array blocks = ints(ids), mask = mask_of(ids, 8, 125);
    for (int32_t topk : {8, 100}) {  // 100: more than five blocks hold
      PagedMqaTopk kept = p.paged_search(topk, {});
      kept.admit.candidates = blocks.view(), kept.admit.candidate_block_size = 8;
      MqaTopk masked = dense.dense_search(topk, {});
      masked.admit.mask = mask.view();
      const Picked a = pick(kept, exec());
      way::expect_same(a, pick(masked, exec()), "candidates and mask differ");
      for (size_t r = 0; r < 4; ++r) EXPECT_EQ(a.counts[r], std::min<int32_t>(topk, 34 + static_cast<int32_t>(r)));
    }
  }
}

TOPKEY_CASES();

}  // namespace
}  // namespace topkey::cases
