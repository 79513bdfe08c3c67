// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// expand_pools: golden values, every backend against the formula written again, in place, strict.
#include "support/oracle_pool.h"
#include "tests/backend_test.h"
#include "tests/draw.h"

namespace topkey::testing {
namespace {

class Expand : public BackendTest {};
using Ints = std::vector<int32_t>;

struct Answer {
  Ints indices, slots;
  int32_t count = 0;
};
/// One row of pools of four tokens.
Answer expand(const Ints& ids, const ExpandPools& how, Exec exec) {
  ExpandPools a = how;
  const Array pools(DType::i32, {1, static_cast<int64_t>(ids.size())});
  std::copy(ids.begin(), ids.end(), pools.as<int32_t>());
  const bool tail = a.rows.end.data != nullptr || a.positions.data != nullptr;
  const int64_t width = pools.size() * a.pool_size + (tail ? a.pool_size - 1 : 0);
  const Guarded indices(DType::i32, 1, width), slots(DType::i32, 1, width), counts(DType::i32, 1, -1);
  a.pools = pools.view(), a.rows.count = 1;
  a.out.indices = indices.view(true), a.out.counts = counts.view();
  if (a.out.slot_map.page_size > 0) a.out.slots = slots.view();
  run(a, exec);
  Answer got;
  for (int64_t c = 0; c < width; ++c) {
    got.indices.push_back(static_cast<int32_t>(int_at(indices.view(), 0, c)));
    if (a.out.slots.data != nullptr) got.slots.push_back(static_cast<int32_t>(int_at(slots.view(), 0, c)));
  }
  got.count = static_cast<int32_t>(int_at(counts.view(), 0));
  EXPECT_EQ(indices.touched_outside() + slots.touched_outside() + counts.touched_outside(), "");
  return got;
}

TEST_P(Expand, GoldenValues) {
  const Array end = Array::of({23}), position = Array::of({22});
  ExpandPools a{};
  a.pool_size = 4, a.rows.end = end.view();
  Answer got = expand({4, 0, -1}, a, exec());
  const Ints want{16, 17, 18, 19, 0, 1, 2, 3, -1, -1, -1, -1, 20, 21, 22};
  EXPECT_EQ(got.indices, want);
  EXPECT_EQ(got.count, 11);
  a.rows.end = Tensor{}, a.positions = position.view();
  EXPECT_EQ(expand({4, 0, -1}, a, exec()).indices, want);
  // Without positions: no tail columns, whatever pool.
  a.positions = Tensor{};
  EXPECT_EQ(expand({4, 0, -1}, a, exec()).indices, Ints({16, 17, 18, 19, 0, 1, 2, 3, -1, -1, -1, -1}));
  // A pool of one token is the token.
  a.rows.end = end.view(), a.pool_size = 1;
  EXPECT_EQ(expand({22, 5, 0}, a, exec()).indices, Ints({22, 5, 0}));
}

TEST_P(Expand, ARowThatCompletesItsPoolHasNoTail) {
  const Array end = Array::of({8}), table = Array::of({30, 10});
  ExpandPools a{};
  a.pool_size = 4, a.rows.end = end.view();
  a.out.fill = Fill::value, a.out.fill_value = 7;
  a.out.slot_map.block_table = tensor(table.as<int32_t>(), DType::i32, {1, 2});
  a.out.slot_map.page_size = 4;
  const Answer got = expand({1, -1}, a, exec());
  EXPECT_EQ(got.indices, Ints({4, 5, 6, 7, 7, 7, 7, 7, 7, 7, 7}));
  EXPECT_EQ(got.slots, Ints({40, 41, 42, 43, 7, 7, 7, 7, 7, 7, 7}));
}

/// A drawn call, in memory of its own.
struct Drawn {
  ExpandPools args{};
  Array pools, end, request, indptr, positions, base, table;
  Guarded indices, slots, counts;
};
Drawn draw_call() {
  Drawn d;
  Random random(static_cast<uint64_t>(draw(1, 1000000)));
  ExpandPools& a = d.args;
  const int64_t rows = draw(0, 6), pools = draw(0, 5);
  a.pool_size = static_cast<int32_t>(draw_of({4, 1, 2, 16, 3}));
  a.rows.count = rows;
  d.pools = Array(DType::i32, {rows, pools}), d.end = wild_ints(random, rows, 40);
  for (int64_t i = 0; i < d.pools.size(); ++i) d.pools.as<int32_t>()[i] = wild_int(random, 40 / a.pool_size);
  a.pools = d.pools.view();
  const int64_t lengths = draw(0, 3);
  if (lengths == 0) a.rows.end = d.end.view();
  if (lengths == 1) a.rows.length = d.end.view();
  if (lengths == 2) {
    d.positions = Array(DType::i64, {rows});
    for (int64_t i = 0; i < rows; ++i)
      d.positions.as<int64_t>()[i] = draw_flag(8) ? INT64_MAX - draw(0, 1) : wild_int(random, 40);
    a.positions = d.positions.view();
  }
  if (draw_flag()) {
    d.request = wild_ints(random, rows, 3);
    a.rows.request = d.request.view();
  }
  const int64_t width = pools * a.pool_size + (lengths == 3 ? 0 : a.pool_size - 1);
  d.indices = Guarded(DType::i32, rows, width), d.slots = Guarded(DType::i32, rows, width);
  d.counts = Guarded(DType::i32, rows, -1);
  const int64_t outputs = draw(1, 3);
  if ((outputs & 1) != 0) a.out.indices = d.indices.view();
  if (draw_flag()) a.out.counts = d.counts.view();
  a.out.fill = draw_of({Fill::minus_one, Fill::repeat, Fill::value}), a.out.fill_value = 99;
  if (draw_flag()) {
    d.base = wild_ints(random, rows, 40);
    for (int64_t i = 0; i < rows; ++i) d.base.as<int32_t>()[i] %= 1000;
    a.out.index_base = d.base.view();
  }
  if ((outputs & 2) != 0) {
    a.out.slots = d.slots.view();
    a.out.slot_map.table_per_row = draw_flag();
    d.table = Array(DType::i32, {std::max<int64_t>(rows, 1), draw(0, 6)});
    for (int64_t i = 0; i < d.table.size(); ++i) d.table.as<int32_t>()[i] = wild_int(random, 60);
    a.out.slot_map.block_table = d.table.view(), a.out.slot_map.page_size = static_cast<int32_t>(draw(1, 9));
  }
  return d;
}

TEST_P(Expand, IsTheFormulaInEveryColumn) {
  int64_t wild = 0;
  property("expand_pools", 1000, [&] {
    const Drawn d = draw_call();
    uint64_t stats[kNumStats] = {};
    Exec e = exec();
    e.stats = stats;
    run(d.args, e);
    require(compare_expansion(d.args, d.args.pools, stats));
    RC_ASSERT(d.indices.touched_outside() + d.slots.touched_outside() + d.counts.touched_outside() == "");
    wild += static_cast<int64_t>(stats[kSkippedPages] + stats[kSkippedSlots]);
    // Strict, where it is offered, raises exactly where something was counted, and writes nothing.
    if (e.device == Device::cuda) return;
    for (const Guarded* g : {&d.indices, &d.slots, &d.counts}) const_cast<Guarded*>(g)->reset();
    e.strict = true, e.stats = nullptr;
    const bool counted = stats[kSkippedPages] + stats[kSkippedSlots] > 0;
    RC_ASSERT((thrown_by([&] { run(d.args, e); }).status == Status::invalid_argument) == counted);
    if (counted) RC_ASSERT(d.indices.untouched() && d.slots.untouched() && d.counts.untouched());
  });
  EXPECT_GT(wild, 100);
}

/// Pools stand in the first columns of the output that they become.
TEST_P(Expand, InPlaceIsTheSame) {
  property("expand_pools in place", 500, [&] {
    const Drawn d = draw_call();
    run(d.args, exec());
    ExpandPools a = d.args;
    const Tensor own = a.out.indices.data != nullptr ? a.out.indices : a.out.slots;
    const Array wide(DType::i32, {a.rows.count, own.shape[1] + 2});
    a.pools = own.shape[1] == 0 ? a.pools : wide.view();
    a.pools.shape[1] = d.args.pools.shape[1];
    for (int64_t r = 0; r < a.rows.count; ++r) {
      for (int64_t i = 0; i < a.pools.shape[1]; ++i)
        *reinterpret_cast<int32_t*>(element(a.pools, r, i)) = static_cast<int32_t>(int_at(d.args.pools, r, i));
    }
    (a.out.indices.data != nullptr ? a.out.indices : a.out.slots) = wide.view();
    run(a, exec());
    for (int64_t r = 0; r < a.rows.count; ++r) {
      for (int64_t c = 0; c < own.shape[1]; ++c) RC_ASSERT(int_at(wide.view(), r, c) == int_at(own, r, c));
    }
  });
}

TOPKEY_ON_EVERY_BACKEND(Expand);

}  // namespace
}  // namespace topkey::testing
