// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See gpu_cases.h. The figures of others were measured elsewhere, on an H200 (driver 580, CUDA 13.0) with the same data
// and the same timing, not by this program: DeepGEMM 2.6.1's logits followed by the faster of vLLM's (June 2026) and
// FlashInfer's (August 2026) top-k, both in one graph; for selection alone the best of these top-k kernels in each cell.
// Their selection is unordered and breaks ties at random.
#include "bench/gpu_cases.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <utility>

namespace topkey::bench {
namespace {

using support::Pattern;

constexpr const char* kPair = "deep_gemm 2.6.1 + vllm or flashinfer topk, one graph";
constexpr const char* kTopk = "vllm or flashinfer topk";
constexpr int64_t kK = 1024;

std::string keys_text(int64_t keys) {
  return keys % (kK * kK) == 0 ? std::to_string(keys / kK / kK) + "M" : std::to_string(keys / kK) + "K";
}

GpuCase decode(int64_t requests, int64_t keys) {
  GpuCase c;
  c.name = "decode " + std::to_string(requests) + " x " + keys_text(keys);
  c.suite = "decode", c.op = "paged_mqa_topk", c.rows = requests, c.keys = keys;
  return c;
}

GpuCase prefill(int32_t heads, int64_t rows, int64_t keys) {
  GpuCase c;
  c.name = "prefill H" + std::to_string(heads) + " " + std::to_string(rows) + " x " + std::to_string(keys);
  c.suite = "prefill", c.op = "mqa_topk", c.heads = heads, c.rows = rows, c.keys = keys;
  return c;
}

/// `base` under another name, held against it.
GpuCase variant(const GpuCase& base, const std::string& what, double times, double plus_us = 0) {
  GpuCase c = base;
  c.name += ", " + what;
  c.against = base.name, c.times = times, c.plus_us = plus_us;
  c.must_us = c.target_us = 0, c.peer = nullptr, c.peer_cold_us = c.peer_warm_us = c.read_us = 0;
  return c;
}

void add_decode(std::vector<GpuCase>& list) {
  struct Row {
    int64_t requests, keys;
    double peer, read, must, target;
  };
  for (const Row& r : std::initializer_list<Row>{{1, 8, 11.7, 6.5, 11.5, 9.5},
                                                 {1, 32, 18.2, 7.2, 16, 12},
                                                 {1, 128, 25.9, 11.5, 22, 17},
                                                 {1, 1024, 74.7, 45, 60, 52},
                                                 {4, 32, 22.6, 12, 21, 17},
                                                 {4, 128, 42.7, 28, 38, 33},
                                                 {16, 8, 17.9, 12, 17.5, 15},
                                                 {16, 32, 40.8, 28, 38, 33},
                                                 {16, 128, 101.4, 74, 92, 84},
                                                 {64, 8, 36.9, 28, 35.5, 32},
                                                 {64, 32, 97.9, 74, 92, 84},
                                                 {64, 128, 347.5, 278, 310, 292},
                                                 {128, 32, 169.4, 141, 160, 150},
                                                 {128, 128, 629.5, 551, 595, 566}}) {
    GpuCase c = decode(r.requests, r.keys * kK);
    c.must_us = r.must, c.target_us = r.target, c.peer = kPair, c.peer_cold_us = r.peer, c.read_us = r.read;
    list.push_back(c);
  }
  const auto special = [&](GpuCase c, const char* what, double peer, double must, double target) {
    c.name += what;
    c.must_us = must, c.target_us = target, c.peer = kPair, c.peer_cold_us = peer;
    list.push_back(c);
  };
  GpuCase c = decode(16, 64 * kK);
  c.rows = 32, c.next_n = 2, c.read_us = 40;
  special(c, ", next_n 2", 75.5, 58, 50);
  c = decode(64, 32 * kK);
  c.rows = 128, c.next_n = 2, c.read_us = 74;
  special(c, ", next_n 2", 108.8, 96, 88);
  c = decode(64, 32 * kK);
  c.heads = 32, c.read_us = 74;
  special(c, ", H 32", 98.3, 90, 82);
  c = decode(64, 32 * kK);
  c.topk = 512, c.read_us = 74;
  special(c, ", topk 512", 97.1, 90, 80);
}

/// next_n rows a request, times next_n 1: one size bound by reading, one below.
void add_next_n(std::vector<GpuCase>& list) {
  for (const int32_t heads : {64, 32}) {
    for (const int64_t requests : {64, 16}) {
      GpuCase one = decode(requests, 32 * kK);
      one.heads = heads;
      if (heads == 32) one.name += ", H 32";
      const bool large = requests == 64;
      if (!large && heads == 32) list.push_back(one);  // the others are rows of the table
      const double most[2][3] = {{1.1, 1.75, 3.5}, {1.05, 1.15, 1.75}}, small[3] = {1.15, 1.5, 2.6};
      for (int i = 0; i < 3; ++i) {
        const int32_t next_n = 2 << i;
        GpuCase c = variant(one, "next_n " + std::to_string(next_n) + " times",
                            large ? most[heads == 32 ? 1 : 0][i] : small[i]);
        c.next_n = next_n, c.rows = requests * next_n;
        list.push_back(c);
      }
    }
  }
}

void add_ragged(std::vector<GpuCase>& list) {
  support::Random random(7);
  GpuCase c = decode(64, 128 * kK);
  c.name = "ragged 128K among 63 of 1K to 4K";
  int64_t total = 0;
  for (int i = 0; i < 64; ++i) c.lengths.push_back(static_cast<int32_t>(random.between(kK, 4 * kK)));
  c.lengths[17] = 128 * kK;
  for (const int32_t n : c.lengths) total += n;
  c.must_us = std::max(16.0, 1.25 * static_cast<double>(total) * 132 / 4.3e6);
  list.push_back(c);
  GpuCase drawn = decode(64, 128 * kK);
  drawn.lengths.clear(), total = 0;
  for (int i = 0; i < 64; ++i) {
    drawn.lengths.push_back(static_cast<int32_t>(1024 * std::pow(128.0, random.uniform())));
    total += drawn.lengths.back();
  }
  GpuCase equal = decode(64, (total + 63) / 64);
  equal.name = "ragged 64 equal rows of the same total";
  drawn.name = "ragged 64 rows log-uniform 1K to 128K";
  drawn.against = equal.name, drawn.times = 1.15;
  list.push_back(equal), list.push_back(drawn);
}

void add_blocks(std::vector<GpuCase>& list) {
  const auto admitted = [](const GpuCase& base, double times, double must_us) {
    GpuCase c = variant(base, "16K admitted in blocks of 8", times);
    c.admitted = 2048, c.must_us = must_us;
    if (must_us > 0) c.against.clear();
    return c;
  };
  const auto publishes = [](const GpuCase& base) {
    GpuCase c = variant(base, "2048 blocks of 8 published", 1.15, 6);
    c.blocks = 2048;
    return c;
  };
  const GpuCase one = decode(1, kK * kK), sixteen = decode(16, kK * kK), rows = prefill(64, 512, kK * kK);
  list.push_back(sixteen), list.push_back(rows);
  list.push_back(admitted(one, 0, 14)), list.push_back(admitted(sixteen, 0.1, 0));
  list.push_back(admitted(rows, 0.1, 0));
  list.push_back(publishes(one)), list.push_back(publishes(decode(16, 128 * kK)));
  list.push_back(publishes(decode(64, 32 * kK))), list.push_back(publishes(prefill(64, 2048, 32768)));
}

/// Rows whose live keys fit topk; graphs captured for any context.
void add_bounds(std::vector<GpuCase>& list) {
  for (const int64_t rows : {1, 64}) {
    GpuCase c = decode(rows, kK);
    c.name += ", live <= topk";
    c.must_us = 3.5;
    list.push_back(c);
  }
  for (const auto& [requests, keys] :
       std::initializer_list<std::pair<int64_t, int64_t>>{{1, 8}, {1, 128}, {16, 32}, {64, 32}}) {
    for (const int64_t bound : {int64_t{163840}, int64_t{1048576}}) {
      GpuCase c = variant(decode(requests, keys * kK), "captured at " + std::to_string(bound), 1.03, 1);
      c.bound = bound, c.eager_base = true;
      list.push_back(c);
    }
  }
}

void add_prefill(std::vector<GpuCase>& list) {
  struct Row {
    int32_t heads;
    int64_t rows, keys;
    double cold, warm, must, target;
  };
  for (const Row& r : std::initializer_list<Row>{{64, 2048, 8192, 287, 316, 260, 219},
                                                 {64, 2048, 32768, 1145, 1314, 980, 880},
                                                 {64, 2048, 131072, 4479, 5090, 3900, 3600},
                                                 {64, 8192, 8192, 651, 750, 580, 485},
                                                 {64, 8192, 65536, 8567, 9556, 7300, 6900},
                                                 {32, 2048, 8192, 195, 203, 165, 125},
                                                 {32, 2048, 32768, 729, 789, 560, 500},
                                                 {32, 2048, 131072, 2801, 3176, 2200, 1950},
                                                 {32, 8192, 65536, 5336, 5964, 4150, 3700}}) {
    GpuCase c = prefill(r.heads, r.rows, r.keys);
    c.must_us = r.must, c.target_us = r.target;
    c.peer = kPair, c.peer_cold_us = r.cold, c.peer_warm_us = r.warm;
    list.push_back(c);
  }
  GpuCase paged = variant(prefill(64, 2048, 32768), "from pages", 0);
  paged.op = "paged_mqa_topk", paged.against.clear(), paged.must_us = 980, paged.target_us = 880;
  list.push_back(paged);
}

void add_select(std::vector<GpuCase>& list) {
  const double best[3][3] = {{8.4, 13.5, 16.6}, {8.6, 15.6, 23.0}, {12.3, 19.8, 69.0}};
  const int64_t rows[] = {1, 16, 64}, keys[] = {8, 32, 128};
  const auto add = [&](int64_t r, int64_t n, double peer, double target) {
    GpuCase c;
    c.name = "select " + std::to_string(r) + " x " + keys_text(n);
    c.suite = "select", c.op = "topk", c.heads = 0, c.rows = r, c.keys = n;
    c.must_us = peer, c.target_us = target, c.peer = kTopk, c.peer_cold_us = peer;
    list.push_back(c);
  };
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < 3; ++j) add(rows[i], keys[j] * kK, best[i][j], 0);
  }
  add(1024, 128 * kK, 200, 160);
  GpuCase blocks;
  blocks.name = "select_blocks 64 x 32K";
  blocks.suite = "select", blocks.op = "select_blocks", blocks.heads = 0, blocks.rows = 64, blocks.keys = 32 * kK;
  blocks.blocks = 2048, blocks.topk = 0;
  list.push_back(blocks);
}

