// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See serving_day.h.
#include "tests/serving_day.h"

#include <algorithm>
#include <cstring>
#include <iostream>
#include <numeric>

namespace topkey::testing {

void forward_eager(const std::vector<LayerCall>& calls, const Exec& exec) {
  for (const LayerCall& call : calls) forward_on_device(*call.indexer, call.step, exec);
}

// ---- the scheduler -------------------------------------------------------------------------------------------------

void Day::draw_tokens(Request& request, int64_t count) {
  while (static_cast<int64_t>(request.tokens.size()) < count) {
    std::vector<float> token;
    for (int32_t d = 0; d < g_.head_dim; ++d) token.push_back(random_.normal());
    request.tokens.push_back(std::move(token));
  }
}

void Day::arrive() {
  while (waiting_.size() < 3 && random_.chance(0.35)) {
    Request r{};
    r.id = next_id_++;
    r.prompt = random_.chance(0.2) ? random_.between(1, 5) : random_.between(6, g_.max_tokens * 3 / 4);
    r.finish = std::min(g_.max_tokens - g_.next_n, r.prompt + random_.between(1, 60));
    draw_tokens(r, r.prompt);
    waiting_.push_back(std::move(r));
  }
  while (static_cast<int64_t>(running_.size()) < g_.requests && !waiting_.empty() && random_.chance(0.8)) {
    running_.push_back(std::move(waiting_.front()));
    waiting_.erase(waiting_.begin());
  }
}

void Day::preempt(size_t at) {
  Request r = std::move(running_[at]);
  running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(at));
  free_.insert(free_.end(), r.pages.begin(), r.pages.end());
  r.pages.clear();
  r.prompt = std::max(r.prompt, static_cast<int64_t>(r.tokens.size()));  // what it has said so far is prompt now
  r.cached = r.rows = 0;
  waiting_.insert(waiting_.begin(), std::move(r));
  ++preempted;
}

