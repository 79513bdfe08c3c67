// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A case is a few requests with all their tokens. Calls of pool_k bring them in chunks that start anywhere and take
// drafts back; the last one brings the tokens that are then the query rows. Each call is checked by itself
// (check_call.h) with the bytes that the calls before it left on this backend: pool_k against its replay, the search
// over what it wrote, with candidates, blocks and forced keys, against the oracle, the expansion against its formula.
// The layer must then leave the same bytes as its stages.
#include "check_pools.h"

#include <fmt/format.h>

#include <algorithm>

#include "command.h"
#include "sample.h"
#include "support/on_device.h"

namespace topkey::cli {
namespace {

using support::Array;
using support::Problem;
using support::Random;
using support::Report;

Array normals(Random& random, DType dtype, std::initializer_list<int64_t> shape) {
  const Array array(dtype, shape);
  for (int64_t i = 0; i < array.size(); ++i) {
    const float x = random.normal();
    if (dtype == DType::f32) array.as<float>()[i] = x;
    if (dtype == DType::bf16) array.as<uint16_t>()[i] = float_to_bf16(x);
  }
  return array;
}
Array i64_array(const std::vector<int64_t>& values) {
  const Array array(DType::i64, {static_cast<int64_t>(values.size())});
  std::copy(values.begin(), values.end(), array.as<int64_t>());
  return array;
}
Array drawn_ints(Random& random, int64_t rows, int64_t columns, int64_t low, int64_t high) {
  const Array array(DType::i32, {rows, columns});
  for (int64_t i = 0; i < array.size(); ++i) array.as<int32_t>()[i] = static_cast<int32_t>(random.between(low, high));
  return array;
}

/// Tokens of one call of pool_k, request after request.
struct Tokens {
  std::vector<int32_t> requests, starts{0};
  std::vector<int64_t> positions;
  Array k, gate, at, slots, states, request, indptr;
};

struct PoolCase {
  int32_t pool_size = 1;
  int64_t ring = 1;
  Problem p;
  std::vector<int64_t> tokens, rows;  ///< of each request: all there are, those that are query rows
  std::vector<Tokens> history;
  Tokens step;
  Array ape, tail;  ///< tail absent: every pool must be whole in its call
  bool by_request = false;
  // The search and the layer.
  int32_t topk = 1, force_first = 0, force_last = 0, block_size = 0;
  CandidateRole role = CandidateRole::none;
  Order order = Order::position;
  Array candidates, token_table;           ///< of a consumer; absent: no slots are asked for
  int64_t blocks = 0;                      ///< that a source publishes
  Tensor IndexerStep::*missing = nullptr;  ///< gate, ape or positions: the layer then stores nothing

