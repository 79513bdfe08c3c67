// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// CASES chapter 11, memory that grows with the context: rows in chunks of any size give the same selection, what a
// call asks for is bounded, and what it takes while it runs is no more than that.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "tests/cases/case.h"

namespace topkey::cases {
namespace {

/// The search of rows from `first` on; blocks: those of the whole problem's rows that are candidates, or absent.
MqaTopk search_of(const Problem& p, int32_t topk, const Array& blocks, int64_t first) {
  MqaTopk a = p.dense_search(topk, {});
  if (!blocks) return a;
  a.admit.candidates = blocks.view(), a.admit.candidate_block_size = 8;
  a.admit.candidates.data = support::element(blocks.view(), first), a.admit.candidates.shape[0] = p.count();
  return a;
}

Picked in_chunks(const Problem& p, int64_t chunk, int32_t topk, const Array& blocks, const Exec& exec) {
  Picked all;
  for (int64_t first = 0; first < p.count(); first += chunk) {
    std::vector<int64_t> rows;
    for (int64_t r = first; r < std::min(first + chunk, p.count()); ++r) rows.push_back(r);
    const Problem some = support::rows_of(p, rows);
    const Picked part = pick(search_of(some, topk, blocks, first), exec);
    all.indices.insert(all.indices.end(), part.indices.begin(), part.indices.end());
    all.scores.insert(all.scores.end(), part.scores.begin(), part.scores.end());
  }
  return all;
}

// sglang #35201, vllm #45663, #55569, llama.cpp #25468: the score matrix is cut into chunks. The selection does not
// depend on them.
TEST_P(Cases, B50_row_chunks_do_not_change_the_selection) {
  for (bool exact : {false, true}) {
    ProblemSpec spec;
    spec.heads = full() ? 4 : 1, spec.rows = full() ? 1000 : 130, spec.keys = 20000;
    spec.windows = support::Windows::random, spec.exact = exact, spec.seed = 150;
    const Problem p = support::make_problem(spec);
    support::Random random(151);
    const Array blocks(DType::i32, {p.count(), 1000});  // of 2,500; some twice, some none
    for (int64_t i = 0; i < blocks.size(); ++i)
      blocks.as<int32_t>()[i] = static_cast<int32_t>(random.between(-1, 2600));
    for (const Array& candidates : {Array(), blocks}) {
      const Picked whole = pick(search_of(p, 256, candidates, 0), exec());
      for (int64_t chunk : {1, 7, 128}) {
        const Picked parts = in_chunks(p, chunk, 256, candidates, exec());
        EXPECT_EQ(parts.indices, whole.indices) << "chunks of " << chunk;
        EXPECT_EQ(parts.scores, whole.scores) << "chunks of " << chunk;
      }
    }
    expect_right(support::rows_of(p, {0, 127, 128, 129}), 256, exec());
  }
}

/// A step of M = 4096 rows over `keys` keys, by shape alone.
MqaTopk shapes_of(int64_t keys, bool candidates) {
  MqaTopk a{};
  a.q.values = tensor(nullptr, DType::f8_e4m3fn, {4096, 64, 128});
  a.q.weights = tensor(nullptr, DType::f32, {4096, 64});
  a.keys = {tensor(nullptr, DType::f8_e4m3fn, {keys, 128}), tensor(nullptr, DType::f32, {keys}), KeyFormat::fp8};
  a.rows.count = 4096;
  a.topk = 2048;
  a.out.indices = tensor(nullptr, DType::i32, {4096, 2048});
  if (candidates) {
    a.admit.candidates = tensor(nullptr, DType::i32, {4096, 2048});
    a.admit.candidate_block_size = 8;
    a.out.blocks = tensor(nullptr, DType::i32, {4096, 2048});
    a.out.block_size = 8;
  }
  return a;
}

// The same for memory: what a call asks for is at most 64 MiB, grows with nothing but bounds, and stops growing with
// the context.
TEST_P(Cases, B50_workspace_does_not_grow_with_the_context) {
  for (bool candidates : {false, true}) {
    if (mqa_topk_unsupported(shapes_of(50000, candidates), exec()) != nullptr) continue;
    size_t before = 0;
    for (int64_t keys = 50000; keys <= 1048576; keys += 50000) {
      const size_t bytes = mqa_topk_workspace_bytes(shapes_of(keys, candidates), exec());
      EXPECT_LE(bytes, size_t{64} << 20) << keys << " keys";
      EXPECT_GE(bytes, before) << keys << " keys";
      EXPECT_TRUE(keys <= 400000 || bytes == before) << keys << " keys";  // all parts of a row are then full
      before = bytes;
    }
  }
}

// ---- what a call takes while it runs
// -----------------------------------------------------------------------------------------

/// Bytes of a line of /proc/self/status, "VmHWM"; -1 where there is none.
int64_t process_bytes(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(name + ":", 0) == 0) return std::stoll(line.substr(name.size() + 1)) * 1024;
  }
  return -1;
}

