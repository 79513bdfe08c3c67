// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See gpu_data.h: memory, contents and calls. What a call wrote is looked at in gpu_wrong.cpp.
#include "bench/gpu_data.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "bench/gpu_must.h"

namespace topkey::bench {
namespace {

using support::Pattern;
using support::Random;

constexpr int64_t kDim = 128, kPage = 64, kRow = kDim + 4, kPageBytes = kPage * kRow, kBlock = 8;

enum Fill { kNothing, kCodes, kOneKey, kNormal, kWeights, kPositive, kScales, kBf16, kFills };

/// A few MiB of random data of a kind, which larger memory repeats.
std::vector<uint8_t> sample_of(int fill) {
  constexpr size_t kSize = size_t{4} << 20;
  std::vector<uint8_t> bytes(kSize);
  Random random(static_cast<uint64_t>(fill) + 77);
  const bool codes = fill == kCodes || fill == kOneKey;
  for (size_t i = 0; i < kSize; i += codes ? 1 : fill == kBf16 ? 2 : 4) {
    float x = random.normal();
    if (codes) bytes[i] = fill == kOneKey && i >= kDim ? bytes[i - kDim] : float_to_e4m3(x * 100);
    if (fill == kBf16) {
      const uint16_t h = float_to_bf16(x);
      std::memcpy(&bytes[i], &h, 2);
    }
    if (codes || fill == kBf16) continue;
    if (fill == kWeights || fill == kPositive) x *= 0.01F;
    if (fill == kPositive) x = x < 0 ? -x : x;
    if (fill == kScales) x = 0.008F * (1 + 0.1F * x);  // amax / 448 of normal keys: nearly alike, positive
    std::memcpy(&bytes[i], &x, 4);
  }
  return bytes;
}

}  // namespace

void* GpuData::take(size_t bytes, int fill) {
  void* data = nullptr;
  must(cudaMalloc(&data, std::max<size_t>(bytes, 256)));
  memory_.push_back(data);
  if (fill == kNothing) return data;
  static std::vector<uint8_t> samples[kFills];
  std::vector<uint8_t>& sample = samples[fill];
  if (sample.empty()) sample = sample_of(fill);
  const size_t first = std::min(bytes, sample.size());
  must(cudaMemcpy(data, sample.data(), first, cudaMemcpyHostToDevice));
  for (size_t done = first; done < bytes; done *= 2) {
    must(cudaMemcpy(static_cast<uint8_t*>(data) + done, data, std::min(done, bytes - done), cudaMemcpyDeviceToDevice));
  }
  return data;
}

Tensor GpuData::make(DType dtype, std::initializer_list<int64_t> shape, int fill) {
  size_t bytes = support::dtype_bytes(dtype);
  for (const int64_t n : shape) bytes *= static_cast<size_t>(n);
  return tensor(take(bytes, fill), dtype, shape);
}

Tensor GpuData::output(DType dtype, std::initializer_list<int64_t> shape, const char* name) {
  const Tensor t = make(dtype, shape, kNothing);
  written_.push_back({t, name});
  return t;
}

Tensor GpuData::upload(const std::vector<int32_t>& values) {
  const Tensor t = make(DType::i32, {static_cast<int64_t>(values.size())}, kNothing);
  must(cudaMemcpy(t.data, values.data(), values.size() * 4, cudaMemcpyHostToDevice));
  return t;
}

Tensor GpuData::upload(const std::vector<float>& values) {
  const Tensor t = make(DType::f32, {static_cast<int64_t>(values.size())}, kNothing);
  must(cudaMemcpy(t.data, values.data(), values.size() * 4, cudaMemcpyHostToDevice));
  return t;
}

/// Patterns other than `normal` are made by the keys' scales: all keys have the same codes and weights are positive, so
/// that a row's scores are its own constant times the scales.
Query GpuData::query() {
  const int64_t heads = case_.heads;
  return {make(DType::f8_e4m3fn, {case_.rows, heads, kDim}, kCodes),
          {},
          make(DType::f32, {case_.rows, heads}, case_.pattern == Pattern::normal ? kWeights : kPositive)};
}

std::vector<float> GpuData::key_scales(int64_t keys) const {
  std::vector<float> scales(static_cast<size_t>(keys));
  support::fill_scores(case_.pattern, scales.data(), keys, case_.topk, 3);
  return scales;
}

KeyCache GpuData::pages(int64_t count, bool filled) {
  const Tensor pages = make(DType::u8, {count, kPageBytes}, kNothing);
  const KeyCache cache{pages, KeyFormat::fp8, Layout::planar, static_cast<int32_t>(kPage), static_cast<int32_t>(kDim)};
  if (!filled) return cache;
  const int64_t chunk = std::min<int64_t>(count, 2048);
  const Tensor codes = make(DType::u8, {chunk * kPage, kDim}, case_.pattern == Pattern::normal ? kCodes : kOneKey);
  const Tensor scales = make(DType::f32, {count * kPage}, kScales);
  auto* to = static_cast<uint8_t*>(pages.data);
  for (int64_t p = 0; p < count; p += chunk) {
    must(cudaMemcpy2D(to + p * kPageBytes, kPageBytes, codes.data, kPage * kDim, kPage * kDim,
                      static_cast<size_t>(std::min(chunk, count - p)), cudaMemcpyDeviceToDevice));
  }
  if (case_.pattern != Pattern::normal) {  // every request has the same row of scales, behind its own pages
    const int64_t used = static_cast<int64_t>(order_.size()), each = (case_.keys + kPage - 1) / kPage;
    const std::vector<float> row = key_scales(each * kPage);
    std::vector<float> all(static_cast<size_t>(count * kPage));
    for (int64_t i = 0; i < used; ++i) {
      std::copy_n(row.begin() + i % each * kPage, kPage, all.begin() + int64_t{order_[static_cast<size_t>(i)]} * kPage);
    }
    must(cudaMemcpy(scales.data, all.data(), all.size() * 4, cudaMemcpyHostToDevice));
  }
  must(cudaMemcpy2D(to + kPage * kDim, kPageBytes, scales.data, kPage * 4, kPage * 4, static_cast<size_t>(count),
                    cudaMemcpyDeviceToDevice));
  return cache;
}

std::vector<int32_t> GpuData::request_lengths() const {
  if (!case_.lengths.empty()) return case_.lengths;
  const int64_t requests = case_.suite == "prefill" ? 1 : case_.rows / case_.next_n;
  return std::vector<int32_t>(static_cast<size_t>(requests), static_cast<int32_t>(case_.keys));
}

/// Candidates, outputs and published blocks of a search, and what it costs at least; ends_ is filled.
void GpuData::make_search_parts(Admit& admit, Selection& out) {
  const GpuCase& c = case_;
  out.indices = output(DType::i32, {c.rows, c.topk}, "indices");
  if (c.blocks > 0) out.blocks = output(DType::i32, {c.rows, c.blocks}, "blocks"), out.block_size = kBlock;
  for (const int32_t end : ends_) pairs_ += end;
  if (c.admitted > 0) {
    const int64_t all = (c.keys - c.rows) / kBlock;
    std::vector<int32_t> ids;
    Random random(19);
    for (int64_t r = 0; r < c.rows; ++r) {  // one of each run of blocks: ascending, spread, other ones in each row
      for (int64_t i = 0; i < c.admitted; ++i) {
        const int64_t first = i * all / c.admitted, last = (i + 1) * all / c.admitted - 1;
        ids.push_back(static_cast<int32_t>(random.between(first, last)));
      }
    }
    admit.candidates = upload(ids);
    admit.candidates.ndim = 2, admit.candidates.shape[0] = c.rows;
    admit.candidates.shape[1] = admit.candidates.stride[0] = c.admitted, admit.candidates.stride[1] = 1;
    admit.candidate_block_size = kBlock;
    pairs_ = static_cast<double>(c.rows * c.admitted * kBlock);
  }
  bytes_ = std::min(bytes_, pairs_ * kRow);
  flop_ = 2.0 * c.heads * kDim * pairs_;
}

void GpuData::make_decode() {
  const GpuCase& c = case_;
  const std::vector<int32_t> lens = request_lengths();
  const int64_t requests = static_cast<int64_t>(lens.size());
  const int64_t longest = *std::max_element(lens.begin(), lens.end());
  const int64_t width = (std::max(longest, c.bound) + kPage - 1) / kPage;
  int64_t total = 0, keys = 0;
  for (const int32_t n : lens) total += (n + kPage - 1) / kPage, keys += n;
  order_.resize(static_cast<size_t>(total));
  std::iota(order_.begin(), order_.end(), 0);
  Random random(5);
  random.shuffle(order_);
  std::vector<int32_t> table(static_cast<size_t>(requests * width), -1);
  for (int64_t b = 0, next = 0; b < requests; ++b) {
    const int64_t used = (lens[static_cast<size_t>(b)] + kPage - 1) / kPage;
    std::copy_n(order_.begin() + next, used, table.begin() + b * width);
    next += used;
  }
  paged_.q = query();
  paged_.keys.cache = pages(total, true);
  paged_.keys.block_table = upload(table);
  paged_.keys.block_table.ndim = 2, paged_.keys.block_table.shape[0] = requests;
  paged_.keys.block_table.shape[1] = paged_.keys.block_table.stride[0] = width;
  paged_.keys.block_table.stride[1] = 1;
  const int64_t each = c.rows / requests;
  for (int64_t r = 0; r < c.rows; ++r)
    ends_.push_back(static_cast<int32_t>(lens[static_cast<size_t>(r / each)] - each + 1 + r % each));
  paged_.rows.count = c.rows, paged_.rows.max_len = std::max(longest, c.bound);
  paged_.rows.end = upload(ends_);
  if (c.suite == "prefill") {
    paged_.rows.request = upload(std::vector<int32_t>(static_cast<size_t>(c.rows), 0));
  } else {
    paged_.rows.next_n = c.next_n;
  }
  paged_.topk = c.topk;
  bytes_ = static_cast<double>(keys * kRow);
  make_search_parts(paged_.admit, paged_.out);
}

void GpuData::make_prefill() {
  const GpuCase& c = case_;
  for (int64_t r = 0; r < c.rows; ++r) ends_.push_back(static_cast<int32_t>(c.keys - c.rows + 1 + r));
  const bool normal = c.pattern == Pattern::normal;
  dense_.q = query();
  dense_.keys = {make(DType::f8_e4m3fn, {c.keys, kDim}, normal ? kCodes : kOneKey),
                 normal ? make(DType::f32, {c.keys}, kScales) : upload(key_scales(c.keys)), KeyFormat::fp8};
  dense_.rows.count = c.rows, dense_.rows.end = upload(ends_), dense_.topk = c.topk;
  bytes_ = static_cast<double>(c.keys * kRow);
  make_search_parts(dense_.admit, dense_.out);
}

void GpuData::make_select() {
  const GpuCase& c = case_;
  const Tensor scores = make(DType::f32, {c.rows, c.keys}, kNormal);
  ends_.assign(static_cast<size_t>(c.rows), static_cast<int32_t>(c.keys));
  select_.scores = blocks_.scores = scores, select_.rows.count = blocks_.rows.count = c.rows;
  if (c.op == "topk") {
    select_.topk = c.topk, select_.out.indices = output(DType::i32, {c.rows, c.topk}, "indices");
  } else {
    blocks_.block_size = kBlock, blocks_.blocks = output(DType::i32, {c.rows, c.blocks}, "blocks");
  }
  pairs_ = static_cast<double>(c.rows * c.keys);
  bytes_ = pairs_ * 4;
}

void GpuData::make_producer() {
  const GpuCase& c = case_;
  const int64_t rows = c.rows;
  const bool few = rows <= 64;  // then each is a request of its own, with a page of its own
  std::vector<int32_t> slots, positions;
  for (int64_t r = 0; r < rows; ++r) {
    positions.push_back(static_cast<int32_t>(r % 4096));
    slots.push_back(static_cast<int32_t>(few ? r * kPage : r));
  }
  const auto rope = [&] {
    Rope r{};
    r.positions = upload(positions), r.cos_sin = make(DType::f32, {4096, 64}, kNormal), r.dim = 64;
    return r;
  };
  if (c.op == "store_k") {
    store_.k = make(DType::bf16, {rows, kDim}, kBf16), store_.rope = rope(), store_.hadamard = true;
    store_.norm = {NormKind::layer, make(DType::f32, {kDim}, kNormal), make(DType::f32, {kDim}, kNormal), 1e-6F};
    store_.slot_mapping = upload(slots);
    store_.cache = pages(few ? rows : (rows + kPage - 1) / kPage, false);
    written_.push_back({tensor(store_.cache.pages.data, DType::u8, {kDim}), "cache"});
    bytes_ = static_cast<double>(rows * (2 * kDim + kRow));
  } else if (c.op == "quantize_q") {
    quantize_.q = make(DType::bf16, {rows, c.heads, kDim}, kBf16);
    quantize_.weights = make(DType::f32, {rows, c.heads}, kWeights);
    quantize_.softmax_scale = 0.088388F, quantize_.head_scale = 0.125F, quantize_.rope = rope();
    quantize_.hadamard = true, quantize_.format = KeyFormat::fp8;
    quantize_.q_out = output(DType::f8_e4m3fn, {rows, c.heads, kDim}, "q_out");
    quantize_.weights_out = output(DType::f32, {rows, c.heads}, "weights_out");
    bytes_ = static_cast<double>(rows * c.heads * (3 * kDim + 8));
  } else if (c.op == "gather_k") {
    const int64_t used = (rows + kPage - 1) / kPage;
    order_.resize(static_cast<size_t>(used));
    std::iota(order_.begin(), order_.end(), 0);
    Random random(5);
    random.shuffle(order_);
    gather_.keys.cache = pages(used, true), gather_.keys.block_table = upload(order_);
    gather_.keys.block_table = tensor(gather_.keys.block_table.data, DType::i32, {1, used});
    gather_.indptr = upload(std::vector<int32_t>{0, static_cast<int32_t>(rows)}), gather_.total = rows;
    gather_.out = {output(DType::f8_e4m3fn, {rows, kDim}, "values"), output(DType::f32, {rows}, "scales"),
                   KeyFormat::fp8};
    bytes_ = static_cast<double>(rows * 2 * kRow);
  } else if (c.op == "pool_k") {
    constexpr int32_t kPool = 4, kRing = 8;
    std::vector<int32_t> requests, tails;
    for (int64_t r = 0; r < rows; ++r) {
      if (few) positions[static_cast<size_t>(r)] = kPool - 1;
      if (!few) positions[static_cast<size_t>(r)] = static_cast<int32_t>(r);
      if (!few) slots[static_cast<size_t>(r)] = (r + 1) % kPool == 0 ? static_cast<int32_t>(r / kPool) : -1;
      requests.push_back(few ? static_cast<int32_t>(r) : 0);
      tails.push_back(static_cast<int32_t>(r * kRing + kPool - 1));
    }
    pool_.k = make(DType::bf16, {rows, kDim}, kBf16), pool_.gate = make(DType::bf16, {rows, kDim}, kBf16);
    pool_.ape = make(DType::f32, {kPool, kDim}, kNormal), pool_.positions = upload(positions);
    pool_.slot_mapping = upload(slots), pool_.request = upload(requests), pool_.pool_size = kPool;
    if (few) pool_.tail = make(DType::bf16, {rows, 2, kRing, kDim}, kBf16), pool_.tail_slots = upload(tails);
    pool_.cache = pages(few ? rows : (rows / kPool + kPage - 1) / kPage, false);
    written_.push_back({tensor(pool_.cache.pages.data, DType::u8, {kDim}), "cache"});
    bytes_ = static_cast<double>(rows * 4 * kDim + (few ? rows : rows / kPool) * kRow);
  }
}

GpuData::GpuData(const GpuCase& c) : case_(c) {
  if (c.op == "paged_mqa_topk") make_decode();
  if (c.op == "mqa_topk") make_prefill();
  if (c.suite == "select") make_select();
  if (c.suite == "producers") make_producer();
  poison();
}

GpuData::~GpuData() {
  for (void* data : memory_) cudaFree(data);
}

void GpuData::call(const Exec& exec) const {
  if (case_.op == "empty") return empty_kernel(exec.stream);
  if (case_.op == "paged_mqa_topk") paged_mqa_topk(paged_, exec);
  if (case_.op == "mqa_topk") mqa_topk(dense_, exec);
  if (case_.op == "topk") topk(select_, exec);
  if (case_.op == "select_blocks") select_blocks(blocks_, exec);
  if (case_.op == "store_k") store_k(store_, exec);
  if (case_.op == "quantize_q") quantize_q(quantize_, exec);
  if (case_.op == "gather_k") gather_k(gather_, exec);
  if (case_.op == "pool_k") pool_k(pool_, exec);
}

size_t GpuData::workspace_bytes(const Exec& exec) const {
  if (case_.op == "paged_mqa_topk") return paged_mqa_topk_workspace_bytes(paged_, exec);
  if (case_.op == "mqa_topk") return mqa_topk_workspace_bytes(dense_, exec);
  if (case_.op == "topk") return topk_workspace_bytes(select_, exec);
  if (case_.op == "select_blocks") return select_blocks_workspace_bytes(blocks_, exec);
  if (case_.op == "store_k") return store_k_workspace_bytes(store_, exec);
  if (case_.op == "quantize_q") return quantize_q_workspace_bytes(quantize_, exec);
  if (case_.op == "gather_k") return gather_k_workspace_bytes(gather_, exec);
  if (case_.op == "pool_k") return pool_k_workspace_bytes(pool_, exec);
  return 0;
}

const char* GpuData::unsupported(const Exec& exec) const {
  if (case_.op == "paged_mqa_topk") return paged_mqa_topk_unsupported(paged_, exec);
  if (case_.op == "mqa_topk") return mqa_topk_unsupported(dense_, exec);
  if (case_.op == "topk") return topk_unsupported(select_, exec);
  if (case_.op == "select_blocks") return select_blocks_unsupported(blocks_, exec);
  if (case_.op == "store_k") return store_k_unsupported(store_, exec);
  if (case_.op == "quantize_q") return quantize_q_unsupported(quantize_, exec);
  if (case_.op == "gather_k") return gather_k_unsupported(gather_, exec);
  if (case_.op == "pool_k") return pool_k_unsupported(pool_, exec);
  return nullptr;
}

}  // namespace topkey::bench
