// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The layer: a mixed step equals store_k and paged_mqa_topk apart, and the oracle; what of the buffer is cleared and
// what never touched (B26, B27); candidate roles; workspace; a step that is refused has written nothing.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "tests/backend_test.h"
#include "tests/draw.h"

namespace topkey::testing {
namespace {

using Bytes = std::vector<uint8_t>;
Bytes bytes_of(const Array& a) { return {a.as<uint8_t>(), a.as<uint8_t>() + a.bytes()}; }

/// Requests of `lens` key rows with `rows[b]` query rows each, the newest tokens; `padded` rows behind; pages of 16.
/// The last rows[b] keys of each request are in `k`, as ready codes, not in the cache, where their places hold NaN.
struct Step {
  Problem p;
  Array k, k_scales, slots, request, end;
  Bytes cache_after;  ///< the whole cache as it must be then
  IndexerStep args{};
  IndexerConfig config{};

  int64_t count() const { return args.rows.count; }
};

struct Shape {
  KeyFormat format = KeyFormat::fp8;
  std::vector<int32_t> lens{70, 33, 0, 90, 45, 3}, rows{1, 3, 0, 20, 0, 2};
  int64_t padded = 3, decode_rows = 4;
  int32_t topk = 12;
  uint64_t seed = 1;
};

/// A problem whose requests have these lengths or more: what lies beyond is written keys that no row sees.
Problem problem_of(const Shape& shape) {
  ProblemSpec spec;
  spec.format = shape.format, spec.paged = true, spec.exact = true, spec.page_size = 16, spec.seed = shape.seed;
  spec.requests = static_cast<int32_t>(shape.lens.size());
  spec.keys = 4 * std::max(1, *std::max_element(shape.lens.begin(), shape.lens.end()));
  spec.rows = std::accumulate(shape.rows.begin(), shape.rows.end(), shape.padded);
  // All requests but the first draw their lengths; a seed that makes each long enough is soon found.
  for (;; ++spec.seed) {
    Problem p = make_problem(spec);
    const bool enough =
        std::equal(p.lens.begin(), p.lens.end(), shape.lens.begin(), [](int64_t a, int32_t b) { return a >= b; });
    if (enough) return p;
  }
}

void set_rows(Step& s, const Shape& shape) {
  std::vector<int32_t> request, end;
  for (size_t b = 0; b < shape.lens.size(); ++b) {
    for (int32_t j = 0; j < shape.rows[b]; ++j) {
      request.push_back(static_cast<int32_t>(b));
      end.push_back(shape.lens[b] - shape.rows[b] + 1 + j);
    }
  }
  request.resize(static_cast<size_t>(s.p.count()), -1);
  end.resize(request.size(), 0);
  s.request = Array::of(request), s.end = Array::of(end);
  s.args.rows.count = s.p.count();
  s.args.rows.request = s.request.view(), s.args.rows.end = s.end.view();
  s.args.num_decode_rows = shape.decode_rows;
}

/// Moves the keys of the step's tokens from the cache to `k`.
void set_keys(Step& s, const Shape& shape) {
  const DenseKeys like = [&] {
    ProblemSpec dense = s.p.spec;
    dense.paged = false, dense.keys = s.p.count(), dense.rows = 1;
    const Problem d = make_problem(dense);
    s.k = d.keys, s.k_scales = d.key_scales;
    return d.dense_keys();
  }();
  s.cache_after = bytes_of(s.p.pages);
  std::vector<int32_t> slots;
  const auto v = static_cast<size_t>(value_bytes(shape.format, s.p.spec.head_dim)),
             g = static_cast<size_t>(scale_bytes(shape.format, s.p.spec.head_dim));
  for (size_t b = 0; b < shape.lens.size(); ++b) {
    for (int64_t at = shape.lens[b] - shape.rows[b]; at < shape.lens[b]; ++at) {
      const auto row = static_cast<int64_t>(slots.size()), request = static_cast<int64_t>(b);
      std::memcpy(element(like.values, row), s.p.values_at(request, at), v);
      std::memset(s.p.values_at(request, at), 0xFF, v);
      if (g > 0) std::memcpy(element(like.scales, row), s.p.scales_at(request, at), g);
      if (g > 0) std::memset(s.p.scales_at(request, at), 0xFF, g);
      slots.push_back(s.p.page_ids[b][static_cast<size_t>(at / 16)] * 16 + static_cast<int32_t>(at % 16));
    }
  }
  slots.resize(static_cast<size_t>(s.p.count()), -1);
  s.slots = Array::of(slots);
  s.args.k = like.values, s.args.k_scales = like.scales, s.args.slot_mapping = s.slots.view();
}

Step make_step(const Shape& shape) {
  Step s;
  s.p = problem_of(shape);
  set_rows(s, shape);
  set_keys(s, shape);
  s.args.q = s.p.query();
  s.args.keys = s.p.paged_keys();
  s.config.heads = s.p.spec.heads, s.config.head_dim = s.p.spec.head_dim, s.config.topk = shape.topk;
  s.config.format = shape.format;
  return s;
}

/// forward() in a workspace of the right size for this very step, whatever the limits.
void forward(const Step& s, Exec exec, size_t bytes = size_t{1} << 26) {
  static const std::shared_ptr<uint8_t> memory = aligned_bytes(size_t{1} << 26);
  exec.workspace = memory.get(), exec.workspace_bytes = bytes;
  forward_on_device(SparseAttnIndexer(s.config), s.args, exec);
}

/// What the layer stands for, made by hand.
PagedMqaTopk search_of(const Step& s, const Selection& out) {
  PagedMqaTopk a{};
  a.q = s.args.q, a.keys = s.args.keys, a.rows = s.args.rows, a.topk = s.config.topk, a.out = out;
  a.admit.force_first = s.config.force_first, a.admit.force_last = s.config.force_last;
  return a;
}
StoreK store_of(const Step& s) {
  StoreK a{};
  a.k = s.args.k, a.k_scales = s.args.k_scales, a.slot_mapping = s.args.slot_mapping, a.cache = s.args.keys.cache;
  return a;
}

Want everything(const Step& s) {
  Want want;
  want.slots = want.scores = want.counts = true;
  want.slot_map = {s.p.block_table.view(), false, 16};
  return want;
}

class Indexer : public BackendTest {};

TEST_P(Indexer, MixedStepEqualsItsStagesAndTheOracle) {
  for (const KeyFormat format : {KeyFormat::fp8, KeyFormat::bf16, KeyFormat::f16, KeyFormat::f32, KeyFormat::q8_0}) {
    SCOPED_TRACE(format_name(format));
    Shape shape;
    shape.format = format;
    Step layer = make_step(shape), stages = make_step(shape);
    layer.config.force_first = stages.config.force_first = 2;
    const Outputs got(layer.count(), shape.topk, everything(layer)),
        want(layer.count(), shape.topk, everything(stages));
    layer.args.out = got.selection();
    uint64_t stats[kNumStats] = {}, stage_stats[kNumStats] = {};
    forward(layer, on(GetParam(), stats));
    run(store_of(stages), on(GetParam(), stage_stats));
    const PagedMqaTopk search = search_of(stages, want.selection());
    run(search, on(GetParam(), stage_stats));
    EXPECT_TRUE(same_outputs(layer.args.out, search.out, layer.count(), shape.topk));
    EXPECT_TRUE(inside(got));
    EXPECT_EQ(bytes_of(layer.p.pages), layer.cache_after);
    EXPECT_EQ(std::vector<uint64_t>(stats, stats + kNumStats),
              std::vector<uint64_t>(stage_stats, stage_stats + kNumStats));
    const PagedMqaTopk asked = search_of(layer, got.selection());
    EXPECT_TRUE(good(compare_selection(asked, truth_of(asked.q, asked.keys, asked.rows, false).ref.view())));
  }
}

/// Keys as a model makes them: norm, rope, Hadamard and rounding happen on the way in.
TEST_P(Indexer, RawKeysGoThroughTheProducer) {
  for (const KeyFormat format : {KeyFormat::fp8, KeyFormat::bf16}) {
    Step layer = make_step({format}), stages = make_step({format});
    const int64_t rows = layer.count(), dim = layer.config.head_dim;
    const Array raw(DType::bf16, {rows, dim}), weight(DType::f32, {dim}), table(DType::f32, {200, 16});
    Random random(5);
    for (int64_t i = 0; i < raw.size(); ++i) raw.as<uint16_t>()[i] = float_to_bf16(random.normal());
    for (const Array& a : {weight, table}) {
      for (int64_t i = 0; i < a.size(); ++i) a.as<float>()[i] = random.normal();
    }
    std::vector<int32_t> positions;
    for (int64_t r = 0; r < rows; ++r) positions.push_back(static_cast<int32_t>(r * 7 % 200));
    const Array at = Array::of(positions);
    layer.args.k = raw.view(), layer.args.k_scales = {};
    layer.args.norm.kind = NormKind::layer, layer.args.norm.weight = weight.view(), layer.args.norm.eps = 1e-6F;
    layer.args.rope = {at.view(), table.view(), 16, true, false}, layer.args.hadamard = true;
    const ScaleRule scale = format == KeyFormat::fp8 ? ScaleRule::f32 : ScaleRule::ue8m0;
    layer.config.scale = scale;
    const Outputs got(rows, layer.config.topk, everything(layer)), want(rows, layer.config.topk, everything(stages));
    layer.args.out = got.selection();
    forward(layer, exec());
    StoreK store{};
    store.k = raw.view(), store.norm = layer.args.norm, store.rope = layer.args.rope, store.hadamard = true;
    store.scale = scale, store.slot_mapping = stages.slots.view(), store.cache = stages.args.keys.cache;
    run(store, exec());
    run(search_of(stages, want.selection()), exec());
    EXPECT_EQ(bytes_of(layer.p.pages), bytes_of(stages.p.pages));
    EXPECT_TRUE(same_outputs(got.selection(), want.selection(), rows, layer.config.topk));
  }
}

/// The engines' buffer: more rows than the step, more columns than topk, shared by decode and prefill.
struct Buffer {
  Guarded indices, slots;
  Buffer(const Step& s, int64_t rows, int64_t columns)
      : indices(DType::i32, rows, columns), slots(DType::i32, rows, columns, 5), table(s.p.block_table) {}
  Selection selection() const {
    Selection out{};
    out.indices = indices.view(), out.slots = slots.view();
    out.slot_map = {table.view(), false, 16};
    return out;
  }
  Array table;
};

TEST_P(Indexer, ClearsAllColumnsOfItsRowsAndNoOtherRow) {
  for (const bool cleared : {false, true}) {
    Step s = make_step({});
    const int64_t topk = s.config.topk, columns = topk + 9;
    const Buffer buffer(s, s.count() + 6, columns);
    s.args.out = buffer.selection(), s.args.cleared = cleared;
    forward(s, exec());
    for (const Guarded* g : {&buffer.indices, &buffer.slots}) {
      EXPECT_EQ(g->touched_outside(s.count(), cleared ? topk : columns), "") << cleared;
      for (int64_t r = 0; r < s.count(); ++r) {
        for (int64_t c = topk; c < columns && !cleared; ++c) ASSERT_EQ(int_at(g->view(), r, c), -1) << r << " " << c;
      }
    }
    const Outputs alone(s.count(), topk, everything(s));
    run(search_of(s, alone.selection()), exec());
    EXPECT_TRUE(same_outputs(s.args.out, alone.selection(), s.count(), topk)) << cleared;
  }
}

TEST_P(Indexer, SkippedStepDoesNothing) {
  Step s = make_step({});
  const Buffer buffer(s, s.count(), s.config.topk);
  const Bytes cache = bytes_of(s.p.pages);
  s.args.out = buffer.selection(), s.args.skip_step = true;
  uint64_t stats[kNumStats] = {};
  forward(s, on(GetParam(), stats));
  EXPECT_TRUE(buffer.indices.untouched());
  EXPECT_TRUE(buffer.slots.untouched());
  EXPECT_EQ(bytes_of(s.p.pages), cache);
  EXPECT_EQ(stats[kRows], 0u);
}

TEST_P(Indexer, WithoutKeysTheCacheIsAsItWas) {
  Step s = make_step({});
  run(store_of(s), exec());
  const Bytes cache = bytes_of(s.p.pages);
  const Outputs got(s.count(), s.config.topk, everything(s)), want(s.count(), s.config.topk, everything(s));
  s.args.k = s.args.k_scales = s.args.slot_mapping = {};
  s.args.out = got.selection();
  forward(s, exec());
  EXPECT_EQ(bytes_of(s.p.pages), cache);
  run(search_of(s, want.selection()), exec());
  EXPECT_TRUE(same_outputs(got.selection(), want.selection(), s.count(), s.config.topk));
}

TEST_P(Indexer, SourcePublishesWhatConsumersScore) {
  constexpr int32_t kBlock = 8, kBlocks = 4;
  Step source = make_step({}), consumer = make_step({});
  const int64_t rows = source.count(), topk = source.config.topk;
  source.config.role = CandidateRole::source, consumer.config.role = CandidateRole::consumer;
  for (Step* s : {&source, &consumer})
    s->config.candidate_block_size = kBlock, s->config.candidate_topk_blocks = kBlocks;
  const Guarded candidates(DType::i32, rows + 2, kBlocks);
  const Outputs first(rows, topk, everything(source)), second(rows, topk, everything(consumer));
  source.args.candidates = consumer.args.candidates = candidates.view();
  source.args.out = first.selection(), consumer.args.out = second.selection();
  forward(source, exec());
  forward(consumer, exec());
  EXPECT_EQ(candidates.touched_outside(rows, kBlocks), "");

  Want with_blocks = everything(source);
  with_blocks.blocks = kBlocks, with_blocks.block_size = kBlock;
  const Outputs whole(rows, topk, with_blocks), narrowed(rows, topk, everything(source));
  run(search_of(source, whole.selection()), exec());
  EXPECT_TRUE(same_outputs(first.selection(), whole.selection(), rows, topk));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < kBlocks; ++c) {
      ASSERT_EQ(int_at(candidates.view(), r, c), int_at(whole.blocks.view(), r, c)) << r << " " << c;
    }
  }
  PagedMqaTopk admitted = search_of(consumer, narrowed.selection());
  admitted.admit.candidates = whole.blocks.view(), admitted.admit.candidate_block_size = kBlock;
  run(admitted, exec());
  EXPECT_TRUE(same_outputs(second.selection(), narrowed.selection(), rows, topk));
}

