// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Golden bytes of pool_k and compress_k (tests/golden/make_pools.py, written from the formulas and sharing no code with
// the library). Where a case leaves nothing to exp, on every backend; the others on `ref`, whose exp they have, and on
// `cpu`, whose exp differs in the last place but moves none of these bytes. Each once in one call, once cut in two.
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/backend_test.h"
#include "tests/pools.h"

namespace topkey::testing {
namespace {

using nlohmann::json;
using Bytes = std::vector<uint8_t>;

Bytes unhex(const json& text) {
  const auto hex = text.get<std::string>();
  Bytes bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2)
    bytes.push_back(static_cast<uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}
Array filled(DType dtype, int64_t width, const json& hex) {
  const Bytes bytes = unhex(hex);
  const auto row = static_cast<int64_t>(dtype_bytes(dtype)) * width;
  Array array(dtype, {static_cast<int64_t>(bytes.size()) / row, width});
  std::memcpy(array.as<uint8_t>(), bytes.data(), bytes.size());
  return array;
}

/// One case as a call; state and cache are the caller's.
struct Golden {
  Array value, score, ape, weight, cos_sin, positions, slots, state_slots, starts;
  int64_t tokens, d;
  bool pool;

  Golden(const json& c, int64_t ring) : d(c["d"]), pool(c["op"] == "pool_k") {
    const DType dtype = pool ? DType::bf16 : DType::f32;
    const int64_t width = pool ? d : c["windows"].get<int64_t>() * d;
    value = filled(dtype, width, c["value"]), score = filled(dtype, width, c["score"]);
    ape = filled(DType::f32, width, c["ape"]);
    tokens = value.view().shape[0];
    std::vector<int64_t> at, to, states;
    for (int64_t i = 0; i < tokens; ++i) {
      at.push_back(c["position"].get<int64_t>() + 1 - tokens + i);
      to.push_back(i + 1 == tokens ? 3 : -1), states.push_back(at.back() % ring);
    }
    positions = longs_of(at), slots = longs_of(to), state_slots = longs_of(states);
    if (pool) return;
    const Bytes w = unhex(c["weight"]);
    weight = Array(DType::f32, {d});
    std::memcpy(weight.as<uint8_t>(), w.data(), w.size());
    cos_sin = filled(DType::f32, c["rope"], c["cos_sin"]);
  }
  static Tensor part(const Array& a, int64_t first, int64_t count) {
    Tensor t = a.view();
    t.data = element(t, first), t.shape[0] = count;
    return t;
  }
  /// Rows [first, first + count).
  PoolK pool_args(const json& c, int64_t first, int64_t count, const Array& indptr) const {
    PoolK a{};
    a.k = part(value, first, count), a.gate = part(score, first, count), a.ape = ape.view();
    a.positions = part(positions, first, count), a.slot_mapping = part(slots, first, count);
    a.tail_slots = part(state_slots, first, count), a.q_indptr = indptr.view();
    a.pool_size = c["ratio"], a.scale = c["scale"] == "f32" ? ScaleRule::f32 : ScaleRule::ue8m0;
    return a;
  }
  CompressK window_args(const json& c, int64_t first, int64_t count, const Array& indptr) const {
    CompressK a{};
    a.kv = part(value, first, count), a.score = part(score, first, count), a.ape = ape.view();
    a.positions = part(positions, first, count), a.slot_mapping = part(slots, first, count);
    a.state_slots = part(state_slots, first, count), a.query_start = indptr.view();
    a.rms_weight = weight.view(), a.cos_sin = cos_sin.view();
    std::memcpy(&a.eps, unhex(c["eps"]).data(), sizeof a.eps);
    return a;
  }
};

class PoolGolden : public BackendTest {};

TEST_P(PoolGolden, KeysAreTheseBytes) {
  std::ifstream file(TOPKEY_SOURCE_DIR "/tests/golden/pools.json");
  Tally tally("golden pools");
  for (const json& c : json::parse(file)) {
    const bool exact = c["exact"].get<bool>();
    if (!exact && GetParam() != "ref" && GetParam() != "cpu" && GetParam() != "cuda.portable") continue;
    const int64_t ring = 64;
    const Golden g(c, ring);
    const KeyFormat format = c["format"] == "mxfp4" ? KeyFormat::mxfp4 : KeyFormat::fp8;
    for (const int64_t cut : {int64_t{0}, g.tokens / 2}) {
      Array pages;
      const KeyCache cache = cache_of(pages, format, 2, static_cast<int32_t>(g.d), 2);
      const Array tail(DType::bf16, {1, 2, ring, g.d}), state(DType::f32, {1, ring, 2 * g.value.view().shape[1]});
      bool supported = true;
      for (const auto& [first, count] : {std::pair{int64_t{0}, cut}, std::pair{cut, g.tokens - cut}}) {
        const Array indptr = Array::of({0, static_cast<int32_t>(count)});
        PoolK pool = g.pool_args(c, first, count, indptr);
        pool.tail = tail.view(), pool.cache = cache;
        CompressK window{};
        if (!g.pool) window = g.window_args(c, first, count, indptr), window.state = state.view(), window.cache = cache;
        supported = g.pool ? tally.runs(pool, exec(), GetParam()) : tally.runs(window, exec(), GetParam());
        if (supported && count > 0) g.pool ? run(pool, exec()) : run(window, exec());
      }
      if (!supported) continue;
      const PageLayout layout = page_layout(format, Layout::planar, 2, g.d);
      const uint8_t* page = pages.as<uint8_t>() + pages.view().stride[0];  // slot 3: page 1, row 1
      const Bytes codes = unhex(c["codes"]), scales = unhex(c["scales"]);
      EXPECT_EQ(Bytes(page + layout.value_offset(1), page + layout.value_offset(1) + layout.value), codes) << c["name"];
      EXPECT_EQ(Bytes(page + layout.scale_offset(1), page + layout.scale_offset(1) + layout.scale), scales)
          << c["name"];
    }
  }
}
TOPKEY_ON_EVERY_BACKEND(PoolGolden);

}  // namespace
}  // namespace topkey::testing