  bool stores() const { return missing == nullptr; }
  bool has_positions() const { return missing != &IndexerStep::positions; }
};

support::ProblemSpec draw_spec(uint64_t seed, int32_t pool_size, Random& random) {
  support::ProblemSpec spec = random_sample("paged_mqa_topk", seed).spec;
  if (!random.chance(0.1)) spec.format = random.chance(0.5) ? KeyFormat::fp8 : KeyFormat::mxfp4;
  spec.head_dim = 32 << random.below(3);
  spec.heads = 1 << random.below(5);
  if (!is_fp8(spec.format)) spec.scale = ScaleRule::ue8m0;
  spec.layout = random.chance(0.3) ? Layout::interleaved : Layout::planar;
  spec.keys = random.between(1, 1 + 300 / pool_size);
  spec.exact = false, spec.pattern = support::Pattern::normal, spec.windows = support::Windows::causal;
  spec.paged = true;
  spec.addressing = random.chance(0.4) ? support::Addressing::next_n : support::Addressing::q_indptr;
  spec.next_n = static_cast<int32_t>(random.between(1, 8));
  return spec;
}

/// Slot of the pool that position completes, -1 = none.
int64_t slot_of(const PoolCase& c, int64_t request, int64_t position) {
  const int64_t pool = (position + 1) / c.pool_size - 1, size = c.p.spec.page_size;
  const auto b = static_cast<size_t>(request);
  if (position < 0 || (position + 1) % c.pool_size != 0 || pool >= c.p.lens[b]) return -1;
  return c.p.page_ids[b][static_cast<size_t>(pool / size)] * size + pool % size;
}

/// `first`, `count` of each request.
Tokens draw_tokens(const PoolCase& c, const std::vector<int64_t>& first, const std::vector<int64_t>& count,
                   Random& random) {
  Tokens t;
  std::vector<int64_t> slots, states;
  for (size_t b = 0; b < first.size(); ++b) {
    for (int64_t i = 0; i < count[b]; ++i) {
      const int64_t position = std::max<int64_t>(first[b] + i, -1), request = static_cast<int64_t>(b);
      t.requests.push_back(static_cast<int32_t>(b));
      t.positions.push_back(position);
      slots.push_back(slot_of(c, request, position));
      states.push_back(position < 0 ? -1 : request * c.ring + position % c.ring);
    }
    t.starts.push_back(static_cast<int32_t>(t.positions.size()));
  }
  const auto rows = static_cast<int64_t>(t.positions.size());
  t.k = normals(random, DType::bf16, {rows, c.p.spec.head_dim});
  t.gate = normals(random, DType::bf16, {rows, c.p.spec.head_dim});
  t.at = i64_array(t.positions), t.slots = i64_array(slots), t.states = i64_array(states);
  t.request = Array::of(t.requests), t.indptr = Array::of(t.starts);
  return t;
}

/// Chunks that end where the query rows begin, with drafts that are taken back. Without a tail: one.
void draw_history(PoolCase& c, Random& random) {
  const size_t requests = c.tokens.size();
  const int64_t drafts = c.ring - c.pool_size, calls = c.tail ? random.between(0, 3) : 1;
  std::vector<int64_t> done(requests, 0);
  for (int64_t i = 0; i < calls; ++i) {
    std::vector<int64_t> first(requests), count(requests);
    for (size_t b = 0; b < requests; ++b) {
      const int64_t kept = std::max<int64_t>(c.tokens[b] - c.rows[b], 0);
      if (c.tail && random.chance(0.3)) done[b] -= random.between(0, std::min(done[b], drafts));
      first[b] = done[b];
      count[b] = i + 1 < calls ? random.between(0, kept - done[b]) : kept - done[b];
      done[b] += count[b];
      if (c.tail && i + 1 == calls) count[b] += random.between(0, std::min(drafts, c.rows[b]));
    }
    c.history.push_back(draw_tokens(c, first, count, random));
  }
  if (!c.tail && static_cast<int64_t>(c.history[0].positions.size()) < c.pool_size) c.history.clear();
}

/// A row at position p sees the pools that are whole by then.
void set_windows(PoolCase& c) {
  auto* ends = (c.p.length ? c.p.length : c.p.end).as<int32_t>();
  for (size_t r = 0; r < c.step.positions.size(); ++r)
    ends[r] = static_cast<int32_t>((c.step.positions[r] + 1) / c.pool_size);
}

void draw_search(PoolCase& c, Random& random) {
  const int64_t rows = c.p.count(), keys = c.p.spec.keys;
  const int32_t topks[] = {1, 7, 30};
  c.topk = topks[random.below(3)];
  c.order = static_cast<Order>(random.below(3));
  if (random.chance(0.3)) c.force_first = static_cast<int32_t>(random.between(0, 5));
  if (random.chance(0.3)) c.force_last = static_cast<int32_t>(random.between(0, 5));
  c.role = static_cast<CandidateRole>(random.below(3));
  c.block_size = static_cast<int32_t>(random.between(1, 9)), c.blocks = random.between(1, 6);
  if (c.role == CandidateRole::consumer) c.candidates = drawn_ints(random, rows, c.blocks, -1, keys / c.block_size + 2);
  Tensor IndexerStep::*const optional[] = {&IndexerStep::gate, &IndexerStep::ape, &IndexerStep::positions};
  if (random.chance(0.4)) c.missing = optional[random.below(3)];
  if (random.chance(0.5)) c.token_table = drawn_ints(random, c.p.spec.requests, (keys + 1) * c.pool_size, -1, 500);
}

PoolCase draw_case(uint64_t seed) {
  Random random(seed * 13 + 5);
  PoolCase c;
  const int32_t sizes[] = {1, 2, 4, 16, 64};
  c.pool_size = sizes[random.below(5)];
  c.ring = c.pool_size << random.below(3);
  c.p = support::make_problem(draw_spec(seed, c.pool_size, random));
  const bool uniform = c.p.spec.addressing == support::Addressing::next_n;
  c.by_request = !uniform && random.chance(0.5);
  if (c.by_request) c.p.request = Array::of(c.p.row_request), c.p.q_indptr = Array();
  std::vector<int64_t> first;
  for (size_t b = 0; b < c.p.lens.size(); ++b) {
    c.tokens.push_back(c.p.lens[b] * c.pool_size + random.between(0, c.pool_size - 1));
    c.rows.push_back(std::count(c.p.row_request.begin(), c.p.row_request.end(), static_cast<int32_t>(b)));
    first.push_back(c.tokens[b] - c.rows[b]);
  }
  c.ape = normals(random, DType::f32, {c.pool_size, c.p.spec.head_dim});
  // Without a tail a call that has no pool in whole, as its sizes tell, is refused.
  const bool alone = (uniform ? c.p.spec.next_n : c.p.count()) >= c.pool_size;
  if (!alone || random.chance(0.7))
    c.tail = normals(random, DType::bf16, {c.p.spec.requests, 2, c.ring, c.p.spec.head_dim});
  draw_history(c, random);
  c.step = draw_tokens(c, first, c.rows, random);
  set_windows(c);
  draw_search(c, random);
  return c;
}

PoolK pool_args(const PoolCase& c, const Tokens& t, bool query_rows) {
  PoolK a{};
  a.k = t.k.view(), a.gate = t.gate.view(), a.ape = c.ape.view(), a.positions = t.at.view();
  if (query_rows && c.p.spec.addressing == support::Addressing::next_n) {
    a.next_n = c.p.spec.next_n;
  } else {
    (c.by_request ? a.request : a.q_indptr) = (c.by_request ? t.request : t.indptr).view();
  }
  a.slot_mapping = t.slots.view();
  if (c.tail) a.tail = c.tail.view(), a.tail_slots = t.states.view();
  a.pool_size = c.pool_size, a.scale = c.p.spec.scale, a.cache = c.p.paged_keys().cache;
  return a;
}

/// What the stages, or the layer, leave.
struct Answer {
  Array pools, indices, slots, counts, blocks;
  explicit Answer(const PoolCase& c) {
    const int64_t rows = c.p.count(), width = int64_t{c.topk} * c.pool_size + (c.has_positions() ? c.pool_size - 1 : 0);
    pools = Array(DType::i32, {rows, int64_t{c.topk}}), indices = Array(DType::i32, {rows, width});
    counts = Array(DType::i32, {rows});
    if (c.token_table) slots = Array(DType::i32, {rows, width});
    if (c.role == CandidateRole::source) blocks = Array(DType::i32, {rows, c.blocks});
  }
  /// Tokens.
  Selection selection(const PoolCase& c) const {
    Selection out{};
    out.indices = indices.view(), out.counts = counts.view();
    if (c.token_table) out.slots = slots.view(), out.slot_map = {c.token_table.view(), false, 1};
    return out;
  }
};

PagedMqaTopk search_args(const PoolCase& c, const Answer& answer) {
  Selection out{};
  out.indices = answer.pools.view(), out.order = c.order;
  if (c.role == CandidateRole::source) out.blocks = answer.blocks.view(), out.block_size = c.block_size;
  PagedMqaTopk a = c.p.paged_search(c.topk, out);
  a.admit.force_first = c.force_first, a.admit.force_last = c.force_last;
  if (c.role == CandidateRole::consumer) {
    a.admit.candidates = c.candidates.view();
    a.admit.candidate_block_size = c.block_size;
  }
  return a;
}

ExpandPools expand_args(const PoolCase& c, const Answer& answer) {
  ExpandPools a{};
  a.pools = answer.pools.view();
  a.rows = c.p.rows();
  a.rows.end = a.rows.length = Tensor{};
  if (c.has_positions()) a.positions = c.step.at.view();
  a.pool_size = c.pool_size;
  a.out = answer.selection(c);
  return a;
}

/// Bytes that calls change, to be put back.
struct Bytes {
  std::vector<uint8_t> pages, tail;
  static Bytes of(const PoolCase& c) { return {copy(c.p.pages), copy(c.tail)}; }
  void put_back(const PoolCase& c) const {
    std::copy(pages.begin(), pages.end(), c.p.pages.as<uint8_t>());
    std::copy(tail.begin(), tail.end(), c.tail.as<uint8_t>());
  }

