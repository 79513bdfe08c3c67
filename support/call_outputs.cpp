// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Outputs of each operation: names, dtypes and shapes as they follow from the inputs.
#include "support/call_outputs.h"

#include <algorithm>
#include <charconv>

namespace topkey::support {
namespace {

/// What an output's shape is derived from must be there; anything else about it is the library's to judge.
void need(const Tensor& t, const char* name, int32_t ndim) {
  if (t.data == nullptr) throw TraceError(std::string("trace: the operation needs the tensor '") + name + "'");
  if (t.ndim != ndim) {
    throw TraceError(std::string("trace: tensor '") + name + "' must have " + std::to_string(ndim) +
                     " dimensions, got " + std::to_string(t.ndim));
  }
}

/// Last entry of a prefix sum, [B+1] i32: how many rows there are. 0 where the tensor is not such a thing.
int64_t last_of(const Tensor& indptr) {
  if (indptr.data == nullptr || indptr.dtype != DType::i32 || indptr.ndim != 1 || indptr.shape[0] < 1) return 0;
  return static_cast<const int32_t*>(indptr.data)[indptr.shape[0] - 1];
}

int64_t largest_slot(const Tensor& slots) {
  need(slots, "slot_mapping", 1);
  int64_t largest = -1;
  for (int64_t i = 0; i < slots.shape[0]; ++i) {
    if (slots.dtype == DType::i32) largest = std::max<int64_t>(largest, static_cast<const int32_t*>(slots.data)[i]);
    if (slots.dtype == DType::i64) largest = std::max<int64_t>(largest, static_cast<const int64_t*>(slots.data)[i]);
  }
  return largest;
}

}  // namespace

bool Settings::has(const std::string& key) const {
  return options_.set.count(key) != 0 || trace_.metadata.count(key) != 0;
}

std::string Settings::text(const std::string& key, const std::string& fallback) const {
  const auto place = options_.set.find(key);
  return place != options_.set.end() ? place->second : trace_.text(key, fallback);
}

int64_t Settings::number(const std::string& key, int64_t fallback) const {
  return has(key) ? whole_number(key, text(key, "")) : fallback;
}

int64_t row_count(const CallArgs& args) {
  struct Count {
    int64_t of(const Tensor& t, int dim = 0) { return t.ndim > dim ? t.shape[dim] : 0; }
    int64_t operator()(const MqaLogits& a) { return of(a.q.values); }
    int64_t operator()(const PagedMqaLogits& a) { return of(a.q.values); }
    int64_t operator()(const MqaTopk& a) { return of(a.q.values); }
    int64_t operator()(const PagedMqaTopk& a) { return of(a.q.values); }
    int64_t operator()(const Topk& a) { return of(a.scores); }
    int64_t operator()(const SelectBlocks& a) { return of(a.scores); }
    int64_t operator()(const MergeTopk& a) { return of(a.scores, 1); }
    int64_t operator()(const ExpandRows&) { return 0; }
    int64_t operator()(const ToSlots&) { return 0; }
    int64_t operator()(const QuantizeQ&) { return 0; }
    int64_t operator()(const QuantizeK&) { return 0; }
    int64_t operator()(const StoreK&) { return 0; }
    int64_t operator()(const GatherK&) { return 0; }
    int64_t operator()(const PoolK&) { return 0; }
    int64_t operator()(const CompressK&) { return 0; }
    int64_t operator()(const ExpandPools& a) { return of(a.pools); }
  };
  return std::visit(Count{}, args);
}

bool OutputMaker::wants(const std::string& output, const char* otherwise) const {
  return ("," + settings_.text("out", otherwise) + ",").find("," + output + ",") != std::string::npos;
}

Tensor OutputMaker::make(const std::string& name, DType dtype, std::vector<int64_t> shape) {
  try {
    TraceTensor made = make_tensor(trace_dtype(dtype), std::move(shape), room_);
    room_ -= made.bytes.size();
    const TraceTensor& kept = outputs_.insert_or_assign(name, std::move(made)).first->second;
    return view(kept, name);
  } catch (const TraceError& error) {
    throw TraceError("trace: output " + shown(name) + " cannot be allocated (" + error.what() + ")");
  }
}

void OutputMaker::selection(Selection& out, int64_t rows, int64_t topk, const std::string& taken) {
  const auto name = [&](const std::string& output) {
    return ("," + taken + ",").find("," + output + ",") == std::string::npos ? output : "out." + output;
  };
  if (wants("indices")) out.indices = make(name("indices"), DType::i32, {rows, topk});
  if (wants("slots")) out.slots = make("slots", DType::i32, {rows, topk});
  if (wants("scores")) out.scores = make(name("scores"), DType::f32, {rows, topk});
  if (wants("counts")) out.counts = make("counts", DType::i32, {rows});
  if (wants("blocks")) out.blocks = make("blocks", DType::i32, {rows, settings_.number("num_blocks", 0)});
}

DenseKeys OutputMaker::dense(KeyFormat format, int64_t rows, int64_t head_dim) {
  DenseKeys keys{};
  keys.format = format;
  keys.values = make("keys", dense_dtype(format), {rows, dense_elements(format, head_dim)});
  if (is_fp8(format)) keys.scales = make("key_scale", DType::f32, {rows});
  if (format == KeyFormat::mxfp4) keys.scales = make("key_scale", DType::u8, {rows, head_dim / 32});
  return keys;
}

DType OutputMaker::logits_dtype() const {
  const std::string name = settings_.text("logits_dtype", "F32");
  if (name != "F32" && name != "BF16")
    throw TraceError("trace: metadata 'logits_dtype' must be F32 or BF16, got " + shown(name));
  return tensor_dtype(name);
}

void OutputMaker::outputs(ExpandRows& a) {
  constexpr const char* kAll = "row_request,lens,positions,slots";
  if (a.capacity == 0) a.capacity = last_of(a.query_start);
  if (wants("row_request", kAll)) a.row_request = make("row_request", DType::i32, {a.capacity});
  if (wants("lens", kAll)) a.lens = make("lens", DType::i32, {a.capacity});
  if (wants("positions", kAll)) a.positions = make("positions", DType::i32, {a.capacity});
  if (wants("slots", kAll) && a.block_table.data != nullptr) a.slots = make("slots", DType::i32, {a.capacity});
}

void OutputMaker::outputs(ToSlots& a) {
  need(a.indices, "indices", 2);
  a.slots = make("slots", DType::i32, {a.indices.shape[0], a.indices.shape[1]});
  if (wants("counts", "counts")) a.counts = make("counts", DType::i32, {a.indices.shape[0]});
}

void OutputMaker::outputs(QuantizeQ& a) {
  need(a.q, "q", 3);
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], head_dim = a.q.shape[2];
  const bool packed = a.format == KeyFormat::mxfp4;
  const bool own = !is_fp8(a.format) && !packed;  // q keeps its dtype
  a.q_out = make("q_out", own ? a.q.dtype : dense_dtype(a.format), {rows, heads, packed ? head_dim / 2 : head_dim});
  if (packed) a.q_scales_out = make("q_scales_out", DType::u8, {rows, heads, head_dim / 32});
  a.weights_out = make("weights_out", DType::f32, {rows, heads});
}

