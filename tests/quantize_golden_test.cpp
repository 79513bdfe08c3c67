// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Golden bytes of every QuantRule (tests/golden/make_golden.py, which is written from the table of rules and shares no
// code with the library): quantize_q, quantize_k and store_k must write exactly these, on every backend. Formats that
// a backend refuses are counted.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/array.h"
#include "support/run.h"
#include "tests/backend_test.h"
#include "topkey/topkey.h"

namespace {

using nlohmann::json;
using topkey::DType;
using topkey::KeyFormat;
using topkey::QuantRule;
using topkey::support::Array;
using Bytes = std::vector<uint8_t>;

Bytes unhex(const std::string& text) {
  Bytes bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2)
    bytes.push_back(static_cast<uint8_t>(std::stoi(text.substr(i, 2), nullptr, 16)));
  return bytes;
}
float float_of_hex(const std::string& text) {
  float x;
  std::memcpy(&x, unhex(text).data(), sizeof x);
  return x;
}
Bytes joined(const json& list) {
  Bytes bytes;
  for (const json& one : list) {
    const Bytes more = unhex(one.get<std::string>());
    bytes.insert(bytes.end(), more.begin(), more.end());
  }
  return bytes;
}
DType dtype_of(const std::string& name) { return name == "bf16" ? DType::bf16 : DType::f32; }

QuantRule rule_of(const std::string& name) {
  static const char* const kNames[] = {"automatic",   "v32_key",   "v32_query", "v4_query", "v4_key",
                                       "kpool_query", "kpool_key", "cpu_query", "mxfp4",    "q8_0"};
  for (int i = 0; i < 10; ++i) {
    if (name == kNames[i]) return static_cast<QuantRule>(i);
  }
  throw std::invalid_argument("no rule " + name);
}
KeyFormat format_of(const json& c) {
  if (c.value("format", "") == "fp8_fnuz") return KeyFormat::fp8_fnuz;
  const std::string rule = c["rule"];
  return rule == "mxfp4" ? KeyFormat::mxfp4 : rule == "q8_0" ? KeyFormat::q8_0 : KeyFormat::fp8;
}

/// An array of these bytes.
Array filled(DType dtype, std::initializer_list<int64_t> shape, const Bytes& bytes) {
  Array array(dtype, shape);
  EXPECT_EQ(array.bytes(), bytes.size());
  std::memcpy(array.as<uint8_t>(), bytes.data(), std::min(array.bytes(), bytes.size()));
  return array;
}

const json& golden() {
  static const json document = [] {
    std::ifstream file(TOPKEY_SOURCE_DIR "/tests/golden/quant_rules.json");
    return json::parse(file);
  }();
  return document;
}

Array named_array(const json& name) {
  if (name.is_null()) return {};
  const json& a = golden()["arrays"].at(name.get<std::string>());
  const auto shape = a["shape"].get<std::vector<int64_t>>();
  const Bytes bytes = unhex(a["data"].get<std::string>());
  const DType dtype = dtype_of(a["dtype"].get<std::string>());
  return shape.size() == 1 ? filled(dtype, {shape[0]}, bytes) : filled(dtype, {shape[0], shape[1]}, bytes);
}

/// One case: its arrays, and the argument parts that all producers share.
struct Case {
  explicit Case(const json& c)
      : name(c["name"].get<std::string>()),
        d(c["d"]),
        rows(c["rows"]),
        heads(c["heads"]),
        format(format_of(c)),
        rule(rule_of(c["rule"])),
        hadamard(c.value("hadamard", false)),
        codes(joined(c["codes"])) {
    const json& in = golden()["inputs"].at(c["input"].get<std::string>());
    input = filled(dtype_of(in["dtype"].get<std::string>()), {rows, heads, d}, joined(in["vectors"]));
    if (c.contains("scales")) scales = joined(c["scales"]);
    scale = c["scale"] == "f32" ? topkey::ScaleRule::f32 : topkey::ScaleRule::ue8m0;
    if (c.contains("norm")) {
      const json& n = c["norm"];
      weight = named_array(n["weight"]);
      if (n.contains("bias")) bias = named_array(n["bias"]);
      norm = {n["kind"] == "rms" ? topkey::NormKind::rms : topkey::NormKind::layer, weight.view(), bias.view(),
              float_of_hex(n["eps"])};
    }
    if (c.contains("rope")) {
      const json& r = c["rope"];
      cos_sin = named_array(r["cos_sin"]);
      positions = Array::of(r["positions"].get<std::vector<int32_t>>());
      rope = {positions.view(), cos_sin.view(), r["dim"], r.value("interleaved", false), r.value("trailing", false)};
    }
  }
  Array as_keys() const { return input.seen_as(topkey::tensor(input.view().data, input.view().dtype, {rows, d})); }