 private:
  static std::vector<uint8_t> copy(const Array& array) {
    if (!array) return {};
    const Tensor& t = array.view();
    const auto size = t.ndim == 2 ? static_cast<size_t>((t.shape[0] - 1) * t.stride[0] + t.shape[1]) : array.bytes();
    return {array.as<uint8_t>(), array.as<uint8_t>() + size};
  }
};

void compare(Report& report, const char* what, const uint8_t* got, const uint8_t* want, size_t bytes) {
  report.compared += static_cast<int64_t>(bytes);
  const auto at = static_cast<size_t>(std::mismatch(got, got + bytes, want).first - got);
  if (at == bytes) return;
  ++report.differing;
  report.fail(fmt::format("byte {} of {} is 0x{:02X}, of the stages apart 0x{:02X}", at, what, got[at], want[at]));
}

class Chain {
 public:
  Chain(uint64_t seed, const std::string& backend) : case_(draw_case(seed)), backend_(backend) {}

  PoolFindings run() {
    for (const Tokens& tokens : case_.history) {
      if (!tokens.positions.empty() && !stage(pool_args(case_, tokens, false))) return found_;
    }
    const Bytes before = Bytes::of(case_);
    if (case_.stores() && !stage(pool_args(case_, case_.step, true))) return found_;
    const Answer apart(case_);
    if (!stage(search_args(case_, apart)) || !stage(expand_args(case_, apart))) return found_;
    const Bytes after = Bytes::of(case_);
    before.put_back(case_);
    layer(apart, after);
    return found_;
  }