void OutputMaker::outputs(QuantizeK& a) {
  need(a.k, "k", 2);
  a.out = dense(a.out.format, a.k.shape[0], a.k.shape[1]);
}

void OutputMaker::cache(KeyCache& cache, const Tensor& slot_mapping) {
  const Tensor given = cache.pages;
  if (given.data != nullptr) {
    need(given, "cache", 2);
    cache.pages = make("cache", given.dtype, {given.shape[0], given.shape[1]});
    std::copy_n(static_cast<const std::byte*>(given.data), given.shape[0] * given.shape[1],
                static_cast<std::byte*>(cache.pages.data));
    return;
  }
  if (cache.page_size <= 0 || cache.head_dim <= 0) {
    throw TraceError("trace: without a cache, the operation needs page_size and head_dim above 0 in the metadata");
  }
  const int64_t page = page_layout(cache.format, cache.layout, cache.page_size, cache.head_dim).page_bytes;
  const int64_t pages = settings_.number("pages", largest_slot(slot_mapping) / cache.page_size + 1);
  cache.pages = make("cache", DType::u8, {pages, settings_.number("page_stride", (page + 3) / 4 * 4)});
}

void OutputMaker::outputs(StoreK& a) { cache(a.cache, a.slot_mapping); }

Tensor OutputMaker::state(const char* name, const Tensor& given) {
  if (given.data == nullptr) return given;
  const Tensor made = make(name, given.dtype, {given.shape, given.shape + given.ndim});
  TraceTensor& kept = outputs_.at(name);
  std::copy_n(static_cast<const std::byte*>(given.data), kept.bytes.size(), kept.bytes.data());
  return made;
}

void OutputMaker::outputs(PoolK& a) {
  cache(a.cache, a.slot_mapping);
  a.tail = state("tail", a.tail);
}

void OutputMaker::outputs(CompressK& a) {
  cache(a.cache, a.slot_mapping);
  a.state = state("state", a.state);
}

void OutputMaker::outputs(GatherK& a) {
  if (a.total == 0) a.total = last_of(a.indptr);
  a.out = dense(a.keys.cache.format, a.total, a.keys.cache.head_dim);
}

void OutputMaker::outputs(MqaLogits& a) {
  need(a.keys.values, "keys", 2);
  a.logits = make("logits", logits_dtype(), {a.rows.count, a.keys.values.shape[0]});
}

void OutputMaker::outputs(PagedMqaLogits& a) {
  need(a.keys.block_table, "block_table", 2);
  const int64_t width = a.rows.max_len != 0 ? a.rows.max_len : a.keys.block_table.shape[1] * a.keys.cache.page_size;
  a.logits = make("logits", logits_dtype(), {a.rows.count, width});
}

void OutputMaker::outputs(Topk& a) { selection(a.out, a.rows.count, a.topk, "scores"); }
void OutputMaker::outputs(MqaTopk& a) { selection(a.out, a.rows.count, a.topk, ""); }
void OutputMaker::outputs(PagedMqaTopk& a) {
  selection(a.out, a.rows.count, a.topk, "");
  if (wants("block_scores")) {
    a.block_scores = make("block_scores", DType::f32, {a.rows.count, settings_.number("num_blocks", 0)});
  }
}
void OutputMaker::outputs(MergeTopk& a) { selection(a.out, a.rows.count, a.topk, "scores,indices"); }
void OutputMaker::outputs(ExpandPools& a) {
  need(a.pools, "pools", 2);
  const bool tail = a.positions.data != nullptr || a.rows.end.data != nullptr || a.rows.length.data != nullptr;
  int64_t width = 0;
  if (a.pool_size < 1 || __builtin_mul_overflow(a.pools.shape[1], int64_t{a.pool_size}, &width)) {
    throw TraceError("trace: metadata 'pool_size' must be above 0, and pools as wide as an index can count");
  }
  selection(a.out, a.rows.count, width + (tail ? a.pool_size - 1 : 0), "");
}
void OutputMaker::outputs(SelectBlocks& a) {
  a.blocks = make("blocks", DType::i32, {a.rows.count, settings_.number("num_blocks", 0)});
}

}  // namespace topkey::support