  std::string name;
  int64_t d, rows, heads;
  KeyFormat format;
  QuantRule rule;
  topkey::ScaleRule scale;
  bool hadamard;
  Bytes codes, scales;
  Array input, weight, bias, cos_sin, positions;
  topkey::Norm norm{};
  topkey::Rope rope{};
};

/// Equal, or a sentence that says where not.
std::string difference(const uint8_t* got, const Bytes& want, int64_t vectors) {
  for (size_t i = 0; i < want.size(); ++i) {
    if (got[i] == want[i]) continue;
    const size_t width = want.size() / static_cast<size_t>(vectors);
    return "vector " + std::to_string(i / width) + " byte " + std::to_string(i % width) + ": got " +
           std::to_string(got[i]) + ", want " + std::to_string(want[i]);
  }
  return {};
}

class GoldenTest : public topkey::testing::BackendTest {
 protected:
  int ran_ = 0, refused_ = 0;
  std::string reason_;

  /// False, and counted, where the backend does not have this call.
  template <class Args>
  bool runs(const Args& args) {
    const char* why = topkey::support::unsupported(args, exec());
    if (why != nullptr) reason_ = why;
    ++(why == nullptr ? ran_ : refused_);
    return why == nullptr;
  }
  void report() {
    std::cout << "golden: " << ran_ << " calls compared byte for byte, " << refused_ << " refused"
              << (refused_ > 0 ? " (" + reason_ + ")" : "") << "\n";
  }

  void check_query(const Case& c, const json& weights);
  void check_keys(const Case& c);
  void check_store(const Case& c, topkey::Layout layout);
};

void GoldenTest::check_query(const Case& c, const json& weights) {
  const bool fp4 = c.format == KeyFormat::mxfp4;
  const Array in = filled(dtype_of(weights["dtype"]), {c.rows, c.heads}, unhex(weights["in"]));
  const Array codes(DType::u8, {c.rows, c.heads, fp4 ? c.d / 2 : c.d}), out(DType::f32, {c.rows, c.heads});
  const Array scales = fp4 ? Array(DType::u8, {c.rows, c.heads, c.d / 32}) : Array();
  topkey::QuantizeQ a{};
  a.q = c.input.view();
  a.weights = in.view();
  a.softmax_scale = float_of_hex(weights["softmax_scale"]);
  a.head_scale = float_of_hex(weights["head_scale"]);
  a.rule = c.rule;
  a.rope = c.rope;
  a.hadamard = c.hadamard;
  a.format = c.format;
  a.q_out = codes.view();
  a.q_scales_out = scales.view();
  a.weights_out = out.view();
  if (!runs(a)) return;
  topkey::support::run(a, exec());
  const int64_t n = c.rows * c.heads;
  EXPECT_EQ(difference(codes.as<uint8_t>(), c.codes, n), "") << c.name;
  EXPECT_EQ(difference(out.as<uint8_t>(), unhex(weights["out"]), n), "") << c.name << ", weights_out";
  if (fp4) {
    EXPECT_EQ(difference(scales.as<uint8_t>(), c.scales, n), "") << c.name << ", scales";
  }
}

