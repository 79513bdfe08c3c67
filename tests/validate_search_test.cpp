// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Wrong arguments of the stages score, select, search and merge, each in turn (see validate_cases.h). Every operation
// comes twice, with the two ways to name windows and requests.
#include <gtest/gtest.h>

#include <cstdint>

#include "tests/backend_test.h"
#include "tests/validate_cases.h"
#include "topkey/topkey.h"

namespace topkey::testing {
namespace {

constexpr int64_t kRowCount = 4, kHeads = 2, kDim = 32, kKeys = 6, kTopkCount = 3;

// ---- the parts ----
/// Windows by end, requests by id.
template <class A>
void rows_by_id(Subject<A>& s, bool dense) {
  s.args.rows.count = kRowCount;
  s.args.rows.end = s.arena.ints({6, 5, 4, 6});
  s.args.rows.start = s.arena.ints({0, 1, 0, 2});
  s.args.rows.request = s.arena.ints({0, 0, 1, 1});
  s.tensor(TOPKEY_TENSOR(A, rows.end), kI32Only, "=", dense ? 0u : unsigned{kRequired});
  s.tensor(TOPKEY_TENSOR(A, rows.start), kI32Only, ">");
  s.tensor(TOPKEY_TENSOR(A, rows.request), kI32Only, ">");
  const Tensor length = s.arena.ints({1, 1, 1, 1}), indptr = s.arena.ints({0, 2, 4});
  s.wrong("beside end", "rows.length must ", [length](A& a) { a.rows.length = length; });
  s.wrong("beside request", "rows.q_indptr must ", [indptr](A& a) { a.rows.q_indptr = indptr; });
  s.wrong("negative", "rows.count must ", [](A& a) { a.rows.count = -1; });
  s.wrong("past int32", "rows.count must ", [](A& a) { a.rows.count = int64_t{1} << 31; });
  s.wrong("more than there are", "", [](A& a) { a.rows.count = kRowCount + 1; });
  s.wrong("negative", "rows.next_n must ", [](A& a) { a.rows.next_n = -1; });
  s.wrong("negative", "rows.max_len must ", [](A& a) { a.rows.max_len = -1; });
  s.wrong("past int32", "rows.max_len must ", [](A& a) { a.rows.max_len = int64_t{1} << 31; });
  s.wrong("no multiple of next_n", "rows.count must ", [](A& a) { a.rows.request = Tensor{}, a.rows.next_n = 3; });
}
/// Windows by length, requests by offsets.
template <class A>
void rows_by_offsets(Subject<A>& s) {
  s.args.rows.count = kRowCount;
  s.args.rows.length = s.arena.ints({6, 5, 0, 6});
  s.args.rows.q_indptr = s.arena.ints({0, 2, 4});
  s.tensor(TOPKEY_TENSOR(A, rows.length), kI32Only, ">");
  s.tensor(TOPKEY_TENSOR(A, rows.q_indptr), kI32Only, "*");
  s.wrong("no entry at all", "rows.q_indptr must ", [](A& a) { a.rows.q_indptr.shape[0] = 0; });
}
/// One end a request of two rows.
template <class A>
void rows_by_next_n(Subject<A>& s) {
  s.args.rows.count = kRowCount;
  s.args.rows.next_n = 2;
  s.args.rows.end = s.arena.ints({6, 4});
  s.tensor(TOPKEY_TENSOR(A, rows.end), kI32Only, "=");
}

template <class A>
void query(Subject<A>& s, KeyFormat format) {
  const bool fp8 = format == KeyFormat::fp8, fp4 = format == KeyFormat::mxfp4;
  const bool codes = fp4 || topkey::is_fp8(format);
  s.args.q.values = s.arena.in(codes ? DType::u8 : DType::f32, {kRowCount, kHeads, fp4 ? kDim / 2 : kDim});
  s.args.q.weights = s.arena.in(DType::f32, {kRowCount, kHeads});
  s.tensor(TOPKEY_TENSOR(A, q.values),
           fp8     ? kCodeTypes
           : codes ? std::vector<DType>{DType::u8}
                   : kFloatTypes,
           ">?=", kRequired | kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, q.weights), kWeightTypes, ">=", kRequired | kUnitStride);
  const Tensor scales = s.arena.in(DType::u8, {kRowCount, kHeads, kDim / 32});
  if (fp4) {
    s.args.q.scales = scales;
    s.tensor(TOPKEY_TENSOR(A, q.scales), {DType::u8, DType::e8m0}, ">==", kRequired | kUnitStride);
    s.wrong("words where D is not 128", "q.scales must ", [](A& a) { a.q.scales.dtype = DType::i32; });
  } else {
    s.wrong("given but for mxfp4", "q.scales must ", [scales](A& a) { a.q.scales = scales; });
  }
  s.wrong("no heads", "q.values", [](A& a) { a.q.values.shape[1] = 0; });
}

template <class A>
void dense_keys(Subject<A>& s, KeyFormat format) {
  const bool fp8 = format == KeyFormat::fp8;
  s.args.keys.format = format;
  s.args.keys.values = s.arena.in(fp8 ? DType::u8 : DType::bf16, {kKeys, kDim});
  const Tensor scales = s.arena.in(DType::f32, {kKeys});
  s.tensor(TOPKEY_TENSOR(A, keys.values), fp8 ? kCodeTypes : std::vector<DType>{DType::bf16}, "*?",
           kRequired | kUnitStride);
  if (fp8) {
    s.args.keys.scales = scales;
    s.tensor(TOPKEY_TENSOR(A, keys.scales), kF32Only, ">", kRequired);
  } else {
    s.wrong("given for keys without", "keys.scales must ", [scales](A& a) { a.keys.scales = scales; });
  }
  s.wrong("below", "keys.format must ", [](A& a) { a.keys.format = static_cast<KeyFormat>(-1); });
  s.wrong("above", "keys.format must ", [](A& a) { a.keys.format = static_cast<KeyFormat>(7); });
}

template <class A>
void paged_keys(Subject<A>& s) {
  s.args.keys.cache = {s.arena.in(DType::u8, {3, 144}), KeyFormat::fp8, Layout::planar, 4, kDim};
  s.args.keys.block_table = s.arena.ints({0, 1, 2, 2}), s.args.keys.block_table.ndim = 2;
  s.args.keys.block_table.shape[0] = s.args.keys.block_table.shape[1] = 2;
  s.args.keys.block_table.stride[0] = 2, s.args.keys.block_table.stride[1] = 1;
  s.tensor(
      "cache.pages", [](A& a) -> Tensor& { return a.keys.cache.pages; }, kCodeTypes, "*>", kRequired | kUnitStride);
  s.wrong("zero", "cache.page_size must ", [](A& a) { a.keys.cache.page_size = 0; });
  s.wrong("another", "", [](A& a) { a.keys.cache.head_dim = 16; });
  s.wrong("above", "cache.format must ", [](A& a) { a.keys.cache.format = static_cast<KeyFormat>(7); });
  s.wrong("above", "cache.layout must ", [](A& a) { a.keys.cache.layout = static_cast<Layout>(5); });
  s.wrong("stride no multiple of 4", "cache.pages must ", [](A& a) { a.keys.cache.pages.stride[0] = 147; });
  s.wrong("a row for each query row", "keys.block_table must ", [](A& a) { a.keys.table_per_row = true; });
  shard_wrongs<A>(s, [](A& a) -> Shard& { return a.keys.shard; });
}

template <class A>
void admission(Subject<A>& s, bool masked) {
  s.args.admit.candidates = s.arena.in(DType::i32, {kRowCount, 2});
  s.args.admit.candidate_block_size = 2;
  s.tensor(TOPKEY_TENSOR(A, admit.candidates), kI32Only, ">*", kUnitStride);
  const Tensor mask = s.arena.in(DType::f32, {kRowCount, kKeys});
  if (masked) {
    s.args.admit.mask = mask;
    s.tensor(TOPKEY_TENSOR(A, admit.mask), kMaskTypes, ">>", kUnitStride);
  } else {
    s.wrong("given for paged keys", "admit.mask must ", [mask](A& a) { a.admit.mask = mask; });
  }
  s.wrong("zero", "admit.candidate_block_size must ", [](A& a) { a.admit.candidate_block_size = 0; });
  s.wrong("negative", "admit.candidate_block_size must ", [](A& a) { a.admit.candidate_block_size = -8; });
  s.wrong("negative", "admit.force_first must ", [](A& a) { a.admit.force_first = -1; });
  s.wrong("negative", "admit.force_last must ", [](A& a) { a.admit.force_last = -1; });
}

template <class A>
void selection(Subject<A>& s, bool has_blocks = true) {
  s.args.topk = kTopkCount;
  s.args.out.indices = s.arena.out(DType::i32, {kRowCount, kTopkCount});
  s.args.out.slots = s.arena.out(DType::i32, {kRowCount, kTopkCount});
  s.args.out.scores = s.arena.out(DType::f32, {kRowCount, kTopkCount});
  s.args.out.counts = s.arena.out(DType::i32, {kRowCount});
  s.args.out.index_base = s.arena.in(DType::i32, {kRowCount});
  s.args.out.slot_map = {s.arena.in(DType::i32, {4, 3}), false, 2};
  s.tensor(TOPKEY_TENSOR(A, out.indices), kI32Only, ">>", kUnitStride | kWritten);
  s.tensor(TOPKEY_TENSOR(A, out.slots), kI32Only, ">>", kUnitStride | kWritten);
  s.tensor(TOPKEY_TENSOR(A, out.scores), kF32Only, ">>", kUnitStride | kWritten);
  s.tensor(TOPKEY_TENSOR(A, out.counts), kI32Only, ">", kWritten);
  s.tensor(TOPKEY_TENSOR(A, out.index_base), kI32Only, ">");
  s.tensor(TOPKEY_TENSOR(A, out.slot_map.block_table), kI32Only, "**", kRequired);
  s.wrong("zero", "out.slot_map.page_size must ", [](A& a) { a.out.slot_map.page_size = 0; });
  s.wrong("a map without slots", "out.slot_map.block_table must ", [](A& a) { a.out.slots = Tensor{}; });
  s.wrong("neither indices nor slots", "out.",
          [](A& a) { a.out.indices = a.out.slots = a.out.slot_map.block_table = Tensor{}; });
  s.wrong("below", "out.order must ", [](A& a) { a.out.order = static_cast<Order>(-1); });
  s.wrong("above", "out.order must ", [](A& a) { a.out.order = static_cast<Order>(3); });
  s.wrong("below", "out.fill must ", [](A& a) { a.out.fill = static_cast<Fill>(-1); });
  s.wrong("above", "out.fill must ", [](A& a) { a.out.fill = static_cast<Fill>(3); });
  s.wrong("zero", "topk must ", [](A& a) { a.topk = 0; });
  s.wrong("negative", "topk must ", [](A& a) { a.topk = -3; });
  s.wrong("wider than the outputs", "out.indices must ", [](A& a) { a.topk = kTopkCount + 1; });
  if (!has_blocks) return;
  s.args.out.blocks = s.arena.out(DType::i32, {kRowCount, 2});
  s.args.out.block_size = 2;
  s.tensor(TOPKEY_TENSOR(A, out.blocks), kI32Only, ">*", kUnitStride | kWritten);
  s.wrong("zero", "out.block_size must ", [](A& a) { a.out.block_size = 0; });
  s.wrong("no columns", "out.blocks must ", [](A& a) { a.out.blocks.shape[1] = 0; });
}

class ValidateSearch : public BackendTest {};

// ---- score ----
TEST_P(ValidateSearch, MqaLogits) {
  using A = MqaLogits;
  for (KeyFormat format : {KeyFormat::fp8, KeyFormat::bf16}) {
    Subject<A> s;
    rows_by_id(s, true);
    query(s, format);
    dense_keys(s, format);
    s.args.mask = s.arena.in(DType::f32, {kRowCount, kKeys});
    s.args.logits = s.arena.out(DType::f32, {kRowCount, kKeys});
    s.tensor(TOPKEY_TENSOR(A, mask), kMaskTypes, ">>", kUnitStride);
    s.tensor(TOPKEY_TENSOR(A, logits), kWeightTypes, ">>", kRequired | kUnitStride | kWritten);
    check_subject(s, exec());
  }
}

TEST_P(ValidateSearch, MqaLogitsByOffsets) {
  using A = MqaLogits;
  Subject<A> s;
  rows_by_offsets(s);
  query(s, KeyFormat::fp8);
  dense_keys(s, KeyFormat::fp8);
  s.args.logits = s.arena.out(DType::bf16, {kRowCount, kKeys});
  check_subject(s, exec());
}

TEST_P(ValidateSearch, MqaLogitsOfMxFp4) {
  using A = MqaLogits;
  Subject<A> s;
  rows_by_next_n(s);
  query(s, KeyFormat::mxfp4);
  s.args.keys = {s.arena.in(DType::u8, {kKeys, kDim / 2}), s.arena.in(DType::u8, {kKeys, 1}), KeyFormat::mxfp4};
  s.tensor(TOPKEY_TENSOR(A, keys.values), {DType::u8}, "*?", kRequired | kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, keys.scales), {DType::u8, DType::e8m0}, ">=", kRequired | kUnitStride);
  s.args.logits = s.arena.out(DType::f32, {kRowCount, kKeys});
  s.tensor(TOPKEY_TENSOR(A, logits), kWeightTypes, ">>", kRequired | kUnitStride | kWritten);
  check_subject(s, exec());
}

