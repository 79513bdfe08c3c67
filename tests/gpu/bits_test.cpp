// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// One arithmetic a format on a GPU: the same (query, key) pair has the same bits through prefill, decode, every page size
// and layout, dense keys, chunks of a long row; where the arithmetic is `f32`, those of backend cpu.
#include "support/call.h"
#include "tests/backend_test.h"

namespace topkey::testing {
namespace {

Array logits_of(const Problem& p, const Exec& exec) {
  const Array out(DType::f32, {p.count(), p.width()});
  if (p.spec.paged) {
    run(p.paged_logits(out.view()), exec);
  } else {
    run(p.dense_logits(out.view()), exec);
  }
  return out;
}

class Bits : public ::testing::TestWithParam<std::string> {};

TEST_P(Bits, PlainArithmeticEqualsTheCpus) {
  int ran = 0;
  struct Pairing {
    KeyFormat format;
    DType q;
    int32_t dim;
  };
  const Pairing pairings[] = {{KeyFormat::f32, DType::f32, 40},  {KeyFormat::f32, DType::bf16, 7},
                              {KeyFormat::bf16, DType::f32, 64}, {KeyFormat::f16, DType::bf16, 48},
                              {KeyFormat::bf16, DType::f16, 33}, {KeyFormat::q8_0, DType::f32, 96},
                              {KeyFormat::q8_0, DType::f16, 64}};
  for (const Pairing& pairing : pairings) {
    for (const bool paged : {false, true}) {
      ProblemSpec spec;
      spec.format = pairing.format, spec.q_dtype = pairing.q, spec.head_dim = pairing.dim, spec.heads = 5;
      spec.rows = 9, spec.keys = 500, spec.paged = paged, spec.requests = paged ? 2 : 1;
      const Problem p = make_problem(spec);
      const char* name = arithmetic(GetParam().c_str(), spec.format, query_dtype(spec));
      if (name == nullptr) continue;  // it refuses the format, whole
      ASSERT_STREQ(name, "f32");
      const Array gpu = logits_of(p, on(GetParam())), cpu = logits_of(p, on("cpu"));
      EXPECT_EQ(std::memcmp(gpu.as<uint8_t>(), cpu.as<uint8_t>(), gpu.bytes()), 0) << p.text();
      ++ran;
    }
  }
  EXPECT_EQ(ran, GetParam() == "cuda.portable" ? 14 : ran);
}

TEST_P(Bits, PagesLayoutsAndRowsChangeNoBit) {
  Tally tally("pages, layouts and rows");
  for (const KeyFormat format : {KeyFormat::fp8, KeyFormat::bf16, KeyFormat::f16}) {
    for (const int32_t dim : {16, 128, 144, 256}) {
      ProblemSpec spec;
      spec.format = format, spec.head_dim = dim, spec.heads = 20, spec.rows = 11, spec.keys = 700, spec.paged = true;
      spec.page_size = 64;
      const Problem whole = make_problem(spec);
      const Array probe(DType::f32, {whole.count(), whole.width()});
      if (!tally.runs(whole.paged_logits(probe.view()), on(GetParam()), label_of(GetParam(), spec))) continue;
      const Array first = logits_of(whole, on(GetParam()));
      std::vector<int64_t> rows_of_it;
      const Problem dense = dense_of(whole, 0, &rows_of_it);
      const Array flat = logits_of(dense, on(GetParam()));
      for (int64_t r = 0; r < whole.count(); ++r) {
        const Problem one = rows_of(whole, {r});
        const Array alone = logits_of(one, on(GetParam()));
        for (int64_t n = 0; n < whole.lens[0]; ++n) {
          const uint32_t bits = bits_of(float_at(first.view(), r, n));
          ASSERT_EQ(bits, bits_of(float_at(alone.view(), 0, n))) << whole.text() << " " << r << " " << n;
          ASSERT_EQ(bits, bits_of(float_at(flat.view(), r, n))) << whole.text() << " " << r << " " << n;
        }
      }
    }
  }
}

/// More scores than a search keeps at a time, so that rows are worked on in chunks of their keys; or fewer of them, whole,
/// where nothing but winners is asked.
TEST_P(Bits, ChunksOfALongRowChangeNothing) {
  for (const Pattern pattern : {Pattern::normal, Pattern::ties_at_cut, Pattern::all_equal, Pattern::nans}) {
    ProblemSpec spec;
    spec.heads = 2, spec.head_dim = GetParam() == "cuda.portable" ? 16 : 64;
    spec.rows = 130, spec.keys = 110000, spec.pattern = pattern, spec.windows = Windows::random;
    const Problem p = make_problem(spec);
    const Array logits = logits_of(p, on(GetParam()));
    for (const bool plain : {false, true}) {
      Want want;
      want.scores = want.counts = true, want.blocks = plain ? 0 : 40, want.block_size = 48;
      const Outputs fused(spec.rows, 700, want), apart(spec.rows, 700, want);
      uint64_t stats[2][kNumStats] = {};
      MqaTopk search = p.dense_search(700, fused.selection());
      if (!plain) search.admit.force_first = 5, search.admit.force_last = 9;
      run(search, on(GetParam(), stats[0]));
      Topk select{};
      select.scores = logits.view(), select.rows = p.rows(), select.topk = 700, select.out = apart.selection();
      select.admit = search.admit;
      // A backend of searches alone is held against what the other one selects from its scores.
      run(select, on(unsupported(select, on(GetParam())) == nullptr ? GetParam() : "cuda.portable", stats[1]));
      EXPECT_TRUE(same_outputs(search.out, select.out, spec.rows, 700)) << pattern_name(pattern) << " " << plain;
      for (const Stat stat : {kRows, kScoredKeys, kNanScores, kTiedCuts})
        EXPECT_EQ(stats[0][stat], stats[1][stat]) << pattern_name(pattern) << " " << plain << " " << stat;
      EXPECT_TRUE(inside(fused));
    }
  }
}

TEST_P(Bits, WorkspaceStaysUnder64MiB) {
  for (const int64_t rows : {1, 64, 128, 129, 8192, 100000}) {
    for (const int64_t keys : {100, 60000, 1000000, 2000000000}) {
      PagedMqaTopk a{};
      a.q.values = tensor(nullptr, DType::u8, {rows, 64, 128}), a.q.weights = tensor(nullptr, DType::f32, {rows, 64});
      a.keys.cache = {tensor(nullptr, DType::u8, {1, 64 * 132}), KeyFormat::fp8, Layout::planar, 64, 128};
      a.keys.block_table = tensor(nullptr, DType::i32, {rows, keys / 64 + 1});
      a.rows.count = rows, a.rows.end = tensor(nullptr, DType::i32, {rows}), a.topk = 8192;
      a.admit.candidates = tensor(nullptr, DType::i32, {rows, 2048}), a.admit.candidate_block_size = 8;
      a.out.indices = tensor(nullptr, DType::i32, {rows, 8192}),
      a.out.blocks = tensor(nullptr, DType::i32, {rows, 2048});
      a.out.block_size = 8;
      EXPECT_LE(paged_mqa_topk_workspace_bytes(a, on(GetParam())), size_t{64} << 20) << rows << " " << keys;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Bits, ::testing::ValuesIn(gpu_backends()), backend_label);

}  // namespace
}  // namespace topkey::testing