void GoldenTest::check_keys(const Case& c) {
  const Array values(DType::u8, {c.rows, topkey::value_bytes(c.format, c.d)});
  Array scales;
  if (topkey::is_fp8(c.format)) scales = Array(DType::f32, {c.rows});
  if (c.format == KeyFormat::mxfp4) scales = Array(DType::u8, {c.rows, c.d / 32});
  topkey::QuantizeK a{};
  const Array keys = c.as_keys();
  a.k = keys.view();
  a.norm = c.norm;
  a.rope = c.rope;
  a.hadamard = c.hadamard;
  a.scale = c.scale;
  a.rule = c.rule;
  a.out = {values.view(), scales.view(), c.format};
  if (!runs(a)) return;
  topkey::support::run(a, exec());
  EXPECT_EQ(difference(values.as<uint8_t>(), c.codes, c.rows), "") << c.name;
  if (scales) {
    EXPECT_EQ(difference(scales.as<uint8_t>(), c.scales, c.rows), "") << c.name << ", scales";
  }
}

void GoldenTest::check_store(const Case& c, topkey::Layout layout) {
  const auto kPage = static_cast<int32_t>(std::max<int64_t>(4, topkey::tile_rows(layout)));
  const topkey::PageLayout page = topkey::page_layout(c.format, layout, kPage, c.d);
  const int64_t pages = (c.rows + kPage - 1) / kPage, stride = (page.page_bytes + 3) / 4 * 4 + 8;
  const Array cache(DType::u8, {pages, stride});
  std::vector<int32_t> slots;
  for (int64_t t = 0; t < c.rows; ++t) slots.push_back(static_cast<int32_t>(c.rows - 1 - t));
  const Array mapping = Array::of(slots), keys = c.as_keys();
  topkey::StoreK a{};
  a.k = keys.view();
  a.norm = c.norm;
  a.rope = c.rope;
  a.hadamard = c.hadamard;
  a.scale = c.scale;
  a.rule = c.rule;
  a.slot_mapping = mapping.view();
  a.cache = {cache.view(), c.format, layout, kPage, static_cast<int32_t>(c.d)};
  if (!runs(a)) return;
  topkey::support::run(a, exec());
  Bytes values(static_cast<size_t>(c.rows * page.value)), scales(static_cast<size_t>(c.rows * page.scale));
  for (int64_t t = 0; t < c.rows; ++t) {
    const int32_t slot = slots[static_cast<size_t>(t)];
    topkey::read_row(page, cache.as<uint8_t>() + slot / kPage * stride, slot % kPage, values.data() + t * page.value,
                     scales.data() + t * page.scale);
  }
  ASSERT_EQ(values.size(), c.codes.size());
  EXPECT_EQ(difference(values.data(), c.codes, c.rows), "") << c.name << ", in pages";
  ASSERT_EQ(scales.size(), c.scales.size());
  EXPECT_EQ(difference(scales.data(), c.scales, c.rows), "") << c.name << ", scales in pages";
}

TEST_P(GoldenTest, Queries) {
  int cases = 0;
  for (const json& c : golden()["cases"]) {
    if (c["side"] != "q") continue;
    const Case one(c);
    for (json weights : c["weights"]) {
      weights["softmax_scale"] = c["softmax_scale"];
      weights["head_scale"] = c["head_scale"];
      check_query(one, weights);
    }
    ++cases;
  }
  report();
  EXPECT_GT(cases, 150);
  EXPECT_EQ(ran_, 2 * cases);
}

TEST_P(GoldenTest, Keys) {
  int cases = 0;
  for (const json& c : golden()["cases"]) {
    if (c["side"] != "k") continue;
    const Case one(c);
    check_keys(one);
    check_store(one, topkey::Layout::planar);
    check_store(one, topkey::Layout::interleaved);
    if (topkey::is_fp8(one.format) || (one.format == KeyFormat::mxfp4 && one.d == 128))
      check_store(one, topkey::Layout::tiled16);
    ++cases;
  }
  report();
  EXPECT_GT(cases, 250);
  EXPECT_GE(ran_, 3 * cases);
}

TOPKEY_ON_EVERY_BACKEND(GoldenTest);

}  // namespace
