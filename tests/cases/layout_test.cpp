// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// CASES chapters 10 and 11, layout, recipe and strides: where bytes lie in a page, what the score formula is, and
// inputs whose strides are not the ones a kernel would like.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "tests/cases/requests.h"

namespace topkey::cases {
namespace {

using support::element;
using support::float_at;

// ---- B43: planar and interleaved
// -----------------------------------------------------------------------------------------

/// One page of one-hot keys of strength 1 whose scale is position + 1, stored by store_k; then scored by a query of
/// ones.
struct OnePage {
  static constexpr int64_t kDim = 128;
  int64_t size;
  KeyCache cache;
  Array codes, scales, slots, q, weights, table, end;

  OnePage(int32_t page_size, Layout layout, uint8_t* bytes) : size(page_size) {
    cache = {tensor(bytes, DType::u8, {1, size * (kDim + 4)}), KeyFormat::fp8, layout, page_size, kDim};
    codes = Array(DType::f8_e4m3fn, {size, kDim});
    scales = Array(DType::f32, {size});
    for (int64_t t = 0; t < size; ++t) {
      *element(codes.view(), t, t % kDim) = 0x38;  // 1.0
      scales.as<float>()[t] = static_cast<float>(t + 1);
    }
    slots = Array::of(progression(0, page_size));
    q = Array(DType::f8_e4m3fn, {1, 4, kDim});
    weights = floats({{0.25F, 0.25F, 0.25F, 0.25F}});
    std::memset(q.as<uint8_t>(), 0x38, q.bytes());
    table = ints({{0}});
    end = Array::of({page_size});
  }
  StoreK store() const {
    StoreK a{};
    a.k = codes.view(), a.k_scales = scales.view(), a.slot_mapping = slots.view(), a.cache = cache;
    return a;
  }
  PagedMqaTopk search(int32_t topk) const {
    PagedMqaTopk a{};
    a.q = {q.view(), {}, weights.view()};
    a.keys.cache = cache, a.keys.block_table = table.view();
    a.rows.count = 1, a.rows.end = end.view(), a.topk = topk, a.out.order = Order::score;
    return a;
  }
};

void expect_bytes(const uint8_t* page, int64_t position, int64_t value_at, int64_t scale_at) {
  float scale;
  std::memcpy(&scale, page + scale_at, sizeof scale);
  EXPECT_EQ(page[value_at + position % OnePage::kDim], 0x38) << "position " << position;
  EXPECT_EQ(scale, static_cast<float>(position + 1)) << "position " << position;
}

// vllm #50576, PR #40991: a planar page is read as interleaved, and both fill the same bytes. Bytes lie where
// docs/formats.md says; score(pos) = pos + 1.
TEST_P(Cases, B43_values_and_scales_lie_where_documented) {
  for (int32_t size : {64, 256}) {
    for (Layout layout : {Layout::planar, Layout::interleaved}) {
      const Walled memory(static_cast<size_t>(size) * (OnePage::kDim + 4), 0xEE);
      const OnePage page(size, layout, memory.data());
      support::run(page.store(), exec());
      EXPECT_TRUE(memory.intact());
      for (int64_t pos : {0, 1, 63, size - 1}) {
        const bool planar = layout == Layout::planar;
        expect_bytes(memory.data(), pos, planar ? pos * 128 : pos * 132,
                     planar ? size * 128 + pos * 4 : pos * 132 + 128);
      }
      const Picked p = pick(page.search(size), exec());
      EXPECT_EQ(p.indices[0], progression(size - 1, size, -1));
      for (int32_t i = 0; i < size; ++i) EXPECT_EQ(p.scores[0][static_cast<size_t>(i)], static_cast<float>(size - i));
    }
  }
}

// The same for tiled pages, which fill the same bytes too. Single offsets by hand; score(pos) = pos + 1.
TEST_P(Cases, B43_tiled_pages_are_not_planar) {
  const Walled memory(64 * (OnePage::kDim + 4), 0xEE);
  const OnePage page(64, Layout::tiled16, memory.data());
  support::run(page.store(), exec());
  EXPECT_TRUE(memory.intact());
  expect_bytes(memory.data(), 0, 0, 8192);
  for (const auto& [pos, value_at] : {std::pair<int64_t, int64_t>{1, 16 + 1}, {63, 6144 + 768 + 240 + 15}}) {
    EXPECT_EQ(memory.data()[value_at], 0x38) << "position " << pos;
    float scale;
    std::memcpy(&scale, memory.data() + 8192 + 4 * pos, sizeof scale);
    EXPECT_EQ(scale, static_cast<float>(pos + 1));
  }
  const Picked p = pick(page.search(64), exec());
  EXPECT_EQ(p.indices[0], progression(63, 64, -1));
  for (int32_t i = 0; i < 64; ++i) EXPECT_EQ(p.scores[0][static_cast<size_t>(i)], static_cast<float>(64 - i));
}

// ---- B45: scale bytes of MXFP4
// ------------------------------------------------------------------------------------------

/// A page of 64 mxfp4 keys of 128 dims whose codes are all 1.0 and whose scale of group g is 2^((t + g) mod 5).
struct ScaledPage {
  Array codes{DType::u8, {64, 64}}, scales{DType::u8, {64, 4}}, pages{DType::u8, {1, 64 * 68}}, slots;
  StoreK store{};
  explicit ScaledPage(Layout layout) : slots(Array::of(progression(0, 64))) {
    std::memset(codes.as<uint8_t>(), 0x22, codes.bytes());
    for (int i = 0; i < 256; ++i) scales.as<uint8_t>()[i] = static_cast<uint8_t>(127 + (i / 4 + i % 4) % 5);
    store.k = codes.view(), store.k_scales = scales.view(), store.slot_mapping = slots.view();
    store.cache = {pages.view(), KeyFormat::mxfp4, layout, 64, 128};
  }
  /// Scores of the 64 keys for a query of codes [64] under scales 2^0, one head of weight 1.
  Floats scores(const Array& q, const Exec& exec) const {
    const Array ones(DType::u8, {1, 1, 4}), weight = floats({{1.F}}), table = ints({{0}}), end = Array::of({64});
    const Array logits(DType::f32, {1, 64});
    std::memset(ones.as<uint8_t>(), 127, 4);
    PagedMqaLogits a{};
    a.q = {q.view(), ones.view(), weight.view()};
    a.keys.cache = store.cache, a.keys.block_table = table.view();
    a.rows.count = 1, a.rows.end = end.view(), a.logits = logits.view();
    support::run(a, exec);
    return row_of<float>(logits.view(), 0);
  }
};

// ROCm/aiter PR #4028: the writer orders the scale bytes of MXFP4 otherwise than the reader. A query of ones on one
// group of 32 sees that group's scale alone: 32 * 2^((t + g) mod 5), in every layout.
TEST_P(Cases, B45_each_group_has_its_own_scale) {
  for (const Layout layout : {Layout::planar, Layout::interleaved, Layout::tiled16, Layout::tiled32, Layout::tiled64}) {
    const ScaledPage page(layout);
    support::run(page.store, exec());
    for (int g = 0; g < 4; ++g) {
      const Array q(DType::u8, {1, 1, 64});
      std::memset(q.as<uint8_t>() + 16 * g, 0x22, 16);
      const Floats got = page.scores(q, exec());
      for (int t = 0; t < 64; ++t) {
        ASSERT_EQ(got[static_cast<size_t>(t)], static_cast<float>(32 << (t + g) % 5))
            << layout_name(layout) << ", group " << g << ", key " << t;
      }
    }
  }
}

// Likewise every code once: {0, .5, 1, 1.5, 2, 3, 4, 6} and their negatives, at an even and at an odd d.
TEST_P(Cases, B45_all_sixteen_codes) {
  const float values[] = {0.F, 0.5F, 1.F, 1.5F, 2.F, 3.F, 4.F, 6.F};
  ScaledPage page(Layout::planar);
  for (const int odd : {0, 1}) {
    std::memset(page.codes.as<uint8_t>(), 0, page.codes.bytes());
    for (int t = 0; t < 64; ++t) *element(page.codes.view(), t, 21) = static_cast<uint8_t>(t % 16 << 4 * odd);
    support::run(page.store, exec());
    for (const int sign : {1, -1}) {
      const Array q(DType::u8, {1, 1, 64});
      q.as<uint8_t>()[21] = static_cast<uint8_t>((sign > 0 ? 0x2 : 0xA) << 4 * odd);
      const Floats got = page.scores(q, exec());
      for (int t = 0; t < 64; ++t) {
        const float value = values[t % 8] * (t % 16 < 8 ? 1.F : -1.F) * static_cast<float>(sign);
        ASSERT_EQ(got[static_cast<size_t>(t)], std::max(value, 0.F) * static_cast<float>(1 << (t + 1) % 5))
            << "code " << t % 16 << ", sign " << sign << ", odd " << odd;
      }
    }
  }
}

// ---- B46: the recipe
// --------------------------------------------------------------------------------------------------------

struct Recipe {
  KeyFormat format;
  DType q_dtype;
};
const Recipe kRecipes[] = {{KeyFormat::fp8, DType::f8_e4m3fn}, {KeyFormat::bf16, DType::bf16},
                           {KeyFormat::f16, DType::f16},       {KeyFormat::f32, DType::f32},
                           {KeyFormat::q8_0, DType::f32},      {KeyFormat::f32, DType::bf16}};
constexpr int64_t kDim = 32;

void put(const Array& a, const Tensor& at, int64_t i, int64_t j, float x) {
  uint8_t* to = element(at, i, j);
  const uint16_t half = a.view().dtype == DType::bf16 ? float_to_bf16(x) : float_to_f16(x);
  const uint8_t code = float_to_e4m3(x);
  switch (a.view().dtype) {
    case DType::f32: std::memcpy(to, &x, sizeof x); break;
    case DType::f8_e4m3fn: *to = code; break;
    default: std::memcpy(to, &half, sizeof half);
  }
}

/// Queries e0, e1, ... with the given weights; keys whose dot with head h is dots[key][h].
struct Scored {
  Array q, weights, keys, scales;
  MqaTopk args{};
  Scored(const Recipe& recipe, const Floats& w, const std::vector<Floats>& dots) {
    const auto heads = static_cast<int64_t>(w.size()), count = static_cast<int64_t>(dots.size());
    q = Array(recipe.q_dtype, {1, heads, kDim});
    weights = floats({w});
    for (int64_t h = 0; h < heads; ++h) put(q, tensor(q.view().data, recipe.q_dtype, {heads, kDim}), h, h, 1.F);
    const bool packed = recipe.format == KeyFormat::q8_0, fp8 = recipe.format == KeyFormat::fp8;
    const DType own = recipe.format == KeyFormat::bf16  ? DType::bf16
                      : recipe.format == KeyFormat::f16 ? DType::f16
                                                        : DType::f32;
    keys = packed ? Array(DType::u8, {count, 34}) : Array(fp8 ? DType::f8_e4m3fn : own, {count, kDim});
    if (fp8) scales = Array(DType::f32, {count}), std::fill_n(scales.as<float>(), count, 1.F);
    const uint16_t one = float_to_f16(1.F);
    for (int64_t n = 0; n < count; ++n) {
      if (packed) std::memcpy(element(keys.view(), n), &one, sizeof one);
      for (int64_t h = 0; h < heads; ++h) {
        const float dot = dots[static_cast<size_t>(n)][static_cast<size_t>(h)];
        if (packed) *element(keys.view(), n, 2 + h) = static_cast<uint8_t>(static_cast<int8_t>(dot));
        if (!packed) put(keys, keys.view(), n, h, dot);
      }
    }
    args.q = {q.view(), {}, weights.view()};
    args.keys = {keys.view(), scales.view(), recipe.format};
    args.rows.count = 1;
    args.topk = static_cast<int32_t>(count);
    args.out.order = Order::score;
  }
};

// transformers PR #44398, mlx-lm PR #531 (adjacent), sglang #13530, vllm-ascend PR #4641: no ReLU per head. 3 +
// relu(-5) beats 1 + 1.
TEST_P(Cases, B46_relu_is_applied_to_each_head) {
  for (const Recipe& recipe : kRecipes) {
    const Scored s(recipe, {1.F, 1.F}, {{3.F, -5.F}, {1.F, 1.F}});
    const Picked p = pick(s.args, exec());
    EXPECT_EQ(p.indices[0], (Ints{0, 1})) << format_name(recipe.format);
    EXPECT_EQ(p.scores[0], (Floats{3.F, 2.F})) << format_name(recipe.format);
  }
}

// The same with a negative weight: scores -4 and 0, and a key outside the window is not chosen although its 0 beats -4.
TEST_P(Cases, B46_negative_weights_and_invisible_keys) {
  for (const Recipe& recipe : kRecipes) {
    Scored s(recipe, {-1.F}, {{4.F}, {-3.F}, {-1.F}});
    const Array end = Array::of({2});
    s.args.rows.end = end.view();
    const Picked p = pick(s.args, exec());
    EXPECT_EQ(p.indices[0], (Ints{1, 0, -1})) << format_name(recipe.format);
    EXPECT_EQ(p.counts[0], 2);
    EXPECT_EQ(bits_of(p.scores[0][0]), 0U) << "minus zero came out";
    EXPECT_EQ(p.scores[0][1], -4.F);
  }
}

// TensorRT-LLM PR #12010, mlx-lm PR #1431: one index list a token, not one a head. [tokens, topk] whatever H; a head
// axis is refused.
TEST_P(Cases, B46_one_list_a_token) {
  ProblemSpec spec;
  spec.heads = 8, spec.rows = 3, spec.keys = 50, spec.exact = true, spec.seed = 146;
  const Problem p = support::make_problem(spec);
  EXPECT_EQ(expect_right(p, 16, exec()).indices.size(), 3U);
  const Array per_head(DType::i32, {3, 8, 16});
  MqaTopk a = p.dense_search(16, {});
  a.out.indices = per_head.view();
  EXPECT_FALSE(ran([&] { support::run(a, exec()); }));
}

// The same sources on rotary pairs: pi/2 on pair 0 turns [1,0,0,0] into [0,0,1,0] half-split, [0,1,0,0] interleaved,
// by argument.
TEST_P(Cases, B46_rotary_pairing_is_an_argument) {
  const Array x = floats({{1.F, 0.F, 0.F, 0.F}}), cos_sin = floats({{0.F, 1.F, 1.F, 0.F}}), position = Array::of({0});
  const Array weights = floats({{1.F}}), out(DType::f32, {1, 4}), weights_out(DType::f32, {1, 1});
  for (bool interleaved : {false, true}) {
    const Floats want = interleaved ? Floats{0.F, 1.F, 0.F, 0.F} : Floats{0.F, 0.F, 1.F, 0.F};
    const Rope rope{position.view(), cos_sin.view(), 4, interleaved, false};
    QuantizeK keys{};
    keys.k = x.view(), keys.rope = rope, keys.out = {out.view(), {}, KeyFormat::f32};
    support::run(keys, exec());
    EXPECT_EQ(row_of<float>(out.view(), 0), want);
    QuantizeQ queries{};
    queries.q = tensor(x.view().data, DType::f32, {1, 1, 4}), queries.weights = weights.view();
    queries.rope = rope, queries.format = KeyFormat::f32;
    queries.q_out = tensor(out.view().data, DType::f32, {1, 1, 4}), queries.weights_out = weights_out.view();
    support::run(queries, exec());
    EXPECT_EQ(row_of<float>(out.view(), 0), want);
  }
}

// ---- B48: strides
// -------------------------------------------------------------------------------------------------------------

/// 64 heads and `batch` requests of their own, as many as or more than the heads.
Problem batch_of(int32_t batch, bool exact) {
  ProblemSpec spec;
  spec.heads = 64, spec.exact = exact, spec.seed = 148;
  Ints lens;
  for (int32_t b = 0; b < batch; ++b) lens.push_back(5 + b % 28);
  return drafts_of(spec, lens, 1);
}

// ROCm/aiter PR #1815: the head stride is passed as the batch stride. Right rows in a slice of a wider output, whose
// rest stays 7.
TEST_P(Cases, B48_output_is_a_slice_of_a_wider_matrix) {
  for (int32_t batch : {63, 64, 65, 96}) {
    const Problem p = batch_of(batch, batch % 2 == 0);
    const Array want = logits_of(p, exec()), wide(DType::f32, {batch, p.width() + 256});
    std::fill_n(wide.as<float>(), wide.size(), 7.F);
    const Tensor slice = tensor(wide.view().data, DType::f32, {batch, p.width()}, {p.width() + 256, 1});
    support::run(p.paged_logits(slice), exec());
    for (int64_t b = 0; b < batch; ++b) {
      const auto bytes = static_cast<size_t>(p.width()) * sizeof(float);
      ASSERT_EQ(std::memcmp(element(slice, b), element(want.view(), b), bytes), 0) << "row " << b << " of " << batch;
      for (int64_t n = p.width(); n < p.width() + 256; ++n)
        ASSERT_EQ(float_at(wide.view(), b, n), 7.F) << b << ", " << n;
    }
    expect_right(p, 16, exec());
  }
}

/// A column of a wider matrix that holds the same numbers.
Array as_column(const Array& vector, int64_t columns) {
  const int64_t n = vector.size();
  const Array wide(DType::i32, {n, columns});
  std::fill_n(wide.as<int32_t>(), wide.size(), 1000000000);
  for (int64_t i = 0; i < n; ++i) wide.as<int32_t>()[i * columns] = vector.as<int32_t>()[i];
  return wide.seen_as(tensor(wide.view().data, DType::i32, {n}, {columns}));
}

/// Every second column of a wider table.
Array spread_columns(const Array& table) {
  const int64_t rows = table.view().shape[0], columns = table.view().shape[1];
  const Array wide(DType::i32, {rows, 2 * columns});
  std::fill_n(wide.as<int32_t>(), wide.size(), 1000000000);
  for (int64_t i = 0; i < rows * columns; ++i) wide.as<int32_t>()[2 * i] = table.as<int32_t>()[i];
  return wide.seen_as(tensor(wide.view().data, DType::i32, {rows, columns}, {2 * columns, 2}));
}

/// The same weights in memory as [H, R].
Array transposed(const Array& weights) {
  const int64_t rows = weights.view().shape[0], heads = weights.view().shape[1];
  const Array t(DType::f32, {heads, rows});
  for (int64_t i = 0; i < rows * heads; ++i) t.as<float>()[i % heads * rows + i / heads] = weights.as<float>()[i];
  return t.seen_as(tensor(t.view().data, DType::f32, {rows, heads}, {1, rows}));
}

// vllm #40987: lengths are a column of a wider tensor, the table a slice, the weights a transpose. Right or refused,
// each.
TEST_P(Cases, B48_lengths_tables_and_weights_with_strides) {
  for (int32_t batch : {63, 64, 65, 96}) {
    const Problem p = batch_of(batch, batch % 2 == 1);
    const Picked want = pick(p.paged_search(16, {}), exec());
    for (int form = 0; form < 3; ++form) {
      Problem strided = p;
      if (form == 0) strided.end = as_column(p.end, 8);
      if (form == 1) strided.block_table = spread_columns(p.block_table);
      if (form == 2) strided.weights = transposed(p.weights);
      Picked got;
      const bool answered = ran([&] { got = pick(strided.paged_search(16, {}), exec()); });
      EXPECT_TRUE(answered || form == 2) << "lengths and tables have free strides";
      if (!answered) continue;
      EXPECT_EQ(got.indices, want.indices) << "form " << form << ", batch " << batch;
      EXPECT_EQ(got.scores, want.scores) << "form " << form << ", batch " << batch;
    }
  }
}

// The same for an expanded key: 40 keys that are one key in memory score alike, so the first are chosen.
TEST_P(Cases, B48_keys_are_an_expanded_view) {
  ProblemSpec spec;
  spec.heads = 64, spec.rows = 65, spec.keys = 1, spec.exact = true, spec.seed = 149;
  const Problem p = support::make_problem(spec);
  const Array one = logits_of(p, exec());
  MqaTopk a = p.dense_search(16, {});
  a.keys.values = tensor(a.keys.values.data, a.keys.values.dtype, {40, spec.head_dim}, {0, 1});
  a.keys.scales = tensor(a.keys.scales.data, DType::f32, {40}, {0});
  Picked got;
  if (!ran([&] { got = pick(a, exec()); })) return;
  for (size_t r = 0; r < 65; ++r) {
    EXPECT_EQ(got.indices[r], progression(0, 16)) << "row " << r;
    EXPECT_EQ(got.scores[r], Floats(16, float_at(one.view(), static_cast<int64_t>(r), 0))) << "row " << r;
  }
}

TOPKEY_CASES();

}  // namespace
}  // namespace topkey::cases
