// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Producers in the forms that engines ask for, which have kernels of their own on a GPU: few rows and many, equal slots,
// rows and tables at odd addresses, pools of four with all that can be wrong with them. Bytes and statistics are the CPU's.
#include <algorithm>

#include "tests/backend_test.h"
#include "tests/pools.h"

namespace topkey::testing {
namespace {

class Producers : public ::testing::TestWithParam<std::string> {};

/// Slots of which some come again, some are not to be written and some are wild.
Array draw_slots(Random& random, int64_t rows, int64_t slots) {
  std::vector<int64_t> all;
  for (int64_t r = 0; r < rows; ++r) {
    all.push_back(random.below(static_cast<uint64_t>(slots)));
    if (r > 0 && random.chance(0.2)) all.back() = all[random.below(static_cast<uint64_t>(r))];
    if (random.chance(0.05)) all.back() = random.chance(0.5) ? -1 : slots + 3;
  }
  return longs_of(all);
}

/// Lines of `dim` numbers, some numbers apart and from the `lead`-th on.
Tensor apart(const Array& memory, int64_t rows, int64_t dim, int64_t step, int64_t lead) {
  Tensor t = memory.view();
  t.data = static_cast<uint8_t*>(t.data) + lead * (t.dtype == DType::f32 ? 4 : 2);
  t.ndim = 2, t.shape[0] = rows, t.shape[1] = dim, t.stride[0] = step, t.stride[1] = 1;
  return t;
}

TEST_P(Producers, StoreKWritesTheCpusBytes) {
  constexpr int64_t kDim = 128, kTable = 40;
  Random random(11);
  int ran = 0;
  for (const int64_t rows : {1, 2, 5, 31, 64, 200, 700, 3000}) {
    for (const NormKind norm : {NormKind::none, NormKind::layer, NormKind::rms}) {
      for (const int64_t lead : {0, 1}) {
        const int64_t step = kDim + 4 + lead, pages = rows / 48 + 1;
        const Array k = normals(DType::bf16, {rows * step + 8}, random), weight = normals(DType::f32, {kDim}, random),
                    bias = normals(DType::f32, {kDim}, random), table = normals(DType::f32, {kTable * 65 + 8}, random);
        std::vector<int32_t> at;
        for (int64_t r = 0; r < rows; ++r) at.push_back(static_cast<int32_t>(random.between(-1, kTable)));
        const Array positions = Array::of(at), slots = draw_slots(random, rows, pages * 64);
        StoreK a{};
        a.k = apart(k, rows, kDim, step, lead), a.slot_mapping = slots.view(), a.hadamard = true;
        a.rope.positions = positions.view(), a.rope.dim = 64;
        a.rope.cos_sin = apart(table, kTable, 64, 64 + lead, lead);
        if (norm == NormKind::layer) a.norm = {norm, weight.view(), bias.view(), 1e-6F};
        if (norm == NormKind::rms) a.norm = {norm, weight.view(), {}, 1e-6F};
        Array memory[2];
        uint64_t stats[2][kNumStats] = {};
        for (int i = 0; i < 2; ++i) {
          a.cache = cache_of(memory[i], KeyFormat::fp8, 64, kDim, pages);
          support::run(a, on(i == 0 ? "cpu" : GetParam(), stats[i]));
        }
        EXPECT_TRUE(same_bytes(memory[0], memory[1]))
            << rows << " rows, norm " << static_cast<int>(norm) << ", " << lead;
        EXPECT_TRUE(std::equal(stats[0], stats[0] + kNumStats, stats[1])) << rows;
        ++ran;
      }
    }
  }
  EXPECT_EQ(ran, 48);
}

TEST_P(Producers, QuantizeQWritesTheCpusBytes) {
  constexpr int64_t kDim = 128, kTable = 40;
  Random random(12);
  for (const int64_t rows : {1, 3, 70}) {
    for (const int64_t heads : {1, 6, 64}) {
      for (const QuantRule rule : {QuantRule::v32_query, QuantRule::v4_query, QuantRule::kpool_query}) {
        const Array q = normals(DType::bf16, {rows, heads, kDim}, random),
                    w = normals(DType::f32, {rows, heads}, random), table = normals(DType::f32, {kTable, 64}, random);
        std::vector<int32_t> at;
        for (int64_t r = 0; r < rows; ++r) at.push_back(static_cast<int32_t>(random.between(-1, kTable)));
        const Array positions = Array::of(at);
        QuantizeQ a{};
        a.q = q.view(), a.weights = w.view(), a.softmax_scale = 0.088F, a.head_scale = 0.125F, a.rule = rule;
        a.rope.positions = positions.view(), a.rope.cos_sin = table.view(), a.rope.dim = 64, a.hadamard = true;
        a.format = KeyFormat::fp8;
        Array codes[2], weights[2];
        for (int i = 0; i < 2; ++i) {
          codes[i] = Array(DType::f8_e4m3fn, {rows, heads, kDim}), weights[i] = Array(DType::f32, {rows, heads});
          a.q_out = codes[i].view(), a.weights_out = weights[i].view();
          support::run(a, on(i == 0 ? "cpu" : GetParam()));
        }
        EXPECT_TRUE(same_bytes(codes[0], codes[1])) << rows << " x " << heads;
        EXPECT_TRUE(same_bytes(weights[0], weights[1])) << rows << " x " << heads;
      }
    }
  }
}

/// exp is the CPU's too, so every byte is: of keys, of what the tail holds behind the call, and of the statistics.
TEST_P(Producers, PoolsOfFourAreTheCpus) {
  int few = 0, many = 0;
  for (uint64_t seed = 1; seed <= 120; ++seed) {
    Random random(seed);
    PoolShape s;
    s.head_dim = 128, s.page_size = static_cast<int32_t>(random.chance(0.5) ? 64 : 3),
    s.ring = random.chance(0.5) ? 8 : 4;
    s.requests = random.between(1, 20), s.most = random.chance(0.7) ? random.between(1, 3) : random.between(4, 90);
    s.tail = random.chance(0.8), s.by_request = random.chance(0.9), s.wild = random.chance(0.5), s.seed = seed;
    s.scale = random.chance(0.5) ? ScaleRule::f32 : ScaleRule::ue8m0;
    PoolCase c = make_pool_case(s);
    const int64_t rows = c.args.k.shape[0];
    if (rows == 0 || unsupported(c.args, on(GetParam())) != nullptr || unsupported(c.args, on("cpu")) != nullptr)
      continue;
    // Some pools go to the same slot, some tokens to the same entry.
    for (int64_t r = 1; r < rows; ++r) {
      const auto other = static_cast<int64_t>(random.below(static_cast<uint64_t>(r)));
      if (random.chance(0.1)) c.slots.as<int64_t>()[r] = c.slots.as<int64_t>()[other];
      if (s.tail && random.chance(0.1)) c.tail_slots.as<int64_t>()[r] = c.tail_slots.as<int64_t>()[other];
    }
    PoolCase own = c.copy();
    uint64_t stats[2][kNumStats] = {};
    c.run("cpu", stats[0]), own.run(GetParam(), stats[1]);
    EXPECT_TRUE(same_bytes(c.pages, own.pages)) << "keys of seed " << seed << ", " << rows << " rows";
    EXPECT_TRUE(!s.tail || same_bytes(c.tail, own.tail)) << "tail of seed " << seed << ", " << rows << " rows";
    EXPECT_TRUE(std::equal(stats[0], stats[0] + kNumStats, stats[1])) << seed;
    ++(rows <= 64 ? few : many);
  }
  EXPECT_GT(few, 30);
  EXPECT_GT(many, 10);
}

/// What quotient_by of device/vector.cuh does, where it could miss: for a spread of divisors all numbers next to the edges
/// between e4m3 codes (five bits) times them. Every divisor was looked at once; it takes a minute.
TEST(QuotientBy, IsNearestNextToTheEdgesOfCodes) {
  int64_t looked = 0;
  for (uint32_t fraction = 0; fraction < 1u << 23; fraction += 4099) {
    const float b = float_of(0x3F800000u | fraction), inverse = 1.0F / b;
    for (uint32_t edge = 16; edge < 32; ++edge) {
      const uint32_t middle = bits_of(static_cast<float>(edge) / 16 * b);
      for (uint32_t at = middle - 5; at <= middle + 5; ++at) {
        const float a = float_of(at), q = a * inverse;
        ASSERT_EQ(std::fma(-std::fma(q, b, -a), inverse, q), a / b) << a << " / " << b;
        ++looked;
      }
    }
  }
  EXPECT_GT(looked, 300000);
}

INSTANTIATE_TEST_SUITE_P(Backends, Producers, ::testing::ValuesIn(gpu_backends()), backend_label);

}  // namespace
}  // namespace topkey::testing