TEST_P(ValidateSearch, MqaLogitsOfFp8Fnuz) {
  using A = MqaLogits;
  Subject<A> s;
  rows_by_next_n(s);
  query(s, KeyFormat::fp8_fnuz);
  s.args.keys = {s.arena.in(DType::u8, {kKeys, kDim}), s.arena.in(DType::f32, {kKeys}), KeyFormat::fp8_fnuz};
  s.tensor(TOPKEY_TENSOR(A, keys.values), {DType::u8}, "*?", kRequired | kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, keys.scales), kF32Only, ">", kRequired);
  s.args.logits = s.arena.out(DType::f32, {kRowCount, kKeys});
  check_subject(s, exec());
}

TEST_P(ValidateSearch, PagedMqaLogits) {
  using A = PagedMqaLogits;
  Subject<A> s;
  rows_by_id(s, false);
  query(s, KeyFormat::fp8);
  paged_keys(s);
  s.tensor(TOPKEY_TENSOR(A, keys.block_table), kI32Only, "**", kRequired);
  s.args.logits = s.arena.out(DType::f32, {kRowCount, 8});
  s.tensor(TOPKEY_TENSOR(A, logits), kWeightTypes, ">>", kRequired | kUnitStride | kWritten);
  check_subject(s, exec());
}

