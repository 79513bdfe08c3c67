// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Samples of the operations that score: a Problem of support/, quantised anew by the library, with optional arguments
// drawn on top.
#include "sample.h"

#include <algorithm>
#include <optional>

#include "producers.h"
#include "support/call.h"

namespace topkey::cli {
namespace {

using support::Array;
using support::Problem;
using support::Random;

bool scores_keys(const std::string& op) { return op.find("mqa") != std::string::npos; }
bool searches(const std::string& op) { return op == "mqa_topk" || op == "paged_mqa_topk"; }

/// Runs a producer, if some backend can: formats whose producers are still to come keep the problem's own codes.
bool produce(const support::CallArgs& args) {
  const Exec exec{};
  if (support::args_unsupported(args, exec) != nullptr) return false;
  support::run_args(args, exec);
  return true;
}

/// Replaces the problem's own codes by the library's. False: it keeps them, and then its vectors are not their truth.
bool quantise(const Problem& p) {
  const Vectors vectors{p.q_truth.view(), p.keys_truth.view(), p.weights_truth.view()};
  const Query to = p.query();
  if (to.weights.dtype != DType::f32 || !produce(query_producer(vectors, p.spec.format, to, {}))) return false;
  if (!p.spec.paged) return produce(dense_producer(vectors, p.spec.scale, p.dense_keys()));
  std::vector<int64_t> slots;
  for (size_t b = 0; b < p.lens.size(); ++b) {
    for (int64_t t = 0; t < p.keys_truth.view().shape[1]; ++t) {
      const int64_t page = t < p.lens[b] ? p.page_ids[b][static_cast<size_t>(t / p.spec.page_size)] : -1;
      slots.push_back(page < 0 ? -1 : page * p.spec.page_size + t % p.spec.page_size);
    }
  }
  return produce(page_producer(vectors, p.spec.scale, slots, p.paged_keys().cache));
}

/// One request's vectors need no leading dimension.
support::TraceTensor truth_of_keys(const Array& keys) {
  support::TraceTensor copy = support::copy_of(keys.view());
  if (copy.shape[0] == 1) copy.shape.erase(copy.shape.begin());
  return copy;
}

/// Optional arguments of the problem's calls, and the memory they live in.
struct Options {
  Admit admit{};
  Selection out{};
  std::string outputs = "indices,scores,counts";
  int64_t num_blocks = 0;
  std::vector<Array> memory;

  Tensor keep(const Array& array) {
    memory.push_back(array);
    return array.view();
  }
};

Array random_ints(Random& random, int64_t rows, int64_t cols, int64_t low, int64_t high) {
  const Array array = cols < 0 ? Array(DType::i32, {rows}) : Array(DType::i32, {rows, cols});
  for (int64_t i = 0; i < array.size(); ++i) array.as<int32_t>()[i] = static_cast<int32_t>(random.between(low, high));
  return array;
}

void draw_admission(Options& options, Random& random, const Problem& p) {
  const int64_t rows = p.count(), keys = p.spec.keys;
  if (random.chance(0.4)) {
    options.admit.candidate_block_size = static_cast<int32_t>(random.between(1, 9));
    const int64_t blocks = keys / options.admit.candidate_block_size + 1;
    options.admit.candidates = options.keep(random_ints(random, rows, random.between(1, blocks + 2), -1, blocks + 3));
  }
  if (random.chance(0.3)) options.admit.force_first = static_cast<int32_t>(random.between(0, 5));
  if (random.chance(0.3)) options.admit.force_last = static_cast<int32_t>(random.between(0, 5));
  if (p.spec.paged || !random.chance(0.4)) return;
  const Array mask(DType::b8, {rows, p.width()});
  for (int64_t i = 0; i < mask.size(); ++i) mask.as<uint8_t>()[i] = random.chance(0.7);
  options.admit.mask = options.keep(mask);
}

void draw_outputs(Options& options, Random& random, const Problem& p) {
  const int64_t rows = p.count();
  options.out.order = static_cast<Order>(random.below(3));
  options.out.fill = static_cast<Fill>(random.below(3));
  options.out.fill_value = options.out.fill == Fill::value ? 77 : 0;
  if (random.chance(0.3)) options.out.index_base = options.keep(random_ints(random, rows, -1, 0, 1000));
  if (random.chance(0.3)) {
    options.out.slot_map.page_size = static_cast<int32_t>(random.between(1, 9));
    const int64_t pages = p.spec.keys / options.out.slot_map.page_size + 1;
    const bool per_row = options.out.slot_map.table_per_row = random.chance(0.5);
    options.out.slot_map.block_table = options.keep(random_ints(random,
                                                                per_row        ? rows
                                                                : p.spec.paged ? p.spec.requests
                                                                               : rows,
                                                                pages, -1, 50));
    options.outputs += ",slots";
  }
  if (random.chance(0.3)) {
    options.out.block_size = static_cast<int32_t>(random.between(1, 9));
    options.num_blocks = random.between(1, 6);
    options.outputs += ",blocks";
  }
}

support::CallArgs args_of(const Sample& sample, const Problem& p, const Options& options) {
  if (sample.op == "mqa_logits") return p.dense_logits({}, true);
  if (sample.op == "paged_mqa_logits") return p.paged_logits({}, true);
  if (sample.op == "mqa_topk") {
    MqaTopk a = p.dense_search(sample.topk, options.out);
    a.admit = options.admit;
    return a;
  }
  PagedMqaTopk a = p.paged_search(sample.topk, options.out);
  a.admit = options.admit;
  return a;
}

}  // namespace

support::Trace make_sample(const Sample& sample) {
  if (sample.op == "pool_k" || sample.op == "compress_k" || sample.op == "expand_pools")
    return make_pool_sample(sample);
  if (!scores_keys(sample.op)) return make_stage_sample(sample);
  support::ProblemSpec spec = sample.spec;
  spec.paged = sample.op.rfind("paged", 0) == 0;
  const Problem p = support::make_problem(spec);
  const bool truth = p.q_truth && quantise(p);
  Random random(spec.seed * 7 + 3);
  Options options;
  if (sample.options && searches(sample.op)) {
    draw_admission(options, random, p);
    draw_outputs(options, random, p);
  }
  support::Trace trace = support::trace_of(args_of(sample, p, options));
  trace.metadata["head_dim"] = std::to_string(spec.head_dim);
  trace.metadata["model"] = "synthetic";
  trace.metadata["pattern"] = support::pattern_name(spec.pattern);
  if (spec.exact) trace.metadata["exact"] = "1";
  if (searches(sample.op)) trace.metadata["out"] = options.outputs;
  if (options.num_blocks != 0) trace.metadata["num_blocks"] = std::to_string(options.num_blocks);
  if (truth) {
    trace.tensors["q_bf16"] = support::copy_of(p.q_truth.view());
    trace.tensors["keys_bf16"] = truth_of_keys(p.keys_truth);
    trace.tensors["weights_raw"] = support::copy_of(p.weights_truth.view());
    if (spec.scale == ScaleRule::f32) trace.metadata["scale"] = "f32";
  }
  return trace;
}

}  // namespace topkey::cli
