// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// CASES chapter 1, addressing and integer width: offsets that pass 2^31 and 2^32 bytes in the cache, in the score
// matrix and in given scores. The addresses are real; sparse mappings and short windows keep memory and time small.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <set>
#include <vector>

#include "tests/cases/case.h"

namespace topkey::cases {
namespace {

using support::element;
using support::float_at;

// ---- B01: the cache
// -------------------------------------------------------------------------------------------------------

constexpr int64_t kPoolStride = 1002240, kPoolPages = 4287, kPageBytes = 64 * 132;
/// On both sides of 2^31 and of 2^32 bytes.
const Ints kFarPages = {2142, 2143, 4285, 4286};

Tensor pool_view(const Sparse& pool) {
  return tensor(pool.data(), DType::u8, {kPoolPages, kPageBytes}, {kPoolStride, 1});
}

/// One request of one page of 64 keys, asked by four rows; row i's table leads to a copy of that page at kFarPages[i].
struct FarPages {
  Problem near, far;
};

FarPages far_pages(const Sparse& pool, bool exact) {
  ProblemSpec spec;
  spec.head_dim = 128, spec.rows = 1, spec.keys = 64, spec.paged = true, spec.page_size = 64;
  spec.exact = exact, spec.seed = 101, spec.scale = ScaleRule::f32;
  FarPages both{support::make_problem(spec), {}};
  Problem& far = both.far = support::rows_of(both.near, {0, 0, 0, 0});
  std::vector<Ints> table;
  for (int32_t page : kFarPages) {
    const int64_t only = both.near.page_ids[0][0];
    std::memcpy(pool.data() + page * kPoolStride, element(both.near.pages.view(), only), kPageBytes);
    table.push_back({page});
  }
  far.request = Array::of({0, 1, 2, 3});
  far.pages = far.pages.seen_as(pool_view(pool));
  far.block_table = ints(table);
  return both;
}

// ROCm/aiter PR #4774, vllm #52109: keys past 2 GiB of cache score 0. Every row equals the reference, whatever page
// it reads.
TEST_P(Cases, B01_keys_past_two_and_four_gigabytes_of_cache) {
  const Sparse pool(kPoolPages * kPoolStride);
  TOPKEY_NEEDS(pool);
  for (bool exact : {false, true}) {
    const FarPages p = far_pages(pool, exact);
    const Array near = logits_of(p.near, exec()), far = logits_of(p.far, exec());
    int nonzero = 0;
    for (int64_t r = 0; r < 4; ++r) {
      for (int64_t n = 0; n < 64; ++n) {
        ASSERT_EQ(bits_of(float_at(far.view(), r, n)), bits_of(float_at(near.view(), 0, n))) << "row " << r;
        nonzero += float_at(far.view(), r, n) != 0;
      }
    }
    EXPECT_GT(nonzero, 4 * 32);
    expect_right(p.near, 20, exec());
    const Picked chosen = expect_right(p.far, 20, exec());
    for (size_t r = 1; r < 4; ++r) {
      EXPECT_EQ(chosen.indices[r], chosen.indices[0]);
      EXPECT_EQ(chosen.scores[r], chosen.scores[0]);
    }
  }
}

// The same on the way in and out: store_k writes and gather_k reads at the true offset.
TEST_P(Cases, B01_keys_stored_past_two_and_four_gigabytes_of_cache) {
  const Sparse pool(kPoolPages * kPoolStride);
  TOPKEY_NEEDS(pool);
  const Array codes(DType::f8_e4m3fn, {4, 128}), scales(DType::f32, {4}), slots(DType::i32, {4});
  for (int64_t i = 0; i < 4; ++i) {
    std::memset(element(codes.view(), i), static_cast<int>(0x20 + i), 128);
    scales.as<float>()[i] = static_cast<float>(i + 1);
    slots.as<int32_t>()[i] = kFarPages[static_cast<size_t>(i)] * 64 + 5;
  }
  StoreK store{};
  store.k = codes.view(), store.k_scales = scales.view(), store.slot_mapping = slots.view();
  store.cache = {pool_view(pool), KeyFormat::fp8, Layout::planar, 64, 128};
  support::run(store, exec());
  const Array table = ints({{2142}, {2143}, {4285}, {4286}}), indptr = Array::of({0, 64, 128, 192, 256});
  const Array values(DType::f8_e4m3fn, {256, 128}), out_scales(DType::f32, {256});
  GatherK gather{};
  gather.keys.cache = store.cache, gather.keys.block_table = table.view();
  gather.indptr = indptr.view(), gather.total = 256, gather.out = {values.view(), out_scales.view(), KeyFormat::fp8};
  support::run(gather, exec());
  for (int64_t i = 0; i < 4; ++i) {
    const uint8_t* at = pool.data() + kFarPages[static_cast<size_t>(i)] * kPoolStride;
    EXPECT_EQ(std::memcmp(at + 5 * 128, element(codes.view(), i), 128), 0) << i;
    EXPECT_EQ(std::memcmp(at + 64 * 128 + 5 * 4, element(scales.view(), i), 4), 0) << i;
    EXPECT_EQ(std::memcmp(element(values.view(), i * 64 + 5), element(codes.view(), i), 128), 0) << i;
    EXPECT_EQ(out_scales.as<float>()[i * 64 + 5], static_cast<float>(i + 1));
  }
}

// ---- B03: the score matrix
// ------------------------------------------------------------------------------------------------

constexpr int64_t kWide = 1048576;

/// 260 requests of 64 tokens, two rows each, behind a table that could hold 2^20 keys. The requests share one page: a
/// page is cheap, and rows differ by their queries.
Problem many_drafts(bool exact) {
  ProblemSpec spec;
  spec.rows = 520, spec.keys = 64, spec.paged = true, spec.page_size = 64, spec.exact = exact, spec.seed = 103;
  Problem p = support::make_problem(spec);
  p.request = {};
  p.spec.addressing = support::Addressing::next_n, p.spec.next_n = 2;
  p.end = Array::of(Ints(260, 64));
  p.block_table = Array(DType::i32, {260, kWide / 64});
  std::fill_n(p.block_table.as<int32_t>(), p.block_table.size(), 1000000000);
  for (int64_t b = 0; b < 260; ++b) p.block_table.as<int32_t>()[b * (kWide / 64)] = p.page_ids[0][0];
  return p;
}

/// The reference's scores of the 64 columns that any row may see.
support::Truth visible_truth(const Problem& p) {
  PagedKeys keys = p.paged_keys();
  keys.block_table.shape[1] = 1;
  return support::truth_of(p.query(), keys, p.rows());
}

// ROCm/aiter PR #4244, #5121, sglang PR #36960: scores past 2^31 bytes are dropped. Rows 511 to 519 are right,
// nothing stale is chosen.
TEST_P(Cases, B03_score_rows_past_two_gigabytes_are_written) {
  const Sparse memory(520 * kWide * 4);
  TOPKEY_NEEDS(memory);
  for (bool exact : {false, true}) {
    const Problem p = many_drafts(exact);
    for (int64_t r = 0; r < 520; ++r) std::fill_n(memory.as<float>(r * kWide), 128, 12345.F);
    const Tensor logits = tensor(memory.data(), DType::f32, {520, kWide});
    const PagedMqaLogits args = p.paged_logits(logits, false);
    support::run(args, exec());
    const char* bound = exact ? "ref" : arithmetic(exec().backend, KeyFormat::fp8, DType::f8_e4m3fn);
    EXPECT_TRUE(topkey::testing::good(support::compare_scores(args, visible_truth(p), bound)));
    Topk a{};
    a.scores = logits, a.rows = p.rows(), a.topk = 63;
    const Picked chosen = pick_exactly(a, exec());
    for (size_t r = 0; r < 520; ++r) {
      const int64_t length = 63 + static_cast<int64_t>(r % 2);
      ASSERT_EQ(float_at(logits, static_cast<int64_t>(r), length), 12345.F) << "past the window, row " << r;
      ASSERT_EQ(invalid(chosen.indices[r], 63, 0, length), "") << "row " << r;
      for (float score : chosen.scores[r]) ASSERT_NE(score, 12345.F) << "row " << r;
    }
  }
}

constexpr int64_t kPrefillRows = 8192, kPrefillKeys = 65537;

/// 8192 rows over 65537 keys, of which each row sees the last few (full: all): [R, N] f32 ends just past 2^31 bytes.
MqaLogits prefill(const Problem& p, const Array& start, int64_t first, int64_t count, float* logits) {
  MqaLogits a = p.dense_logits(tensor(logits, DType::f32, {count, kPrefillKeys}), false);
  a.rows.count = count;
  a.rows.start = start.view();
  a.q.values.data = element(a.q.values, first);
  a.q.weights.data = element(a.q.weights, first);
  a.q.values.shape[0] = a.q.weights.shape[0] = count;
  return a;
}

// The same for mqa_logits: 8192 x 65537 gives the values of two calls of 4096 rows.
TEST_P(Cases, B03_dense_scores_just_past_two_gigabytes) {
  const Sparse whole(kPrefillRows * kPrefillKeys * 4), half(kPrefillRows / 2 * kPrefillKeys * 4);
  TOPKEY_NEEDS(whole && half);
  ProblemSpec spec;
  spec.rows = kPrefillRows, spec.keys = kPrefillKeys, spec.exact = true, spec.seed = 104;
  const Problem p = support::make_problem(spec);
  const int64_t from = full() ? 0 : kPrefillKeys - 16;
  const Array start = Array::of(Ints(kPrefillRows, static_cast<int32_t>(from)));
  support::run(prefill(p, start, 0, kPrefillRows, whole.as<float>()), exec());
  for (int64_t first : {int64_t{0}, kPrefillRows / 2}) {
    support::run(prefill(p, start, first, kPrefillRows / 2, half.as<float>()), exec());
    for (int64_t r = 0; r < kPrefillRows / 2; ++r) {
      const float *a = whole.as<float>((first + r) * kPrefillKeys + from), *b = half.as<float>(r * kPrefillKeys + from);
      ASSERT_EQ(std::memcmp(a, b, static_cast<size_t>(kPrefillKeys - from) * 4), 0) << "row " << first + r;
    }
  }
  const support::Scorer score(p.query(), KeyFormat::fp8, spec.head_dim);
  for (int64_t r : {int64_t{0}, int64_t{4095}, int64_t{4096}, int64_t{8190}, int64_t{8191}}) {
    for (int64_t n = kPrefillKeys - 16; n < kPrefillKeys; ++n) {
      const float want = score.score(r, *support::key_at(p.dense_keys(), n)).ref;
      ASSERT_EQ(bits_of(*whole.as<float>(r * kPrefillKeys + n)), bits_of(want)) << r << ", " << n;
    }
  }
}

// ---- B04: given scores
// ----------------------------------------------------------------------------------------------------

/// Windows of `rows` rows: whole rows where `whole` says so, else `width` columns from a place that moves with the row.
Rows windows(int64_t rows, int64_t columns, int64_t width, const std::function<bool(int64_t)>& whole, Array* start,
             Array* end) {
  *start = Array(DType::i32, {rows});
  *end = Array(DType::i32, {rows});
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t from = whole(r) ? 0 : r * 7919 % (columns - width);
    start->as<int32_t>()[r] = static_cast<int32_t>(from);
    end->as<int32_t>()[r] = static_cast<int32_t>(whole(r) ? columns : from + width);
  }
  Rows out{};
  out.count = rows, out.start = start->view(), out.end = end->view();
  return out;
}

// pytorch #95455: indices near 2^31 on [2120, 500000]. Value-exact, all below the row length, on both sides of 2^31
// bytes.
TEST_P(Cases, B04_rows_past_two_gigabytes_of_scores) {
  constexpr int64_t kRows = 2120, kColumns = 500000;
  const Sparse scores(kRows * kColumns * 4);
  TOPKEY_NEEDS(scores);
  Random random(104);
  const std::set<int64_t> chosen = {0, 1073, 1074, kRows - 1};
  const auto whole = [&](int64_t r) { return full() || chosen.count(r) > 0; };
  for (int64_t r = 0; r < kRows; ++r) {
    if (whole(r)) std::generate_n(scores.as<float>(r * kColumns), kColumns, [&] { return random.normal(); });
  }
  Array start, end;
  Topk a{};
  a.scores = tensor(scores.data(), DType::f32, {kRows, kColumns});
  a.rows = windows(kRows, kColumns, 24, whole, &start, &end);
  a.topk = 20;
  const Picked p = pick_exactly(a, exec());
  for (const Ints& row : p.indices) ASSERT_EQ(invalid(row, 20, 0, kColumns), "");
}

/// Very many rows. They overlap in memory, one every 8 columns, so that all differ and little is stored; every 1024th
/// is seen whole.
void many_rows(int64_t rows, int64_t columns, int32_t topk, bool full, const Exec& exec) {
  Random random(105);
  const Array scores(DType::f32, {rows * 8 + columns});
  std::generate_n(scores.as<float>(), scores.size(), [&] { return random.normal(); });
  Array start, end;
  Topk a{};
  a.scores = tensor(scores.view().data, DType::f32, {rows, columns}, {8, 1});
  a.rows = windows(
      rows, columns, topk + 8, [&](int64_t r) { return full || r % 1024 == 1023; }, &start, &end);
  a.topk = topk;
  const Picked p = pick_exactly(a, exec, false);
  for (const Ints& row : p.indices) ASSERT_EQ(invalid(row, topk, 0, columns), "");
}

// pytorch #93006, #82569: illegal access with very many rows. Value-exact in each.
TEST_P(Cases, B04_very_many_rows_of_scores) {
  many_rows(122880, 1024, 32, full(), exec());
  many_rows(60000, 1000, 10, full(), exec());
}

// pytorch PR #176095: a row longer than INT_MAX. Right or refused, never a negative index; the longest row that is
// allowed is right.
TEST_P(Cases, B04_rows_around_the_largest_int) {
  constexpr int64_t kLongest = INT32_MAX, kTooLong = (int64_t{1} << 31) + 8, kSeen = 1000;
  const Sparse scores(static_cast<size_t>(kTooLong) * 2);
  TOPKEY_NEEDS(scores);
  Random random(106);
  const int64_t first = kLongest - kSeen;
  for (int64_t i = 0; i < kSeen + 9; ++i) *scores.as<uint16_t>(first + i) = float_to_bf16(random.normal());
  const Array start = Array::of({static_cast<int32_t>(first)}), end = Array::of({INT32_MAX});
  Topk a{};
  a.rows.count = 1, a.rows.start = start.view(), a.rows.end = end.view(), a.topk = 20;
  a.scores = tensor(scores.data(), DType::bf16, {1, kLongest});
  const Picked longest = pick_exactly(a, exec());
  EXPECT_EQ(invalid(longest.indices[0], 20, 0, kSeen), "");
  a.scores = tensor(scores.data(), DType::bf16, {1, kTooLong});
  Picked p;
  if (ran([&] { p = pick_exactly(a, exec()); })) {
    EXPECT_EQ(p.indices, longest.indices);
  } else {  // then also where nothing but the shape says how long a row is
    a.rows.start = {}, a.rows.end = {};
    EXPECT_THROW(topk_workspace_bytes(a, exec()), Error);
  }
}

TOPKEY_CASES();

}  // namespace
}  // namespace topkey::cases
