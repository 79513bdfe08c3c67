// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Wrong arguments of the stages rows, quantize and cache, each in turn (see validate_cases.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "tests/backend_test.h"
#include "tests/validate_cases.h"
#include "topkey/topkey.h"

namespace topkey::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

class ValidateProducers : public BackendTest {};

TEST_P(ValidateProducers, ExpandRows) {
  using A = ExpandRows;
  Subject<A> s;
  s.args.query_start = s.arena.ints({0, 1, 3});
  s.args.seq_lens = s.arena.ints({4, 6});
  s.args.block_table = s.arena.in(DType::i32, {2, 2});
  s.args.page_size = 4;
  s.args.capacity = 4;
  s.args.row_request = s.arena.out(DType::i32, {4});
  s.args.lens = s.arena.out(DType::i32, {4});
  s.args.positions = s.arena.out(DType::i32, {4});
  s.args.slots = s.arena.out(DType::i64, {4});
  s.tensor(TOPKEY_TENSOR(A, query_start), kI32Only, "*", kRequired);
  s.tensor(TOPKEY_TENSOR(A, seq_lens), kI32Only, ">", kRequired);
  s.tensor(TOPKEY_TENSOR(A, block_table), kI32Only, ">*", kRequired);
  s.tensor(TOPKEY_TENSOR(A, row_request), kI32Only, ">", kWritten);
  s.tensor(TOPKEY_TENSOR(A, lens), kI32Only, ">", kWritten);
  s.tensor(TOPKEY_TENSOR(A, positions), kIntTypes, ">", kWritten);
  s.tensor(TOPKEY_TENSOR(A, slots), kIntTypes, ">", kWritten);
  s.wrong("no entry at all", "query_start must ", [](A& a) { a.query_start.shape[0] = 0; });
  s.wrong("negative", "ratio must ", [](A& a) { a.ratio = -1; });
  s.wrong("negative", "capacity must ", [](A& a) { a.capacity = -1; });
  s.wrong("past int32", "capacity must ", [](A& a) { a.capacity = int64_t{1} << 31; });
  s.wrong("more rows than the outputs have", "row_request must ", [](A& a) { a.capacity = 5; });
  s.wrong("zero", "page_size must ", [](A& a) { a.page_size = 0; });
  s.wrong("negative", "page_size must ", [](A& a) { a.page_size = -4; });
  s.wrong("a table without slots", "block_table must ", [](A& a) { a.slots = Tensor{}; });
  s.wrong("over the lengths", "positions must be in other memory than lens",
          [](A& a) { a.positions.data = a.lens.data; });
  shard_wrongs<A>(s, [](A& a) -> Shard& { return a.shard; });
  check_subject(s, exec());
}

TEST_P(ValidateProducers, ToSlots) {
  using A = ToSlots;
  Subject<A> s;
  s.args.indices = s.arena.in(DType::i32, {2, 3});
  s.args.row_request = s.arena.in(DType::i32, {2});
  s.args.block_table = s.arena.in(DType::i32, {2, 2});
  s.args.page_size = 4;
  s.args.slots = s.arena.out(DType::i32, {2, 3});
  s.args.counts = s.arena.out(DType::i32, {2});
  s.tensor(TOPKEY_TENSOR(A, indices), kI32Only, "**", kRequired | kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, row_request), kI32Only, ">");
  s.tensor(TOPKEY_TENSOR(A, block_table), kI32Only, "**", kRequired);
  s.tensor(TOPKEY_TENSOR(A, slots), kI32Only, ">>", kRequired | kUnitStride | kWritten);
  s.tensor(TOPKEY_TENSOR(A, counts), kI32Only, ">", kWritten);
  s.wrong("zero", "page_size must ", [](A& a) { a.page_size = 0; });
  s.wrong("negative", "page_size must ", [](A& a) { a.page_size = -1; });
  s.wrong("a table with fewer rows than requests", "block_table must ",
          [](A& a) { a.row_request = Tensor{}, a.block_table.shape[0] = 1; });
  shard_wrongs<A>(s, [](A& a) -> Shard& { return a.shard; });
  check_subject(s, exec());
}

