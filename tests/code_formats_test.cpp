// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// mxfp4 and fp8_fnuz keys and tiled pages, what is theirs alone: scale bytes from end to end, scales as words and with
// strides, the ramp and NaN blocks of their producers, golden pages through every stage that reads or writes them, and
// arithmetic `f32` computed again with std::fma. Drawn problems of all stages hold them too.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/backend_test.h"

namespace topkey::testing {
namespace {

using Bytes = std::vector<uint8_t>;

class CodeFormats : public BackendTest {
 protected:
  /// Scores [rows, keys] of dense keys.
  Array logits(const Query& q, const DenseKeys& keys) {
    const Array out(DType::f32, {q.values.shape[0], keys.values.shape[0]});
    MqaLogits a{};
    a.q = q, a.keys = keys, a.rows.count = q.values.shape[0], a.logits = out.view();
    run(a, exec());
    return out;
  }
  bool is_f32(KeyFormat format, DType q) {
    const char* name = arithmetic(GetParam().c_str(), format, q);
    return name != nullptr && std::string(name) == "f32";
  }
};

// ---- scale bytes of mxfp4
// ----------------------------------------------------------------------------------------------

/// One query row of one head and one key, 32 dims, all codes alike.
struct Pair {
  uint8_t q_code, q_scale, k_code, k_scale;
  float want;
};

constexpr uint8_t kSix = 7, kHalf = 1, kMinus = 8;

TEST_P(CodeFormats, ScaleBytesFromEndToEnd) {
  const float inf = std::numeric_limits<float>::infinity(), nan = canonical_nan();
  for (const Pair& p :
       {Pair{kSix, 127, kSix, 127, 1152}, Pair{kSix, 254, kSix, 0, 1152}, Pair{kSix, 0, kSix, 254, 1152},
        Pair{kHalf, 0, kHalf, 254, 8}, Pair{kHalf, 254, kHalf, 0, 8}, Pair{kSix, 254, kSix, 117, 1152 * 0x1p117F},
        Pair{kSix, 117, kSix, 254, 1152 * 0x1p117F}, Pair{kSix, 254, kSix, 254, inf},
        Pair{kSix, 254, kSix | kMinus, 254, 0}, Pair{kSix, 0, kSix, 0, 0}, Pair{kSix, 127, kSix, 0, 1152 * 0x1p-127F},
        Pair{kSix, 127, 0, 255, nan}, Pair{0, 127, kSix, 255, nan}, Pair{0, 255, kSix, 127, nan},
        Pair{kSix, 255, 0, 0, nan}, Pair{kSix | kMinus, 255, kSix, 127, nan}}) {
    const Bytes q(16, static_cast<uint8_t>(p.q_code * 17)), k(16, static_cast<uint8_t>(p.k_code * 17));
    const float one = 1;
    const Array got =
        logits({tensor(q.data(), DType::u8, {1, 1, 16}), tensor(&p.q_scale, DType::e8m0, {1, 1, 1}),
                tensor(&one, DType::f32, {1, 1})},
               {tensor(k.data(), DType::u8, {1, 16}), tensor(&p.k_scale, DType::u8, {1, 1}), KeyFormat::mxfp4});
    EXPECT_EQ(bits_of(got.as<float>()[0]), bits_of(p.want))
        << "codes " << +p.q_code << ", " << +p.k_code << ", scales " << +p.q_scale << ", " << +p.k_scale << ": "
        << got.as<float>()[0] << ", not " << p.want;
  }
}

/// Random codes under random scale bytes whose sums stay below 2^100: within the bound of S_ref, NaN blocks included.
TEST_P(CodeFormats, AnyScaleBytesAreWithinTheBound) {
  property("scores under any scale bytes", 200, [&] {
    ProblemSpec spec;
    spec.format = KeyFormat::mxfp4, spec.head_dim = draw_of({32, 96, 128}), spec.heads = draw_of({1, 3, 8});
    spec.rows = 3, spec.keys = 40, spec.seed = static_cast<uint64_t>(draw(1, 1000000));
    const Problem p = make_problem(spec);
    Random random(spec.seed);
    const int64_t centre = draw(0, 254);
    const auto fill = [&](const Array& scales, int64_t low, int64_t high) {
      for (size_t i = 0; i < scales.bytes(); ++i) {
        const int64_t byte =
            random.chance(0.01) ? 255 : random.between(std::max<int64_t>(low, 0), std::min<int64_t>(high, 254));
        scales.as<uint8_t>()[i] = static_cast<uint8_t>(byte);
      }
    };
    fill(p.q_scales, centre - 40, centre);
    fill(p.key_scales, 254 - centre - 60, 254 - centre + 90);
    const Array out(DType::f32, {3, 40});
    const MqaLogits a = p.dense_logits(out.view());
    run(a, exec());
    const char* name = arithmetic(GetParam().c_str(), KeyFormat::mxfp4, DType::u8);
    RC_LOG() << p.text() << " centre " << centre;
    require(compare_scores(a, truth_of(a.q, a.keys, a.rows, false), name, 0));
  });
}

// ---- arithmetic f32, a second time
// -------------------------------------------------------------------------------------

/// Values of a row as arithmetic `f32` holds them.
std::vector<float> held(KeyFormat format, const uint8_t* values, const uint8_t* scales, int64_t dim) {
  std::vector<float> x(static_cast<size_t>(dim));
  for (int64_t d = 0; d < dim; ++d) {
    float& v = x[static_cast<size_t>(d)];
    const int code = format == KeyFormat::mxfp4 ? values[d / 2] >> (d % 2 * 4) & 15 : values[d];
    if (format == KeyFormat::fp8) v = e4m3_to_float(static_cast<uint8_t>(code));
    if (format == KeyFormat::fp8_fnuz) v = e4m3fnuz_to_float(static_cast<uint8_t>(code));
    if (format == KeyFormat::mxfp4) v = e2m1_to_float(static_cast<uint8_t>(code)) / 4 * e8m0_to_float(scales[d / 32]);
  }
  return x;
}

float f32_score(const Problem& p, int64_t row, int64_t key) {
  const KeyFormat format = p.spec.format;
  const bool fp4 = format == KeyFormat::mxfp4;
  const int64_t dim = p.spec.head_dim;
  const std::vector<float> k = held(format, p.values_at(0, key), p.scales_at(0, key), dim);
  float sum = 0, kscale = 16;
  if (!fp4) std::memcpy(&kscale, p.scales_at(0, key), sizeof kscale);
  for (int64_t h = 0; h < p.spec.heads; ++h) {
    const std::vector<float> q =
        held(format, element(p.q.view(), row, h), fp4 ? element(p.q_scales.view(), row, h) : nullptr, dim);
    float dot = 0;
    for (size_t d = 0; d < q.size(); ++d) dot = std::fma(q[d], k[d], dot);
    sum = std::fma(p.weights.as<float>()[row * p.spec.heads + h], dot <= 0 ? 0 : dot, sum);
  }
  const float score = sum * kscale;
  return std::isnan(score) ? canonical_nan() : score == 0 ? 0 : score;
}

/// So the bits are the same on every instruction set.
TEST_P(CodeFormats, F32IsOneFmaAfterTheOther) {
  int compared = 0;
  for (const KeyFormat format : {KeyFormat::mxfp4, KeyFormat::fp8_fnuz, KeyFormat::fp8}) {
    if (!is_f32(format, DType::u8)) continue;
    for (const Pattern pattern : {Pattern::normal, Pattern::nans, Pattern::denormals, Pattern::relu_plateau}) {
      ProblemSpec spec;
      spec.format = format, spec.pattern = pattern, spec.head_dim = 96, spec.heads = 9, spec.rows = 4, spec.keys = 61;
      const Problem p = make_problem(spec);
      const Array got = logits(p.query(), p.dense_keys());
      for (int64_t i = 0; i < 4 * 61; ++i, ++compared) {
        ASSERT_EQ(bits_of(got.as<float>()[i]), bits_of(f32_score(p, i / 61, i % 61))) << p.text() << ", cell " << i;
      }
    }
  }
  EXPECT_EQ(compared, GetParam() == "ref" ? 0 : 3 * 4 * 4 * 61);
}

// ---- scales as words, and apart
// ------------------------------------------------------------------------------------------

Problem mxfp4_problem(bool exact) {
  ProblemSpec spec;
  spec.format = KeyFormat::mxfp4, spec.head_dim = 128, spec.heads = 5, spec.rows = 6, spec.keys = 70;
  spec.exact = exact;
  return make_problem(spec);
}

TEST_P(CodeFormats, ScalesAsWordsAreTheSameScales) {
  const Problem p = mxfp4_problem(false);
  const Array want = logits(p.query(), p.dense_keys());
  Query q = p.query();
  DenseKeys keys = p.dense_keys();
  q.scales = tensor(q.scales.data, DType::i32, {6, 5});
  keys.scales = tensor(keys.scales.data, DType::i32, {70});
  const Array got = logits(q, keys);
  EXPECT_EQ(std::memcmp(got.as<float>(), want.as<float>(), want.bytes()), 0);
}

/// A copy of [A, B, n] or [A, n] bytes with `apart` bytes from one n to the next.
Array spread(const Tensor& t, int64_t apart) {
  const int64_t b = t.ndim == 3 ? t.shape[1] : 1, n = t.shape[t.ndim - 1];
  const Array wide(DType::u8, {t.shape[0] * (b + 1) * apart});
  std::memset(wide.as<uint8_t>(), 0xFF, wide.bytes());
  const Tensor view = t.ndim == 3 ? tensor(wide.as<uint8_t>(), t.dtype, {t.shape[0], b, n}, {(b + 1) * apart, apart, 1})
                                  : tensor(wide.as<uint8_t>(), t.dtype, {t.shape[0], n}, {2 * apart, 1});
  for (int64_t i = 0; i < t.shape[0]; ++i) {
    for (int64_t j = 0; j < b; ++j) {
      const auto* from = t.ndim == 3 ? element(t, i, j) : element(t, i);
      std::memcpy(t.ndim == 3 ? element(view, i, j) : element(view, i), from, static_cast<size_t>(n));
    }
  }
  return wide.seen_as(view);
}

TEST_P(CodeFormats, StridesOfMxFp4ChangeNoBit) {
  const Problem p = mxfp4_problem(false);
  const Array want = logits(p.query(), p.dense_keys());
  const Array q = spread(p.q.view(), 67), q_scales = spread(p.q_scales.view(), 5), keys = spread(p.keys.view(), 71),
              scales = spread(p.key_scales.view(), 9);
  const Array got =
      logits({q.view(), q_scales.view(), p.weights.view()}, {keys.view(), scales.view(), KeyFormat::mxfp4});
  EXPECT_EQ(std::memcmp(got.as<float>(), want.as<float>(), want.bytes()), 0);
}

// ---- producers
// -----------------------------------------------------------------------------------------------------------

std::string hex(const uint8_t* bytes, size_t n) {
  static const char* const kDigits = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < n; ++i) text += {kDigits[bytes[i] >> 4], kDigits[bytes[i] & 15]};
  return text;
}

std::vector<float> ramp() {
  std::vector<float> x;
  for (int i = 0; i < 128; ++i) x.push_back(static_cast<float>(i - 64) / 16);
  return x;
}

const char* const kRamp =
    "eeeeeeeededdddddddddddddcccccccceeeededdddddccccccbcbbaaaa9a9988"
    "0010112222323344444454555555666644444444545555555555555566666666";

/// quantize_k and quantize_q of one vector in mxfp4; scales leave as bytes or as one word.
struct Fp4 {
  Bytes codes = Bytes(64, 0xA5), q_codes = codes, scales = Bytes(4, 0xA5), q_scales = scales;
  float weight_out = 0;
  Fp4(const std::vector<float>& x, bool words, const Exec& exec) {
    const float weight = 3;
    QuantizeK k{};
    k.k = tensor(x.data(), DType::f32, {1, 128});
    k.out = {tensor(codes.data(), DType::u8, {1, 64}), tensor(scales.data(), DType::u8, {1, 4}), KeyFormat::mxfp4};
    QuantizeQ q{};
    q.q = tensor(x.data(), DType::f32, {1, 1, 128});
    q.weights = tensor(&weight, DType::f32, {1, 1});
    q.softmax_scale = 0.5F, q.head_scale = 0.25F, q.format = KeyFormat::mxfp4;
    q.q_out = tensor(q_codes.data(), DType::u8, {1, 1, 64});
    q.q_scales_out = tensor(q_scales.data(), DType::e8m0, {1, 1, 4});
    q.weights_out = tensor(&weight_out, DType::f32, {1, 1});
    if (words) k.out.scales = tensor(scales.data(), DType::i32, {1});
    if (words) q.q_scales_out = tensor(q_scales.data(), DType::i32, {1, 1});
    run(k, exec), run(q, exec);
  }
};

TEST_P(CodeFormats, RampInMxFp4) {
  for (const bool words : {false, true}) {
    const Fp4 out(ramp(), words, exec());
    EXPECT_EQ(hex(out.scales.data(), 4), "7f7e7e7f");
    EXPECT_EQ(hex(out.codes.data(), 64), kRamp);
    EXPECT_EQ(out.q_scales, out.scales);
    EXPECT_EQ(out.q_codes, out.codes);
    EXPECT_EQ(out.weight_out, 3 * 0.5F * 0.25F) << "the scale stays beside the codes";
    const Fp4 zero(std::vector<float>(128), words, exec()), minus(std::vector<float>(128, -0.0F), words, exec());
    EXPECT_EQ(hex(zero.scales.data(), 4), "01010101");
    EXPECT_EQ(zero.codes, Bytes(64, 0x00));
    EXPECT_EQ(minus.codes, Bytes(64, 0x88)) << "-0 is kept";
  }
}

TEST_P(CodeFormats, OneBadElementMakesItsBlockNaN) {
  const Fp4 good(ramp(), false, exec());
  for (const float bad : {std::numeric_limits<float>::infinity(), -std::nanf("")}) {
    for (const size_t at : {size_t{0}, size_t{63}, size_t{127}}) {
      std::vector<float> x = ramp();
      x[at] = bad;
      const Fp4 out(x, false, exec());
      for (size_t b = 0; b < 4; ++b) {
        const bool hit = b == at / 32;
        EXPECT_EQ(out.scales[b], hit ? 255 : good.scales[b]);
        const Bytes codes(out.codes.begin() + 16 * static_cast<int>(b),
                          out.codes.begin() + 16 * static_cast<int>(b + 1));
        const Bytes want(good.codes.begin() + 16 * static_cast<int>(b),
                         good.codes.begin() + 16 * static_cast<int>(b + 1));
        EXPECT_EQ(codes, hit ? Bytes(16) : want);
      }
      EXPECT_EQ(out.q_scales, out.scales);
      EXPECT_EQ(out.q_codes, out.codes);
      EXPECT_TRUE(std::isfinite(out.weight_out));
    }
  }
}

TEST_P(CodeFormats, Fp8FnuzIsScaledTo224) {
  for (const float peak : {224.F, 3.5F}) {
    Bytes codes(32, 0xA5);
    float scale = 0;
    std::vector<float> x(32, 0.F);
    x[3] = -peak, x[4] = peak / 2, x[5] = -0.F;
    QuantizeK k{};
    k.k = tensor(x.data(), DType::f32, {1, 32});
    k.out = {tensor(codes.data(), DType::u8, {1, 32}), tensor(&scale, DType::f32, {1}), KeyFormat::fp8_fnuz};
    run(k, exec());
    EXPECT_EQ(scale, peak / 224);
    EXPECT_EQ(codes[3], 0xFE) << "-224";
    EXPECT_EQ(codes[4], 0x76) << "112";
    EXPECT_EQ(codes[5], 0x00) << "no negative zero: its code is NaN";
    x[9] = std::nanf("");
    run(k, exec());
    EXPECT_EQ(codes, Bytes(32, 0x80));
    EXPECT_EQ(bits_of(scale), 0x7FC00000U);
  }
}

// ---- golden pages
// --------------------------------------------------------------------------------------------------------

Bytes unhex(const std::string& text) {
  Bytes bytes;
  for (size_t i = 0; i < text.size(); i += 2)
    bytes.push_back(static_cast<uint8_t>(std::stoi(text.substr(i, 2), nullptr, 16)));
  return bytes;
}

/// One golden page: its rows as dense keys, and the page.
struct Golden {
  KeyCache cache{};
  Bytes values, scales, page;
  explicit Golden(const nlohmann::json& g) : page(unhex(g["page"])) {
    for (const auto& row : g["values"]) append(values, unhex(row));
    for (const auto& row : g["scales"]) append(scales, unhex(row));
    const std::string format = g["format"], layout = g["layout"];
    cache.format = format == "fp8" ? KeyFormat::fp8 : format == "mxfp4" ? KeyFormat::mxfp4 : KeyFormat::fp8_fnuz;
    cache.layout = layout == "tiled16" ? Layout::tiled16 : layout == "tiled32" ? Layout::tiled32 : Layout::tiled64;
    cache.page_size = g["page_size"], cache.head_dim = g["head_dim"];
    cache.pages = tensor(page.data(), DType::u8, {1, static_cast<int64_t>(page.size())});
  }
  static void append(Bytes& to, const Bytes& more) { to.insert(to.end(), more.begin(), more.end()); }
  static DenseKeys dense(const KeyCache& like, Bytes& values, Bytes& scales) {
    const int64_t n = like.page_size, v = static_cast<int64_t>(values.size()) / n;
    return {tensor(values.data(), DType::u8, {n, v}),
            is_fp8(like.format) ? tensor(scales.data(), DType::f32, {n}) : tensor(scales.data(), DType::u8, {n, 4}),
            like.format};
  }
};

std::vector<Golden> golden_pages() {
  std::ifstream file(TOPKEY_SOURCE_DIR "/tests/golden/tiled_pages.json");
  std::vector<Golden> pages;
  for (const auto& page : nlohmann::json::parse(file)) pages.emplace_back(page);
  return pages;
}

TEST_P(CodeFormats, GoldenPagesAreWrittenAndRead) {
  std::vector<Golden> pages = golden_pages();
  EXPECT_EQ(pages.size(), 6U);
  for (Golden& g : pages) {
    const int32_t zero = 0, indptr[] = {0, g.cache.page_size};
    const std::string what = std::string(format_name(g.cache.format)) + " " + layout_name(g.cache.layout);
    const DenseKeys rows = Golden::dense(g.cache, g.values, g.scales);
    Bytes stored(g.page.size(), 0xA5), values(g.values.size(), 0xA5), scales(g.scales.size(), 0xA5);
    std::vector<int64_t> slots;
    for (int64_t t = 0; t < g.cache.page_size; ++t) slots.push_back(t);
    StoreK store{};
    store.k = rows.values, store.k_scales = rows.scales;
    store.slot_mapping = tensor(slots.data(), DType::i64, {g.cache.page_size});
    store.cache = g.cache;
    store.cache.pages.data = stored.data();
    run(store, exec());
    EXPECT_EQ(stored, g.page) << what;
    GatherK gather{};
    gather.keys.cache = g.cache;
    gather.keys.block_table = tensor(&zero, DType::i32, {1, 1});
    gather.indptr = tensor(indptr, DType::i32, {2});
    gather.total = g.cache.page_size;
    gather.out = Golden::dense(g.cache, values, scales);
    run(gather, exec());
    EXPECT_EQ(values, g.values) << what;
    EXPECT_EQ(scales, g.scales) << what;
  }
}

/// Scores of a page are those of its rows, whole and from the middle on.
TEST_P(CodeFormats, GoldenPagesAreScored) {
  for (Golden& g : golden_pages()) {
    ProblemSpec spec;
    spec.format = g.cache.format, spec.head_dim = g.cache.head_dim, spec.rows = 3, spec.keys = 1, spec.heads = 4;
    const Problem p = make_problem(spec);
    const int64_t n = g.cache.page_size;
    const Array want = logits(p.query(), Golden::dense(g.cache, g.values, g.scales));
    const Array got(DType::f32, {3, n}), ends = Array::of(std::vector<int32_t>(3, static_cast<int32_t>(n)));
    const Array starts = Array::of(std::vector<int32_t>{0, 5, 17}), table(DType::i32, {3, 1});
    PagedMqaLogits a{};
    a.q = p.query(), a.keys.cache = g.cache, a.keys.block_table = table.view();
    a.rows.count = 3, a.rows.start = starts.view(), a.rows.end = ends.view(), a.logits = got.view();
    run(a, exec());
    for (int64_t r = 0; r < 3; ++r) {
      for (int64_t t = starts.as<int32_t>()[r]; t < n; ++t) {
        ASSERT_EQ(bits_of(float_at(got.view(), r, t)), bits_of(float_at(want.view(), r, t)))
            << format_name(g.cache.format) << " " << layout_name(g.cache.layout) << ", row " << r << ", key " << t;
      }
    }
  }
}

TOPKEY_ON_EVERY_BACKEND(CodeFormats);

}  // namespace
}  // namespace topkey::testing
