// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Samples of the operations around the score: selection on given scores, merge, rows and slots, producers, gather.
// Written straight as traces; and the draw of a random Sample.
#include <algorithm>
#include <cstring>

#include "sample.h"
#include "support/call.h"
#include "support/oracle.h"

namespace topkey::cli {
namespace {

using support::Random;
using support::Trace;
using support::TraceTensor;

template <class T>
TraceTensor tensor_of(const char* dtype, std::vector<int64_t> shape, const std::vector<T>& values) {
  TraceTensor tensor = support::make_tensor(dtype, std::move(shape));
  std::memcpy(tensor.bytes.data(), values.data(), std::min(tensor.bytes.size(), values.size() * sizeof(T)));
  return tensor;
}

std::vector<int32_t> ints(Random& random, int64_t count, int64_t low, int64_t high) {
  std::vector<int32_t> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(static_cast<int32_t>(random.between(low, high)));
  return values;
}

/// Ascending from 0: how `total` things fall to `parts` owners.
std::vector<int32_t> prefix(Random& random, int64_t parts, int64_t total) {
  std::vector<int32_t> cuts = ints(random, parts - 1, 0, total);
  std::sort(cuts.begin(), cuts.end());
  cuts.insert(cuts.begin(), 0);
  cuts.push_back(static_cast<int32_t>(total));
  return cuts;
}

TraceTensor normal_vectors(Random& random, std::vector<int64_t> shape, DType dtype) {
  TraceTensor tensor = support::make_tensor(support::trace_dtype(dtype), std::move(shape));
  for (int64_t i = 0, n = tensor.count(); i < n; ++i) {
    const float x = 3 * random.normal();
    if (dtype == DType::f32) tensor.as<float>()[i] = x;
    if (dtype == DType::bf16) tensor.as<uint16_t>()[i] = float_to_bf16(x);
    if (dtype == DType::f16) tensor.as<uint16_t>()[i] = float_to_f16(x);
  }
  return tensor;
}

std::vector<float> scores_of(const Sample& sample) {
  const support::ProblemSpec& spec = sample.spec;
  std::vector<float> scores(static_cast<size_t>(spec.rows * spec.keys));
  for (int64_t r = 0; r < spec.rows; ++r) {
    support::fill_scores(spec.pattern, scores.data() + r * spec.keys, spec.keys, sample.topk,
                         spec.seed * 1000 + static_cast<uint64_t>(r));
  }
  return scores;
}

void set_number(Trace& trace, const char* key, int64_t value) { trace.metadata[key] = std::to_string(value); }

void selection(const Sample& sample, Random& random, Trace& trace) {
  const int64_t rows = sample.spec.rows, keys = sample.spec.keys;
  trace.tensors["scores"] = tensor_of("F32", {rows, keys}, scores_of(sample));
  if (sample.op == "select_blocks") {
    set_number(trace, "block_size", sample.options ? random.between(1, 9) : 4);
    set_number(trace, "num_blocks", sample.topk);
  } else {
    set_number(trace, "topk", sample.topk);
    trace.metadata["out"] = "indices,scores,counts";
    if (sample.options && random.chance(0.5))
      trace.tensors["row_topk"] = tensor_of("I32", {rows}, ints(random, rows, -1, sample.topk + 2));
    if (sample.options && random.chance(0.5)) trace.metadata["order"] = "score";
    if (sample.options && random.chance(0.5)) set_number(trace, "force_last", random.between(0, 4));
  }
  if (!sample.options) return;
  trace.tensors["starts"] = tensor_of("I32", {rows}, ints(random, rows, -2, keys));
  trace.tensors["ends"] = tensor_of("I32", {rows}, ints(random, rows, 0, keys + 3));
}

/// Parts of one selection: each position is in one part, every part holds its own best.
void merge(const Sample& sample, Random& random, Trace& trace) {
  const int64_t rows = sample.spec.rows, keys = sample.spec.keys, parts = random.between(1, 5), width = sample.topk;
  const std::vector<float> scores = scores_of(sample);
  std::vector<float> part_scores(static_cast<size_t>(parts * rows * width), 0.0F);
  std::vector<int32_t> part_indices(part_scores.size(), -1);
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = scores.data() + r * keys;
    std::vector<std::vector<int64_t>> owned(static_cast<size_t>(parts));
    for (int64_t i = 0; i < keys; ++i) owned[random.below(static_cast<uint64_t>(parts))].push_back(i);
    for (int64_t p = 0; p < parts; ++p) {
      std::vector<int64_t>& mine = owned[static_cast<size_t>(p)];
      std::sort(mine.begin(), mine.end(),
                [&](int64_t a, int64_t b) { return support::comes_before(row[a], a, row[b], b); });
      for (int64_t i = 0; i < std::min(width, static_cast<int64_t>(mine.size())); ++i) {
        const auto at = static_cast<size_t>((p * rows + r) * width + i);
        part_indices[at] = static_cast<int32_t>(mine[static_cast<size_t>(i)]);
        part_scores[at] = row[mine[static_cast<size_t>(i)]];
      }
    }
  }
  trace.tensors["scores"] = tensor_of("F32", {parts, rows, width}, part_scores);
  trace.tensors["indices"] = tensor_of("I32", {parts, rows, width}, part_indices);
  set_number(trace, "topk", sample.topk);
  trace.metadata["out"] = "indices,scores,counts";
  if (sample.options && random.chance(0.5)) trace.metadata["order"] = "score";
}

void rows_and_slots(const Sample& sample, Random& random, Trace& trace) {
  const support::ProblemSpec& spec = sample.spec;
  const int64_t requests = spec.requests, pages = spec.keys / spec.page_size + 1;
  trace.tensors["block_table"] =
      tensor_of("I32", {requests, pages}, ints(random, requests * pages, sample.options ? -1 : 0, 100));
  set_number(trace, "page_size", spec.page_size);
  if (sample.options && random.chance(0.5)) {
    const int64_t world = random.between(2, 4);
    set_number(trace, "shard.world_size", world), set_number(trace, "shard.rank", random.between(0, world - 1));
    set_number(trace, "shard.interleave", random.between(1, 4));
  }
  if (sample.op == "to_slots") {
    trace.tensors["indices"] =
        tensor_of("I32", {spec.rows, sample.topk}, ints(random, spec.rows * sample.topk, -1, spec.keys + 2));
    trace.tensors["row_request"] =
        tensor_of("I32", {spec.rows}, ints(random, spec.rows, sample.options ? -1 : 0, requests - 1));
    if (sample.options && random.chance(0.5)) set_number(trace, "compact", 1);
    return;
  }
  trace.tensors["query_start"] = tensor_of("I32", {requests + 1}, prefix(random, requests, spec.rows));
  trace.tensors["seq_lens"] = tensor_of("I32", {requests}, ints(random, requests, 0, spec.keys));
  if (sample.options)
    set_number(trace, "ratio", random.between(1, 4)), set_number(trace, "capacity", spec.rows + random.between(0, 3));
}

/// Norm (keys only), rope and Hadamard by chance.
void draw_steps(const Sample& sample, Random& random, int64_t vectors, bool norm, Trace& trace) {
  const int64_t head_dim = sample.spec.head_dim;
  if (!sample.options) return;
  if (norm && random.chance(0.6)) {
    trace.metadata["norm.kind"] = random.chance(0.5) ? "layer" : "rms";
    trace.metadata["norm.eps"] = "1e-06";
    trace.tensors["norm.weight"] = normal_vectors(random, {head_dim}, DType::f32);
  }
  if (head_dim % 2 == 0 && random.chance(0.6)) {
    const int64_t dim = 2 * random.between(1, head_dim / 2);
    set_number(trace, "rope.dim", dim);
    set_number(trace, "rope.interleaved", random.chance(0.5)), set_number(trace, "rope.trailing", random.chance(0.5));
    trace.tensors["rope.cos_sin"] = normal_vectors(random, {64, dim}, DType::f32);
    trace.tensors["positions"] = tensor_of("I32", {vectors}, ints(random, vectors, 0, 63));
  }
  if ((head_dim & (head_dim - 1)) == 0 && random.chance(0.5)) set_number(trace, "hadamard", 1);
}

void producer(const Sample& sample, Random& random, Trace& trace) {
  const support::ProblemSpec& spec = sample.spec;
  const DType dtypes[] = {DType::bf16, DType::f32, DType::f16};
  const DType dtype = dtypes[sample.options ? random.below(3) : 0];
  trace.metadata["format"] = format_name(spec.format);
  if (sample.op == "quantize_q") {
    trace.tensors["q"] = normal_vectors(random, {spec.rows, spec.heads, spec.head_dim}, dtype);
    trace.tensors["weights"] = normal_vectors(random, {spec.rows, spec.heads}, DType::f32);
    return draw_steps(sample, random, spec.rows, false, trace);
  }
  trace.tensors["k"] = normal_vectors(random, {spec.keys, spec.head_dim}, dtype);
  if (spec.scale == ScaleRule::f32) trace.metadata["scale"] = "f32";
  draw_steps(sample, random, spec.keys, true, trace);
  if (sample.op == "quantize_k") return;
  std::vector<int64_t> slots;
  const int64_t pages = spec.keys / spec.page_size + 2;
  for (int64_t i = 0; i < pages * spec.page_size; ++i) slots.push_back(i);
  random.shuffle(slots);
  slots.resize(static_cast<size_t>(spec.keys));
  for (int64_t& slot : slots) slot = sample.options && random.chance(0.1) ? -1 : slot;
  trace.tensors["slot_mapping"] = tensor_of("I64", {spec.keys}, slots);
  set_number(trace, "page_size", spec.page_size), set_number(trace, "head_dim", spec.head_dim),
      set_number(trace, "pages", pages);
  if (spec.layout != Layout::planar) trace.metadata["layout"] = layout_name(spec.layout);
}

void gather(const Sample& sample, Trace& trace) {
  support::ProblemSpec spec = sample.spec;
  spec.paged = true;
  spec.table_per_row = false;
  const support::Problem p = support::make_problem(spec);
  std::vector<int32_t> indptr{0};
  for (const int64_t len : p.lens) indptr.push_back(indptr.back() + static_cast<int32_t>(len));
  GatherK a{};
  a.keys = p.paged_keys();
  a.indptr = tensor(indptr.data(), DType::i32, {static_cast<int64_t>(indptr.size())});
  trace = support::trace_of(a);
}

}  // namespace

