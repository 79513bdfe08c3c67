// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `cache`: key rows into pages and out of them, a warp a row.
#include "cuda/check.h"
#include "cuda/keys.h"
#include "cuda/launch.h"
#include "cuda/producer.h"
#include "cuda/stages.h"

namespace topkey::cuda {
namespace {

struct RowBytes {
  uint8_t *values, *scale;
};
struct StoreJob {
  StoreK a;
  Recipe recipe;
  PageLayout layout;
  bool ready;       ///< codes are given
  int64_t scratch;  ///< bytes a warp, for tiled pages
  uint64_t* stats;
};
struct GatherJob {
  GatherK a;
  KeySource keys;
  PageLayout layout;
  uint64_t* stats;
};

/// Bytes of row `row` of dense keys of this layout.
__device__ RowBytes dense_row(const Tensor& values, const Tensor& scales, const PageLayout& layout, int64_t row) {
  const int64_t element_bytes = layout.value / values.shape[1];
  return {static_cast<uint8_t*>(values.data) + row * values.stride[0] * element_bytes, scale_at(scales, row)};
}

__device__ void copy_bytes(uint8_t* to, const uint8_t* from, int64_t bytes) {
  const uint64_t both = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from);
  const int64_t words = both % 4 == 0 ? bytes / 4 : 0;
  for (int64_t i = lane_id(); i < words; i += 32)
    reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(from)[i];
  for (int64_t i = words * 4 + lane_id(); i < bytes; i += 32) to[i] = from[i];
}
__device__ void copy_row(const RowBytes& to, const uint8_t* values, const uint8_t* scale, const PageLayout& layout) {
  copy_bytes(to.values, values, layout.value);
  if (layout.scale > 0) copy_bytes(to.scale, scale, layout.scale);
}

__device__ void copy_to_page(uint8_t* values, uint8_t* scale, const RowBytes& from, const PageLayout& layout) {
  if (layout.tile == 0) {
    copy_row({values, scale}, from.values, from.scale, layout);
    return;
  }
  for (int64_t j = lane_id(); j < layout.value; j += 32) values[value_gap(layout.tile, j)] = from.values[j];
  for (int64_t j = lane_id(); j < layout.scale; j += 32)
    scale[scale_gap(layout.scale_tile, layout.scale, j)] = from.scale[j];
}
__device__ void copy_from_page(const RowBytes& to, const KeyBytes& from, const PageLayout& layout) {
  if (layout.tile == 0) {
    copy_row(to, from.values, from.scale, layout);
    return;
  }
  for (int64_t j = lane_id(); j < layout.value; j += 32) to.values[j] = from.values[value_gap(layout.tile, j)];
  for (int64_t j = lane_id(); j < layout.scale; j += 32)
    to.scale[j] = from.scale[scale_gap(layout.scale_tile, layout.scale, j)];
}

/// A key that scores NaN for every query: what stands where no key can be read.
__device__ void nan_row(const RowBytes& to, KeyFormat format, const PageLayout& layout) {
  for (int64_t i = lane_id(); i < layout.value; i += 32) {
    uint32_t byte = format == KeyFormat::fp8_fnuz ? 0x80 : 0x7F;  // e4m3
    if (format == KeyFormat::bf16) byte = i % 2 == 0 ? 0xC0 : 0x7F;
    if (format == KeyFormat::f16) byte = i % 2 == 0 ? 0x00 : 0x7E;
    if (format == KeyFormat::f32) byte = kCanonicalNan >> (8 * (i % 4)) & 0xFF;
    if (format == KeyFormat::q8_0) byte = i % 34 == 1 ? 0x7E : 0x00;
    if (format == KeyFormat::mxfp4) byte = 0x00;
    to.values[i] = static_cast<uint8_t>(byte);
  }
  if (is_e4m3(format) && lane_id() == 0) store_word(to.scale, kCanonicalNan);
  for (int64_t i = lane_id(); format == KeyFormat::mxfp4 && i < layout.scale; i += 32) to.scale[i] = 255;
}

/// True if a later row has the same slot: of equal slots the last row is stored, whole.
__device__ bool comes_again(const Tensor& slots, int64_t row, int64_t rows, int64_t slot) {
  for (int64_t base = row + 1; base < rows; base += 32) {
    const int64_t i = base + lane_id();
    if (__any_sync(kWarp, i < rows && integer(slots, i) == slot)) return true;
  }
  return false;
}

__global__ void store_rows(const __grid_constant__ StoreJob job) {
  extern __shared__ float memory[];
  const StoreK& a = job.a;
  const int dim = job.recipe.head_dim, warps = blockDim.x / 32;
  float* x = memory + threadIdx.x / 32 * dim;
  uint8_t* scratch = reinterpret_cast<uint8_t*>(memory + warps * dim) + threadIdx.x / 32 * job.scratch;
  const PageLayout& layout = job.layout;
  const int64_t rows = a.slot_mapping.shape[0], slots = a.cache.pages.shape[0] * a.cache.page_size;
  for (int64_t row = int64_t{blockIdx.x} * warps + threadIdx.x / 32; row < rows; row += int64_t{gridDim.x} * warps) {
    const int64_t slot = integer(a.slot_mapping, row);
    if (lane_id() == 0) count(job.stats, kSkippedSlots, slot >= slots);
    if (slot < 0 || slot >= slots) continue;
    const int64_t offset = slot % a.cache.page_size;
    uint8_t* page = static_cast<uint8_t*>(a.cache.pages.data) + slot / a.cache.page_size * a.cache.pages.stride[0];
    const bool again = comes_again(a.slot_mapping, row, rows, slot);
    if (job.ready) {
      const RowBytes from = dense_row(a.k, a.k_scales, layout, row);
      if (!again) copy_to_page(page + value_start(layout, offset), page + scale_start(layout, offset), from, layout);
      continue;
    }
    for (int d = lane_id(); d < dim; d += 32) x[d] = real(a.k, row, d);
    __syncwarp();
    const bool wild = transform(job.recipe, rope_position(job.recipe, row), x);
    if (lane_id() == 0) count(job.stats, kSkippedPages, wild);
    if (!again) quantize_to_page(job.recipe, x, layout, page, offset, scratch);
    __syncwarp();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) count(job.stats, kRows, static_cast<uint64_t>(rows));
}

/// Rows past `total` are not written, but counted.
__device__ void count_gathered(const GatherJob& job, int64_t requests) {
  for (int64_t b = threadIdx.x; b < requests; b += blockDim.x) {
    const int64_t first = max(0ll, static_cast<long long>(integer(job.a.indptr, b))),
                  last = integer(job.a.indptr, b + 1);
    const int64_t past = first > job.a.total ? first : job.a.total;
    if (last > past) count(job.stats, kSkippedPages, static_cast<uint64_t>(last - past));
  }
  if (threadIdx.x != 0 || requests <= 0) return;
  const int64_t rows = integer(job.a.indptr, requests);
  count(job.stats, kRows, static_cast<uint64_t>(rows < 0 ? 0 : rows > job.a.total ? job.a.total : rows));
}

__global__ __launch_bounds__(128) void gather_rows(const __grid_constant__ GatherJob job) {
  const int64_t requests = job.a.indptr.shape[0] - 1;
  for (int64_t i = int64_t{blockIdx.x} * 4 + threadIdx.x / 32; i < job.a.total; i += int64_t{gridDim.x} * 4) {
    const int64_t request = request_in(job.a.indptr, i);
    if (request < 0) continue;
    const int64_t position = i - max(0ll, static_cast<long long>(integer(job.a.indptr, request)));
    KeyBytes from{nullptr, nullptr};
    if (position < job.keys.count) from = find_key(job.keys, static_cast<int32_t>(request), position);
    const RowBytes to = dense_row(job.a.out.values, job.a.out.scales, job.layout, i);
    if (from.values == nullptr) {
      nan_row(to, job.a.out.format, job.layout);
      if (lane_id() == 0) count(job.stats, kSkippedPages, 1);
    } else {
      copy_from_page(to, from, job.layout);
    }
  }
  if (blockIdx.x == 0) count_gathered(job, requests);
}

const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&store_rows), kMostProducerShared},
                                {reinterpret_cast<const void*>(&gather_rows), 0}};

}  // namespace

