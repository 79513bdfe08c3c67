// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The serving test of layers whose key rows stand for several tokens (serving_test.cpp is that of all others): k-pools
// through SparseAttnIndexerKpool, compressed windows through compress_k and SparseAttnIndexer. Requests are prefilled
// in chunks that start anywhere, decode with drafts of which some are rejected, are preempted, give pages and state
// blocks to others, finish. Every answer equals one from scratch: all tokens of the request in one call over a cache of
// its own, a search over that, and the tokens of the answer counted out by hand.
#include <algorithm>

#include "tests/backend_test.h"
#include "tests/pools.h"

namespace topkey::testing {
namespace {

struct Geometry {
  const char* name;
  bool pools;  ///< else compressed windows
  int32_t group = 4;
  int32_t heads = 32, head_dim = 128, topk = 32, page_size = 4;
  int32_t next_n = 3;    ///< most rows of a decode request
  bool uniform = false;  ///< decode and prefill rows padded to next_n a request
  bool overlap = true;   ///< of windows
  KeyFormat format = KeyFormat::fp8;
  int64_t requests = 4, max_tokens = 150, steps = 80;
  uint64_t seed = 1;

  int64_t width() const { return pools ? head_dim : (overlap ? 2 : 1) * head_dim; }  ///< of k and gate, kv and score
  int64_t ring() const {
    int64_t ring = pools ? group : (overlap ? 2 : 1) * group;
    while (ring < (pools ? group : (overlap ? 2 : 1) * group) + next_n - 1) ring *= 2;
    return ring;
  }
  int64_t max_pages() const { return max_tokens / group / page_size + 1; }
  int64_t columns() const { return pools ? topk + group - 1 : topk; }
};

struct Request {
  int64_t prompt = 0, finish = 0, cached = 0, rows = 0;
  std::vector<std::vector<float>> tokens;  ///< value, then score
  std::vector<int32_t> pages;
  int32_t block = 0;  ///< of the tail or state
  bool decodes() const { return cached + 1 >= prompt; }
};

/// The two tensors of some tokens.
struct Tokens {
  Array value, score;
  Tokens(const Geometry& g, int64_t rows)
      : value(g.pools ? DType::bf16 : DType::f32, {rows, g.width()}),
        score(g.pools ? DType::bf16 : DType::f32, {rows, g.width()}) {}
  void set(int64_t row, const std::vector<float>& token) const {
    const auto width = static_cast<int64_t>(token.size()) / 2;
    for (int64_t i = 0; i < 2 * width; ++i) {
      const Array& to = i < width ? value : score;
      const int64_t at = row * width + i % width;
      if (to.view().dtype == DType::bf16) to.as<uint16_t>()[at] = float_to_bf16(token[static_cast<size_t>(i)]);
      if (to.view().dtype == DType::f32) to.as<float>()[at] = token[static_cast<size_t>(i)];
    }
  }
};

class Day {
 public:
  Day(const Geometry& geometry, std::string backend) : g_(geometry), backend_(std::move(backend)), random_(g_.seed) {
    ape_ = normals(DType::f32, {g_.group, g_.width()}, random_);
    weight_ = normals(DType::f32, {g_.head_dim}, random_);
    cos_sin_ = normals(DType::f32, {g_.max_tokens, g_.head_dim / 2}, random_);
    // Fewer than all can want, so that some are preempted.
    const int64_t pages = std::max(g_.max_pages(), g_.requests * g_.max_pages() * 2 / 5);
    cache_ = cache_of(pages_, g_.format, g_.page_size, g_.head_dim, pages);
    for (int32_t p = 0; p < pages; ++p) free_.push_back(p);
    random_.shuffle(free_);
    for (int32_t b = 0; b < g_.requests; ++b) blocks_.push_back(b);
    state_ = g_.pools ? normals(DType::bf16, {g_.requests, 2, g_.ring(), g_.head_dim}, random_)
                      : normals(DType::f32, {g_.requests, g_.ring(), 2 * g_.width()}, random_);
    const IndexerLimits limits{0, kBufferRows, g_.requests, g_.max_pages() * g_.page_size, g_.next_n};
    workspace_bytes_ = g_.pools ? SparseAttnIndexerKpool(config()).workspace_bytes(limits, on(backend_))
                                : SparseAttnIndexer(config()).workspace_bytes(limits, on(backend_));
    workspace_ = aligned_bytes(workspace_bytes_);
  }
  void step();
  int64_t answered = 0, preempted = 0, finished = 0, rejected = 0;