/// Pages for running_[at], if need be those of requests behind it. False: it had to give way itself.
bool Day::make_room(size_t at) {
  const auto needed = [&] {
    const int64_t keys = (running_[at].cached + running_[at].rows) / g_.ratio;
    return static_cast<size_t>((keys + g_.page_size - 1) / g_.page_size);
  };
  while (running_[at].pages.size() < needed()) {
    if (free_.empty()) {
      const size_t last = running_.size() - 1;
      preempt(last);
      if (last == at) return false;
      continue;
    }
    const size_t i = random_.below(free_.size());
    running_[at].pages.push_back(free_[i]);
    free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return true;
}

/// Rows of this step for each running request; decodes before prefills, as the engines order a batch.
void Day::schedule() {
  std::stable_sort(running_.begin(), running_.end(),
                   [](const Request& a, const Request& b) { return a.decodes() > b.decodes(); });
  int64_t left = g_.step_rows - random_.between(0, g_.step_rows / 2);
  const int64_t drafts = random_.between(1, g_.next_n);
  for (size_t i = 0; i < running_.size(); ++i) {
    Request& r = running_[i];
    const int64_t wanted = !r.decodes() ? std::min(r.prompt - r.cached, random_.between(1, 30))
                           : g_.uniform ? drafts
                                        : random_.between(1, g_.next_n);
    r.rows = random_.chance(0.1) ? 0 : std::min(wanted, left);
    if (r.decodes()) draw_tokens(r, r.cached + r.rows);
    if (!make_room(i)) break;
    left -= running_[i].rows;
  }
}

/// Of a decode's drafts some are rejected: their keys stay in the cache as rubbish that the next step writes over.
void Day::advance() {
  std::vector<Request> kept;
  for (Request& r : running_) {
    const bool decoded = r.decodes() && r.rows > 0;
    const int64_t accepted = decoded ? random_.between(1, r.rows) : r.rows;
    rejected += r.rows - accepted;
    r.cached += accepted;
    if (decoded && accepted < r.rows) r.tokens.resize(static_cast<size_t>(std::max(r.cached, r.prompt)));
    r.rows = 0;
    if (r.cached < r.finish) {
      kept.push_back(std::move(r));
      continue;
    }
    free_.insert(free_.end(), r.pages.begin(), r.pages.end());
    ++finished;
  }
  running_ = std::move(kept);
}

// ---- a step --------------------------------------------------------------------------------------------------------

Day::Inputs Day::inputs() {
  Inputs in;
  std::vector<int32_t> starts{0}, lens;
  for (const Request& r : running_) {
    starts.push_back(starts.back() + static_cast<int32_t>(r.rows));
    lens.push_back(static_cast<int32_t>(r.cached + r.rows));
  }
  in.rows = starts.back();
  in.capacity = fixed_rows_ ? g_.step_rows : std::min(g_.step_rows, in.rows + random_.between(0, 6));  // graph padding
  in.query_start = Array::of(starts);
  in.seq_lens = Array::of(lens);
  in.table = Array(DType::i32, {g_.requests, g_.max_pages()});
  std::fill_n(in.table.as<int32_t>(), in.table.size(), 1000000000);
  for (size_t b = 0; b < running_.size(); ++b) {
    std::copy(running_[b].pages.begin(), running_[b].pages.end(),
              in.table.as<int32_t>() + static_cast<int64_t>(b) * g_.max_pages());
  }
  in.row_request = Array(DType::i32, {in.capacity}), in.lens = Array(DType::i32, {in.capacity});
  in.positions = Array(DType::i32, {in.capacity}), in.slots = Array(DType::i64, {in.capacity});
  ExpandRows a{};
  a.query_start = in.query_start.view(), a.seq_lens = in.seq_lens.view(), a.ratio = g_.ratio;
  a.block_table = in.table.view(), a.page_size = g_.page_size, a.capacity = in.capacity;
  a.row_request = in.row_request.view(), a.lens = in.lens.view(), a.positions = in.positions.view();
  a.slots = in.slots.view();
  if (in.capacity > 0) run(a, on(backend_));
  if (g_.blocks > 0) in.candidates = Array(DType::i32, {in.capacity, g_.blocks});
  set_keys(in);
  quantize(in);
  in.plan = plan(in);
  return in;
}

/// Raw keys of the step's rows; rows without a slot hold NaN, which no one may look at.
void Day::set_keys(Inputs& in) {
  in.k = Array(DType::f32, {in.capacity, g_.head_dim});
  std::memset(in.k.as<uint8_t>(), 0xFF, in.k.bytes());
  int64_t row = 0;
  for (const Request& r : running_) {
    for (int64_t i = 0; i < r.rows; ++i, ++row) {
      const int64_t token = r.cached + i;
      if ((token + 1) % g_.ratio != 0) continue;
      std::copy_n(r.tokens[static_cast<size_t>(token)].data(), g_.head_dim, in.k.as<float>() + row * g_.head_dim);
    }
  }
}

void Day::quantize(Inputs& in) {
  const Array raw(DType::bf16, {in.capacity, g_.heads, g_.head_dim}), weights(DType::f32, {in.capacity, g_.heads});
  for (int64_t i = 0; i < raw.size(); ++i) raw.as<uint16_t>()[i] = float_to_bf16(random_.normal());
  for (int64_t i = 0; i < weights.size(); ++i) weights.as<float>()[i] = random_.normal();
  const bool fp4 = g_.format == KeyFormat::mxfp4;
  in.q = Array(g_.format == KeyFormat::bf16 ? DType::bf16 : DType::u8,
               {in.capacity, g_.heads, fp4 ? g_.head_dim / 2 : g_.head_dim});
  if (fp4) in.q_scales = Array(DType::u8, {in.capacity, g_.heads, g_.head_dim / 32});
  in.weights = Array(DType::f32, {in.capacity, g_.heads});
  QuantizeQ a{};
  a.q = raw.view(), a.weights = weights.view(), a.softmax_scale = 0.25F, a.head_scale = 0.5F, a.format = g_.format;
  a.q_out = in.q.view(), a.q_scales_out = in.q_scales.view(), a.weights_out = in.weights.view();
  if (in.capacity > 0) run(a, on(backend_));
}

/// From bounds that may be too high; only the split is used here, and no answer may depend on it.
StepPlan Day::plan(const Inputs& in) const {
  std::vector<int64_t> query_lens, seq_lens;
  std::vector<uint8_t> prefilling;
  for (const Request& r : running_) {
    query_lens.push_back(r.rows);
    seq_lens.push_back((r.cached + r.rows) * (number_ % 3 == 0 ? 8 : 1));
    prefilling.push_back(!r.decodes());
  }
  PlanStep step{};
  step.num_requests = static_cast<int64_t>(running_.size());
  step.query_lens = query_lens.data(), step.seq_lens = seq_lens.data(), step.prefilling = prefilling.data();
  step.decode_threshold = g_.next_n, step.require_uniform = g_.uniform, step.extends_prefill = number_ % 2 == 0;
  step.ratio = g_.ratio, step.logits_bytes = 4 * 5000;
  StepPlan plan = plan_step(step);
  EXPECT_EQ(plan.num_decode_rows + plan.num_prefill_rows, in.rows);
  return plan;
}

void Day::answer(const Inputs& in, const Outputs& out) {
  IndexerStep s{};
  s.k = in.k.view(), s.slot_mapping = in.slots.view();
  s.norm = norm(), s.rope = rope(in.positions.view());
  s.q = {in.q.view(), in.q_scales.view(), in.weights.view()};
  s.keys.cache = {pool_.view(), g_.format, g_.layout, g_.page_size, g_.head_dim};
  s.keys.block_table = in.table.view();
  s.rows.count = in.capacity, s.rows.end = in.lens.view(), s.rows.request = in.row_request.view();
  s.num_decode_rows = in.plan.num_decode_rows;
  s.out = out.selection();
  uint64_t stats[kNumStats] = {};
  Exec exec = on(backend_, stats);
  exec.workspace = workspace_.get(), exec.workspace_bytes = workspace_bytes_;
  // Nothing is wild, so that strict changes nothing.
  exec.strict = exec.device == Device::cpu && number_ % 2 == 0;
  s.candidates = in.candidates.view();
  std::vector<LayerCall> calls{{&indexer_, s}};
  if (g_.blocks > 0) {
    s.k = s.slot_mapping = {}, s.norm = {}, s.rope = {}, s.out = consumed_->selection();
    calls.push_back({&consumer_, s});
  }
  const Array nothing(DType::i32, {in.capacity});  // a layer that did not skip would answer -1 everywhere
  if (g_.reuse) {
    s.rows.end = nothing.view(), s.skip_step = true;
    for (int layer = 0; layer < 3; ++layer) calls.push_back({&indexer_, s});
  }
  forward_(calls, exec);
  EXPECT_EQ(stats[kSkippedPages], 0u);
  EXPECT_EQ(stats[kSkippedSlots], 0u);
}

/// A matrix of all the keys that the last row of a request sees, made anew from its tokens.
struct Scratch {
  Array values, scales;
  Scratch(KeyFormat format, int64_t keys, int64_t head_dim)
      : values(format == KeyFormat::bf16 ? DType::bf16 : DType::u8,
               {keys, format == KeyFormat::bf16 ? head_dim : value_bytes(format, head_dim)}) {
    if (is_fp8(format)) scales = Array(DType::f32, {keys});
    if (format == KeyFormat::mxfp4) scales = Array(DType::u8, {keys, head_dim / 32});
  }
};

void Day::check_request(const Inputs& in, const Outputs& out, size_t b, int64_t first) {
  const Request& r = running_[b];
  const int64_t keys = (r.cached + r.rows) / g_.ratio;
  const Array raw(DType::f32, {keys, g_.head_dim}), ends(DType::i32, {r.rows}), at(DType::i32, {keys});
  for (int64_t i = 0; i < keys; ++i) {
    const int64_t token = (i + 1) * g_.ratio - 1;
    std::copy_n(r.tokens[static_cast<size_t>(token)].data(), g_.head_dim, raw.as<float>() + i * g_.head_dim);
    at.as<int32_t>()[i] = static_cast<int32_t>(token);
  }
  for (int64_t i = 0; i < r.rows; ++i) ends.as<int32_t>()[i] = static_cast<int32_t>((r.cached + i + 1) / g_.ratio);
  const Scratch made(g_.format, keys, g_.head_dim);
  QuantizeK quantize{};
  quantize.k = raw.view(), quantize.norm = norm(), quantize.rope = rope(at.view());
  quantize.out = {made.values.view(), made.scales.view(), g_.format};
  run(quantize, on(backend_));

  Want want;
  want.scores = want.counts = true;
  want.blocks = g_.blocks, want.block_size = g_.block_size;
  const Outputs own(r.rows, g_.topk, want);
  MqaTopk search{};
  const auto rows_from = [&](const Array& a) {
    Tensor t = a.view();
    if (!a) return t;
    t.data = element(t, first);
    t.shape[0] = r.rows;
    return t;
  };
  search.q = {rows_from(in.q), rows_from(in.q_scales), rows_from(in.weights)};
  search.keys = quantize.out;
  search.rows.count = r.rows, search.rows.end = ends.view();
  search.topk = g_.topk, search.out = own.selection();
  run(search, on(backend_));
  if (number_ % 20 == 0) {
    const Truth truth = truth_of(search.q, search.keys, search.rows, false);
    EXPECT_TRUE(good(compare_sets(search, truth, arithmetic(backend_.c_str(), g_.format, in.q.view().dtype))));
  }
  for (int64_t i = 0; i < r.rows; ++i) {
    ASSERT_EQ(int_at(out.counts.view(), first + i), int_at(own.counts.view(), i)) << "row " << first + i;
    for (int64_t c = 0; c < g_.topk; ++c) {
      const int64_t index = int_at(out.indices.view(), first + i, c);
      ASSERT_EQ(index, int_at(own.indices.view(), i, c)) << "row " << first + i << ", column " << c;
      ASSERT_EQ(bits_of(float_at(out.scores.view(), first + i, c)), bits_of(float_at(own.scores.view(), i, c)))
          << "row " << first + i << ", column " << c;
      const int64_t slot =
          index < 0 ? -1
                    : int64_t{r.pages[static_cast<size_t>(index / g_.page_size)]} * g_.page_size + index % g_.page_size;
      ASSERT_EQ(int_at(out.slots.view(), first + i, c), slot) << "row " << first + i << ", column " << c;
    }
    for (int64_t c = 0; c < g_.blocks; ++c) {
      ASSERT_EQ(int_at(in.candidates.view(), first + i, c), int_at(own.blocks.view(), i, c)) << "row " << first + i;
    }
    ++answered;
  }
  if (g_.blocks > 0) check_consumer(in, search, first);
}

/// The second layer sees the keys of the blocks that the first one chose, and no others.
void Day::check_consumer(const Inputs& in, MqaTopk search, int64_t first) {
  Tensor blocks = in.candidates.view();
  blocks.data = element(blocks, first), blocks.shape[0] = search.rows.count;
  search.admit.candidates = blocks, search.admit.candidate_block_size = g_.block_size;
  const Outputs own(search.rows.count, g_.topk, {});
  search.out = own.selection();
  run(search, on(backend_));
  for (int64_t i = 0; i < search.rows.count; ++i) {
    for (int64_t c = 0; c < g_.topk; ++c) {
      ASSERT_EQ(int_at(consumed_->indices.view(), first + i, c), int_at(own.indices.view(), i, c))
          << "row " << first + i;
    }
  }
}

void Day::check(const Inputs& in, const Outputs& out) {
  int64_t first = 0;
  for (size_t b = 0; b < running_.size(); ++b) {
    SCOPED_TRACE("request " + std::to_string(running_[b].id) + ", number " + std::to_string(b) + " of the batch, " +
                 std::to_string(running_[b].cached) + " tokens before");
    if (running_[b].rows > 0) check_request(in, out, b, first);
    if (::testing::Test::HasFatalFailure()) return;
    first += running_[b].rows;
  }
  for (int64_t row = first; row < in.capacity; ++row, ++padded_rows) {
    EXPECT_EQ(int_at(out.counts.view(), row), 0) << "padded row " << row;
    for (int64_t c = 0; c < g_.topk; ++c) ASSERT_EQ(int_at(out.indices.view(), row, c), -1) << "padded row " << row;
  }
  for (const Guarded* g : {&out.indices, &out.slots, &out.scores}) {
    EXPECT_EQ(g->touched_outside(in.capacity, g_.topk), "") << "rows of the buffer that are no rows of the step";
  }
}

void Day::step() {
  ++number_;
  arrive();
  schedule();
  const Inputs in = inputs();
  Want want;
  want.slots = want.scores = want.counts = true;
  want.slot_map = {in.table.view(), false, g_.page_size};
  const Outputs out(g_.step_rows, g_.topk, want), consumed(g_.step_rows, g_.topk, {});
  consumed_ = &consumed;
  answer(in, out);
  check(in, out);
  mixed_steps += in.plan.num_decode_rows > 0 && in.plan.num_prefill_rows > 0;
  advance();
}

const std::vector<Geometry>& geometries() {
  static const std::vector<Geometry> all = [] {
    std::vector<Geometry> list;
    const auto add = [&](const char* name, KeyFormat format, int32_t page_size) -> Geometry& {
      Geometry g{name};
      g.format = format, g.page_size = page_size, g.seed = list.size() + 1;
      list.push_back(g);
      return list.back();
    };
    add("fp8_page16", KeyFormat::fp8, 16).rope = true;
    Geometry& reused = add("fp8_page64", KeyFormat::fp8, 64);
    reused.uniform = reused.reuse = true;
    add("bf16_page16", KeyFormat::bf16, 16).uniform = true;
    add("bf16_page64", KeyFormat::bf16, 64).next_n = 1;
    Geometry& compressed = add("fp8_page16_ratio4", KeyFormat::fp8, 16);
    compressed.ratio = 4, compressed.pool_keys = 180, compressed.rope = true;
    Geometry& mxfp4 = add("mxfp4_page64_ratio4", KeyFormat::mxfp4, 64);
    mxfp4.ratio = 4, mxfp4.pool_keys = 320, mxfp4.rope = true, mxfp4.head_dim = 64;
    Geometry& two_level = add("fp8_page16_ratio2_blocks", KeyFormat::fp8, 16);
    two_level.ratio = 2, two_level.pool_keys = 360, two_level.block_size = 8, two_level.blocks = 6;
    Geometry& production = add("fp8_page64_d128", KeyFormat::fp8, 64);  // the shape that every CUDA backend takes
    production.heads = 8, production.head_dim = 128, production.rope = true;
    Geometry& tiled = add("fp8_fnuz_tiled16_page32", KeyFormat::fp8_fnuz, 32);
    tiled.layout = Layout::tiled16;
    Geometry& blocks = add("fp8_page64_blocks", KeyFormat::fp8, 64);
    blocks.block_size = 8, blocks.blocks = 6;
    return list;
  }();
  return all;
}

bool live_through(const Geometry& geometry, const std::string& backend, const Forward& forward, bool fixed_rows) {
  try {
    Day day(geometry, backend, forward, fixed_rows);
    for (int step = 0; step < 200; ++step) {
      SCOPED_TRACE(std::string(geometry.name) + ", step " + std::to_string(step));
      day.step();
      if (::testing::Test::HasFailure()) return true;
    }
    // A day in which little happened would test little.
    EXPECT_GT(day.answered, 1000) << geometry.name;
    EXPECT_GT(day.mixed_steps, 50) << geometry.name;
    EXPECT_GT(day.preempted, 5) << geometry.name;
    EXPECT_GT(day.finished, 10) << geometry.name;
    EXPECT_GT(day.padded_rows, 100) << geometry.name;
    EXPECT_GT(geometry.next_n > 1 ? day.rejected : 1, 0) << geometry.name;
    return true;
  } catch (const Error& error) {
    if (error.status() != Status::unsupported) throw;
    std::cout << "[ refused  ] " << geometry.name << ": " << error.what() << "\n";
    return false;
  }
}

}  // namespace topkey::testing