KernelList cache_kernels() { return {kEntries, 2}; }

void store_k(const StoreK& a, const Exec& exec) {
  const int64_t rows = a.slot_mapping.shape[0], dim = a.cache.head_dim;
  if (rows == 0) return;
  const Launch launch("store_k", exec);
  const bool ready = a.k_scales.data != nullptr || a.k.dtype == DType::u8;
  StoreJob job{a, {}, page_layout(a.cache.format, a.cache.layout, a.cache.page_size, dim), ready, 0, exec.stats};
  job.scratch = scratch_for(job.layout);
  Recipe& r = job.recipe;
  r.norm = a.norm, r.rope = a.rope, r.hadamard = a.hadamard, r.hadamard_scale = hadamard_scale(dim),
  r.input = a.k.dtype;
  r.rule = key_facts(a.rule, a.scale, a.cache.format), r.scale = a.scale, r.format = a.cache.format;
  r.head_dim = static_cast<int32_t>(dim);
  const int warps = warps_for(dim);
  const size_t shared = shared_for(dim) + static_cast<size_t>(warps * job.scratch);
  store_rows<<<launch.blocks((rows + warps - 1) / warps, 8), 32 * warps, shared, launch.stream()>>>(job);
  TOPKEY_CUDA_LAUNCHED("store_k");
}

void gather_k(const GatherK& a, const Exec& exec) {
  const Launch launch("gather_k", exec);
  const KeyCache& cache = a.keys.cache;
  const GatherJob job{a, source_of(a.keys), page_layout(a.out.format, cache.layout, cache.page_size, cache.head_dim),
                      exec.stats};
  gather_rows<<<launch.blocks((a.total + 3) / 4, 8), 128, 0, launch.stream()>>>(job);
  TOPKEY_CUDA_LAUNCHED("gather_k");
}

}  // namespace topkey::cuda