TEST_P(ValidateSearch, PagedMqaLogitsByNextN) {
  using A = PagedMqaLogits;
  Subject<A> s;
  rows_by_next_n(s);
  query(s, KeyFormat::fp8);
  paged_keys(s);
  s.tensor(TOPKEY_TENSOR(A, keys.block_table), kI32Only, ">*", kRequired);
  s.args.rows.max_len = 7;
  s.args.logits = s.arena.out(DType::f32, {kRowCount, 7});
  s.wrong("narrower than max_len", "logits must ", [](A& a) { a.rows.max_len = 8; });
  s.wrong("neither end nor length", "rows.end must ", [](A& a) { a.rows.end = Tensor{}; });
  check_subject(s, exec());
}

// ---- select ----
TEST_P(ValidateSearch, Topk) {
  using A = Topk;
  Subject<A> s;
  rows_by_id(s, true);
  s.args.scores = s.arena.in(DType::f32, {kRowCount, kKeys});
  s.args.row_topk = s.arena.in(DType::i32, {kRowCount});
  s.tensor(TOPKEY_TENSOR(A, scores), kFloatTypes, ">*", kRequired | kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, row_topk), kI32Only, ">");
  admission(s, true);
  selection(s);
  check_subject(s, exec());
}

TEST_P(ValidateSearch, SelectBlocks) {
  using A = SelectBlocks;
  Subject<A> s;
  rows_by_offsets(s);
  s.args.scores = s.arena.in(DType::bf16, {kRowCount, kKeys});
  s.args.block_size = 2;
  s.args.blocks = s.arena.out(DType::i32, {kRowCount, 2});
  s.tensor(TOPKEY_TENSOR(A, scores), kFloatTypes, ">*", kRequired | kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, blocks), kI32Only, ">*", kRequired | kUnitStride | kWritten);
  s.wrong("zero", "block_size must ", [](A& a) { a.block_size = 0; });
  s.wrong("negative", "block_size must ", [](A& a) { a.block_size = -1; });
  s.wrong("no columns", "blocks must ", [](A& a) { a.blocks.shape[1] = 0; });
  check_subject(s, exec());
}

