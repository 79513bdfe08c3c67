// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Random calls of pool_k and compress_k with all the memory they point to: what the tests of stage `pool` share. A
// request's tokens stand at consecutive positions from any on; `wild` puts rubbish among positions and slots.
#pragma once
#include <algorithm>
#include <cstring>

#include "support/oracle_pool.h"
#include "tests/testing.h"

namespace topkey::testing {

inline Array normals(DType dtype, std::initializer_list<int64_t> shape, Random& random, float scale = 1) {
  Array a(dtype, shape);
  for (int64_t i = 0; i < a.size(); ++i) {
    const float x = random.normal() * scale;
    if (dtype == DType::f32) a.as<float>()[i] = x;
    if (dtype == DType::bf16) a.as<uint16_t>()[i] = float_to_bf16(x);
    if (dtype == DType::f16) a.as<uint16_t>()[i] = float_to_f16(x);
  }
  return a;
}

/// A cache of `pages` poisoned pages, some bytes apart.
inline KeyCache cache_of(Array& memory, KeyFormat format, int32_t page_size, int32_t head_dim, int64_t pages,
                         Layout layout = Layout::planar) {
  const int64_t bytes = (page_size * row_bytes(format, head_dim) + 3) / 4 * 4 + 8;
  memory = Array(DType::u8, {pages, bytes});
  std::memset(memory.as<uint8_t>(), 0xA5, memory.bytes());
  return {memory.view(), format, layout, page_size, head_dim};
}

/// The rows of some requests: who they belong to, where they stand, which slot each completed group gets.
struct TokenRows {
  std::vector<int32_t> starts{0}, requests;
  std::vector<int64_t> positions, slots, first;  ///< first: a request's first position
  int64_t rows() const { return static_cast<int64_t>(positions.size()); }
};
inline TokenRows draw_rows(Random& random, int64_t requests, int64_t most, int64_t group, int64_t cache_slots) {
  TokenRows t;
  std::vector<int64_t> free;
  for (int64_t i = 0; i < cache_slots; ++i) free.push_back(i);
  random.shuffle(free);
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t count = random.between(0, most);
    t.first.push_back(random.between(0, 3 * group));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = t.first.back() + i;
      t.requests.push_back(static_cast<int32_t>(b));
      t.positions.push_back(position);
      const bool stored = (position + 1) % group == 0 && !free.empty() && random.chance(0.9);
      t.slots.push_back(stored ? free.back() : -1);
      if (stored) free.pop_back();
    }
    t.starts.push_back(static_cast<int32_t>(t.rows()));
  }
  return t;
}
inline void put_rubbish(TokenRows& t, Random& random, int64_t cache_slots) {
  for (int64_t r = 0; r < t.rows(); ++r) {
    const auto at = static_cast<size_t>(r);
    if (random.chance(0.1)) t.positions[at] = random.between(-3, 40);
    if (random.chance(0.02)) t.positions[at] = INT64_MAX - random.between(0, 1);
    if (random.chance(0.1)) t.slots[at] = random.between(-2, cache_slots + 3);
    if (random.chance(0.05)) t.slots[at] = int64_t{1} << random.between(31, 62);
  }
}

inline Array longs_of(const std::vector<int64_t>& values) {
  Array a(DType::i64, {static_cast<int64_t>(values.size())});
  std::copy(values.begin(), values.end(), a.as<int64_t>());
  return a;
}

/// `copy` of the memory that a call writes, so that one case runs on several backends.
struct PoolCase {
  PoolK args{};
  Array k, gate, ape, positions, q_indptr, request, slots, tail, tail_slots, pages;

  Exec run(const std::string& backend, uint64_t* stats, bool strict = false) const {
    Exec exec = on(backend, stats);
    exec.strict = strict;
    support::run(args, exec);
    return exec;
  }
  PoolCase copy() const {
    PoolCase c = *this;
    c.pages = pages.clone();
    c.args.cache.pages = c.pages.view();
    if (tail) c.tail = tail.clone(), c.args.tail = c.tail.view();
    return c;
  }
};

struct PoolShape {
  int32_t pool_size = 4, head_dim = 32, page_size = 8;
  int64_t ring = 8, requests = 3, most = 20;  ///< most rows a request
  KeyFormat format = KeyFormat::fp8;
  ScaleRule scale = ScaleRule::ue8m0;
  Layout layout = Layout::planar;
  bool tail = true, by_request = false, wild = false;
  uint64_t seed = 1;
};