void query_numbers(Subject<QuantizeQ>& s) {
  using A = QuantizeQ;
  s.wrong("below", "format must ", [](A& a) { a.format = static_cast<KeyFormat>(-1); });
  s.wrong("above", "format must ", [](A& a) { a.format = static_cast<KeyFormat>(7); });
  s.wrong("below", "rule must ", [](A& a) { a.rule = static_cast<QuantRule>(-1); });
  s.wrong("above", "rule must ", [](A& a) { a.rule = static_cast<QuantRule>(10); });
  s.wrong("of keys", "rule must ", [](A& a) { a.rule = QuantRule::v32_key; });
  s.wrong("of q8_0", "rule must ", [](A& a) { a.rule = QuantRule::q8_0; });
  s.wrong("NaN", "softmax_scale must ", [](A& a) { a.softmax_scale = std::nanf(""); });
  s.wrong("infinite", "head_scale must ", [](A& a) { a.head_scale = -kInf; });
}

TEST_P(ValidateProducers, QuantizeQToFp8) {
  using A = QuantizeQ;
  Subject<A> s;
  s.args.q = s.arena.in(DType::f32, {2, 3, 32});
  s.args.weights = s.arena.in(DType::f32, {2, 3});
  s.args.q_out = s.arena.out(DType::u8, {2, 3, 32});
  s.args.weights_out = s.arena.out(DType::f32, {2, 3});
  s.tensor(TOPKEY_TENSOR(A, q), kFloatTypes, "*??", kRequired | kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, weights), kWeightTypes, ">=", kRequired | kUnitStride);
  rope_table(s, 2, 16);
  s.tensor(TOPKEY_TENSOR(A, q_out), kCodeTypes, ">==", kRequired | kUnitStride | kWritten);
  s.tensor(TOPKEY_TENSOR(A, weights_out), kF32Only, ">=", kRequired | kUnitStride | kWritten);
  query_numbers(s);
  const Tensor scales = s.arena.out(DType::u8, {2, 3, 1});
  s.wrong("given for fp8", "q_scales_out must ", [scales](A& a) { a.q_scales_out = scales; });
  check_subject(s, exec());
}

TEST_P(ValidateProducers, QuantizeQToMxFp4) {
  using A = QuantizeQ;
  Subject<A> s;
  s.args.format = KeyFormat::mxfp4;
  s.args.q = s.arena.in(DType::bf16, {2, 3, 64});
  s.args.weights = s.arena.in(DType::f32, {2, 3});
  s.args.q_out = s.arena.out(DType::u8, {2, 3, 32});
  s.args.q_scales_out = s.arena.out(DType::u8, {2, 3, 2});
  s.args.weights_out = s.arena.out(DType::f32, {2, 3});
  s.tensor(TOPKEY_TENSOR(A, q_out), {DType::u8}, ">==", kRequired | kUnitStride | kWritten);
  s.tensor(TOPKEY_TENSOR(A, q_scales_out), {DType::u8, DType::e8m0}, ">==", kRequired | kUnitStride | kWritten);
  s.wrong("of fp8", "rule must ", [](A& a) { a.rule = QuantRule::v4_query; });
  s.wrong("no multiple of 32", "q head_dim must ", [](A& a) { a.q.shape[2] = 48; });
  const Tensor words = s.arena.out(DType::i32, {2, 3});
  s.wrong("words where D is not 128", "q_scales_out must ", [words](A& a) { a.q_scales_out = words; });
  check_subject(s, exec());
}

TEST_P(ValidateProducers, QuantizeQToFp8Fnuz) {
  using A = QuantizeQ;
  Subject<A> s;
  s.args.format = KeyFormat::fp8_fnuz;
  s.args.q = s.arena.in(DType::bf16, {2, 3, 20});
  s.args.weights = s.arena.in(DType::f32, {2, 3});
  s.args.q_out = s.arena.out(DType::u8, {2, 3, 20});
  s.args.weights_out = s.arena.out(DType::f32, {2, 3});
  s.tensor(TOPKEY_TENSOR(A, q_out), {DType::u8}, ">==", kRequired | kUnitStride | kWritten);
  s.wrong("of no producer that makes them", "rule must ", [](A& a) { a.rule = QuantRule::kpool_query; });
  check_subject(s, exec());
}

TEST_P(ValidateProducers, QuantizeQToPlain) {
  using A = QuantizeQ;
  Subject<A> s;
  s.args.format = KeyFormat::bf16;
  s.args.q = s.arena.in(DType::f16, {2, 3, 48});
  s.args.weights = s.arena.in(DType::bf16, {2, 3});
  s.args.q_out = s.arena.out(DType::f32, {2, 3, 48});
  s.args.weights_out = s.arena.out(DType::f32, {2, 3});
  s.tensor(TOPKEY_TENSOR(A, q_out), kFloatTypes, ">==", kRequired | kUnitStride | kWritten);
  s.wrong("any for plain queries", "rule must ", [](A& a) { a.rule = QuantRule::v32_query; });
  s.wrong("for 48 dims", "hadamard must ", [](A& a) { a.hadamard = true; });
  check_subject(s, exec());
}