// ---- search ----
TEST_P(ValidateSearch, MqaTopk) {
  using A = MqaTopk;
  for (KeyFormat format : {KeyFormat::fp8, KeyFormat::bf16}) {
    Subject<A> s;
    rows_by_id(s, true);
    query(s, format);
    dense_keys(s, format);
    admission(s, true);
    selection(s);
    check_subject(s, exec());
  }
}

TEST_P(ValidateSearch, PagedMqaTopk) {
  using A = PagedMqaTopk;
  Subject<A> s;
  rows_by_id(s, false);
  query(s, KeyFormat::fp8);
  paged_keys(s);
  s.tensor(TOPKEY_TENSOR(A, keys.block_table), kI32Only, "**", kRequired);
  admission(s, false);
  selection(s);
  s.wrong("a start under a shard", "whole_start must ", [](A& a) { a.keys.shard = {0, 2, 1}; });
  const Tensor window = s.arena.in(DType::i32, {kRowCount});
  s.wrong("given without a shard", "whole_start must ", [window](A& a) { a.whole_start = window; });
  s.wrong("given without a shard", "whole_end must ", [window](A& a) { a.whole_end = window; });
  check_subject(s, exec());
}

TEST_P(ValidateSearch, PagedMqaTopkUnderAShard) {
  using A = PagedMqaTopk;
  Subject<A> s;
  rows_by_id(s, false);
  query(s, KeyFormat::fp8);
  paged_keys(s);
  admission(s, false);
  selection(s);
  s.args.keys.shard = {1, 2, 4};
  s.args.whole_start = s.arena.in(DType::i32, {kRowCount});
  s.args.whole_end = s.arena.in(DType::i32, {kRowCount});
  s.args.block_scores = s.arena.out(DType::f32, {kRowCount, 2});
  s.tensor(TOPKEY_TENSOR(A, whole_start), kI32Only, ">", kRequired);
  s.tensor(TOPKEY_TENSOR(A, whole_end), kI32Only, ">", kRequired);
  s.tensor(TOPKEY_TENSOR(A, block_scores), kF32Only, ">>", kUnitStride | kWritten);
  s.wrong("scores of no blocks", "block_scores must ", [](A& a) { a.out.blocks = Tensor{}; });
  s.wrong("over the block ids", "block_scores must be in other memory than out.blocks",
          [](A& a) { a.block_scores.data = a.out.blocks.data; });
  check_subject(s, exec());
}