 private:
  static constexpr int64_t kStepRows = 40, kBufferRows = 48;  ///< padded rows come on top
  struct Inputs {
    Array query_start, seq_lens, table, q, q_scales, weights, request, lens, positions, slots, state_slots, token_table;
    Tokens tokens;
    int64_t rows;
  };

  IndexerConfig config() const {
    IndexerConfig c{};
    c.heads = g_.heads, c.head_dim = g_.head_dim, c.topk = g_.topk, c.format = g_.format;
    (g_.pools ? c.pool_size : c.ratio) = g_.group;
    return c;
  }
  void schedule();
  bool make_room(size_t at);
  void preempt(size_t at);
  void advance();
  Inputs inputs();
  void place_rows(Inputs& in);
  void store(const Inputs& in);
  void answer(const Inputs& in, const Outputs& out);
  PoolK pool_args(const Tokens& tokens, const KeyCache& cache) const;
  CompressK compress_args(const Tokens& tokens, const KeyCache& cache) const;
  void fill_from_scratch(const Request& r, const KeyCache& cache);
  void check_request(const Inputs& in, const Outputs& out, size_t b, int64_t first);
  std::vector<int64_t> expected(const Tensor& chosen, int64_t row, int64_t seen) const;

  Geometry g_;
  std::string backend_;
  Random random_;
  Array ape_, weight_, cos_sin_, pages_, state_;
  KeyCache cache_{};
  std::vector<int32_t> free_, blocks_;
  std::vector<Request> running_;
  std::shared_ptr<uint8_t> workspace_;
  size_t workspace_bytes_ = 0;
  int64_t number_ = 0;
};

// ---- the scheduler -------------------------------------------------------------------------------------------------

void Day::preempt(size_t at) {
  Request& r = running_[at];
  free_.insert(free_.end(), r.pages.begin(), r.pages.end());
  r.pages.clear();
  r.prompt = std::max(r.prompt, static_cast<int64_t>(r.tokens.size()));
  r.cached = r.rows = 0;
  ++preempted;
}

/// Pages for running_[at], if need be those of the request with the most. False: it had to give way itself.
bool Day::make_room(size_t at) {
  const auto needed = [&] {
    const int64_t keys = (running_[at].cached + running_[at].rows) / g_.group;
    return static_cast<size_t>((keys + g_.page_size - 1) / g_.page_size);
  };
  while (running_[at].pages.size() < needed()) {
    if (free_.empty()) {
      const auto most = std::max_element(running_.begin(), running_.end(), [](const Request& a, const Request& b) {
        return a.pages.size() < b.pages.size();
      });
      preempt(static_cast<size_t>(most - running_.begin()));
      if (running_[at].rows == 0) return false;
      continue;
    }
    running_[at].pages.push_back(free_.back());
    free_.pop_back();
  }
  return true;
}

void Day::schedule() {
  while (static_cast<int64_t>(running_.size()) < g_.requests) {
    Request r;
    r.prompt = random_.between(1, g_.max_tokens * 2 / 3);
    r.finish = std::min(g_.max_tokens - g_.next_n, r.prompt + random_.between(1, 40));
    r.block = blocks_.back();
    blocks_.pop_back();
    running_.push_back(std::move(r));
  }
  random_.shuffle(running_);
  int64_t left = kStepRows;
  for (size_t i = 0; i < running_.size(); ++i) {
    Request& r = running_[i];
    const int64_t wanted = r.decodes() ? random_.between(1, g_.next_n)
                                       : std::min(r.prompt - r.cached, random_.between(1, g_.uniform ? g_.next_n : 20));
    r.rows = random_.chance(0.1) ? 0 : std::min(wanted, left);
    while (static_cast<int64_t>(r.tokens.size()) < r.cached + r.rows) {
      std::vector<float> token;
      for (int64_t d = 0; d < 2 * g_.width(); ++d) token.push_back(round_to_bf16(random_.normal()));
      r.tokens.push_back(std::move(token));
    }
    if (make_room(i)) left -= g_.uniform ? g_.next_n : running_[i].rows;
  }
}

void Day::advance() {
  std::vector<Request> kept;
  for (Request& r : running_) {
    const bool decoded = r.decodes() && r.rows > 0;
    const int64_t accepted = decoded ? random_.between(1, r.rows) : r.rows;
    rejected += r.rows - accepted;
    r.cached += accepted;
    if (decoded) r.tokens.resize(static_cast<size_t>(std::max(r.cached, r.prompt)));
    r.rows = 0;
    if (r.cached < r.finish) {
      kept.push_back(std::move(r));
      continue;
    }
    free_.insert(free_.end(), r.pages.begin(), r.pages.end());
    blocks_.push_back(r.block);
    ++finished;
  }
  running_ = std::move(kept);
}

// ---- a step --------------------------------------------------------------------------------------------------------

Day::Inputs Day::inputs() {
  const auto count = static_cast<int64_t>(running_.size());
  int64_t real = 0;
  for (const Request& r : running_) real += r.rows;
  const int64_t rows = g_.uniform ? count * g_.next_n : real + random_.between(0, 3);  // graph padding
  Inputs in{{}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, Tokens(g_, rows), rows};
  std::vector<int32_t> starts{0}, lens;
  in.table = Array(DType::i32, {count, g_.max_pages()}), in.token_table = Array(DType::i32, {count, g_.max_tokens});
  std::fill_n(in.table.as<int32_t>(), in.table.size(), 1000000000);
  for (int64_t b = 0; b < count; ++b) {
    const Request& r = running_[static_cast<size_t>(b)];
    starts.push_back(starts.back() + static_cast<int32_t>(r.rows));
    lens.push_back(static_cast<int32_t>(r.cached + r.rows));
    std::copy(r.pages.begin(), r.pages.end(), in.table.as<int32_t>() + b * g_.max_pages());
    for (int64_t t = 0; t < g_.max_tokens; ++t)
      in.token_table.as<int32_t>()[b * g_.max_tokens + t] = static_cast<int32_t>(1000 * b + t);
  }
  in.query_start = Array::of(starts), in.seq_lens = Array::of(lens);
  place_rows(in);
  const Array raw = normals(DType::bf16, {rows, g_.heads, g_.head_dim}, random_),
              weights = normals(DType::f32, {rows, g_.heads}, random_);
  const bool fp4 = g_.format == KeyFormat::mxfp4;
  const DType codes = fp4 ? DType::u8 : g_.format == KeyFormat::fp8 ? DType::f8_e4m3fn : DType::bf16;
  in.q = Array(codes, {rows, g_.heads, fp4 ? g_.head_dim / 2 : g_.head_dim});
  if (fp4) in.q_scales = Array(DType::u8, {rows, g_.heads, g_.head_dim / 32});
  in.weights = Array(DType::f32, {rows, g_.heads});
  QuantizeQ a{};
  a.q = raw.view(), a.weights = weights.view(), a.format = g_.format;
  a.q_out = in.q.view(), a.q_scales_out = in.q_scales.view(), a.weights_out = in.weights.view();
  if (rows > 0) run(a, on(backend_));
  return in;
}

/// Windows, positions, slots of the rows: by expand_rows where they are packed, by hand where each request has next_n.
void Day::place_rows(Inputs& in) {
  in.request = Array(DType::i32, {in.rows}), in.lens = Array(DType::i32, {in.rows});
  in.positions = Array(DType::i32, {in.rows}), in.slots = Array(DType::i64, {in.rows});
  in.state_slots = Array(DType::i64, {in.rows});
  ExpandRows a{};
  a.query_start = in.query_start.view(), a.seq_lens = in.seq_lens.view(), a.ratio = g_.group;
  a.block_table = in.table.view(), a.page_size = g_.page_size, a.capacity = in.rows;
  a.row_request = in.request.view(), a.lens = in.lens.view(), a.positions = in.positions.view();
  a.slots = in.slots.view();
  if (in.rows > 0) run(a, on(backend_));
  std::vector<int64_t> from;  // the packed row that stands at each row
  for (int64_t row = 0; row < in.rows; ++row) from.push_back(row);
  if (g_.uniform) {
    for (int64_t row = in.rows - 1; row >= 0; --row) {
      const int64_t b = row / g_.next_n, i = row % g_.next_n;
      const int64_t at = in.query_start.as<int32_t>()[b] + i;
      const bool real = i < running_[static_cast<size_t>(b)].rows;
      in.request.as<int32_t>()[row] = static_cast<int32_t>(b);
      in.lens.as<int32_t>()[row] = real ? in.lens.as<int32_t>()[at] : 0;
      in.positions.as<int32_t>()[row] = real ? in.positions.as<int32_t>()[at] : -1;
      in.slots.as<int64_t>()[row] = real ? in.slots.as<int64_t>()[at] : -1;
    }
  }
  for (int64_t row = 0; row < in.rows; ++row) {
    const int64_t b = in.request.as<int32_t>()[row], p = in.positions.as<int32_t>()[row];
    in.state_slots.as<int64_t>()[row] = -1;
    if (b < 0 || p < 0) continue;
    const Request& r = running_[static_cast<size_t>(b)];
    in.state_slots.as<int64_t>()[row] = r.block * g_.ring() + p % g_.ring();
    in.tokens.set(row, r.tokens[static_cast<size_t>(p)]);
  }
}

PoolK Day::pool_args(const Tokens& tokens, const KeyCache& cache) const {
  PoolK a{};
  a.k = tokens.value.view(), a.gate = tokens.score.view(), a.ape = ape_.view(), a.pool_size = g_.group;
  a.cache = cache;
  return a;
}

CompressK Day::compress_args(const Tokens& tokens, const KeyCache& cache) const {
  CompressK a{};
  a.kv = tokens.value.view(), a.score = tokens.score.view(), a.ape = ape_.view();
  a.rms_weight = weight_.view(), a.eps = 1e-6F, a.cos_sin = cos_sin_.view(), a.cache = cache;
  return a;
}

/// Windows are stored before the layer, as the model's compressor does it.
void Day::store(const Inputs& in) {
  CompressK a = compress_args(in.tokens, cache_);
  a.positions = in.positions.view(), a.state = state_.view(), a.state_slots = in.state_slots.view();
  a.slot_mapping = in.slots.view();
  std::vector<int32_t> starts{0};
  for (int64_t b = 0; b < in.seq_lens.size(); ++b) starts.push_back(static_cast<int32_t>((b + 1) * g_.next_n));
  const Array padded = Array::of(starts);
  a.query_start = g_.uniform ? padded.view() : in.query_start.view();
  Exec exec = on(backend_);
  exec.strict = exec.device == Device::cpu && number_ % 2 == 0;
  run(a, exec);
}

void Day::answer(const Inputs& in, const Outputs& out) {
  IndexerStep s{};
  s.q = {in.q.view(), in.q_scales.view(), in.weights.view()};
  s.keys.cache = cache_, s.keys.block_table = in.table.view();
  s.rows.count = in.rows, s.rows.end = in.lens.view();
  if (g_.uniform) {
    s.rows.next_n = g_.next_n;
  } else {
    s.rows.request = in.request.view();
  }
  s.num_decode_rows = in.rows;
  s.out = out.selection();
  uint64_t stats[kNumStats] = {};
  Exec exec = on(backend_, stats);
  exec.workspace = workspace_.get(), exec.workspace_bytes = workspace_bytes_;
  exec.strict = exec.device == Device::cpu && number_ % 2 == 0;  // nothing is wild
  if (g_.pools) {
    s.k = in.tokens.value.view(), s.gate = in.tokens.score.view(), s.ape = ape_.view();
    s.positions = in.positions.view(), s.slot_mapping = in.slots.view();
    s.tail = state_.view(), s.tail_slots = in.state_slots.view();
    forward_on_device(SparseAttnIndexerKpool(config()), s, exec);
  } else {
    if (in.rows > 0) store(in);
    forward_on_device(SparseAttnIndexer(config()), s, exec);
  }
  EXPECT_EQ(stats[kSkippedPages], 0u);
  EXPECT_EQ(stats[kSkippedSlots], 0u);
}

/// All tokens of a request in one call: slot g for group g.
void Day::fill_from_scratch(const Request& r, const KeyCache& cache) {
  const int64_t rows = (r.cached + r.rows) / g_.group * g_.group;
  if (rows == 0) return;
  const Tokens tokens(g_, rows);
  std::vector<int64_t> positions, slots, states;
  for (int64_t p = 0; p < rows; ++p) {
    tokens.set(p, r.tokens[static_cast<size_t>(p)]);
    positions.push_back(p), states.push_back(p % g_.ring());
    slots.push_back((p + 1) % g_.group == 0 ? p / g_.group : -1);
  }
  const Array at = longs_of(positions), to = longs_of(slots), state_slots = longs_of(states);
  const Array starts = Array::of({0, static_cast<int32_t>(rows)});
  if (g_.pools) {
    PoolK a = pool_args(tokens, cache);
    a.positions = at.view(), a.slot_mapping = to.view(), a.q_indptr = starts.view();
    return run(a, on(backend_));
  }
  CompressK a = compress_args(tokens, cache);
  const Array state(DType::f32, {1, g_.ring(), 2 * g_.width()});
  a.positions = at.view(), a.slot_mapping = to.view(), a.query_start = starts.view();
  a.state = state.view(), a.state_slots = state_slots.view();
  run(a, on(backend_));
}

/// What a row's columns must hold, given the key rows chosen for it.
std::vector<int64_t> Day::expected(const Tensor& chosen, int64_t row, int64_t seen) const {
  std::vector<int64_t> want;
  for (int64_t i = 0; i < chosen.shape[1]; ++i) {
    const int64_t id = int_at(chosen, row, i);
    for (int64_t j = 0; j < (g_.pools ? g_.group : 1); ++j) {
      want.push_back(id < 0 ? -1 : g_.pools ? id * g_.group + j : id);
    }
  }
  for (int64_t o = 0; g_.pools && o < g_.group - 1; ++o) {
    want.push_back(o < seen % g_.group ? seen / g_.group * g_.group + o : -1);
  }
  return want;
}

void Day::check_request(const Inputs& in, const Outputs& out, size_t b, int64_t first) {
  const Request& r = running_[b];
  const int64_t pages = g_.max_pages(), keys = g_.pools ? g_.topk / g_.group : g_.topk;
  Array memory;
  const KeyCache cache = cache_of(memory, g_.format, g_.page_size, g_.head_dim, pages);
  fill_from_scratch(r, cache);
  const Array table(DType::i32, {1, pages}), ends(DType::i32, {r.rows}), request(DType::i32, {r.rows});
  for (int32_t p = 0; p < pages; ++p) table.as<int32_t>()[p] = p;
  for (int64_t i = 0; i < r.rows; ++i) ends.as<int32_t>()[i] = static_cast<int32_t>((r.cached + i + 1) / g_.group);
  const Array chosen(DType::i32, {r.rows, keys});
  PagedMqaTopk search{};
  search.q = {in.q.view(), in.q_scales.view(), in.weights.view()};
  for (Tensor* t : {&search.q.values, &search.q.scales, &search.q.weights}) {
    if (t->data != nullptr) t->data = element(*t, first), t->shape[0] = r.rows;
  }
  search.keys.cache = cache, search.keys.block_table = table.view();
  search.rows.count = r.rows, search.rows.end = ends.view(), search.rows.request = request.view();
  search.topk = static_cast<int32_t>(keys), search.out.indices = chosen.view();
  run(search, on(backend_));
  for (int64_t i = 0; i < r.rows; ++i, ++answered) {
    const std::vector<int64_t> want = expected(chosen.view(), i, r.cached + i + 1);
    ASSERT_EQ(static_cast<int64_t>(want.size()), g_.columns());
    for (int64_t c = 0; c < g_.columns(); ++c) {
      const int64_t token = want[static_cast<size_t>(c)];
      ASSERT_EQ(int_at(out.indices.view(), first + i, c), token) << "row " << first + i << ", column " << c;
      ASSERT_EQ(int_at(out.slots.view(), first + i, c), token < 0 ? -1 : 1000 * static_cast<int64_t>(b) + token);
    }
  }
}

void Day::step() {
  ++number_;
  schedule();
  const Inputs in = inputs();
  Want want;
  want.slots = true, want.slot_map = {in.token_table.view(), false, 1}, want.wide = true;
  const Outputs out(kBufferRows, g_.columns(), want);
  answer(in, out);
  for (size_t b = 0; b < running_.size(); ++b) {
    const int64_t first = g_.uniform ? static_cast<int64_t>(b) * g_.next_n : in.query_start.as<int32_t>()[b];
    if (running_[b].rows > 0) check_request(in, out, b, first);
    if (::testing::Test::HasFatalFailure()) return;
  }
  for (int64_t row = 0; row < in.rows; ++row) {
    if (in.positions.as<int32_t>()[row] >= 0) continue;
    for (int64_t c = 0; c < g_.columns(); ++c)
      ASSERT_EQ(int_at(out.indices.view(), row, c), -1) << "padded row " << row;
  }
  EXPECT_EQ(out.indices.touched_outside(in.rows, g_.columns() + 3), "");
  advance();
}

std::vector<Geometry> geometries() {
  std::vector<Geometry> list;
  const auto add = [&](const char* name, bool pools, int32_t group) -> Geometry& {
    Geometry g{name, pools, group};
    g.seed = list.size() + 1;
    list.push_back(g);
    return list.back();
  };
  add("pools of 4", true, 4);
  add("pools of 16", true, 16).topk = 64;
  Geometry& padded = add("pools of 4, rows padded", true, 4);
  padded.uniform = true, padded.next_n = 4, padded.heads = 4, padded.head_dim = 32;
  Geometry& one = add("pools of 1", true, 1);
  one.heads = 4, one.head_dim = 32;
  Geometry& bf16 = add("pools of 2, bf16", true, 2);
  bf16.format = KeyFormat::bf16, bf16.heads = 4, bf16.head_dim = 32;
  Geometry& fp4 = add("pools of 4, mxfp4", true, 4);
  fp4.format = KeyFormat::mxfp4, fp4.heads = 4, fp4.head_dim = 64;
  add("windows of 4 with overlap", false, 4).heads = 8;
  Geometry& wide = add("windows of 128 without", false, 128);
  wide.overlap = false, wide.heads = 8, wide.head_dim = 32, wide.max_tokens = 700, wide.topk = 3, wide.page_size = 2,
  wide.steps = 160;
  Geometry& drafts = add("windows of 4, rows padded", false, 4);
  drafts.uniform = true, drafts.next_n = 8, drafts.requests = 5, drafts.heads = 4, drafts.head_dim = 32;
  return list;
}

class ServingPools : public BackendTest {};

TEST_P(ServingPools, EveryAnswerOfADayEqualsOneFromScratch) {
  for (const Geometry& geometry : geometries()) {
    Day day(geometry, GetParam());
    for (int64_t step = 0; step < geometry.steps; ++step) {
      SCOPED_TRACE(std::string(geometry.name) + ", step " + std::to_string(step));
      day.step();
      if (HasFailure()) return;
    }
    // A day in which little happened would test little.
    EXPECT_GT(day.answered, 500) << geometry.name;
    EXPECT_GT(day.rejected, 10) << geometry.name;
    EXPECT_GT(day.preempted, 0) << geometry.name;
    EXPECT_GT(day.finished, 3) << geometry.name;
  }
}
TOPKEY_ON_GENERAL_BACKENDS(ServingPools);

}  // namespace
}  // namespace topkey::testing
