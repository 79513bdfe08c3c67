// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `pool`, compress_k: a window whose key is known, every backend against a second formulation (a replay in
// double) and against `ref`, state in rings and in pages, and chunked calls against one call over the whole sequence.
#include <cmath>

#include "tests/backend_test.h"
#include "tests/pools.h"

namespace topkey::testing {
namespace {

class Compress : public BackendTest {};

/// ratio 2 with overlap, equal scores: older tokens give the first half of their channels, younger ones the second.
TEST_P(Compress, OlderTokensGiveTheFirstHalfYoungerOnesTheSecond) {
  CompressShape s;
  s.ratio = 2, s.head_dim = 1, s.requests = 1, s.rope = 0, s.format = KeyFormat::f32, s.block = 4;
  CompressCase c = make_compress_case(s);
  c.kv = Array(DType::f32, {4, 2}), c.score = Array(DType::f32, {4, 2});
  for (int64_t i = 0; i < 8; ++i)
    c.kv.as<float>()[i] = static_cast<float>(std::array{1, 100, 2, 200, 4, 400, 8, 800}[i]);
  std::memset(c.ape.as<uint8_t>(), 0, c.ape.bytes());
  c.positions = longs_of({0, 1, 2, 3}), c.slots = longs_of({-1, 0, -1, 1}), c.query_start = Array::of({0, 4});
  c.state_slots = longs_of({0, 1, 2, 3});
  CompressK& a = c.args;
  a.kv = c.kv.view(), a.score = c.score.view(), a.positions = c.positions.view(), a.slot_mapping = c.slots.view();
  a.query_start = c.query_start.view(), a.state_slots = c.state_slots.view(), a.rms_weight = Tensor{}, a.eps = 3;
  c.run(GetParam(), nullptr);
  // The first window has no older half: (100 + 200) / 2. The second: (1 + 2 + 400 + 800) / 4.
  for (const auto& [slot, x] : std::map<int64_t, double>{{0, 150}, {1, 1203.0 / 4}}) {
    float got;
    std::memcpy(&got, c.pages.as<uint8_t>() + 4 * slot, sizeof got);
    EXPECT_NEAR(static_cast<double>(got), x / std::sqrt(x * x + 3), 1e-6) << "slot " << slot;
  }
  // kv, then score + ape, of every token.
  EXPECT_EQ(c.state.as<float>()[3 * 4 + 1], 800);
}

CompressShape draw_shape() {
  CompressShape s;
  s.ratio = static_cast<int32_t>(draw_of({4, 1, 2, 128})), s.overlap = s.ratio == 128 ? false : draw_flag();
  s.head_dim = static_cast<int32_t>(draw_of({32, 128, 12, 2}));
  s.page_size = static_cast<int32_t>(draw_of({8, 1, 64}));
  s.requests = draw(1, 3), s.most = draw(0, s.ratio == 128 ? 150 : 30), s.paged = draw_flag();
  s.block = s.paged ? draw_of({4, 8, 3}) : s.ratio * (s.overlap ? 2 : 1) * draw_of({1, 2});
  s.kv = draw_of({DType::f32, DType::bf16, DType::f16}), s.score = draw_of({DType::f32, DType::bf16, DType::f16});
  s.rope = draw_of({8, 2, 0});
  if (s.rope > s.head_dim) s.rope = s.head_dim;
  s.format = draw_of({KeyFormat::fp8, KeyFormat::mxfp4, KeyFormat::f32, KeyFormat::bf16});
  if (s.head_dim % dim_multiple(s.format) != 0) s.format = KeyFormat::fp8;
  s.seed = static_cast<uint64_t>(draw(1, 1000000));
  return s;
}

TEST_P(Compress, WritesWhatAReplayInDoubleSays) {
  int64_t keys = 0;
  property("compress_k against a replay", 300, [&] {
    const CompressCase c = make_compress_case(draw_shape());
    if (unsupported(c.args, on(GetParam())) != nullptr) return;
    const Replay want = replay(c.args, c.state);
    uint64_t stats[kNumStats] = {};
    c.run(GetParam(), stats);
    require(compare_replay(c.args, want, stats));
    keys += static_cast<int64_t>(want.keys.size());
  });
  EXPECT_GT(keys, 300);
}

TEST_P(Compress, IsRefWithinTheRoundingsOfExp) {
  int64_t skipped = 0, positions = 0;
  property("compress_k against ref", 300, [&] {
    CompressShape s = draw_shape();
    s.format = KeyFormat::f32, s.wild = draw_flag();
    const CompressCase c = make_compress_case(s), r = c.copy();
    uint64_t stats[kNumStats] = {}, want[kNumStats] = {};
    c.run(GetParam(), stats), r.run("ref", want);
    for (int i = 0; i < kNumStats; ++i) RC_ASSERT(stats[i] == want[i]);
    RC_ASSERT(same_bytes(c.state, r.state));
    skipped += static_cast<int64_t>(stats[kSkippedSlots]), positions += static_cast<int64_t>(stats[kSkippedPages]);
    const float *got = c.pages.as<float>(), *expected = r.pages.as<float>();
    for (size_t i = 0; i < c.pages.bytes() / 4; ++i) {
      const bool close = std::isnan(expected[i])
                             ? std::isnan(got[i])
                             : std::abs(got[i] - expected[i]) <= 1e-5F * (1 + 10 * std::abs(expected[i]));
      RC_ASSERT(close);
    }
  });
  EXPECT_GT(skipped, 20);
  EXPECT_GT(positions, 5);
}

TEST_P(Compress, StrictRaisesBeforeAnythingIsWritten) {
  if (exec().device == Device::cuda) GTEST_SKIP() << "strict is not offered here";
  int raised = 0;
  property("compress_k, strict", 200, [&] {
    CompressShape s = draw_shape();
    s.wild = draw_flag();
    if (s.format == KeyFormat::mxfp4) s.format = KeyFormat::fp8;
    const CompressCase c = make_compress_case(s), before = c.copy(), other = c.copy();
    uint64_t stats[kNumStats] = {};
    other.run(GetParam(), stats);
    Exec exec = on(GetParam());
    exec.strict = true;
    const Thrown thrown = thrown_by([&] { run(c.args, exec); });
    const bool wild = stats[kSkippedSlots] + stats[kSkippedPages] > 0;
    RC_ASSERT((thrown.status == Status::invalid_argument) == wild);
    RC_ASSERT(same_bytes(c.pages, wild ? before.pages : other.pages));
    RC_ASSERT(same_bytes(c.state, wild ? before.state : other.state));
    raised += wild;
  });
  EXPECT_GT(raised, 20);
}

/// The rows of a case from `first` on, `count` of them, as a call of its own.
CompressK part_of(const CompressCase& c, int64_t first, int64_t count, const Array& start) {
  CompressK a = c.args;
  for (Tensor* t : {&a.kv, &a.score, &a.positions, &a.state_slots, &a.slot_mapping}) {
    t->data = element(*t, first), t->shape[0] = count;
  }
  a.query_start = start.view();
  return a;
}

/// Any cut of one request's rows into calls leaves the bytes of one call: windows straddle the cuts.
TEST_P(Compress, CallsCutAnywhereGiveTheBytesOfOne) {
  int64_t keys = 0;
  property("compress_k in parts", 200, [&] {
    CompressShape s = draw_shape();
    s.requests = 1;
    if (s.format == KeyFormat::mxfp4) s.format = KeyFormat::fp8;
    CompressCase whole = make_compress_case(s);
    // From the first token on, each of which has its place in the state.
    for (int64_t r = 0; r < whole.positions.size(); ++r) {
      const int64_t page = s.paged ? whole.state_table.as<int32_t>()[r / s.block] : 0;
      whole.positions.as<int64_t>()[r] = r;
      whole.state_slots.as<int64_t>()[r] = page * s.block + r % s.block;
      whole.slots.as<int64_t>()[r] = (r + 1) % s.ratio == 0 ? r / s.ratio : -1;
      keys += (r + 1) % s.ratio == 0;
    }
    const CompressCase parts = whole.copy();
    whole.run(GetParam(), nullptr);
    for (int64_t first = 0; first < whole.positions.size();) {
      const int64_t count = std::min(draw(1, 9), whole.positions.size() - first);
      const Array start = Array::of({0, static_cast<int32_t>(count)});
      support::run(part_of(parts, first, count, start), on(GetParam()));
      first += count;
    }
    RC_ASSERT(same_bytes(parts.pages, whole.pages));
    RC_ASSERT(same_bytes(parts.state, whole.state));
  });
  EXPECT_GT(keys, 300);
}

TOPKEY_ON_EVERY_BACKEND(Compress);

}  // namespace
}  // namespace topkey::testing