TEST_P(ValidateSearch, PagedMqaTopkByOffsets) {
  using A = PagedMqaTopk;
  Subject<A> s;
  rows_by_offsets(s);
  query(s, KeyFormat::fp8);
  paged_keys(s);
  s.tensor(TOPKEY_TENSOR(A, keys.block_table), kI32Only, ">*", kRequired);
  selection(s);
  s.wrong("neither end nor length", "rows.end must ", [](A& a) { a.rows.length = Tensor{}; });
  check_subject(s, exec());
}

// ---- merge ----
TEST_P(ValidateSearch, MergeTopk) {
  using A = MergeTopk;
  Subject<A> s;
  rows_by_id(s, true);
  s.args.scores = s.arena.in(DType::f32, {2, kRowCount, kKeys});
  s.args.indices = s.arena.in(DType::i32, {2, kRowCount, kKeys});
  s.tensor(TOPKEY_TENSOR(A, scores), kF32Only, "?>?", kRequired | kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, indices), kI32Only, "=>=", kRequired | kUnitStride);
  selection(s, false);
  s.wrong("negative", "force_first must ", [](A& a) { a.force_first = -1; });
  s.wrong("negative", "force_last must ", [](A& a) { a.force_last = -1; });
  s.wrong("without an end", "rows.end must ", [](A& a) { a.force_last = 1, a.rows.end = a.rows.length = Tensor{}; });
  const Tensor blocks = s.arena.out(DType::i32, {kRowCount, 2});
  s.wrong("blocks of no parts", "block_ids must ", [blocks](A& a) { a.out.blocks = blocks; });
  const Tensor ids = s.arena.in(DType::i32, {2, kRowCount, 3}), scores = s.arena.in(DType::f32, {2, kRowCount, 3});
  s.wrong("without blocks", "block_ids must ", [ids](A& a) { a.block_ids = ids; });
  s.wrong("without blocks", "block_scores must ", [scores](A& a) { a.block_scores = scores; });
  check_subject(s, exec());
}