 private:
  /// Checks a call, then makes it. False: this backend cannot.
  bool stage(const support::CallArgs& args) {
    auto trace = std::make_shared<support::Trace>(support::trace_of(args));
    trace->metadata["model"] = "synthetic";
    if (std::holds_alternative<PagedMqaTopk>(args) && case_.role == CandidateRole::source)
      trace->metadata["num_blocks"] = std::to_string(case_.blocks);
    for (Finding& finding : check_trace(trace, {backend_}, 0)) {
      const bool skipped = !finding.skipped.empty();
      if (!skipped) finding.report.name = fmt::format("{} {}", support::args_op(args), finding.report.name);
      if (!skipped && !finding.report.ok && found_.differing == nullptr) found_.differing = trace;
      found_.findings.push_back(std::move(finding));
      if (skipped) return false;
    }
    support::run_args(args, exec_on(backend_));
    return true;
  }

  void layer(const Answer& want, const Bytes& after) {
    const PoolCase& c = case_;
    const support::ProblemSpec& spec = c.p.spec;
    IndexerConfig config{};
    config.heads = spec.heads, config.head_dim = spec.head_dim, config.format = spec.format, config.scale = spec.scale;
    config.topk = c.topk * c.pool_size, config.pool_size = c.pool_size, config.role = c.role;
    config.force_first = c.force_first, config.force_last = c.force_last;
    if (c.role != CandidateRole::none)
      config.candidate_block_size = c.block_size, config.candidate_topk_blocks = static_cast<int32_t>(c.blocks);
    const Answer got(c);
    const SparseAttnIndexerKpool indexer(config);
    Exec exec = exec_on(backend_);
    const int64_t rows = c.p.count();
    const size_t bytes =
        indexer.workspace_bytes({0, rows, spec.requests, c.p.width(), static_cast<int32_t>(rows)}, exec);
    const auto room = support::aligned_bytes(bytes);
    exec.workspace = room.get(), exec.workspace_bytes = bytes;
    support::forward_on_device(indexer, step(got), exec);
    Report report;
    report.name = "layer";
    report.rows = rows;
    const auto same = [&](const char* what, const Array& a, const Array& b) {
      if (a) compare(report, what, a.as<uint8_t>(), b.as<uint8_t>(), a.bytes());
    };
    same("the indices", got.indices, want.indices), same("the slots", got.slots, want.slots);
    same("the counts", got.counts, want.counts), same("the blocks", got.blocks, want.blocks);
    const Bytes left = Bytes::of(c);
    compare(report, "the cache", left.pages.data(), after.pages.data(), after.pages.size());
    compare(report, "the tail", left.tail.data(), after.tail.data(), after.tail.size());
    found_.findings.push_back({backend_, report, ""});
  }

  IndexerStep step(const Answer& to) const {
    const PoolCase& c = case_;
    const PoolK pool = pool_args(c, c.step, true);
    IndexerStep s{};
    s.k = pool.k, s.gate = pool.gate, s.ape = pool.ape, s.positions = pool.positions;
    s.slot_mapping = pool.slot_mapping, s.tail = pool.tail, s.tail_slots = pool.tail_slots;
    if (c.missing != nullptr) s.*c.missing = Tensor{};
    s.q = c.p.query(), s.keys = c.p.paged_keys(), s.rows = c.p.rows();
    if (c.role == CandidateRole::source) s.candidates = to.blocks.view();
    if (c.role == CandidateRole::consumer) s.candidates = c.candidates.view();
    s.out = to.selection(c);
    s.out.order = c.order;
    return s;
  }

  const PoolCase case_;
  const std::string backend_;
  PoolFindings found_;
};

}  // namespace

PoolFindings check_pools(uint64_t seed, const std::string& backend) { return Chain(seed, backend).run(); }

}  // namespace topkey::cli
