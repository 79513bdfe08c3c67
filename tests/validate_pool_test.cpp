// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Wrong arguments of pool_k, compress_k and expand_pools, each in turn (see validate_cases.h).
#include <gtest/gtest.h>

#include <limits>

#include "tests/backend_test.h"
#include "tests/validate_cases.h"
#include "topkey/topkey.h"

namespace topkey::testing {
namespace {

class ValidatePool : public BackendTest {};
const std::vector<DType> kBf16Only = {DType::bf16};

/// Pages of 4 rows of 32 dims, fp8.
template <class A>
void cache_table(Subject<A>& s) {
  s.args.cache = {s.arena.out(DType::u8, {3, 4 * 36}), KeyFormat::fp8, Layout::planar, 4, 32};
  s.wrong("no such format", "cache.format must ", [](A& a) { a.cache.format = static_cast<KeyFormat>(99); });
  s.wrong("zero", "cache.page_size must ", [](A& a) { a.cache.page_size = 0; });
  s.wrong("a page too short", "cache.pages must ", [](A& a) { --a.cache.pages.shape[1]; });
  s.wrong("a page stride of 146", "cache.pages must ", [](A& a) { a.cache.pages.stride[0] = 146; });
}

TEST_P(ValidatePool, PoolK) {
  using A = PoolK;
  Subject<A> s;
  cache_table(s);
  s.args.k = s.arena.in(DType::bf16, {8, 32}), s.args.gate = s.arena.in(DType::bf16, {8, 32});
  s.args.ape = s.arena.in(DType::f32, {4, 32}), s.args.pool_size = 4;
  s.args.positions = s.arena.ints({0, 1, 2, 3, 4, 5, 6, 7}), s.args.q_indptr = s.arena.ints({0, 8});
  s.args.slot_mapping = s.arena.ints({-1, -1, -1, 5, -1, -1, -1, 6});
  s.args.tail = s.arena.in(DType::bf16, {1, 2, 8, 32}), s.args.tail_slots = s.arena.ints({0, 1, 2, 3, 4, 5, 6, 7});
  s.tensor(TOPKEY_TENSOR(A, k), kBf16Only, ">=", kRequired | kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, gate), kBf16Only, ">=", kRequired | kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, ape), kF32Only, "==", kRequired | kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, positions), kIntTypes, ">", kRequired);
  s.tensor(TOPKEY_TENSOR(A, q_indptr), kI32Only, "*");
  s.tensor(TOPKEY_TENSOR(A, slot_mapping), kIntTypes, "*", kRequired);
  s.tensor(TOPKEY_TENSOR(A, tail), kBf16Only, "*===", kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, tail_slots), kIntTypes, ">", kRequired);
  s.wrong("zero", "pool_size must ", [](A& x) { x.pool_size = 0; });
  s.wrong("past the limit", "pool_size must ", [](A& x) { x.pool_size = 1025; });
  s.wrong("not that of ape", "ape must ", [](A& x) { x.pool_size = 8; });
  s.wrong("negative", "next_n must ", [](A& x) { x.next_n = -1; });
  s.wrong("two ways to a request", "q_indptr must ", [](A& x) { x.request = x.positions; });
  s.wrong("no power of two", "cache.head_dim must ",
          [](A& x) { x.cache.head_dim = 24, x.k.shape[1] = x.gate.shape[1] = x.ape.shape[1] = x.tail.shape[3] = 24; });
  s.wrong("f32 scales of bf16 keys", "scale must ",
          [](A& x) { x.cache.format = KeyFormat::bf16, x.cache.page_size = 1, x.scale = ScaleRule::f32; });
  s.wrong("a ring that is no multiple", "tail must ", [](A& x) { x.tail.shape[2] = 6; });
  s.wrong("a ring under a pool", "tail must ", [](A& x) { x.tail.shape[2] = 2; });
  s.wrong("entries that overlap", "tail must ", [](A& x) { x.tail.stride[2] = 16; });
  s.wrong("slots of no tail", "tail_slots must ", [](A& x) { x.tail = Tensor{}; });
  s.wrong("nowhere to find a pool's tokens", "tail must ", [](A& x) {
    x.tail = x.tail_slots = x.q_indptr = Tensor{};
    x.next_n = 2;
  });
  check_subject(s, exec());
}