void key_numbers(Subject<QuantizeK>& s) {
  using A = QuantizeK;
  s.wrong("below", "out.format must ", [](A& a) { a.out.format = static_cast<KeyFormat>(-1); });
  s.wrong("above", "out.format must ", [](A& a) { a.out.format = static_cast<KeyFormat>(7); });
  s.wrong("above", "rule must ", [](A& a) { a.rule = static_cast<QuantRule>(10); });
  s.wrong("of queries", "rule must ", [](A& a) { a.rule = QuantRule::v32_query; });
  s.wrong("below", "scale must ", [](A& a) { a.scale = static_cast<ScaleRule>(-1); });
  s.wrong("above", "scale must ", [](A& a) { a.scale = static_cast<ScaleRule>(2); });
  s.wrong("f32 under v4_key", "scale must ", [](A& a) { a.rule = QuantRule::v4_key, a.scale = ScaleRule::f32; });
  s.wrong("below", "norm.kind must ", [](A& a) { a.norm.kind = static_cast<NormKind>(-1); });
  s.wrong("above", "norm.kind must ", [](A& a) { a.norm.kind = static_cast<NormKind>(3); });
  s.wrong("given without a norm", "norm.weight must ", [](A& a) { a.norm.kind = NormKind::none; });
  s.wrong("given for rms", "norm.bias must ", [](A& a) { a.norm.kind = NormKind::rms; });
  for (float eps : {-1e-6f, kInf, std::nanf("")}) {
    s.wrong("no number to add", "norm.eps must ", [eps](A& a) { a.norm.eps = eps; });
  }
}

TEST_P(ValidateProducers, QuantizeKToFp8) {
  using A = QuantizeK;
  Subject<A> s;
  s.args.k = s.arena.in(DType::f32, {2, 32});
  s.args.norm = {NormKind::layer, s.arena.in(DType::f32, {32}), s.arena.in(DType::bf16, {32}), 1e-6f};
  s.args.out = {s.arena.out(DType::u8, {2, 32}), s.arena.out(DType::f32, {2}), KeyFormat::fp8};
  s.tensor(TOPKEY_TENSOR(A, k), kFloatTypes, "*?", kRequired | kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, norm.weight), kWeightTypes, "=", kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, norm.bias), kWeightTypes, "=", kUnitStride);
  rope_table(s, 2, 16);
  s.tensor(TOPKEY_TENSOR(A, out.values), kCodeTypes, ">=", kRequired | kUnitStride | kWritten);
  s.tensor(TOPKEY_TENSOR(A, out.scales), kF32Only, ">", kRequired | kWritten);
  key_numbers(s);
  check_subject(s, exec());
}

TEST_P(ValidateProducers, QuantizeKToOtherFormats) {
  using A = QuantizeK;
  struct Format {
    KeyFormat format;
    DType dtype;
    int64_t width;
  };
  for (const Format& f : {Format{KeyFormat::bf16, DType::bf16, 64}, Format{KeyFormat::f16, DType::f16, 64},
                          Format{KeyFormat::f32, DType::f32, 64}, Format{KeyFormat::q8_0, DType::u8, 68},
                          Format{KeyFormat::mxfp4, DType::u8, 32}, Format{KeyFormat::fp8_fnuz, DType::u8, 64}}) {
    const bool fp4 = f.format == KeyFormat::mxfp4, fnuz = f.format == KeyFormat::fp8_fnuz;
    Subject<A> s;
    s.args.k = s.arena.in(DType::f32, {2, 64});
    s.args.out = {s.arena.out(f.dtype, {2, f.width}), {}, f.format};
    if (fp4) s.args.out.scales = s.arena.out(DType::u8, {2, 2});
    if (fnuz) s.args.out.scales = s.arena.out(DType::f32, {2});
    if (fnuz) s.tensor(TOPKEY_TENSOR(A, out.scales), kF32Only, ">", kRequired | kWritten);
    s.tensor(TOPKEY_TENSOR(A, out.values), {f.dtype}, ">=", kRequired | kUnitStride | kWritten);
    if (fp4) s.tensor(TOPKEY_TENSOR(A, out.scales), {DType::u8, DType::e8m0}, ">=", kRequired | kUnitStride | kWritten);
    if (fp4 || f.format == KeyFormat::q8_0)
      s.wrong("no multiple of 32", "k head_dim must ", [](A& a) { a.k.shape[1] = 48; });
    const Tensor scales = s.arena.out(DType::f32, {2});
    if (!fp4 && !fnuz) s.wrong("given for keys without", "out.scales must ", [scales](A& a) { a.out.scales = scales; });
    if (!fnuz) s.wrong("f32 without scales of their own", "scale must ", [](A& a) { a.scale = ScaleRule::f32; });
    s.wrong("of fp8", "rule must ", [](A& a) { a.rule = QuantRule::kpool_key; });
    check_subject(s, exec());
  }
}