/// CASES B26: a batch in which no row sees a key, alone and around one that does.
TEST_P(Indexer, BatchWithoutWork) {
  for (const size_t requests : {size_t{1}, size_t{32}, size_t{128}}) {
    for (const size_t busy : {requests, size_t{0}, requests / 2, requests - 1}) {  // `requests`: none
      Shape shape;
      shape.lens.assign(requests, 0), shape.rows.assign(requests, 1), shape.padded = 2;
      shape.decode_rows = static_cast<int64_t>(requests);
      if (busy < requests) shape.lens[busy] = 1;
      // Rows of empty requests stand at no token: they store nothing.
      Shape stored = shape;
      stored.rows.assign(requests, 0), stored.padded = static_cast<int64_t>(requests) + 2;
      Step s = make_step(stored);
      set_rows(s, shape);
      const Buffer buffer(s, s.count() + 3, s.config.topk + 4);
      s.args.out = buffer.selection();
      forward(s, exec());
      EXPECT_EQ(buffer.indices.touched_outside(s.count(), s.config.topk + 4), "");
      EXPECT_EQ(bytes_of(s.p.pages), s.cache_after);
      for (int64_t r = 0; r < s.count(); ++r) {
        for (int64_t c = 0; c < s.config.topk + 4; ++c) {
          const bool answered = busy < requests && r == static_cast<int64_t>(busy) && c == 0;
          ASSERT_EQ(int_at(buffer.indices.view(), r, c), answered ? 0 : -1) << requests << " " << busy << " row " << r;
        }
      }
    }
  }
}