Trace make_stage_sample(const Sample& sample) {
  Random random(sample.spec.seed * 7 + 5);
  Trace trace;
  if (sample.op == "gather_k") gather(sample, trace);
  trace.metadata.insert({{"topkey_trace", "1"}, {"op", sample.op}, {"model", "synthetic"}});
  if (sample.op == "topk" || sample.op == "select_blocks") selection(sample, random, trace);
  if (sample.op == "merge_topk") merge(sample, random, trace);
  if (sample.op == "expand_rows" || sample.op == "to_slots") rows_and_slots(sample, random, trace);
  if (sample.op == "quantize_q" || sample.op == "quantize_k" || sample.op == "store_k") producer(sample, random, trace);
  return trace;
}

namespace {

/// Tiled pages, where the format has them.
void tile(Random& random, support::ProblemSpec& spec) {
  const bool fp4 = spec.format == KeyFormat::mxfp4;
  if (fp4 ? spec.head_dim != 128 : !is_fp8(spec.format) || spec.head_dim % 16 != 0) return;
  const Layout layouts[] = {Layout::tiled16, Layout::tiled32, Layout::tiled64};
  spec.layout = layouts[fp4 ? random.below(3) : 0];
  spec.page_size = static_cast<int32_t>(tile_rows(spec.layout) * random.between(1, 3));
}

}  // namespace