/// pages, format, layout, page_size and head_dim of a cache of fp8 pages.
template <class Args>
void cache_wrongs(Subject<Args>& s, KeyCache& (*get)(Args&)) {
  const auto wrong = [&](const char* what, const char* argument, void (*make)(KeyCache&)) {
    s.wrong(what, argument, [get, make](Args& a) { make(get(a)); });
  };
  wrong("below", "cache.format must ", [](KeyCache& c) { c.format = static_cast<KeyFormat>(-1); });
  wrong("above", "cache.format must ", [](KeyCache& c) { c.format = static_cast<KeyFormat>(7); });
  wrong("below", "cache.layout must ", [](KeyCache& c) { c.layout = static_cast<Layout>(-1); });
  wrong("above", "cache.layout must ", [](KeyCache& c) { c.layout = static_cast<Layout>(5); });
  wrong("zero", "cache.page_size must ", [](KeyCache& c) { c.page_size = 0; });
  wrong("negative", "cache.page_size must ", [](KeyCache& c) { c.page_size = -4; });
  wrong("more rows than a page holds", "cache.pages must ", [](KeyCache& c) { c.page_size = 5; });
  wrong("product past 64 bits", "cache.", [](KeyCache& c) { c.page_size = INT32_MAX, c.head_dim = INT32_MAX; });
  wrong("zero", "cache.head_dim must ", [](KeyCache& c) { c.head_dim = 0; });
  wrong("negative", "cache.head_dim must ", [](KeyCache& c) { c.head_dim = -32; });
  wrong("no multiple of 32", "cache.head_dim must ", [](KeyCache& c) { c.format = KeyFormat::q8_0, c.head_dim = 24; });
  wrong("overlapping pages", "cache.pages must ", [](KeyCache& c) { c.pages.stride[0] = 140; });
  wrong("backward pages", "cache.pages must ", [](KeyCache& c) { c.pages.stride[0] = -144; });
  wrong("stride no multiple of 4", "cache.pages must ", [](KeyCache& c) { c.pages.stride[0] = 146; });
  for (int off : {1, 2, 3}) {
    s.wrongs.push_back({"base no multiple of 4", "cache.pages must ",
                        [get, off](Args& a) { get(a).pages.data = static_cast<uint8_t*>(get(a).pages.data) + off; },
                        true});
  }
}

TEST_P(ValidateProducers, StoreK) {
  using A = StoreK;
  Subject<A> s;
  s.args.k = s.arena.in(DType::f32, {3, 32});
  s.args.norm = {NormKind::layer, s.arena.in(DType::f32, {32}), s.arena.in(DType::bf16, {32}), 1e-6f};
  s.args.slot_mapping = s.arena.ints({0, 5, -1});
  s.args.cache = {s.arena.out(DType::u8, {2, 144}), KeyFormat::fp8, Layout::planar, 4, 32};
  s.tensor(TOPKEY_TENSOR(A, k), kFloatTypes, ">=", kRequired | kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, norm.weight), kWeightTypes, "=", kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, norm.bias), kWeightTypes, "=", kUnitStride);
  rope_table(s, 3, 16);
  s.tensor(TOPKEY_TENSOR(A, slot_mapping), kIntTypes, "*", kRequired);
  s.tensor(TOPKEY_TENSOR(A, cache.pages), kCodeTypes, "*>", kRequired | kUnitStride);
  cache_wrongs<A>(s, [](A& a) -> KeyCache& { return a.cache; });
  const Tensor scales = s.arena.in(DType::f32, {3}), codes = s.arena.in(DType::u8, {3, 32});
  s.wrong("ready codes with steps before the rule", "norm", [=](A& a) { a.k = codes, a.k_scales = scales; });
  s.wrong("codes without scales", "k must ", [=](A& a) { a.k = codes; });
  s.wrong("of queries", "rule must ", [](A& a) { a.rule = QuantRule::kpool_query; });
  s.wrong("above", "scale must ", [](A& a) { a.scale = static_cast<ScaleRule>(2); });
  check_subject(s, exec());
}

