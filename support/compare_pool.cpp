// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What pool_k, compress_k and expand_pools have written, against oracle_pool.h.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "support/oracle_pool.h"

namespace topkey::support {
namespace {

Report named(const char* name, int64_t rows) {
  Report report;
  report.name = name;
  report.rows = rows;
  return report;
}

void differ(Report& report, const std::string& sentence, int64_t row, int64_t column = -1) {
  ++report.differing;
  report.fail(sentence, row, column);
}

/// Half a step between neighbouring codes around x; `top` is the vector's largest magnitude.
double half_step(KeyFormat format, double x, double top) {
  top = std::max(top, 1e-4);  // floors
  switch (format) {
    case KeyFormat::fp8: return std::max(std::abs(x) * 0x1p-4, top / 448 * 2 * 0x1p-9) * 1.001;
    case KeyFormat::fp8_fnuz: return std::max(std::abs(x) * 0x1p-4, top / 224 * 2 * 0x1p-10) * 1.001;
    case KeyFormat::mxfp4: return std::max(std::abs(x) / 4, top / 6 * 2 * 0.25) * 1.001;  // 5 and 7 are no codes
    case KeyFormat::q8_0: return top / 127 * 0.51 + std::abs(x) * 0x1p-10;
    case KeyFormat::bf16: return std::abs(x) * 0x1p-8;
    case KeyFormat::f16: return std::abs(x) * 0x1p-10 + 0x1p-24;
    case KeyFormat::f32: return std::abs(x) * 0x1p-23;
  }
  return 0;
}

void compare_key(Report& report, const KeyCache& cache, int64_t slot, const JoinedKey& want) {
  int32_t page = static_cast<int32_t>(slot / cache.page_size);
  PagedKeys keys{};
  keys.cache = cache;
  keys.block_table = tensor(&page, DType::i32, {1, 1});
  const auto bytes = key_at(keys, 0, slot % cache.page_size);
  std::vector<double> got(static_cast<size_t>(cache.head_dim));
  const double outer = decode_key(cache.format, cache.head_dim, *bytes, got.data());
  double top = 0;
  bool number = true;
  for (size_t d = 0; d < got.size(); ++d) {
    number = number && std::isfinite(want.value[d]);
    top = std::fmax(top, std::abs(want.value[d]) + want.slack[d]);
  }
  for (size_t d = 0; d < got.size(); ++d) {
    ++report.compared;
    const double value = got[d] * outer, error = std::abs(value - want.value[d]);
    const double bound = want.slack[d] + half_step(cache.format, std::abs(want.value[d]) + want.slack[d], top) + 1e-30;
    if (!number) {
      if (std::isfinite(value)) differ(report, "a number where the tokens give none", slot, static_cast<int64_t>(d));
      continue;
    }
    report.worst = std::max(report.worst, error / bound);
    if (!(error <= bound)) {
      differ(report,
             "channel " + std::to_string(d) + " of slot " + std::to_string(slot) + " decodes to " +
                 std::to_string(value) + ", expected " + std::to_string(want.value[d]) + " within " +
                 std::to_string(bound),
             slot, static_cast<int64_t>(d));
    }
  }
}

/// Every element of the last dimension's runs, bit for bit.
void compare_state(Report& report, const char* name, const Tensor& got, const Array& want) {
  if (got.data == nullptr) return;
  const size_t width = dtype_bytes(got.dtype);
  const int64_t last = got.ndim - 1, run = got.shape[last];
  const uint8_t* next = want.as<uint8_t>();
  const int64_t middle = got.ndim == 4 ? got.shape[2] : 1;
  for (int64_t i = 0; i < got.shape[0]; ++i) {
    for (int64_t j = 0; j < got.shape[1]; ++j) {
      for (int64_t l = 0; l < middle; ++l, next += static_cast<size_t>(run) * width) {
        ++report.compared;
        const uint8_t* at = element(got, i, j, got.ndim == 4 ? l : 0);
        if (std::memcmp(at, next, static_cast<size_t>(run) * width) == 0) continue;
        differ(report,
               std::string(name) + " entry " + std::to_string(l) + " of block " + std::to_string(i) +
                   ", half or offset " + std::to_string(j) + " is not what the call must leave",
               i);
      }
    }
  }
}

void compare_count(Report& report, const char* name, uint64_t got, int64_t want) {
  ++report.compared;
  if (got != static_cast<uint64_t>(want)) {
    differ(report, std::string(name) + " " + std::to_string(got) + ", expected " + std::to_string(want), -1);
  }
}

template <class Args>
Report compare_joined(const Args& a, const Replay& want, const char* name, const Tensor& state, const uint64_t* stats) {
  Report report = named("replay", a.slot_mapping.shape[0]);
  for (const auto& [slot, key] : want.keys) compare_key(report, a.cache, slot, key);
  compare_state(report, name, state, want.state);
  if (stats == nullptr) return report;
  compare_count(report, "rows", stats[kRows], a.slot_mapping.shape[0]);
  compare_count(report, "skipped slots", stats[kSkippedSlots], want.skipped);
  compare_count(report, "skipped positions", stats[kSkippedPages], want.positions);
  return report;
}

}  // namespace

Report compare_replay(const PoolK& a, const Replay& want, const uint64_t* stats) {
  return compare_joined(a, want, "tail", a.tail, stats);
}
Report compare_replay(const CompressK& a, const Replay& want, const uint64_t* stats) {
  return compare_joined(a, want, "state", a.state, stats);
}

Report compare_expansion(const ExpandPools& a, const Tensor& pools, const uint64_t* stats) {
  Report report = named("formula", a.rows.count);
  const bool tail = a.positions.data != nullptr || a.rows.end.data != nullptr || a.rows.length.data != nullptr;
  const int64_t size = a.pool_size, first = pools.shape[1] * size, width = first + (tail ? size - 1 : 0);
  const Tensor& table = a.out.slot_map.block_table;
  int64_t wild_pools = 0, wild_slots = 0;
  for (int64_t r = 0; r < a.rows.count; ++r) {
    const RowRange range = row_range(a.rows, r, tail ? 0 : int64_t{1} << 31, -1);
    const int64_t seen = a.positions.data != nullptr
                             ? (range.request < 0 ? 0 : std::min(int_at(a.positions, r), int64_t{INT32_MAX}) + 1)
                             : (range.request < 0 ? 0 : range.end - range.start);
    for (int64_t i = 0; seen > 0 && i < pools.shape[1]; ++i) wild_pools += (int_at(pools, r, i) + 1) * size > seen;
    std::vector<int64_t> tokens, slots;
    int64_t used = 0;
    for (int64_t c = 0; c < width; ++c) {
      const int64_t id = c < first ? int_at(pools, r, c / size) : std::max<int64_t>(seen, 0) / size;
      const int64_t token = id < 0 ? -1 : id * size + (c < first ? c % size : c - first);
      const bool whole = (id + 1) * size <= seen;
      tokens.push_back(token >= 0 && token < seen && (c >= first || whole) ? token : -1);
      const int64_t line = a.out.slot_map.table_per_row ? r : range.request;
      int64_t slot = -1;
      if (tokens.back() >= 0 && a.out.slots.data != nullptr) {
        const int64_t column = token / a.out.slot_map.page_size;
        if (line < table.shape[0] && column < table.shape[1] && int_at(table, line, column) >= 0) {
          slot = int_at(table, line, column) * a.out.slot_map.page_size + token % a.out.slot_map.page_size;
        }
        if (slot > INT32_MAX) slot = -1;
        wild_slots += slot < 0;
      }
      slots.push_back(slot);
      used += tokens.back() >= 0;
    }
    const auto begin = std::find_if(tokens.begin(), tokens.end(), [](int64_t t) { return t >= 0; });
    const auto filled = [&](int64_t value_of_first) -> int64_t {
      if (a.out.fill == Fill::value) return a.out.fill_value;
      return a.out.fill == Fill::repeat && begin != tokens.end() ? value_of_first : -1;
    };
    const int64_t base = a.out.index_base.data == nullptr ? 0 : int_at(a.out.index_base, r);
    for (int64_t c = 0; c < width; ++c) {
      const auto at = static_cast<size_t>(c);
      const auto expect = [&](const char* what, const Tensor& t, int64_t want) {
        if (t.data == nullptr) return;
        ++report.compared;
        if (int_at(t, r, c) == static_cast<int32_t>(want)) return;  // a base may carry past int32
        differ(report, std::string(what) + " " + std::to_string(int_at(t, r, c)) + ", expected " + std::to_string(want),
               r, c);
      };
      const bool found = begin != tokens.end();
      expect("index", a.out.indices, tokens[at] >= 0 ? tokens[at] + base : filled(found ? *begin + base : -1));
      expect("slot", a.out.slots,
             tokens[at] >= 0 ? slots[at] : filled(found ? slots[static_cast<size_t>(begin - tokens.begin())] : -1));
    }
    if (a.out.counts.data != nullptr && int_at(a.out.counts, r) != used) {
      differ(report, "count " + std::to_string(int_at(a.out.counts, r)) + ", expected " + std::to_string(used), r);
    }
  }
  if (stats == nullptr) return report;
  compare_count(report, "rows", stats[kRows], a.rows.count);
  compare_count(report, "skipped pools", stats[kSkippedPages], wild_pools);
  compare_count(report, "skipped slots", stats[kSkippedSlots], wild_slots);
  return report;
}

}  // namespace topkey::support
