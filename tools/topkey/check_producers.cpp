// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Second ways to what the operations around the score write. Rows and slots: the formulas of their headers, written
// again. store_k and quantize_k: both roads must lead to the same bytes. gather_k: the oracle's own reading of pages.
// quantize_q: decoded values lie within half a code step of the input. pool_k, compress_k: a replay in double. Golden
// bytes of every rule are in tests/.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "check_call.h"
#include "support/array.h"
#include "support/oracle.h"
#include "support/oracle_pool.h"

namespace topkey::cli {
namespace {

using support::Array;
using support::int_at;
using support::Report;

Report named(const char* name, int64_t rows) {
  Report report;
  report.name = name;
  report.rows = rows;
  return report;
}

void expect(Report& report, const char* what, int64_t got, int64_t want, int64_t row, int64_t column = -1) {
  ++report.compared;
  if (got == want) return;
  ++report.differing;
  report.fail(fmt::format("{} {}, expected {}", what, got, want), row, column);
}

/// block_table[request, p / page_size] * page_size + p % page_size, p local under a shard; -1 where there is no such
/// slot.
int64_t slot_of(const Tensor& table, int64_t request, int64_t position, int64_t page_size, const Shard& shard) {
  if (position < 0 || request < 0 || request >= table.shape[0] || !shard.owns(position)) return -1;
  const int64_t local = shard.local(position), column = local / page_size;
  if (column >= table.shape[1]) return -1;
  const int64_t page = int_at(table, request, column), slot = page * page_size + local % page_size;
  return page < 0 || slot > INT32_MAX ? -1 : slot;
}

Report check_rows(const ExpandRows& a) {
  Report report = named("formula", a.capacity);
  const int64_t requests = a.seq_lens.shape[0], ratio = std::max(1, a.ratio);
  for (int64_t r = 0; r < a.capacity; ++r) {
    int64_t b = 0;
    while (b < requests && !(int_at(a.query_start, b) <= r && r < int_at(a.query_start, b + 1))) ++b;
    const bool none = b == requests;
    const int64_t first = none ? 0 : int_at(a.query_start, b), count = none ? 0 : int_at(a.query_start, b + 1) - first;
    const int64_t position = none ? -1 : int_at(a.seq_lens, b) - count + r - first;
    const int64_t length = position < 0 ? 0 : a.shard.local_length((position + 1) / ratio);
    const bool completes = position >= 0 && (position + 1) % ratio == 0;
    if (a.row_request.data != nullptr) expect(report, "row_request", int_at(a.row_request, r), none ? -1 : b, r);
    if (a.positions.data != nullptr && (none || position >= 0))
      expect(report, "position", int_at(a.positions, r), position, r);
    if (a.lens.data != nullptr) expect(report, "length", int_at(a.lens, r), length, r);
    if (a.slots.data != nullptr) {
      const int64_t slot = completes ? slot_of(a.block_table, b, position / ratio, a.page_size, a.shard) : -1;
      expect(report, "slot", int_at(a.slots, r), slot, r);
    }
  }
  return report;
}

Report check_slots(const ToSlots& a) {
  Report report = named("formula", a.indices.shape[0]);
  for (int64_t r = 0; r < a.indices.shape[0]; ++r) {
    const int64_t request = a.row_request.data == nullptr ? r : int_at(a.row_request, r);
    std::vector<int64_t> wanted;
    int64_t valid = 0;
    for (int64_t i = 0; i < a.indices.shape[1]; ++i) {
      const int64_t slot = slot_of(a.block_table, request, int_at(a.indices, r, i), a.page_size, a.shard);
      valid += slot >= 0;
      if (slot >= 0 || !a.compact) wanted.push_back(slot);
    }
    wanted.resize(static_cast<size_t>(a.indices.shape[1]), -1);
    for (int64_t i = 0; i < a.indices.shape[1]; ++i)
      expect(report, "slot", int_at(a.slots, r, i), wanted[static_cast<size_t>(i)], r, i);
    if (a.counts.data != nullptr) expect(report, "count", int_at(a.counts, r), valid, r);
  }
  return report;
}

/// Bytes of one dense key row.
std::string dense_bytes(const DenseKeys& keys, int64_t row, int64_t head_dim) {
  const auto values = static_cast<size_t>(value_bytes(keys.format, head_dim)),
             scales = static_cast<size_t>(scale_bytes(keys.format, head_dim));
  std::string bytes(reinterpret_cast<const char*>(support::element(keys.values, row)), values);
  if (scales > 0) bytes.append(reinterpret_cast<const char*>(support::element(keys.scales, row)), scales);
  return bytes;
}

/// The same of a key at a slot of a cache.
std::string cached_bytes(const KeyCache& cache, int64_t slot) {
  const PageLayout layout = page_layout(cache.format, cache.layout, cache.page_size, cache.head_dim);
  std::string bytes(static_cast<size_t>(layout.value + layout.scale), '\0');
  auto* to = reinterpret_cast<uint8_t*>(bytes.data());
  read_row(layout, support::element(cache.pages, slot / cache.page_size), slot % cache.page_size, to,
           to + layout.value);
  return bytes;
}

void expect_bytes(Report& report, const std::string& got, const std::string& want, int64_t row) {
  ++report.compared;
  if (got == want) return;
  ++report.differing;
  const auto at =
      static_cast<size_t>(std::mismatch(got.begin(), got.end(), want.begin(), want.end()).first - got.begin());
  report.fail(fmt::format("byte {} of the key is 0x{:02X}, expected 0x{:02X}", at, static_cast<uint8_t>(got[at]),
                          static_cast<uint8_t>(want[at])),
              row);
}

/// Memory for dense keys of `rows` rows.
struct DenseMemory {
  Array values, scales;
  DenseKeys keys;
  DenseMemory(KeyFormat format, int64_t rows, int64_t head_dim) {
    const DType dtypes[] = {DType::f8_e4m3fn, DType::u8, DType::bf16, DType::f16, DType::f32, DType::u8, DType::u8};
    const DType dtype = dtypes[static_cast<size_t>(format)];
    values = Array(dtype, {rows, dtype == DType::u8 ? value_bytes(format, head_dim) : head_dim});
    if (is_fp8(format)) scales = Array(DType::f32, {rows});
    if (format == KeyFormat::mxfp4) scales = Array(DType::u8, {rows, head_dim / 32});
    keys = {values.view(), scales.view(), format};
  }
};

/// store_k against quantize_k of the same rows.
Report check_store(const StoreK& a, const Exec& exec) {
  const int64_t rows = a.slot_mapping.shape[0], head_dim = a.cache.head_dim;
  Report report = named("as quantize_k", rows);
  if (a.k_scales.data != nullptr || a.k.shape[0] == 0) return report;  // ready codes
  const DenseMemory memory(a.cache.format, a.k.shape[0], head_dim);
  QuantizeK dense{};
  dense.k = a.k, dense.norm = a.norm, dense.rope = a.rope, dense.hadamard = a.hadamard, dense.scale = a.scale,
  dense.rule = a.rule;
  dense.out = memory.keys;
  if (support::args_unsupported(dense, exec) != nullptr) return report;
  support::run_args(dense, exec);
  std::map<int64_t, std::vector<std::string>> wanted;  // of equal slots any one row may have won, but whole
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t slot = int_at(a.slot_mapping, r), slots = a.cache.pages.shape[0] * a.cache.page_size;
    if (slot >= 0 && slot < slots) wanted[slot].push_back(dense_bytes(memory.keys, r, head_dim));
  }
  for (const auto& [slot, rows_there] : wanted) {
    const std::string got = cached_bytes(a.cache, slot);
    const auto same = std::find(rows_there.begin(), rows_there.end(), got);
    expect_bytes(report, got, same == rows_there.end() ? rows_there.back() : got, slot);
  }
  return report;
}

/// quantize_k against store_k into one page.
Report check_dense(const QuantizeK& a, const Exec& exec) {
  const int64_t rows = a.k.shape[0], head_dim = a.k.shape[1];
  Report report = named("as store_k", rows);
  if (rows == 0) return report;
  const int64_t bytes = page_layout(a.out.format, Layout::planar, rows, head_dim).page_bytes;
  const Array pages(DType::u8, {1, (bytes + 3) / 4 * 4});
  std::vector<int64_t> slots;
  for (int64_t r = 0; r < rows; ++r) slots.push_back(rows - 1 - r);
  StoreK store{};
  store.k = a.k, store.norm = a.norm, store.rope = a.rope, store.hadamard = a.hadamard, store.scale = a.scale,
  store.rule = a.rule;
  store.slot_mapping = tensor(slots.data(), DType::i64, {rows});
  store.cache = {pages.view(), a.out.format, Layout::planar, static_cast<int32_t>(rows),
                 static_cast<int32_t>(head_dim)};
  support::run_args(store, exec);
  for (int64_t r = 0; r < rows; ++r)
    expect_bytes(report, dense_bytes(a.out, r, head_dim), cached_bytes(store.cache, rows - 1 - r), r);
  return report;
}

Report check_gather(const GatherK& a) {
  Report report = named("oracle", a.total);
  const int64_t head_dim = a.keys.cache.head_dim;
  const auto values = static_cast<size_t>(value_bytes(a.out.format, head_dim)),
             scales = static_cast<size_t>(scale_bytes(a.out.format, head_dim));
  for (int64_t b = 0; b + 1 < a.indptr.shape[0]; ++b) {
    // Of an indptr that does not ascend, a row's request is any that has it: nothing to hold it against.
    if (int_at(a.indptr, b) < 0 || int_at(a.indptr, b) > int_at(a.indptr, b + 1)) return named("oracle", 0);
    for (int64_t i = int_at(a.indptr, b); i < std::min(int_at(a.indptr, b + 1), a.total); ++i) {
      const auto key = support::key_at(a.keys, b, i - int_at(a.indptr, b));
      if (!key) continue;  // a NaN key: tests/cache_test.cpp
      std::string want(reinterpret_cast<const char*>(key->values), values);
      if (scales > 0) want.append(reinterpret_cast<const char*>(key->scales), scales);
      expect_bytes(report, dense_bytes(a.out, i, head_dim), want, i);
    }
  }
  return report;
}

double query_code(const QuantizeQ& a, int64_t r, int64_t h, int64_t d) {
  const uint8_t* codes = support::element(a.q_out, r, h);
  if (a.format == KeyFormat::mxfp4)
    return support::e2m1_value(static_cast<uint8_t>(d % 2 == 0 ? codes[d / 2] & 15 : codes[d / 2] >> 4));
  return a.format == KeyFormat::fp8 ? support::e4m3_value(codes[d]) : support::e4m3fnuz_value(codes[d]);
}

/// Scale of one query head, or of one of its blocks of 32: fp8 hides it in weights_out. NaN where it cannot be told.
double query_scale(const QuantizeQ& a, int64_t r, int64_t h, int64_t d) {
  if (a.format == KeyFormat::mxfp4) return support::e8m0_value(support::element(a.q_scales_out, r, h)[d / 32]);
  const double weight = support::float_at(a.weights, r, h);
  return weight == 0 ? NAN : support::float_at(a.weights_out, r, h) / weight;
}

/// fp8, fp8_fnuz and mxfp4 without rope and Hadamard: code * s lies within half a step of x.
Report check_query(const QuantizeQ& a) {
  Report report = named("decoded", a.q.shape[0]);
  const bool fp4 = a.format == KeyFormat::mxfp4;
  if ((!fp4 && !is_fp8(a.format)) || a.rope.dim != 0 || a.hadamard || a.softmax_scale != 0 || a.head_scale != 0)
    return report;
  // Half a step: of 3 fraction bits and a smallest code of 2^-9 or 2^-10; of 1 bit and 0.5.
  const double relative = fp4 ? 0x1p-2 : 0x1p-4, smallest = fp4 ? 0.25 : 0x1p-10;
  for (int64_t i = 0; i < a.q.shape[0] * a.q.shape[1]; ++i) {
    const int64_t r = i / a.q.shape[1], h = i % a.q.shape[1];
    for (int64_t d = 0; d < a.q.shape[2]; ++d) {
      const double s = query_scale(a, r, h, d);
      if (!std::isfinite(s)) continue;
      const double x = support::float_at(a.q, r, h, d), got = query_code(a, r, h, d) * s;
      const double step = std::max(std::abs(x) * relative, s * smallest) * (1 + 0x1p-20);
      ++report.compared;
      report.worst = std::max(report.worst, std::abs(got - x) / step);
      if (std::abs(got - x) <= step) continue;
      ++report.differing;
      report.fail(fmt::format("value {:.9g} decodes to {:.9g} in head {}", x, got, h), r, d);
    }
  }
  return report;
}

/// The trace's own tensor, as the call found it; absent where it has none.
Array state_of(const support::Trace& trace, const char* name) {
  const support::TraceTensor* found = trace.find(name);
  if (found == nullptr) return {};
  const Tensor from = support::view(*found, name);
  const Array copy = from.ndim == 4 ? Array(from.dtype, {from.shape[0], from.shape[1], from.shape[2], from.shape[3]})
                                    : Array(from.dtype, {from.shape[0], from.shape[1], from.shape[2]});
  std::copy_n(found->bytes.data(), found->bytes.size(), reinterpret_cast<std::byte*>(copy.as<uint8_t>()));
  return copy;
}

}  // namespace

std::vector<Report> check_producer(const support::CallArgs& args, const support::Trace& trace, const Exec& exec,
                                   const uint64_t* stats) {
  if (const auto* a = std::get_if<ExpandRows>(&args)) return {check_rows(*a)};
  if (const auto* a = std::get_if<ToSlots>(&args)) return {check_slots(*a)};
  if (const auto* a = std::get_if<StoreK>(&args)) return {check_store(*a, exec)};
  if (const auto* a = std::get_if<QuantizeK>(&args)) return {check_dense(*a, exec)};
  if (const auto* a = std::get_if<GatherK>(&args)) return {check_gather(*a)};
  if (const auto* a = std::get_if<QuantizeQ>(&args)) return {check_query(*a)};
  if (const auto* a = std::get_if<PoolK>(&args)) {
    return {support::compare_replay(*a, support::replay(*a, state_of(trace, "tail")), stats)};
  }
  if (const auto* a = std::get_if<CompressK>(&args)) {
    return {support::compare_replay(*a, support::replay(*a, state_of(trace, "state")), stats)};
  }
  if (const auto* a = std::get_if<ExpandPools>(&args)) return {support::compare_expansion(*a, a->pools, stats)};
  return {};
}

}  // namespace topkey::cli