TEST_P(ValidateProducers, StoreIntoTiledPages) {
  using A = StoreK;
  Subject<A> s;
  s.args.k = s.arena.in(DType::f32, {3, 128});
  s.args.slot_mapping = s.arena.ints({0, 5, -1});
  s.args.cache = {s.arena.out(DType::u8, {2, 32 * 132}), KeyFormat::fp8, Layout::tiled16, 32, 128};
  s.wrong("wider tiles than fp8 has", "cache.layout must ", [](A& a) { a.cache.layout = Layout::tiled32; });
  s.wrong("a format that is never tiled", "cache.layout must ", [](A& a) { a.cache.format = KeyFormat::bf16; });
  s.wrong("half a tile", "cache.page_size must ", [](A& a) { a.cache.page_size = 24; });
  s.wrong("dims between pieces", "cache.head_dim must ", [](A& a) { a.cache.head_dim = 40; });
  s.wrong("mxfp4 of another head_dim", "cache.head_dim must ",
          [](A& a) { a.cache.format = KeyFormat::mxfp4, a.cache.head_dim = 64; });
  s.wrong("half a tile of mxfp4", "cache.page_size must ",
          [](A& a) { a.cache.format = KeyFormat::mxfp4, a.cache.layout = Layout::tiled64; });
  check_subject(s, exec());
}

TEST_P(ValidateProducers, StoreReadyCodes) {
  using A = StoreK;
  Subject<A> s;
  s.args.k = s.arena.in(DType::u8, {3, 32});
  s.args.k_scales = s.arena.in(DType::f32, {3});
  s.args.slot_mapping = s.arena.ints({0, 5, -1});
  s.args.cache = {s.arena.out(DType::u8, {2, 144}), KeyFormat::fp8, Layout::planar, 4, 32};
  s.tensor(TOPKEY_TENSOR(A, k), kCodeTypes, ">=", kRequired | kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, k_scales), kF32Only, ">");
  s.wrong("with a Hadamard", "", [](A& a) { a.hadamard = true; });
  s.wrong("for a format without", "", [](A& a) { a.cache.format = KeyFormat::q8_0; });
  check_subject(s, exec());
}

TEST_P(ValidateProducers, GatherK) {
  using A = GatherK;
  Subject<A> s;
  s.args.keys.cache = {s.arena.in(DType::u8, {2, 144}), KeyFormat::fp8, Layout::planar, 4, 32};
  s.args.keys.block_table = s.arena.in(DType::i32, {2, 2});
  s.args.indptr = s.arena.ints({0, 3, 5});
  s.args.total = 5;
  s.args.out = {s.arena.out(DType::u8, {5, 32}), s.arena.out(DType::f32, {5}), KeyFormat::fp8};
  s.tensor(TOPKEY_TENSOR(A, keys.block_table), kI32Only, ">*", kRequired);
  s.tensor(
      "cache.pages", [](A& a) -> Tensor& { return a.keys.cache.pages; }, kCodeTypes, "*>", kRequired | kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, indptr), kI32Only, "*", kRequired);
  s.tensor(TOPKEY_TENSOR(A, out.values), kCodeTypes, ">=", kRequired | kUnitStride | kWritten);
  s.tensor(TOPKEY_TENSOR(A, out.scales), kF32Only, ">", kRequired | kWritten);
  cache_wrongs<A>(s, [](A& a) -> KeyCache& { return a.keys.cache; });
  shard_wrongs<A>(s, [](A& a) -> Shard& { return a.keys.shard; });
  s.wrong("a table for each row", "keys.table_per_row must ", [](A& a) { a.keys.table_per_row = true; });
  s.wrong("no entry at all", "indptr must ", [](A& a) { a.indptr.shape[0] = 0; });
  s.wrong("negative", "total must ", [](A& a) { a.total = -1; });
  s.wrong("more than the destination has (CASES B39)", "out.values must ", [](A& a) { a.total = 6; });
  s.wrong("another format than the cache's", "out.format must ", [](A& a) { a.out.format = KeyFormat::bf16; });
  s.wrong("over the codes", "out.scales must be in other memory than out.values",
          [](A& a) { a.out.scales.data = a.out.values.data; });
  check_subject(s, exec());
}

TOPKEY_ON_EVERY_BACKEND(ValidateProducers);

}  // namespace
}  // namespace topkey::testing