/// CASES B27: 4 decode rows, padded to 6, in front of prefill rows that are answered already; then ragged decodes;
/// then more lengths than requests.
TEST_P(Indexer, PaddedDecodeRowsLeavePrefillRowsAlone) {
  Shape shape;
  shape.lens = {70, 33, 45}, shape.rows = {1, 2, 1}, shape.padded = 0, shape.decode_rows = 4;
  Step s = make_step(shape);
  const Buffer buffer(s, 9, s.config.topk);
  s.args.out = buffer.selection();
  forward(s, exec());
  EXPECT_EQ(buffer.indices.touched_outside(4, s.config.topk), "") << "rows 4..8 belong to the prefill";
  const PagedMqaTopk asked = search_of(s, buffer.selection());
  EXPECT_TRUE(good(compare_selection(asked, truth_of(asked.q, asked.keys, asked.rows, false).ref.view())));

  shape.lens = {70, 33, 45, 12, 90, 60}, shape.rows = {1, 1, 1, 1, 2, 2}, shape.decode_rows = 8;
  Step ragged = make_step(shape);
  const Buffer eight(ragged, 9, ragged.config.topk);
  ragged.args.out = eight.selection();
  forward(ragged, exec());
  EXPECT_EQ(eight.indices.touched_outside(8, ragged.config.topk), "");
  const PagedMqaTopk eighth = search_of(ragged, eight.selection());
  EXPECT_TRUE(good(compare_selection(eighth, truth_of(eighth.q, eighth.keys, eighth.rows, false).ref.view())));

  const Array longer(DType::i32, {128});
  std::copy_n(ragged.end.as<int32_t>(), 8, longer.as<int32_t>());
  const Buffer again(ragged, 9, ragged.config.topk);
  ragged.args.rows.end = longer.view(), ragged.args.out = again.selection();
  const Thrown thrown = thrown_by([&] { forward(ragged, exec()); });
  EXPECT_EQ(thrown.sentence, "paged_mqa_topk: rows.end must be i32 [8], got i32 [128]");
  EXPECT_TRUE(again.indices.untouched());
}