void add_producers(std::vector<GpuCase>& list) {
  GpuCase empty;
  empty.name = empty.op = "empty", empty.suite = "producers", empty.heads = 0, empty.topk = 0, empty.rows = 0;
  list.push_back(empty);
  struct Row {
    const char* op;
    int64_t large;
    double fraction;
  };
  // The large ones read 64 MiB or more.
  for (const Row& r : std::initializer_list<Row>{
           {"store_k", 262144, 0.8}, {"quantize_q", 4096, 0.8}, {"gather_k", 524288, 0.8}, {"pool_k", 131072, 0.7}}) {
    for (const int64_t rows : {int64_t{1}, int64_t{64}, r.large}) {
      GpuCase c;
      c.name = std::string(r.op) + " " + std::to_string(rows);
      c.suite = "producers", c.op = r.op, c.rows = rows, c.heads = c.op == "quantize_q" ? 64 : 0, c.topk = 0;
      if (rows <= 64) c.against = "empty", c.times = 1, c.plus_us = 1.5;
      if (rows > 64) c.must_fraction = r.fraction;
      list.push_back(c);
    }
  }
}

void add_worst(std::vector<GpuCase>& list) {
  for (const GpuCase& base : {decode(1, 128 * kK), decode(16, 32 * kK), decode(64, 32 * kK), decode(1, kK * kK),
                              prefill(64, 2048, 32768), prefill(64, 8192, 8192)}) {
    for (const Pattern pattern : {Pattern::ascending, Pattern::descending, Pattern::all_equal, Pattern::relu_plateau,
                                  Pattern::bit_reversed, Pattern::decoy}) {
      GpuCase c = variant(base, support::pattern_name(pattern), 1.6);
      c.suite = "worst", c.pattern = pattern;
      list.push_back(c);
    }
  }
}

}  // namespace

std::vector<GpuCase> gpu_cases() {
  std::vector<GpuCase> list;
  add_decode(list), add_next_n(list), add_ragged(list), add_bounds(list), add_prefill(list), add_blocks(list);
  add_select(list), add_producers(list), add_worst(list);
  return list;
}

std::vector<GpuCase> quick_gpu_cases() {
  std::vector<GpuCase> list;
  for (const GpuCase& c : gpu_cases()) {
    const double pairs = static_cast<double>(c.rows) * static_cast<double>(c.keys);
    const bool small = pairs <= 2.2e6 && c.pattern == Pattern::normal && c.bound != 163840;
    const bool sample = c.name == "prefill H64 2048 x 8192" || c.name == "prefill H64 8192 x 8192, decoy" ||
                        c.name == "decode 16 x 32K, decoy" || c.name == "prefill H32 2048 x 32768";
    if (small || sample) list.push_back(c);
  }
  return list;
}

}  // namespace topkey::bench
