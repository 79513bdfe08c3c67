// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// One call of each operation, large enough that several threads are worth it, with the memory it points to; and the
// caller's own threads to run it on. What the tests of threads (team_test.cpp) and of memory (memory_test.cpp) share.
#pragma once
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstring>
#include <thread>

#include "support/call.h"
#include "tests/testing.h"

namespace topkey::testing {

// ---- one call of each operation ------------------------------------------------------------------------------------

/// A call with the memory that it points to, large enough that several threads are worth it.
struct Work {
  std::string name;
  CallArgs args;
  std::vector<Array> arrays;
  Problem problem{};

  const Array& add(Array a) { return arrays.emplace_back(std::move(a)); }
};

inline int64_t size_of(const Tensor& t) {
  int64_t n = static_cast<int64_t>(dtype_bytes(t.dtype));
  for (int32_t d = 0; d < t.ndim; ++d) n *= t.shape[d];
  return n;
}
/// All output bytes; outputs here are dense.
inline std::vector<uint8_t> snapshot(const Work& w) {
  std::vector<uint8_t> bytes;
  for (const auto& [name, t] : output_tensors(w.args)) {
    const auto* data = static_cast<const uint8_t*>(t.data);
    bytes.insert(bytes.end(), data, data + size_of(t));
  }
  return bytes;
}
inline void poison(const Work& w) {
  for (const auto& [name, t] : output_tensors(w.args)) std::memset(t.data, 0xA5, static_cast<size_t>(size_of(t)));
}
inline bool poisoned(const Work& w) {
  const std::vector<uint8_t> bytes = snapshot(w);
  return std::all_of(bytes.begin(), bytes.end(), [](uint8_t b) { return b == 0xA5; });
}
inline void launch_work(const Work& w, const Exec& exec) {
  std::visit([&](const auto& a) { launch(a, exec); }, w.args);
}
inline size_t workspace_of(const Work& w, const Exec& exec) {
  return std::visit([&](const auto& a) { return workspace_bytes(a, exec); }, w.args);
}

inline Array floats(std::initializer_list<int64_t> shape, DType dtype, uint64_t seed) {
  Array a(dtype, shape);
  Random random(seed);
  for (int64_t i = 0; i < a.size(); ++i) {
    if (dtype == DType::f32) a.as<float>()[i] = random.normal();
    if (dtype == DType::bf16) a.as<uint16_t>()[i] = float_to_bf16(random.normal());
  }
  return a;
}
inline Array ints(std::initializer_list<int64_t> shape, int64_t below, uint64_t seed) {
  Array a(DType::i32, shape);
  Random random(seed);
  for (int64_t i = 0; i < a.size(); ++i)
    a.as<int32_t>()[i] = static_cast<int32_t>(random.below(static_cast<uint64_t>(below)));
  return a;
}

inline Selection selection(Work& w, int64_t rows, int64_t topk, bool blocks) {
  Selection out{};
  out.indices = w.add(Array(DType::i32, {rows, topk})).view();
  out.slots = w.add(Array(DType::i32, {rows, topk})).view();
  out.scores = w.add(Array(DType::f32, {rows, topk})).view();
  out.counts = w.add(Array(DType::i32, {rows})).view();
  if (blocks) out.blocks = w.add(Array(DType::i32, {rows, 5})).view(), out.block_size = 64;
  out.slot_map = {w.add(ints({rows, 4096}, 1000, 3)).view(), false, 16};
  return out;
}

inline Work paged_work(const char* name, int64_t rows, int64_t keys, Pattern pattern) {
  ProblemSpec spec;
  spec.paged = true, spec.rows = rows, spec.keys = keys, spec.requests = 3, spec.pattern = pattern;
  Work w{name, {}, {}, make_problem(spec)};
  w.args = w.problem.paged_search(100, selection(w, rows, 100, false));
  return w;
}
inline Work dense_work(const char* name, int64_t rows, int64_t keys, Pattern pattern) {
  ProblemSpec spec;
  spec.rows = rows, spec.keys = keys, spec.pattern = pattern, spec.windows = Windows::causal;
  Work w{name, {}, {}, make_problem(spec)};
  w.args = w.problem.dense_search(100, selection(w, rows, 100, true));
  return w;
}
inline Work logits_work(bool paged) {
  ProblemSpec spec;
  spec.paged = paged, spec.rows = 24, spec.keys = 3000, spec.requests = 3;
  Work w{paged ? "paged_mqa_logits" : "mqa_logits", {}, {}, make_problem(spec)};
  const Tensor logits = w.add(Array(DType::f32, {spec.rows, w.problem.width()})).view();
  w.args = paged ? CallArgs(w.problem.paged_logits(logits)) : CallArgs(w.problem.dense_logits(logits));
  return w;
}
inline Work topk_work(bool blocks) {
  Work w{blocks ? "select_blocks" : "topk", {}, {}};
  const Array& scores = w.add(Array(DType::f32, {24, 20000}));
  for (int64_t r = 0; r < 24; ++r) {
    fill_scores(static_cast<Pattern>(r % kNumPatterns), scores.as<float>() + r * 20000, 20000, 100,
                static_cast<uint64_t>(r));
  }
  Rows rows{};
  rows.count = 24;
  if (blocks) {
    w.args = SelectBlocks{0, scores.view(), rows, 64, w.add(Array(DType::i32, {24, 9})).view()};
    return w;
  }
  Topk a{};
  a.scores = scores.view(), a.rows = rows, a.topk = 100;
  a.out = selection(w, 24, 100, true);
  w.args = a;
  return w;
}
inline Work merge_work() {
  Work w{"merge_topk", {}, {}};
  MergeTopk a{};
  a.scores = w.add(floats({4, 128, 128}, DType::f32, 5)).view();
  const Array& indices = w.add(Array(DType::i32, {4, 128, 128}));
  for (int64_t i = 0; i < indices.size(); ++i)
    indices.as<int32_t>()[i] = static_cast<int32_t>(i % 128 * 4 + i / (128 * 128));
  a.indices = indices.view(), a.topk = 100, a.rows.count = 128;
  a.out = selection(w, 128, 100, false);
  w.args = a;
  return w;
}
inline Work store_work(bool codes) {
  Work w{codes ? "store_k of codes" : "store_k", {}, {}};
  StoreK a{};
  a.k = codes ? w.add(Array(DType::u8, {9000, 32})).view() : w.add(floats({9000, 32}, DType::bf16, 6)).view();
  if (codes) a.k_scales = w.add(floats({9000}, DType::f32, 7)).view();
  // Some slots come twice: the last row must win on any number of threads.
  a.slot_mapping = w.add(ints({9000}, 9600, 8)).view();
  a.cache = {w.add(Array(DType::u8, {600, 16 * 36})).view(), KeyFormat::fp8, Layout::planar, 16, 32};
  w.args = a;
  return w;
}
inline Work gather_work() {
  ProblemSpec spec;
  spec.paged = true, spec.requests = 3, spec.keys = 6000, spec.rows = 1;
  Work w{"gather_k", {}, {}, make_problem(spec)};
  std::vector<int32_t> indptr{0};
  for (int64_t len : w.problem.lens) indptr.push_back(indptr.back() + static_cast<int32_t>(len));
  GatherK a{};
  a.keys = w.problem.paged_keys(), a.indptr = w.add(Array::of(indptr)).view(), a.total = indptr.back();
  a.out = {w.add(Array(DType::f8_e4m3fn, {a.total, 32})).view(), w.add(Array(DType::f32, {a.total})).view(),
           KeyFormat::fp8};
  w.args = a;
  return w;
}
inline Work quantize_work(bool query) {
  Work w{query ? "quantize_q" : "quantize_k", {}, {}};
  if (query) {
    QuantizeQ a{};
    a.q = w.add(floats({2048, 4, 32}, DType::bf16, 9)).view(),
    a.weights = w.add(floats({2048, 4}, DType::f32, 10)).view();
    a.q_out = w.add(Array(DType::f8_e4m3fn, {2048, 4, 32})).view(),
    a.weights_out = w.add(Array(DType::f32, {2048, 4})).view();
    w.args = a;
  } else {
    QuantizeK a{};
    a.k = w.add(floats({9000, 32}, DType::f32, 11)).view(), a.norm.kind = NormKind::layer, a.hadamard = true;
    a.out = {w.add(Array(DType::f8_e4m3fn, {9000, 32})).view(), w.add(Array(DType::f32, {9000})).view(),
             KeyFormat::fp8};
    w.args = a;
  }
  return w;
}
inline Work rows_work(bool slots) {
  Work w{slots ? "to_slots" : "expand_rows", {}, {}};
  const Tensor table = w.add(ints({64, 600}, 5000, 12)).view();
  if (slots) {
    ToSlots a{};
    a.indices = w.add(ints({64, 700}, 9000, 13)).view(), a.block_table = table, a.page_size = 16, a.compact = true;
    a.slots = w.add(Array(DType::i32, {64, 700})).view(), a.counts = w.add(Array(DType::i32, {64})).view();
    w.args = a;
    return w;
  }
  std::vector<int32_t> starts{0}, lens;
  for (int32_t b = 0; b < 64; ++b) starts.push_back(starts.back() + b * 4), lens.push_back(b * 5 + 100);
  ExpandRows a{};
  a.query_start = w.add(Array::of(starts)).view(), a.seq_lens = w.add(Array::of(lens)).view();
  a.block_table = table, a.page_size = 16, a.capacity = 9000;
  for (Tensor* t : {&a.row_request, &a.lens, &a.positions, &a.slots}) *t = w.add(Array(DType::i32, {9000})).view();
  w.args = a;
  return w;
}

/// Of one request, from its first token on. Wider than what a producer keeps on its stack, it needs a workspace.
inline Work pool_work(bool windows, int64_t rows, int64_t head_dim) {
  Work w{std::string(windows ? "compress_k of " : "pool_k of ") + std::to_string(head_dim) + " dims", {}, {}};
  const int64_t width = windows ? 2 * head_dim : head_dim, ring = 8;
  const Array positions(DType::i32, {rows}), slots(DType::i32, {rows}), states(DType::i32, {rows});
  for (int32_t r = 0; r < rows; ++r) {
    positions.as<int32_t>()[r] = r, states.as<int32_t>()[r] = r % static_cast<int32_t>(ring);
    slots.as<int32_t>()[r] = (r + 1) % 4 == 0 ? r / 4 : -1;
  }
  const KeyCache cache{w.add(Array(DType::u8, {rows / 64, 16 * (head_dim + 4)})).view(), KeyFormat::fp8, Layout::planar,
                       16, static_cast<int32_t>(head_dim)};
  const Tensor starts = w.add(Array::of({0, static_cast<int32_t>(rows)})).view();
  const Tensor ape = w.add(floats({4, width}, DType::f32, 31)).view(), at = w.add(positions).view();
  const Tensor to = w.add(slots).view(), state_slots = w.add(states).view();
  if (windows) {
    CompressK a{};
    a.kv = w.add(floats({rows, width}, DType::f32, 32)).view();
    a.score = w.add(floats({rows, width}, DType::f32, 33)).view(), a.ape = ape, a.positions = at;
    a.state = w.add(Array(DType::f32, {1, ring, 2 * width})).view(), a.state_slots = state_slots;
    a.query_start = starts, a.slot_mapping = to, a.cache = cache;
    w.args = a;
    return w;
  }
  PoolK a{};
  a.k = w.add(floats({rows, head_dim}, DType::bf16, 34)).view();
  a.gate = w.add(floats({rows, head_dim}, DType::bf16, 35)).view(), a.ape = ape, a.positions = at;
  a.q_indptr = starts, a.slot_mapping = to, a.pool_size = 4, a.cache = cache;
  a.tail = w.add(Array(DType::bf16, {1, 2, ring, head_dim})).view(), a.tail_slots = state_slots;
  w.args = a;
  return w;
}
inline Work expand_work() {
  Work w{"expand_pools", {}, {}};
  const int64_t rows = 300;
  ExpandPools a{};
  a.pools = w.add(ints({rows, 128}, 5000, 36)).view(), a.rows.count = rows, a.pool_size = 4;
  a.positions = w.add(ints({rows}, 30000, 37)).view();
  a.out.indices = w.add(Array(DType::i32, {rows, 515})).view();
  a.out.slots = w.add(Array(DType::i32, {rows, 515})).view(), a.out.counts = w.add(Array(DType::i32, {rows})).view();
  a.out.slot_map = {w.add(ints({rows, 3000}, 1000, 38)).view(), true, 16};
  w.args = a;
  return w;
}

inline const std::vector<Work>& all_work() {
  static const std::vector<Work> all = [] {
    std::vector<Work> list;
    for (const bool other : {false, true}) {
      list.push_back(rows_work(other)), list.push_back(quantize_work(other)), list.push_back(store_work(other));
      list.push_back(logits_work(other)), list.push_back(topk_work(other));
    }
    list.push_back(gather_work()), list.push_back(merge_work()), list.push_back(expand_work());
    for (const bool windows : {false, true}) {
      list.push_back(pool_work(windows, 4096, 128)), list.push_back(pool_work(windows, 256, 2048));
    }
    list.push_back(dense_work("mqa_topk", 40, 3000, Pattern::normal));
    list.push_back(dense_work("mqa_topk of one row", 1, 60000, Pattern::ties_at_cut));
    list.push_back(paged_work("paged_mqa_topk", 70, 2000, Pattern::few_mantissa_bits));
    list.push_back(paged_work("paged_mqa_topk of one row", 1, 60000, Pattern::normal));
    return list;
  }();
  return all;
}

/// The caller's own threads, and what they threw.
struct Crew {
  explicit Crew(int32_t n) : gate(n), thrown(static_cast<size_t>(n)) {}
  static void wait(void* crew) {
    auto& c = *static_cast<Crew*>(crew);
    if (c.at_barrier) c.at_barrier();
    c.gate.arrive_and_wait();
  }
  std::barrier<> gate;
  std::vector<Thrown> thrown;
  std::function<void()> at_barrier{};
};

inline void run_crew(Crew& crew, const std::function<void(const Exec&)>& call, const Exec& exec) {
  const auto n = static_cast<int32_t>(crew.thrown.size());
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      const Team team{rank, n, Crew::wait, &crew};
      Exec own = exec;
      own.team = &team;
      Crew::wait(&crew);
      crew.thrown[static_cast<size_t>(rank)] = thrown_by([&] { call(own); });
      Crew::wait(&crew);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// A workspace of exactly `size` bytes.
struct Room {
  explicit Room(size_t size) : memory(size, true) {}
  void give(Exec& exec) const { exec.workspace = memory.data(), exec.workspace_bytes = memory.bytes(); }
  bool kept() const { return memory.kept_inside(); }
  Workspace memory;
};

}  // namespace topkey::testing