// ---- refused steps -------------------------------------------------------------------------------------------------

struct Fault {
  const char* name;
  std::function<void(Step&, Exec&)> make;
};

const std::vector<Fault>& faults() {
  static const std::vector<Fault> all = {
      {"other heads", [](Step& s, Exec&) { ++s.config.heads; }},
      {"other head_dim", [](Step& s, Exec&) { s.config.head_dim *= 2; }},
      {"other format", [](Step& s, Exec&) { s.config.format = KeyFormat::bf16; }},
      {"more decode rows than rows", [](Step& s, Exec&) { s.args.num_decode_rows = s.count() + 1; }},
      {"candidates without a role", [](Step& s, Exec&) { s.args.candidates = s.request.view(); }},
      {"a role without candidates",
       [](Step& s, Exec&) {
         s.config.role = CandidateRole::source;
         s.config.candidate_block_size = s.config.candidate_topk_blocks = 4;
       }},
      {"blocks of its own", [](Step& s, Exec&) { s.args.out.blocks = s.args.out.indices, s.args.out.block_size = 4; }},
      {"slots without keys", [](Step& s, Exec&) { s.args.k = s.args.k_scales = {}; }},
      {"keys without slots", [](Step& s, Exec&) { s.args.slot_mapping = {}; }},
      {"fewer keys than slots", [](Step& s, Exec&) { --s.args.k.shape[0]; }},
      {"buffer narrower than topk", [](Step& s, Exec&) { s.args.out.indices.shape[1] = s.config.topk - 1; }},
      {"no buffer", [](Step& s, Exec&) { s.args.out = {}; }},
      {"misaligned cache", [](Step& s, Exec&) { ++s.args.keys.cache.pages.stride[0]; }},
      {"unknown backend", [](Step&, Exec& e) { e.backend = "cuda.sm89"; }},
      {"q without memory", [](Step& s, Exec&) { s.args.q.values.data = nullptr; }},
      {"weights without memory", [](Step& s, Exec&) { s.args.q.weights.data = nullptr; }},
      {"lengths without memory", [](Step& s, Exec&) { s.args.rows.end.data = nullptr; }},
      {"table without memory", [](Step& s, Exec&) { s.args.keys.block_table.data = nullptr; }},
      {"slots without memory", [](Step& s, Exec&) { s.args.slot_mapping.data = nullptr; }},
      {"strict, wild slot", [](Step& s, Exec& e) { e.strict = true, s.slots.as<int32_t>()[0] = 1 << 30; }},
      {"strict, wild page", [](Step& s, Exec& e) { e.strict = true, s.p.block_table.as<int32_t>()[0] = 1 << 30; }},
      {"strict, wild request", [](Step& s, Exec& e) { e.strict = true, s.request.as<int32_t>()[0] = 99; }},
      {"strict, wild length", [](Step& s, Exec& e) { e.strict = true, s.end.as<int32_t>()[0] = 1 << 30; }},
  };
  return all;
}

