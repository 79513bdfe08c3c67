// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What the operations that join several tokens to one key row want, and the way back from pools to tokens.
#include <algorithm>

#include "validate.h"
#include "validate_parts.h"

namespace topkey {
namespace {

/// Tokens a pool or window may have: far past any model; backends keep a list of them on their stack.
constexpr int64_t kMaxPool = 1024;
constexpr DTypes kBf16 = set_of({DType::bf16});

/// What can be known without reading contents: no pool is whole in the call and there is nowhere else to look.
void check_whole_pools(const Check& c, const PoolK& a, int64_t rows) {
  if (c.has(a.tail)) {
    const int64_t dim = a.cache.head_dim;
    c.tensor("tail", a.tail, kBf16, {any(), exactly(2), at_least(a.pool_size), exactly(dim)}, kUnit);
    c.number("tail ring", a.tail.shape[2], 1, kMaxKeys);
    c.tensor("tail", a.tail, kBf16, {any(), exactly(2), exactly(a.tail.shape[2]), exactly(dim)}, kUnit | kOutput);
    TOPKEY_REQUIRE(c, a.tail.shape[2] % a.pool_size == 0, "tail",
                   "bf16 with a ring that is a multiple of pool_size " + std::to_string(a.pool_size), describe(a.tail));
    c.tensor("tail_slots", a.tail_slots, kInts, {at_least(rows)}, 0);
    return;
  }
  c.absent("tail_slots", a.tail_slots, "without a tail");
  const bool uniform = !c.has(a.request) && !c.has(a.q_indptr);
  const int64_t together = uniform ? std::max<int64_t>(a.next_n, 1) : rows;
  TOPKEY_REQUIRE(c, rows == 0 || together >= a.pool_size, "tail",
                 "given where no request has pool_size " + std::to_string(a.pool_size) + " rows in the call",
                 describe(a.tail) + " with " + std::to_string(together) + " rows");
}

}  // namespace

Shape validate(const PoolK& a, Mode mode) {
  const Check c("pool_k", mode);
  check_cache(c, a.cache);
  const int64_t dim = a.cache.head_dim;
  c.number("pool_size", a.pool_size, 1, kMaxPool);
  TOPKEY_REQUIRE(c, (dim & (dim - 1)) == 0, "cache.head_dim", "a power of two (keys are rotated by a Hadamard matrix)",
                 std::to_string(dim));
  check_rule(c, QuantRule::automatic, a.scale, a.cache.format, false);
  c.tensor("slot_mapping", a.slot_mapping, kInts, {any()}, 0);
  const int64_t rows = a.slot_mapping.shape[0];
  c.tensor("k", a.k, kBf16, {at_least(rows), exactly(dim)}, kUnit);
  c.tensor("gate", a.gate, kBf16, {at_least(rows), exactly(dim)}, kUnit);
  c.tensor("ape", a.ape, kF32, {exactly(a.pool_size), exactly(dim)}, kUnit);
  c.tensor("positions", a.positions, kInts, {at_least(rows)}, 0);
  c.number("next_n", a.next_n, 0, kMaxKeys);
  const bool by_request = c.tensor("request", a.request, kI32, {at_least(rows)}, kOptional);
  const bool by_indptr = c.tensor("q_indptr", a.q_indptr, kI32, {at_least(1)}, kOptional);
  TOPKEY_REQUIRE(c, !by_request || !by_indptr, "q_indptr", "absent where request is given", describe(a.q_indptr));
  check_whole_pools(c, a, rows);
  return cache_shape(a.cache, rows);
}

Shape validate(const CompressK& a, Mode mode) {
  const Check c("compress_k", mode);
  check_cache(c, a.cache);
  const int64_t dim = a.cache.head_dim;
  c.tensor("slot_mapping", a.slot_mapping, kInts, {any()}, 0);
  const int64_t rows = a.slot_mapping.shape[0];
  c.tensor("kv", a.kv, kFloats, {at_least(rows), any()}, kUnit);
  const int64_t width = a.kv.shape[1];
  TOPKEY_REQUIRE(c, width == dim || width == 2 * dim, "kv",
                 "[*, " + std::to_string(dim) + "] or [*, " + std::to_string(2 * dim) + "]", describe(a.kv));
  c.tensor("score", a.score, kFloats, {at_least(rows), exactly(width)}, kUnit);
  c.tensor("ape", a.ape, kF32, {at_least(1), exactly(width)}, kUnit);
  const int64_t ratio = a.ape.shape[0], window = ratio * (width / dim);
  c.number("ape rows", ratio, 1, kMaxPool / 2);
  c.tensor("positions", a.positions, kInts, {at_least(rows)}, 0);
  const bool paged = c.tensor("state_table", a.state_table, kI32, {any(), any()}, kOptional);
  c.tensor("state", a.state, kF32, {any(), at_least(paged ? 1 : window), exactly(2 * width)}, kUnit);
  c.number("state block", a.state.shape[1], 1, kMaxKeys);
  c.tensor("state", a.state, kF32, {any(), exactly(a.state.shape[1]), exactly(2 * width)}, kUnit | kOutput);
  c.tensor("state_slots", a.state_slots, kInts, {at_least(rows)}, 0);
  c.tensor("query_start", a.query_start, kI32, {at_least(1)}, 0);
  c.tensor("rms_weight", a.rms_weight, kWeights, {exactly(dim)}, kUnit | kOptional);
  TOPKEY_REQUIRE(c, a.eps >= 0 && a.eps < 1e30f, "eps", "finite and not negative", std::to_string(a.eps));
  if (c.tensor("cos_sin", a.cos_sin, kFloats, {any(), at_least(2)}, kUnit | kOptional)) {
    const int64_t rope = a.cos_sin.shape[1];
    TOPKEY_REQUIRE(c, rope <= dim && rope % 2 == 0, "cos_sin", "of an even width up to " + std::to_string(dim),
                   describe(a.cos_sin));
  }
  check_rule(c, a.rule, ScaleRule::ue8m0, a.cache.format, false);
  return cache_shape(a.cache, rows);
}

Shape validate(const ExpandPools& a, Mode mode) {
  const Check c("expand_pools", mode);
  c.number("pool_size", a.pool_size, 1, kMaxKeys);
  c.tensor("pools", a.pools, kI32, {at_least(a.rows.count), any()}, kUnit);
  const RowFacts rows = check_rows(c, a.rows, true);
  c.absent("rows.start", a.rows.start, "(pools count from the request's first token)");
  if (c.tensor("positions", a.positions, kInts, {at_least(rows.count)}, kOptional)) {
    TOPKEY_REQUIRE(c, !c.has(a.rows.end) && !c.has(a.rows.length), "positions",
                   "absent where rows.end or rows.length is given", describe(a.positions));
  }
  const bool tail = c.has(a.positions) || c.has(a.rows.end) || c.has(a.rows.length);
  int64_t width = 0;
  const bool fits = !__builtin_mul_overflow(a.pools.shape[1], int64_t{a.pool_size}, &width) && width <= kMaxKeys;
  TOPKEY_REQUIRE(c, fits, "pools", "of at most 2147483647 tokens a row", describe(a.pools));
  check_selection(c, a.out, rows, width + (tail ? a.pool_size - 1 : 0), true);
  c.absent("out.blocks", a.out.blocks, "of an expansion");
  c.absent("out.scores", a.out.scores, "of an expansion");
  TOPKEY_REQUIRE(c, a.out.order == Order::position, "out.order", "position (0)",
                 std::to_string(static_cast<int>(a.out.order)));
  Shape s{};
  s.rows = rows.count;
  return s;
}

}  // namespace topkey
