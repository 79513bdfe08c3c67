// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Samples of the operations between tokens and key rows that stand for several of them: pool_k, compress_k,
// expand_pools. Rows of some requests, each from any position on, so that pools and windows reach back into the state.
#include <algorithm>
#include <cstring>

#include "sample.h"

namespace topkey::cli {
namespace {

using support::Random;
using support::Trace;
using support::TraceTensor;

TraceTensor longs(const std::vector<int64_t>& values) {
  TraceTensor tensor = support::make_tensor("I64", {static_cast<int64_t>(values.size())});
  std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  return tensor;
}
TraceTensor ints(const std::vector<int32_t>& values, std::vector<int64_t> shape) {
  TraceTensor tensor = support::make_tensor("I32", std::move(shape));
  std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  return tensor;
}
TraceTensor normals(Random& random, const char* dtype, std::vector<int64_t> shape) {
  TraceTensor tensor = support::make_tensor(dtype, std::move(shape));
  for (int64_t i = 0, n = tensor.count(); i < n; ++i) {
    const float x = random.normal();
    if (tensor.dtype == "F32") tensor.as<float>()[i] = x;
    if (tensor.dtype == "BF16") tensor.as<uint16_t>()[i] = float_to_bf16(x);
  }
  return tensor;
}
void set(Trace& trace, const char* key, int64_t value) { trace.metadata[key] = std::to_string(value); }

/// Rows of each request, where they stand, which slot the groups that they complete get, where they leave their state.
struct TokenRows {
  std::vector<int32_t> starts{0};
  std::vector<int64_t> positions, slots, states;
  int64_t groups = 0;
};
TokenRows draw_rows(const support::ProblemSpec& spec, Random& random, int64_t group, int64_t ring) {
  TokenRows t;
  for (int64_t b = 0; b < spec.requests; ++b) {
    const int64_t count =
        b + 1 == spec.requests ? spec.keys - t.starts.back() : random.between(0, spec.keys - t.starts.back());
    const int64_t first = random.between(0, 2 * group);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = first + i;
      t.positions.push_back(position);
      t.slots.push_back((position + 1) % group == 0 ? t.groups++ : -1);
      t.states.push_back(b * ring + position % ring);
    }
    t.starts.push_back(static_cast<int32_t>(t.positions.size()));
  }
  return t;
}

void put_cache(const support::ProblemSpec& spec, int64_t head_dim, int64_t groups, Trace& trace) {
  trace.metadata["format"] = format_name(spec.format);
  set(trace, "page_size", spec.page_size), set(trace, "head_dim", head_dim);
  set(trace, "pages", groups / spec.page_size + 1);
}

void pool(const Sample& sample, Random& random, Trace& trace) {
  const support::ProblemSpec& spec = sample.spec;
  int64_t head_dim = 1;
  while (2 * head_dim <= spec.head_dim) head_dim *= 2;
  const int64_t sizes[] = {4, 1, 2, 16, 64};
  const int64_t size = sample.options ? sizes[random.below(5)] : 4,
                ring = size * (sample.options ? 1 << random.below(3) : 2);
  const TokenRows t = draw_rows(spec, random, size, ring);
  const int64_t rows = spec.keys;
  put_cache(spec, head_dim, t.groups, trace);
  set(trace, "pool_size", size);
  if (spec.scale == ScaleRule::f32) trace.metadata["scale"] = "f32";
  trace.tensors["k"] = normals(random, "BF16", {rows, head_dim});
  trace.tensors["gate"] = normals(random, "BF16", {rows, head_dim});
  trace.tensors["ape"] = normals(random, "F32", {size, head_dim});
  trace.tensors["positions"] = longs(t.positions);
  trace.tensors["slot_mapping"] = longs(t.slots);
  trace.tensors["q_indptr"] = ints(t.starts, {static_cast<int64_t>(t.starts.size())});
  if (sample.options && rows >= size && random.chance(0.2)) return;
  trace.tensors["tail"] = normals(random, "BF16", {spec.requests, 2, ring, head_dim});
  trace.tensors["tail_slots"] = longs(t.states);
}

void compress(const Sample& sample, Random& random, Trace& trace) {
  const support::ProblemSpec& spec = sample.spec;
  const int64_t ratios[] = {4, 2, 1, 128};
  const int64_t ratio = sample.options ? ratios[random.below(4)] : 4, head_dim = spec.head_dim;
  const int64_t windows = ratio == 128 || (sample.options && random.chance(0.3)) ? 1 : 2;
  const int64_t width = windows * head_dim, ring = windows * ratio * (sample.options ? 1 + random.below(2) : 1);
  const TokenRows t = draw_rows(spec, random, ratio, ring);
  const int64_t rows = spec.keys;
  put_cache(spec, head_dim, t.groups, trace);
  const auto dtype = [&] { return sample.options && random.chance(0.5) ? "BF16" : "F32"; };
  trace.tensors["kv"] = normals(random, dtype(), {rows, width});
  trace.tensors["score"] = normals(random, dtype(), {rows, width});
  trace.tensors["ape"] = normals(random, "F32", {ratio, width});
  trace.tensors["positions"] = longs(t.positions);
  trace.tensors["slot_mapping"] = longs(t.slots);
  trace.tensors["query_start"] = ints(t.starts, {static_cast<int64_t>(t.starts.size())});
  trace.tensors["state"] = normals(random, "F32", {spec.requests, ring, 2 * width});
  trace.tensors["state_slots"] = longs(t.states);
  trace.tensors["rms_weight"] = normals(random, "F32", {head_dim});
  trace.metadata["eps"] = "1e-06";
  if (head_dim < 2) return;
  const int64_t turned = head_dim / 2 / 2 * 2;
  if (turned > 0) trace.tensors["cos_sin"] = normals(random, "F32", {rows + 2 * ratio + 1, turned});
}

void expand(const Sample& sample, Random& random, Trace& trace) {
  const support::ProblemSpec& spec = sample.spec;
  const int64_t sizes[] = {4, 1, 2, 16, 64};
  const int64_t size = sample.options ? sizes[random.below(5)] : 4;
  std::vector<int32_t> pools, ends;
  for (int64_t r = 0; r < spec.rows; ++r) {
    ends.push_back(static_cast<int32_t>(random.between(sample.options ? -1 : 0, spec.keys)));
    const int64_t complete = std::max(ends.back(), 0) / size;
    for (int64_t i = 0; i < sample.topk; ++i) {
      pools.push_back(static_cast<int32_t>(complete > 0 ? random.between(-1, complete - 1) : -1));
    }
  }
  set(trace, "pool_size", size);
  trace.metadata["out"] = "indices,counts";
  trace.tensors["pools"] = ints(pools, {spec.rows, sample.topk});
  if (!sample.options || random.chance(0.8)) trace.tensors["ends"] = ints(ends, {spec.rows});
  if (!sample.options || random.chance(0.5)) return;
  trace.metadata["fill"] = random.chance(0.5) ? "repeat" : "value";
  trace.metadata["out"] = "indices,slots,counts";
  std::vector<int32_t> table;
  for (int64_t i = 0; i < spec.rows * (spec.keys + 1); ++i) table.push_back(static_cast<int32_t>(random.below(50)));
  trace.tensors["slot_map.block_table"] = ints(table, {spec.rows, spec.keys + 1});
  set(trace, "slot_map.page_size", random.between(1, 9));
}

}  // namespace

Trace make_pool_sample(const Sample& sample) {
  Random random(sample.spec.seed * 7 + 6);
  Trace trace;
  trace.metadata = {{"topkey_trace", "1"}, {"op", sample.op}, {"model", "synthetic"}};
  if (sample.op == "pool_k") pool(sample, random, trace);
  if (sample.op == "compress_k") compress(sample, random, trace);
  if (sample.op == "expand_pools") expand(sample, random, trace);
  return trace;
}

}  // namespace topkey::cli