/// Rows, slots, cache and statistics are as they were.
void expect_untouched(const Buffer& buffer, const Step& s, const Bytes& cache, const uint64_t* stats,
                      const char* name) {
  EXPECT_TRUE(buffer.indices.untouched()) << name;
  EXPECT_TRUE(buffer.slots.untouched()) << name;
  EXPECT_TRUE(bytes_of(s.p.pages) == cache) << name << ": the cache was written";
  EXPECT_TRUE(std::all_of(stats, stats + kNumStats, [](uint64_t word) { return word == 0; })) << name;
}

TEST_P(Indexer, RefusedStepHasWrittenNothing) {
  for (const Fault& fault : faults()) {
    Step s = make_step({});
    const Buffer buffer(s, s.count(), s.config.topk);
    s.args.out = buffer.selection();
    uint64_t stats[kNumStats] = {};
    Exec own = on(GetParam(), stats);
    const Bytes cache = bytes_of(s.p.pages);
    fault.make(s, own);
    EXPECT_NE(thrown_by([&] { forward(s, own); }).status, Status::ok) << fault.name;
    expect_untouched(buffer, s, cache, stats, fault.name);
  }
}

TEST_P(Indexer, SmallerWorkspaceIsRefusedBeforeAnythingIsWritten) {
  Step s = make_step({});
  const Buffer buffer(s, s.count(), s.config.topk);
  s.args.out = buffer.selection();
  const size_t needed = workspace_bytes(search_of(s, buffer.selection()), exec());
  if (needed == 0) return;
  uint64_t stats[kNumStats] = {};
  Exec own = on(GetParam(), stats);
  const Bytes cache = bytes_of(s.p.pages);
  EXPECT_EQ(thrown_by([&] { forward(s, own, needed - 1); }).status, Status::workspace_too_small);
  expect_untouched(buffer, s, cache, stats, "a byte too few");
  own.workspace_bytes = size_t{1} << 26;  // and no memory
  EXPECT_EQ(thrown_by([&] { SparseAttnIndexer(s.config).forward(s.args, own); }).status, Status::workspace_too_small);
  expect_untouched(buffer, s, cache, stats, "no memory");
}