/// Largest growth of resident memory while `call` runs; -1 where the system cannot say.
template <class Call>
int64_t peak_growth(const Call& call) {
  if (!(std::ofstream("/proc/self/clear_refs") << "5" << std::flush)) return -1;  // the peak starts anew
  const int64_t before = process_bytes("VmRSS");
  call();
  const int64_t peak = process_bytes("VmHWM");
  return before < 0 || peak < 0 ? -1 : peak - before;
}

constexpr int64_t kRows = 16, kDim = 32, kMostKeys = 1048576;

/// 16 rows over as many of a million keys as a step wants; the selection is kept to every other block if asked.
struct LongContext {
  Array q{DType::f8_e4m3fn, {kRows, 1, kDim}}, weights{DType::f32, {kRows, 1}};
  Array values{DType::f8_e4m3fn, {kMostKeys, kDim}}, scales{DType::f32, {kMostKeys}};
  Array indices{DType::i32, {kRows, 2048}}, blocks{DType::i32, {kRows, 2048}}, candidates{DType::i32, {kRows, 2048}};

  LongContext() {
    Random random(152);
    const auto fill = [&](const Array& a) {  // any e4m3 codes below 2 in magnitude
      for (size_t i = 0; i < a.bytes(); ++i) a.as<uint8_t>()[i] = static_cast<uint8_t>(random.next() & 0xBF);
    };
    fill(q), fill(values);
    std::fill_n(weights.as<float>(), kRows, 1.F);
    std::fill_n(scales.as<float>(), kMostKeys, 1.F);
    for (int64_t i = 0; i < candidates.size(); ++i) candidates.as<int32_t>()[i] = static_cast<int32_t>(i % 2048 * 2);
  }
  MqaTopk search(int64_t keys, bool with_blocks) const {
    MqaTopk a{};
    a.q = {q.view(), {}, weights.view()};
    a.keys = {values.view(), scales.view(), KeyFormat::fp8};
    a.keys.values.shape[0] = a.keys.scales.shape[0] = keys;
    a.rows.count = kRows, a.topk = 2048, a.out.indices = indices.view();
    if (with_blocks) {
      a.admit.candidates = candidates.view(), a.admit.candidate_block_size = 8;
      a.out.blocks = blocks.view(), a.out.block_size = 8;
    }
    return a;
  }
};

// The same while it runs: a score matrix of 16 rows would be 64 MiB at a million keys. The call takes its workspace
// and little more, and no more at a million keys than at the first two lengths.
TEST_P(Cases, B50_no_score_matrix_while_it_runs) {
  if (GetParam() == "ref") GTEST_SKIP() << "ref is the specification: it may allocate";
  if (exec().device == Device::cuda) GTEST_SKIP() << "the copies of a GPU's test are the process's memory";
  const LongContext context;
  for (bool with_blocks : {false, true}) {
    int64_t most = 0;
    for (int64_t keys : {kMostKeys / 8, kMostKeys / 4, kMostKeys / 2, kMostKeys}) {
      const MqaTopk a = context.search(keys, with_blocks);
      const auto workspace = static_cast<int64_t>(mqa_topk_workspace_bytes(a, exec()));
      const int64_t growth = peak_growth([&] { support::run(a, exec()); });
      if (growth < 0) GTEST_SKIP() << "this system does not tell a process its peak memory";
      EXPECT_LE(growth, workspace + (int64_t{8} << 20)) << keys << " keys";
      if (keys <= kMostKeys / 4) most = std::max(most, growth);
      EXPECT_LE(growth, most + (int64_t{4} << 20)) << keys << " keys: memory still grows";
    }
  }
}

TOPKEY_CASES();

}  // namespace
}  // namespace topkey::cases
