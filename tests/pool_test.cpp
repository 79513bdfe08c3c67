// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `pool`, pool_k: small pools whose key is known, every backend against a second formulation (a replay in double)
// and against `ref` within one bf16 step, the same bytes on every ISA, strict. Histories over many calls are in
// pool_history_test.cpp, compress_k in compress_test.cpp.
#include <cmath>

#include "tests/backend_test.h"
#include "tests/pools.h"

namespace topkey::testing {
namespace {

class Pool : public BackendTest {};

/// Key bytes of vectors as store_k makes them: Hadamard and rule kpool_key, slot i for row i.
Array stored(const Array& k, const KeyCache& like, ScaleRule scale, const std::string& backend) {
  Array pages;
  StoreK a{};
  a.cache = cache_of(pages, like.format, like.page_size, like.head_dim, like.pages.shape[0], like.layout);
  std::vector<int64_t> slots;
  for (int64_t i = 0; i < k.view().shape[0]; ++i) slots.push_back(i);
  const Array mapping = longs_of(slots);
  a.k = k.view(), a.slot_mapping = mapping.view(), a.hadamard = true, a.scale = scale;
  if (like.format == KeyFormat::fp8) a.rule = QuantRule::kpool_key;
  run(a, on(backend));
  return pages;
}

TEST_P(Pool, APoolOfOneTokenIsThatToken) {
  for (const ScaleRule scale : {ScaleRule::ue8m0, ScaleRule::f32}) {
    PoolShape s;
    s.pool_size = 1, s.tail = false, s.scale = scale, s.head_dim = 64, s.requests = 1, s.most = 12;
    PoolCase c = make_pool_case(s);
    for (int64_t i = 0; i < c.slots.size(); ++i) c.slots.as<int64_t>()[i] = i;
    uint64_t stats[kNumStats] = {};
    c.run(GetParam(), stats);
    ASSERT_GT(c.slots.size(), 0);
    EXPECT_TRUE(same_bytes(c.pages, stored(c.k, c.args.cache, scale, GetParam())));
    EXPECT_EQ(stats[kSkippedSlots], 0u);
  }
}

/// Four tokens whose scores leave nothing to exp: equal ones give the mean, one far above the others is alone.
TEST_P(Pool, EqualScoresGiveTheMeanAndOneFarAboveIsAlone) {
  PoolShape s;
  s.requests = 1, s.tail = false;
  PoolCase c = make_pool_case(s);
  const int64_t dim = s.head_dim;
  c.k = Array(DType::bf16, {8, dim}), c.gate = Array(DType::bf16, {8, dim}),
  c.positions = longs_of({0, 1, 2, 3, 4, 5, 6, 7});
  c.slots = longs_of({-1, -1, -1, 0, -1, -1, -1, 1}), c.q_indptr = Array::of({0, 8});
  std::memset(c.ape.as<uint8_t>(), 0, c.ape.bytes());
  const Array want(DType::bf16, {2, dim});
  Random random(3);
  for (int64_t d = 0; d < dim; ++d) {
    float sum = 0;
    for (int64_t t = 0; t < 8; ++t) {
      const auto x = static_cast<float>(random.between(-8, 8) * 4);
      c.k.as<uint16_t>()[t * dim + d] = float_to_bf16(x);
      if (t < 4) sum += x;
      c.gate.as<uint16_t>()[t * dim + d] = float_to_bf16(t < 4 ? 1.5F : t == 4 + d % 4 ? 300.0F : -300.0F);
      if (t == 4 + d % 4) want.as<uint16_t>()[dim + d] = float_to_bf16(x);
    }
    want.as<uint16_t>()[d] = float_to_bf16(sum / 4);
  }
  c.args.k = c.k.view(), c.args.gate = c.gate.view(), c.args.positions = c.positions.view();
  c.args.slot_mapping = c.slots.view(), c.args.q_indptr = c.q_indptr.view();
  c.run(GetParam(), nullptr);
  EXPECT_TRUE(same_bytes(c.pages, stored(want, c.args.cache, s.scale, GetParam())));
}

PoolShape draw_pool_shape() {
  PoolShape s;
  s.pool_size = static_cast<int32_t>(draw_of({4, 1, 2, 16, 64}));
  s.ring = s.pool_size * draw_of({1, 2, 4});
  s.head_dim = static_cast<int32_t>(draw_of({32, 64, 128, 8, 2, 1}));
  s.page_size = static_cast<int32_t>(draw_of({8, 1, 16, 64}));
  s.requests = draw(1, 4), s.most = draw(0, 3 * s.pool_size + 5);
  s.format =
      draw_of({KeyFormat::fp8, KeyFormat::mxfp4, KeyFormat::f32, KeyFormat::bf16, KeyFormat::f16, KeyFormat::q8_0});
  if (s.head_dim % dim_multiple(s.format) != 0) s.format = KeyFormat::fp8;
  s.scale = s.format == KeyFormat::fp8 && draw_flag() ? ScaleRule::f32 : ScaleRule::ue8m0;
  s.layout = draw_of({Layout::planar, Layout::interleaved});
  s.tail = !draw_flag(4), s.by_request = draw_flag();
  s.seed = static_cast<uint64_t>(draw(1, 1000000));
  return s;
}

/// Without a tail a call whose rows cannot hold a pool is refused, and that is another test; so are formats that a
/// backend lacks.
bool refused(const PoolCase& c, const std::string& backend) { return unsupported(c.args, on(backend)) != nullptr; }

TEST_P(Pool, WritesWhatAReplayInDoubleSays) {
  int64_t keys = 0, left_out = 0;
  property("pool_k against a replay", 300, [&] {
    const PoolShape s = draw_pool_shape();
    const PoolCase c = make_pool_case(s);
    if (refused(c, GetParam())) return;
    const Replay want = replay(c.args, c.tail);
    uint64_t stats[kNumStats] = {};
    c.run(GetParam(), stats);
    require(compare_replay(c.args, want, stats));
    keys += static_cast<int64_t>(want.keys.size()), left_out += want.skipped;
    // What belongs to no slot that was written is as it was.
    PoolCase untouched = c.copy();
    for (const auto& [slot, key] : want.keys) {
      const PageLayout layout = page_layout(s.format, s.layout, s.page_size, s.head_dim);
      uint8_t* page = untouched.pages.as<uint8_t>() + slot / s.page_size * untouched.pages.view().stride[0];
      std::memset(page + layout.value_offset(slot % s.page_size), 0xA5, static_cast<size_t>(layout.value));
      std::memset(page + layout.scale_offset(slot % s.page_size), 0xA5, static_cast<size_t>(layout.scale));
    }
    const uint8_t* bytes = untouched.pages.as<uint8_t>();
    RC_ASSERT(std::all_of(bytes, bytes + untouched.pages.bytes(), [](uint8_t b) { return b == 0xA5; }));
  });
  EXPECT_GT(keys, 300);
  EXPECT_GT(left_out, 20) << "pools without a tail that are not whole";
}

/// The joined vector of a slot of an f32 cache: the Hadamard transform is its own inverse.
std::vector<double> joined_of(const PoolCase& c, int64_t slot) {
  const auto dim = static_cast<size_t>(c.args.cache.head_dim);
  const PageLayout layout =
      page_layout(KeyFormat::f32, c.args.cache.layout, c.args.cache.page_size, c.args.cache.head_dim);
  const uint8_t* row = c.pages.as<uint8_t>() + slot / c.args.cache.page_size * c.pages.view().stride[0] +
                       layout.value_offset(slot % c.args.cache.page_size);
  std::vector<double> x(dim);
  for (size_t i = 0; i < dim; ++i) {
    float y;
    std::memcpy(&y, row + 4 * i, sizeof y);
    x[i] = static_cast<double>(y);
  }
  for (size_t stride = 1; stride < dim; stride *= 2) {
    for (size_t i = 0; i < dim; ++i) {
      if ((i & stride) != 0) continue;
      const double a = x[i], b = x[i + stride];
      x[i] = a + b, x[i + stride] = a - b;
    }
  }
  for (double& v : x) v /= std::sqrt(static_cast<double>(dim));
  return x;
}

/// exp alone may differ, by one bf16 step of the joined vector; wild values are met alike.
TEST_P(Pool, IsRefWithinOneStepOfBf16) {
  int64_t values = 0, apart = 0;
  property("pool_k against ref", 300, [&] {
    PoolShape s = draw_pool_shape();
    s.format = KeyFormat::f32, s.scale = ScaleRule::ue8m0, s.wild = draw_flag();
    const PoolCase c = make_pool_case(s), r = c.copy();
    if (refused(c, GetParam())) return;
    uint64_t stats[kNumStats] = {}, want[kNumStats] = {};
    c.run(GetParam(), stats), r.run("ref", want);
    for (int i = 0; i < kNumStats; ++i) RC_ASSERT(stats[i] == want[i]);
    if (c.tail) RC_ASSERT(same_bytes(c.tail, r.tail));
    for (int64_t slot = 0; slot < c.args.cache.pages.shape[0] * s.page_size; ++slot) {
      const std::vector<double> got = joined_of(c, slot), expected = joined_of(r, slot);
      double norm = 0;
      for (const double v : expected) norm = std::fmax(norm, std::abs(v));
      for (size_t d = 0; d < got.size(); ++d, ++values) {
        if (got[d] == expected[d]) continue;
        apart += std::abs(got[d] - expected[d]) > 1e-5 * norm;
        RC_ASSERT(std::abs(got[d] - expected[d]) <= std::abs(expected[d]) * 0x1p-7 + 1e-5 * norm);
      }
    }
  });
  EXPECT_GT(values, 1000);
  std::cout << apart << " of " << values << " values are a bf16 step from ref\n";
}

/// Strict raises what is otherwise counted, and then writes nothing at all.
TEST_P(Pool, StrictRaisesBeforeAnythingIsWritten) {
  if (exec().device == Device::cuda) GTEST_SKIP() << "strict is not offered here";
  int raised = 0;
  property("pool_k, strict", 200, [&] {
    PoolShape s = draw_pool_shape();
    s.wild = draw_flag();
    const PoolCase c = make_pool_case(s), before = c.copy(), other = c.copy();
    if (refused(c, GetParam())) return;
    uint64_t stats[kNumStats] = {};
    other.run(GetParam(), stats);
    const Thrown thrown = thrown_by([&] { c.run(GetParam(), nullptr, true); });
    const bool wild = stats[kSkippedSlots] + stats[kSkippedPages] > 0;
    RC_ASSERT((thrown.status == Status::invalid_argument) == wild);
    RC_ASSERT(same_bytes(c.pages, wild ? before.pages : other.pages));
    if (c.tail) RC_ASSERT(same_bytes(c.tail, wild ? before.tail : other.tail));
    raised += wild;
  });
  EXPECT_GT(raised, 20);
}

/// Equal slots in one call: the last row's pool, whole. Many, so that threads meet.
TEST_P(Pool, OfEqualSlotsTheLastRowStays) {
  PoolShape s;
  s.requests = 1, s.most = 4000, s.pool_size = 1, s.seed = 7, s.tail = false;
  PoolCase c = make_pool_case(s);
  const int64_t rows = c.slots.size();
  ASSERT_GT(rows, 100);
  for (int64_t i = 0; i < rows; ++i) c.slots.as<int64_t>()[i] = i % 5;
  c.run(GetParam(), nullptr);
  Array last(DType::bf16, {5, s.head_dim});
  for (int64_t i = rows - 5; i < rows; ++i) {
    std::memcpy(last.as<uint16_t>() + i % 5 * s.head_dim, c.k.as<uint16_t>() + i * s.head_dim,
                static_cast<size_t>(2 * s.head_dim));
  }
  EXPECT_TRUE(same_bytes(c.pages, stored(last, c.args.cache, s.scale, GetParam())));
}

TEST_P(Pool, ANaNInAPoolMakesANaNKey) {
  PoolShape s;
  s.requests = 3, s.most = 40, s.tail = false, s.seed = 5;
  for (const bool in_gate : {false, true}) {
    PoolCase c = make_pool_case(s);
    const int64_t* slots = c.slots.as<int64_t>();
    const int64_t row = std::find_if(slots + 4, slots + c.slots.size(), [](int64_t slot) { return slot >= 0; }) - slots;
    (in_gate ? c.gate : c.k).as<uint16_t>()[row * s.head_dim + 3] = 0x7FC0;
    const Replay want = replay(c.args, c.tail);
    ASSERT_GT(want.keys.size(), 1u);
    ASSERT_TRUE(std::isnan(want.keys.at(slots[row]).value[0]));
    c.run(GetParam(), nullptr);
    EXPECT_TRUE(good(compare_replay(c.args, want)));
  }
}

TEST_P(Pool, WhatTheHostCanKnowNotToBeWholeIsRefused) {
  PoolShape s;
  s.tail = false, s.requests = 1, s.most = 40;
  PoolCase c = make_pool_case(s);
  c.slots = longs_of({-1, -1, 0}), c.args.slot_mapping = c.slots.view();
  EXPECT_EQ(thrown_by([&] { c.run(GetParam(), nullptr); }).sentence,
            "pool_k: tail must be given where no request has pool_size 4 rows in the call, got an absent tensor with 3 "
            "rows");
  c = make_pool_case(s);
  c.args.q_indptr = Tensor{}, c.args.next_n = 3;
  EXPECT_EQ(thrown_by([&] { c.run(GetParam(), nullptr); }).sentence,
            "pool_k: tail must be given where no request has pool_size 4 rows in the call, got an absent tensor with 3 "
            "rows");
  c.args.next_n = 4;
  EXPECT_EQ(thrown_by([&] { c.run(GetParam(), nullptr); }).status, Status::ok);
}

TOPKEY_ON_EVERY_BACKEND(Pool);

// ---- cpu: exp and joining as documented, in plain C++ -------------------------------------------------------------

float exp_of_negative(float x) {
  if (x < -104.0F) x = -104.0F;
  const float n = (x * 1.44269504F + 12582912.0F) - 12582912.0F;
  const float high = x - n * 0.693359375F, r = high - n * -2.12194440e-4F;
  float y = 1.0F / 5040.0F;
  for (const float factor : {720.0F, 120.0F, 24.0F, 6.0F, 2.0F}) y = y * r + 1.0F / factor;
  y = (y * r) * r + r;
  y = y + 1.0F;
  const int e = static_cast<int>(n), half = e >> 1;
  return y * exp2_int(half) * exp2_int(e - half);
}

/// docs/formats.md gives the formula; this test runs on SCALAR too, so that every ISA has these bits.
TEST(PoolOnCpu, HasTheDocumentedBits) {
  int64_t keys = 0;
  property("pool_k on cpu", 100, [&] {
    PoolShape s = draw_pool_shape();
    s.format = KeyFormat::fp8, s.tail = true;
    const PoolCase c = make_pool_case(s);
    const Replay want = replay(c.args, c.tail);
    c.run("cpu", nullptr);
    // The tokens of each pool once more, from rows that the case has in whole.
    const int64_t dim = s.head_dim, rows = c.slots.size();
    for (int64_t r = s.pool_size - 1; r < rows; ++r) {
      const int64_t slot = c.slots.as<int64_t>()[r], first = r - s.pool_size + 1;
      if (slot < 0 || c.request.as<int32_t>()[first] != c.request.as<int32_t>()[r]) continue;
      const Array x(DType::bf16, {1, dim});
      for (int64_t d = 0; d < dim; ++d) {
        const auto score = [&](int64_t j) {
          return bf16_to_float(c.gate.as<uint16_t>()[(first + j) * dim + d]) + c.ape.as<float>()[j * dim + d];
        };
        float most = score(0), sum = 0, weights = 0;
        for (int64_t j = 0; j < s.pool_size; ++j) most = score(j) > most ? score(j) : most;
        for (int64_t j = 0; j < s.pool_size; ++j) {
          const float p = exp_of_negative(score(j) - most);
          sum = sum + bf16_to_float(c.k.as<uint16_t>()[(first + j) * dim + d]) * p;
          weights = weights + p;
        }
        x.as<uint16_t>()[d] = float_to_bf16(sum / weights);
      }
      const KeyCache one{c.args.cache.pages, s.format, s.layout, s.page_size, s.head_dim};
      const Array pages = stored(x, one, s.scale, "cpu");
      const PageLayout layout = page_layout(s.format, s.layout, s.page_size, dim);
      const uint8_t* got = c.pages.as<uint8_t>() + slot / s.page_size * c.pages.view().stride[0];
      RC_ASSERT(std::memcmp(got + layout.value_offset(slot % s.page_size), pages.as<uint8_t>() + layout.value_offset(0),
                            static_cast<size_t>(layout.value)) == 0);
      RC_ASSERT(std::memcmp(got + layout.scale_offset(slot % s.page_size), pages.as<uint8_t>() + layout.scale_offset(0),
                            static_cast<size_t>(layout.scale)) == 0);
      ++keys;
    }
  });
  EXPECT_GT(keys, 100);
}

/// Two units in the last place, over all that a difference of scores can be.
TEST(PoolOnCpu, ExpIsWithinTwoUlp) {
  double worst = 0;
  for (float x = 0; x > -87; x -= 0.00137F) {
    const double want = std::exp(static_cast<double>(x)), got = static_cast<double>(exp_of_negative(x));
    worst = std::max(worst, std::abs(got - want) / (want * 0x1p-23));
  }
  EXPECT_LE(worst, 2);
  EXPECT_EQ(exp_of_negative(0), 1.0F);
  EXPECT_EQ(exp_of_negative(-1e30F), 0.0F);
  std::cout << "largest error of exp: " << worst << " * 2^-23\n";
}

}  // namespace
}  // namespace topkey::testing