TEST(IndexerConfig, MakesSense) {
  const std::pair<const char*, std::function<void(IndexerConfig&)>> wrong[] = {
      {"indexer: heads must be from 1 to 65536, got 0", [](IndexerConfig& c) { c.heads = 0; }},
      {"indexer: topk must be from 1 to 2147483647, got 0", [](IndexerConfig& c) { c.topk = 0; }},
      {"indexer: ratio must be from 0 to 2147483647, got -1", [](IndexerConfig& c) { c.ratio = -1; }},
      {"indexer: candidate_block_size must be from 1 to 2147483647, got 0",
       [](IndexerConfig& c) { c.role = CandidateRole::consumer; }},
  };
  for (const auto& [sentence, make] : wrong) {
    IndexerConfig config{};
    config.heads = 4, config.head_dim = 32, config.topk = 8;
    make(config);
    EXPECT_EQ(thrown_by([&, c = config] { SparseAttnIndexer layer(c); }).sentence, sentence);
  }
}

// ---- workspace -----------------------------------------------------------------------------------------------------

IndexerConfig draw_config(const ProblemSpec& spec) {
  IndexerConfig c{};
  c.heads = spec.heads, c.head_dim = spec.head_dim, c.format = spec.format;
  c.topk = static_cast<int32_t>(draw(1, draw_flag() ? 3000 : 40));
  c.role = draw_of({CandidateRole::none, CandidateRole::source, CandidateRole::consumer});
  c.candidate_block_size = static_cast<int32_t>(draw(1, 9)), c.candidate_topk_blocks = static_cast<int32_t>(draw(1, 9));
  return c;
}