TEST_P(ValidatePool, CompressK) {
  using A = CompressK;
  Subject<A> s;
  cache_table(s);
  s.args.kv = s.arena.in(DType::f32, {4, 64}), s.args.score = s.arena.in(DType::bf16, {4, 64});
  s.args.ape = s.arena.in(DType::f32, {2, 64}), s.args.positions = s.arena.ints({0, 1, 2, 3});
  s.args.state = s.arena.in(DType::f32, {2, 4, 128}), s.args.state_slots = s.arena.ints({0, 1, 2, 3});
  s.args.query_start = s.arena.ints({0, 4}), s.args.rms_weight = s.arena.in(DType::bf16, {32}), s.args.eps = 1e-6F;
  s.args.cos_sin = s.arena.in(DType::f32, {9, 8}), s.args.slot_mapping = s.arena.ints({-1, 3, -1, 4});
  s.tensor(TOPKEY_TENSOR(A, kv), kFloatTypes, ">?", kRequired | kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, score), kFloatTypes, ">=", kRequired | kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, ape), kF32Only, "*=", kRequired | kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, positions), kIntTypes, ">", kRequired);
  s.tensor(TOPKEY_TENSOR(A, state), kF32Only, "*>=", kRequired | kUnitStride | kWritten);
  s.tensor(TOPKEY_TENSOR(A, state_slots), kIntTypes, ">", kRequired);
  s.tensor(TOPKEY_TENSOR(A, query_start), kI32Only, "*", kRequired);
  s.tensor(TOPKEY_TENSOR(A, rms_weight), kWeightTypes, "=", kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, cos_sin), kFloatTypes, "**", kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, slot_mapping), kIntTypes, "*", kRequired);
  s.wrong("neither one width nor two", "kv must ", [](A& x) { x.kv.shape[1] = x.score.shape[1] = 48; });
  s.wrong("no row", "ape must ", [](A& x) { x.ape.shape[0] = 0; });
  s.wrong("more rows than the limit", "ape rows must ", [](A& x) { x.ape.shape[0] = 513; });
  s.wrong("negative", "eps must ", [](A& x) { x.eps = -1; });
  s.wrong("not finite", "eps must ", [](A& x) { x.eps = std::numeric_limits<float>::infinity(); });
  s.wrong("odd", "cos_sin must ", [](A& x) { x.cos_sin.shape[1] = 7; });
  s.wrong("wider than a key", "cos_sin must ", [](A& x) { x.cos_sin.shape[1] = 34; });
  s.wrong("a query's rule", "rule must ", [](A& x) { x.rule = QuantRule::v4_query; });
  s.wrong("a table of another type", "state_table must ", [](A& x) { x.state_table = x.state; });
  check_subject(s, exec());
}

TEST_P(ValidatePool, ExpandPools) {
  using A = ExpandPools;
  Subject<A> s;
  s.args.pools = s.arena.ints({0, 1, 2, 3, 4, 5}), s.args.pools.ndim = 2;
  s.args.pools.shape[0] = 2, s.args.pools.shape[1] = s.args.pools.stride[0] = 3, s.args.pools.stride[1] = 1;
  s.args.rows.count = 2, s.args.pool_size = 4, s.args.positions = s.arena.ints({30, 40});
  s.args.out.indices = s.arena.out(DType::i32, {2, 15}), s.args.out.slots = s.arena.out(DType::i32, {2, 15});
  s.args.out.counts = s.arena.out(DType::i32, {2}), s.args.out.index_base = s.arena.ints({0, 0});
  s.args.out.slot_map = {s.arena.in(DType::i32, {2, 9}), false, 8};
  s.tensor(TOPKEY_TENSOR(A, pools), kI32Only, ">*", kRequired | kUnitStride);
  s.tensor(TOPKEY_TENSOR(A, positions), kIntTypes, ">");
  s.tensor(TOPKEY_TENSOR(A, out.indices), kI32Only, ">>", kUnitStride | kWritten);
  s.tensor(TOPKEY_TENSOR(A, out.slots), kI32Only, ">>", kUnitStride | kWritten);
  s.tensor(TOPKEY_TENSOR(A, out.counts), kI32Only, ">", kWritten);
  s.tensor(TOPKEY_TENSOR(A, out.index_base), kI32Only, ">");
  s.tensor(TOPKEY_TENSOR(A, out.slot_map.block_table), kI32Only, ">*", kRequired);
  s.wrong("zero", "pool_size must ", [](A& x) { x.pool_size = 0; });
  s.wrong("more tokens than an index counts", "pools must ", [](A& x) { x.pool_size = 1 << 30; });
  s.wrong("no output", "out.indices must ", [](A& x) { x.out.indices = x.out.slots = Tensor{}; });
  s.wrong("an order", "out.order must ", [](A& x) { x.out.order = Order::score; });
  s.wrong("scores", "out.scores must ", [](A& x) {
    x.out.scores = x.out.indices;
    x.out.scores.dtype = DType::f32;
  });
  s.wrong("blocks", "out.blocks must ", [](A& x) { x.out.blocks = x.out.indices, x.out.block_size = 4; });
  s.wrong("a start", "rows.start must ", [](A& x) { x.rows.start = x.out.counts; });
  s.wrong("lengths said twice", "positions must ", [](A& x) { x.rows.end = x.out.counts; });
  s.wrong("a fill that is none", "out.fill must ", [](A& x) { x.out.fill = static_cast<Fill>(3); });
  check_subject(s, exec());
}

TOPKEY_ON_EVERY_BACKEND(ValidatePool);

}  // namespace
}  // namespace topkey::testing