inline PoolCase make_pool_case(const PoolShape& s) {
  Random random(s.seed);
  PoolCase c;
  const int64_t pages = 3 + s.requests * s.most / s.page_size, slots = pages * s.page_size;
  TokenRows t = draw_rows(random, s.requests, s.most, s.pool_size, slots);
  std::vector<int64_t> tails;
  for (int64_t r = 0; r < t.rows(); ++r) {
    const auto at = static_cast<size_t>(r);
    const int64_t block = s.requests - 1 - t.requests[at];
    tails.push_back(random.chance(0.05) ? -1 : block * s.ring + t.positions[at] % s.ring);
    if (s.wild && random.chance(0.1)) tails.back() = random.between(-2, s.requests * s.ring + 4);
  }
  if (s.wild) put_rubbish(t, random, slots);
  const int64_t rows = t.rows();
  c.k = normals(DType::bf16, {rows, s.head_dim}, random), c.gate = normals(DType::bf16, {rows, s.head_dim}, random, 2);
  c.ape = normals(DType::f32, {s.pool_size, s.head_dim}, random);
  c.positions = longs_of(t.positions), c.slots = longs_of(t.slots);
  c.q_indptr = Array::of(t.starts), c.request = Array::of(t.requests);
  if (s.tail) {
    c.tail = normals(DType::bf16, {s.requests, 2, s.ring, s.head_dim}, random);
    c.tail_slots = longs_of(tails);
  }
  PoolK& a = c.args;
  a.cache = cache_of(c.pages, s.format, s.page_size, s.head_dim, pages, s.layout);
  a.k = c.k.view(), a.gate = c.gate.view(), a.ape = c.ape.view(), a.positions = c.positions.view();
  (s.by_request ? a.request : a.q_indptr) = (s.by_request ? c.request : c.q_indptr).view();
  a.slot_mapping = c.slots.view(), a.tail = c.tail.view(), a.tail_slots = c.tail_slots.view();
  a.pool_size = s.pool_size, a.scale = s.scale;
  return c;
}

struct CompressCase {
  CompressK args{};
  Array kv, score, ape, positions, query_start, state, state_slots, state_table, weight, cos_sin, slots, pages;

  void run(const std::string& backend, uint64_t* stats) const { support::run(args, on(backend, stats)); }
  CompressCase copy() const {
    CompressCase c = *this;
    c.pages = pages.clone(), c.state = state.clone();
    c.args.cache.pages = c.pages.view(), c.args.state = c.state.view();
    return c;
  }
};

struct CompressShape {
  int32_t ratio = 4, head_dim = 32, page_size = 8;
  bool overlap = true, paged = false, wild = false;
  int64_t block = 8, requests = 3, most = 20;
  DType kv = DType::f32, score = DType::f32;
  int64_t rope = 8;  ///< dims; 0 = none
  KeyFormat format = KeyFormat::fp8;
  uint64_t seed = 1;
};

inline CompressCase make_compress_case(const CompressShape& s) {
  Random random(s.seed);
  CompressCase c;
  const int64_t pages = 3 + s.requests * s.most / s.page_size, slots = pages * s.page_size;
  const int64_t width = (s.overlap ? 2 : 1) * s.head_dim, columns = (3 * s.ratio + s.most) / s.block + 1;
  TokenRows t = draw_rows(random, s.requests, s.most, s.ratio, slots);
  std::vector<int32_t> table;
  for (int64_t i = 0; i < s.requests * columns; ++i) table.push_back(static_cast<int32_t>(i));
  random.shuffle(table);
  if (s.wild) table[random.below(table.size())] = random.chance(0.5) ? -1 : 1 << 20;
  c.state_table = Array(DType::i32, {s.requests, columns});
  std::copy(table.begin(), table.end(), c.state_table.as<int32_t>());
  std::vector<int64_t> states;
  for (int64_t r = 0; r < t.rows(); ++r) {
    const auto at = static_cast<size_t>(r);
    const int64_t column = t.positions[at] / s.block,
                  page = table[static_cast<size_t>(t.requests[at] * columns + column)];
    const int64_t block = s.paged ? std::max<int64_t>(page, 0) : t.requests[at];
    states.push_back(random.chance(0.05) ? -1 : block * s.block + t.positions[at] % s.block);
  }
  if (s.wild) put_rubbish(t, random, slots);
  const int64_t rows = t.rows();
  c.kv = normals(s.kv, {rows, width}, random), c.score = normals(s.score, {rows, width}, random, 2);
  c.ape = normals(DType::f32, {s.ratio, width}, random), c.weight = normals(DType::f32, {s.head_dim}, random);
  c.positions = longs_of(t.positions), c.slots = longs_of(t.slots), c.query_start = Array::of(t.starts);
  c.state = normals(DType::f32, {s.paged ? s.requests * columns : s.requests, s.block, 2 * width}, random);
  c.state_slots = longs_of(states);
  if (s.rope > 0) c.cos_sin = normals(DType::f32, {s.wild ? 20 : 3 * s.ratio + s.most, s.rope}, random);
  CompressK& a = c.args;
  a.cache = cache_of(c.pages, s.format, s.page_size, s.head_dim, pages);
  a.kv = c.kv.view(), a.score = c.score.view(), a.ape = c.ape.view(), a.positions = c.positions.view();
  a.state = c.state.view(), a.state_slots = c.state_slots.view(), a.query_start = c.query_start.view();
  a.rms_weight = c.weight.view(), a.eps = 1e-6F, a.cos_sin = c.cos_sin.view(), a.slot_mapping = c.slots.view();
  if (s.paged) a.state_table = c.state_table.view();
  return c;
}

inline bool same_bytes(const Array& a, const Array& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.as<uint8_t>(), b.as<uint8_t>(), a.bytes()) == 0;
}

}  // namespace topkey::testing