/// Limits are in key rows; a table is in whole pages, which may reach past them.
TEST_P(Indexer, WorkspaceOfTheLimitsIsEnoughForEveryStepWithin) {
  property("workspace_bytes(limits) holds", 300, [&] {
    ProblemSpec spec = draw_spec(true);
    spec.addressing = Addressing::request, spec.rows = draw(1, 30), spec.max_len = 0, spec.table_per_row = false;
    if (spec.windows == Windows::random) spec.windows = Windows::causal;
    if (draw_flag(4)) spec.keys = draw(1, 4000), spec.heads = 1;
    const Problem p = make_problem(spec);
    const IndexerLimits limits{0, p.count() + draw(0, 3), spec.requests + draw(0, 3), spec.keys + draw(0, 3), 1};
    Step s;
    s.p = p, s.config = draw_config(spec);
    s.args.q = p.query(), s.args.keys = p.paged_keys(), s.args.rows = p.rows();
    const int64_t pages = (limits.max_len + spec.page_size - 1) / spec.page_size;
    s.args.keys.block_table.shape[1] = std::min(pages, s.args.keys.block_table.shape[1]);
    const Array candidates(DType::i32, {p.count(), s.config.candidate_topk_blocks});
    if (s.config.role != CandidateRole::none) s.args.candidates = candidates.view();
    Want want;
    want.scores = want.counts = true;
    const Outputs out(p.count(), s.config.topk, want);
    s.args.out = out.selection();
    RC_LOG() << p.text() << " topk " << s.config.topk << " max_len " << limits.max_len << " columns "
             << s.args.keys.block_table.shape[1] << " role " << static_cast<int>(s.config.role);
    const size_t bytes = SparseAttnIndexer(s.config).workspace_bytes(limits, exec());
    const Thrown thrown = thrown_by([&] { forward(s, exec(), bytes); });
    if (thrown.status != Status::ok) RC_FAIL(thrown.sentence);
  });
}

TEST_P(Indexer, WorkspaceNeverShrinksWhenALimitGrows) {
  property("workspace_bytes(limits) is monotone", 400, [&] {
    ProblemSpec spec;
    spec.format = draw_of({KeyFormat::fp8, KeyFormat::bf16, KeyFormat::q8_0});
    spec.heads = draw_of({1, 64}), spec.head_dim = draw_of({32, 128, exec().device == Device::cuda ? 256 : 2048});
    const SparseAttnIndexer layer(draw_config(spec));
    const auto extent = [] { return draw_flag() ? draw(0, 70) : draw(0, 3000000); };
    IndexerLimits limits{0, extent(), extent(), extent(), static_cast<int32_t>(draw(1, 8))};
    const size_t before = layer.workspace_bytes(limits, exec());
    const auto which = draw(0, 3), more = draw(1, 5000);
    if (which == 0) limits.max_rows += more;
    if (which == 1) limits.max_requests += more;
    if (which == 2) limits.max_len += more;
    if (which == 3) limits.max_next_n += 3;
    RC_ASSERT(layer.workspace_bytes(limits, exec()) >= before);
  });
}
TOPKEY_ON_GENERAL_BACKENDS(Indexer);

}  // namespace
}  // namespace topkey::testing