Sample random_sample(const std::string& op, uint64_t seed) {
  Random random(seed * 11 + 1);
  const auto pick = [&](auto... values) {
    const int64_t list[] = {values...};
    return list[random.below(sizeof...(values))];
  };
  Sample sample;
  sample.op = op;
  sample.options = true;
  support::ProblemSpec& spec = sample.spec;
  spec.seed = seed;
  spec.format = static_cast<KeyFormat>(random.below(7));
  const int64_t step = dim_multiple(spec.format);
  spec.head_dim = static_cast<int32_t>(step == 1 ? pick(1, 4, 20, 32, 64, 64, 128, 128) : pick(32, 64, 96, 128));
  spec.heads = static_cast<int32_t>(pick(1, 3, 4, 8, 32, 64));
  spec.rows = random.between(1, 9);
  spec.keys = spec.heads >= 32 ? random.between(1, 150) : random.between(1, 700);
  spec.pattern = random.chance(0.4) ? support::Pattern::normal
                                    : static_cast<support::Pattern>(random.below(support::kNumPatterns));
  spec.exact = random.chance(0.5);
  spec.scale = is_fp8(spec.format) && random.chance(0.5) ? ScaleRule::f32 : ScaleRule::ue8m0;
  spec.windows = static_cast<support::Windows>(random.below(4));
  spec.length_not_end = random.chance(0.3);
  spec.requests = static_cast<int32_t>(random.between(1, 4));
  spec.page_size = static_cast<int32_t>(pick(1, 2, 16, 48, 64));
  spec.addressing = static_cast<support::Addressing>(random.below(3));
  if (spec.addressing == support::Addressing::next_n) spec.next_n = static_cast<int32_t>(random.between(1, 3));
  spec.table_per_row = random.chance(0.2);
  spec.layout = random.chance(0.3) ? Layout::interleaved : Layout::planar;
  if (random.chance(0.25)) tile(random, spec);
  sample.topk = static_cast<int32_t>(std::min<int64_t>(pick(1, 7, 64, 300), spec.keys + 5));
  return sample;
}

}  // namespace topkey::cli
