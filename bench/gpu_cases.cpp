// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See gpu_cases.h.
#include "bench/gpu_cases.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "support/patterns.h"

namespace topkey::bench {
namespace {

using support::Random;

void must(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

enum Fill { kNothing, kCodes, kNormal, kWeights, kBf16 };

/// A few MiB of random data of a kind, which larger memory repeats.
std::vector<uint8_t> sample_of(int fill) {
  constexpr size_t kSize = size_t{4} << 20;
  std::vector<uint8_t> bytes(kSize);
  Random random(static_cast<uint64_t>(fill) + 77);
  for (size_t i = 0; i < kSize; i += fill == kCodes ? 1 : fill == kBf16 ? 2 : 4) {
    const float x = fill == kWeights ? random.normal() * 0.01F : random.normal();
    const uint16_t h = float_to_bf16(x);
    if (fill == kCodes) bytes[i] = float_to_e4m3(x * 100);
    if (fill == kBf16) std::memcpy(&bytes[i], &h, 2);
    if (fill == kNormal || fill == kWeights) std::memcpy(&bytes[i], &x, 4);
  }
  return bytes;
}

}  // namespace

std::vector<GpuCase> gpu_cases(bool quick) {
  const auto decode = [](int64_t rows, int64_t keys, double must_us, double target_us) {
    return GpuCase{"paged_mqa_topk", 64, rows, keys * 1024, 1, 2048, must_us, target_us};
  };
  std::vector<GpuCase> list = {{"empty"}};
  for (const auto& [rows, keys, must_us, target_us] :
       std::initializer_list<std::array<double, 4>>{{1, 8, 11.5, 9.5},
                                                    {1, 32, 16, 12},
                                                    {1, 128, 22, 17},
                                                    {1, 1024, 60, 52},
                                                    {4, 32, 21, 17},
                                                    {4, 128, 38, 33},
                                                    {16, 8, 17.5, 15},
                                                    {16, 32, 38, 33},
                                                    {16, 128, 92, 84},
                                                    {64, 8, 35.5, 32},
                                                    {64, 32, 92, 84},
                                                    {64, 128, 310, 292},
                                                    {128, 32, 160, 150},
                                                    {128, 128, 595, 566}})
    list.push_back(decode(static_cast<int64_t>(rows), static_cast<int64_t>(keys), must_us, target_us));
  list.push_back({"paged_mqa_topk", 64, 128, 32768, 2, 2048, 96, 88});
  for (const auto& [heads, rows, keys, must_us, target_us] :
       std::initializer_list<std::array<double, 5>>{{64, 2048, 8192, 260, 219},
                                                    {64, 2048, 32768, 980, 880},
                                                    {64, 2048, 131072, 3900, 3600},
                                                    {64, 8192, 8192, 580, 485},
                                                    {32, 2048, 32768, 560, 500}})
    list.push_back({"mqa_topk", static_cast<int32_t>(heads), static_cast<int64_t>(rows), static_cast<int64_t>(keys), 1,
                    2048, must_us, target_us});
  for (const int64_t rows : {1, 16, 64}) {
    for (const int64_t keys : {8192, 32768, 131072}) list.push_back({"topk", 0, rows, keys, 1, 2048, 0, 0});
  }
  for (const int64_t rows : {1, 64}) list.push_back({"store_k", 0, rows, 0, 1, 0, 0, 0});
  if (quick) list.resize(4);
  return list;
}

void* GpuData::take(size_t bytes, int fill) {
  void* data = nullptr;
  must(cudaMalloc(&data, std::max<size_t>(bytes, 256)));
  memory_.push_back(data);
  if (fill == kNothing) return data;
  static std::vector<uint8_t> samples[5];
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
  size_t bytes = dtype == DType::f32 || dtype == DType::i32 ? 4 : dtype == DType::bf16 ? 2 : 1;
  for (const int64_t n : shape) bytes *= static_cast<size_t>(n);
  return tensor(take(bytes, fill), dtype, shape);
}

GpuData::GpuData(const GpuCase& c) : case_(c) {
  constexpr int64_t kDim = 128, kPage = 64;
  const auto upload = [&](const std::vector<int32_t>& values) {
    const Tensor t = make(DType::i32, {static_cast<int64_t>(values.size())}, kNothing);
    must(cudaMemcpy(t.data, values.data(), values.size() * 4, cudaMemcpyHostToDevice));
    return t;
  };
  const int64_t rows = c.rows, keys = c.keys, heads = c.heads;
  const Query q{make(DType::f8_e4m3fn, {rows, std::max<int64_t>(heads, 1), kDim}, kCodes),
                {},
                make(DType::f32, {rows, std::max<int64_t>(heads, 1)}, kWeights)};
  const Tensor indices = make(DType::i32, {rows, std::max(c.topk, 1)}, kNothing);
  double pairs = static_cast<double>(rows) * static_cast<double>(keys);
  if (c.op == "paged_mqa_topk") {
    const int64_t requests = rows / c.next_n, pages = keys / kPage;
    std::vector<int32_t> table(static_cast<size_t>(requests * pages));
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
    Random random(5);
    random.shuffle(table);
    paged_.q = q;
    paged_.keys.cache = {make(DType::u8, {requests * pages, kPage * (kDim + 4)}, kWeights), KeyFormat::fp8,
                         Layout::planar, kPage, kDim};
    // Codes in every page's values; its scales are the small floats that were there.
    const Tensor codes = make(DType::u8, {pages * kPage, kDim}, kCodes);
    for (int64_t b = 0; b < requests; ++b) {
      auto* to = static_cast<uint8_t*>(paged_.keys.cache.pages.data) + b * pages * kPage * (kDim + 4);
      must(cudaMemcpy2D(to, kPage * (kDim + 4), codes.data, kPage * kDim, kPage * kDim, static_cast<size_t>(pages),
                        cudaMemcpyDeviceToDevice));
    }
    paged_.keys.block_table = upload(table);
    paged_.keys.block_table.ndim = 2, paged_.keys.block_table.shape[0] = requests;
    paged_.keys.block_table.shape[1] = paged_.keys.block_table.stride[0] = pages;
    paged_.keys.block_table.stride[1] = 1;
    paged_.rows.count = rows, paged_.rows.next_n = c.next_n, paged_.rows.max_len = keys;
    paged_.rows.end = upload(std::vector<int32_t>(static_cast<size_t>(rows), static_cast<int32_t>(keys)));
    paged_.topk = c.topk, paged_.out.indices = indices;
    bytes_ = static_cast<double>(requests) * static_cast<double>(keys) * (kDim + 4);
  } else if (c.op == "mqa_topk") {
    std::vector<int32_t> ends;
    for (int64_t r = 0; r < rows; ++r) ends.push_back(static_cast<int32_t>(keys - rows + 1 + r));
    pairs -= static_cast<double>(rows) * static_cast<double>(rows - 1) / 2;
    dense_.q = q;
    dense_.keys = {make(DType::f8_e4m3fn, {keys, kDim}, kCodes), make(DType::f32, {keys}, kWeights), KeyFormat::fp8};
    dense_.rows.count = rows, dense_.rows.end = upload(ends), dense_.topk = c.topk, dense_.out.indices = indices;
    bytes_ = static_cast<double>(keys) * (kDim + 4);
  } else if (c.op == "topk") {
    select_.scores = make(DType::f32, {rows, keys}, kNormal);
    select_.rows.count = rows, select_.topk = c.topk, select_.out.indices = indices;
    bytes_ = pairs * 4;
  } else if (c.op == "store_k") {
    std::vector<int32_t> slots;
    for (int64_t r = 0; r < rows; ++r) slots.push_back(static_cast<int32_t>(r * 3));
    store_.k = make(DType::bf16, {rows, kDim}, kBf16), store_.norm.kind = NormKind::layer, store_.norm.eps = 1e-6F;
    store_.hadamard = true, store_.slot_mapping = upload(slots);
    store_.cache = {make(DType::u8, {rows, kPage * (kDim + 4)}, kNothing), KeyFormat::fp8, Layout::planar, kPage, kDim};
  }
  flop_ = 2.0 * static_cast<double>(heads) * kDim * pairs;
}

GpuData::~GpuData() {
  for (void* data : memory_) cudaFree(data);
}

void GpuData::call(const Exec& exec) const {
  if (case_.op == "paged_mqa_topk") paged_mqa_topk(paged_, exec);
  if (case_.op == "mqa_topk") mqa_topk(dense_, exec);
  if (case_.op == "topk") topk(select_, exec);
  if (case_.op == "store_k") store_k(store_, exec);
}

size_t GpuData::workspace_bytes(const Exec& exec) const {
  if (case_.op == "paged_mqa_topk") return paged_mqa_topk_workspace_bytes(paged_, exec);
  if (case_.op == "mqa_topk") return mqa_topk_workspace_bytes(dense_, exec);
  if (case_.op == "topk") return topk_workspace_bytes(select_, exec);
  return 0;
}

}  // namespace topkey::bench