TEST_P(ValidateSearch, MergeTopkWithBlocks) {
  using A = MergeTopk;
  Subject<A> s;
  rows_by_id(s, true);
  s.args.scores = s.arena.in(DType::f32, {2, kRowCount, kKeys});
  s.args.indices = s.arena.in(DType::i32, {2, kRowCount, kKeys});
  selection(s, false);
  s.args.out.blocks = s.arena.out(DType::i32, {kRowCount, 2});
  s.args.block_ids = s.arena.in(DType::i32, {2, kRowCount, 2});
  s.args.block_scores = s.arena.in(DType::f32, {2, kRowCount, 2});
  s.tensor(TOPKEY_TENSOR(A, out.blocks), kI32Only, ">*", kUnitStride | kWritten);
  s.tensor(TOPKEY_TENSOR(A, block_ids), kI32Only, "?>>", kRequired | kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, block_scores), kF32Only, "=>=", kRequired | kUnitStride);
  check_subject(s, exec());
}

/// Two outputs in one memory are refused; columns of one buffer, and rows after one another, are not.
TEST(OutputsApart, AsFarAsTheHostKnows) {
  const Array scores(DType::f32, {3, 8}), room(DType::i32, {6, 16});
  const auto refusal = [&](const Tensor& indices, const Tensor& values, const Tensor& counts) -> std::string {
    Topk a{};
    a.scores = scores.view();
    a.rows.count = 3, a.topk = 2;
    a.out.indices = indices, a.out.scores = values, a.out.counts = counts;
    try {
      topk(a, on("ref"));
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  };
  int32_t* at = room.as<int32_t>();
  const auto ints = [&](int64_t first, int64_t step) { return tensor(at + first, DType::i32, {3, 2}, {step, 1}); };
  const auto floats = [&](int64_t first, int64_t step) { return tensor(at + first, DType::f32, {3, 2}, {step, 1}); };
  const Tensor none{};
  EXPECT_EQ(refusal(ints(0, 2), floats(0, 2), none),
            "topk: out.scores must be in other memory than out.indices, got memory that both would write");
  EXPECT_NE(refusal(ints(0, 2), floats(4, 2), none), "") << "the last row";
  EXPECT_NE(refusal(ints(0, 16), floats(1, 16), none), "") << "a column";
  EXPECT_NE(refusal(ints(15, 16), floats(0, 16), none), "") << "into the next row";
  EXPECT_NE(refusal(ints(0, 16), none, tensor(at + 17, DType::i32, {3})), "");
  EXPECT_NE(refusal(ints(0, 16), floats(12, 4), none), "") << "rows of another step: the second meets the second";
  EXPECT_NE(refusal(ints(0, 16), none, tensor(at + 2, DType::i32, {3}, {15})), "") << "a walk into the last row";
  EXPECT_EQ(refusal(ints(0, 16), floats(4, 4), none), "") << "rows of another step, between two";
  EXPECT_NE(refusal(ints(0, 16), floats(32, -16), none), "") << "the same rows, downwards";
  EXPECT_EQ(refusal(ints(0, 2), none, tensor(at + 6, DType::i32, {6}, {1})), "") << "one after the other";
  EXPECT_EQ(refusal(tensor(at, DType::i32, {6, 2}), floats(6, 2), none), "") << "rows that the call does not write";
  EXPECT_EQ(refusal(ints(0, 16), floats(2, 16), none), "") << "columns of one buffer";
  EXPECT_EQ(refusal(ints(14, 16), floats(0, 16), none), "");
  EXPECT_EQ(refusal(ints(0, 2), floats(6, 2), none), "") << "one after the other";
}

TOPKEY_ON_EVERY_BACKEND(ValidateSearch);

}  // namespace
}  // namespace topkey::testing
