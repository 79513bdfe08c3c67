// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `cache`: key rows out of pages. Rows that are whole vectors of 16 bytes are moved by as few lanes as they have of
// them, several rows a warp at a time; others by a warp each.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/device/divisor.cuh"
#include "cuda/device/key_rows.cuh"
#include "cuda/keys.h"
#include "cuda/launch.h"
#include "cuda/stages.h"
#include "cuda/vectors.h"

namespace topkey::cuda {
namespace {

struct GatherJob {
  GatherK a;
  KeySource keys;
  PageLayout layout;
  uint64_t* stats;
};
/// Of it, what rows of vectors need.
struct GatherVectors {
  KeySource keys;
  Tensor indptr;
  Whole only;  ///< of one request: the same; data null: of more
  Divisor page_size;
  int64_t total;
  uint8_t *values, *scales;  ///< out
  int64_t value_step, scale_step;
  int log_lanes;        ///< 1 << so many vectors a row
  uint32_t nan, scale;  ///< words of a key that scores NaN; has_scale: its scale
  bool has_scale;
  uint64_t* stats;
};

/// Rows past `total` are not written, but counted.
__device__ void count_gathered(const Tensor& indptr, int64_t total, uint64_t* stats) {
  const int64_t requests = indptr.shape[0] - 1;
  if (stats == nullptr) return;
  for (int64_t b = threadIdx.x; b < requests; b += blockDim.x) {
    const int64_t first = max(0ll, static_cast<long long>(integer(indptr, b))), last = integer(indptr, b + 1);
    const int64_t past = first > total ? first : total;
    if (last > past) count(stats, kSkippedPages, static_cast<uint64_t>(last - past));
  }
  if (threadIdx.x != 0 || requests <= 0) return;
  const int64_t rows = integer(indptr, requests);
  count(stats, kRows, static_cast<uint64_t>(rows < 0 ? 0 : rows > total ? total : rows));
}

__global__ __launch_bounds__(128) void gather_rows(const __grid_constant__ GatherJob job) {
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
  if (blockIdx.x == 0) count_gathered(job.a.indptr, job.a.total, job.stats);
}

/// Page of a position as the block table has it.
__device__ __forceinline__ int32_t entry_of(const GatherVectors& job, int64_t request, int64_t position) {
  return *element<int32_t>(job.keys.block_table, request, job.page_size.quotient(static_cast<uint32_t>(position)));
}
__device__ __forceinline__ KeyBytes key_of(const GatherVectors& job, int64_t position, int32_t page) {
  const KeySource& keys = job.keys;
  if (page < 0 || page >= keys.num_pages) return {nullptr, nullptr};
  const uint32_t at = static_cast<uint32_t>(position), row = at - job.page_size.quotient(at) * job.page_size.value;
  const int64_t base = page * keys.page_stride;
  return {keys.values + base + row * keys.value_step, keys.scales + base + row * keys.scale_step};
}
/// Where row i of the call lies; values null: nowhere. false: the row is no request's.
__device__ __forceinline__ bool find_row(const GatherVectors& job, int64_t i, KeyBytes& from) {
  from = {nullptr, nullptr};
  const int64_t request = request_in(job.indptr, i);
  if (request < 0) return false;
  const int64_t position = i - max(0ll, static_cast<long long>(integer(job.indptr, request)));
  if (position < job.keys.count) from = key_of(job, position, entry_of(job, request, position));
  return true;
}
/// The same where the call has one request. Its first row is row 0 nearly always: the page is asked for before that is
/// known.
__device__ __forceinline__ bool find_only_row(const GatherVectors& job, int64_t i, KeyBytes& from) {
  from = {nullptr, nullptr};
  const int64_t first = job.only[0], end = job.only[1];
  int32_t page = entry_of(job, 0, min(i, job.keys.count - 1));
  __syncwarp();  // nothing is looked at before all of them are under way
  if (i < first || i >= end) return false;
  const int64_t position = first > 0 ? i - first : i;
  if (position >= job.keys.count) return true;
  if (first > 0) page = entry_of(job, 0, position);
  from = key_of(job, position, page);
  return true;
}

/// A vector a lane, for few rows: nothing waits for another lane, and all rows are under way at once.
template <bool kOnly>
__global__ __launch_bounds__(128) void gather_few(const __grid_constant__ GatherVectors job) {
  const int64_t row = (int64_t{blockIdx.x} * 128 + threadIdx.x) >> job.log_lanes;
  const uint32_t vector = threadIdx.x & ((1u << job.log_lanes) - 1);
  prefetch_to_l2(job.keys.values), prefetch_to_l2(job.values);
  if (job.has_scale) prefetch_to_l2(job.scales);
  KeyBytes from{nullptr, nullptr};
  const bool own =
      kOnly ? find_only_row(job, min(row, job.total - 1), from) : row < job.total && find_row(job, row, from);
  if (own && row < job.total) {
    uint4 value = {job.nan, job.nan, job.nan, job.nan};
    uint32_t scale = job.scale;
    const bool scaled = job.has_scale && vector == 0;
    if (from.values != nullptr) {
      value = reinterpret_cast<const uint4*>(from.values)[vector];
      if (scaled) scale = *reinterpret_cast<const uint32_t*>(from.scale);
    }
    reinterpret_cast<uint4*>(job.values + row * job.value_step)[vector] = value;
    if (scaled) *reinterpret_cast<uint32_t*>(job.scales + row * job.scale_step) = scale;
    if (from.values == nullptr && vector == 0) count(job.stats, kSkippedPages, 1);
  }
  if (blockIdx.x == 0) count_gathered(job.indptr, job.total, job.stats);
}

/// A warp takes 32 rows: each lane finds one of them, then as many lanes as a row has vectors move it.
__global__ __launch_bounds__(128) void gather_vectors(const __grid_constant__ GatherVectors job) {
  constexpr int kBatch = 4;  // vectors of a lane that are under way
  const int lane = lane_id(), vector = lane & ((1 << job.log_lanes) - 1), rows_a_step = 32 >> job.log_lanes;
  const int64_t warps = int64_t{gridDim.x} * 4;
  for (int64_t base = (int64_t{blockIdx.x} * 4 + threadIdx.x / 32) * 32; base < job.total; base += warps * 32) {
    const int64_t row = base + lane;
    KeyBytes from{nullptr, nullptr};
    const bool found = job.only.data != nullptr ? find_only_row(job, min(row, job.total - 1), from)
                                                : row < job.total && find_row(job, row, from);
    const bool own = found && row < job.total;
    const bool there = own && from.values != nullptr;
    if (own && job.has_scale)
      *reinterpret_cast<uint32_t*>(job.scales + row * job.scale_step) =
          there ? *reinterpret_cast<const uint32_t*>(from.scale) : job.scale;
    if (own && !there) count(job.stats, kSkippedPages, 1);
    const uint32_t owned = __ballot_sync(kWarp, own);
    const int steps = min(1 << job.log_lanes, static_cast<int>((job.total - base + rows_a_step - 1) / rows_a_step));
#pragma unroll 1
    for (int step = 0; step < steps; step += kBatch) {
      uint4 value[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int source = ((step + u) * rows_a_step + (lane >> job.log_lanes)) & 31;
        const auto* at = reinterpret_cast<const uint4*>(
            __shfl_sync(kWarp, reinterpret_cast<unsigned long long>(from.values), source));
        value[u] = {job.nan, job.nan, job.nan, job.nan};
        if (at != nullptr && step + u < steps) value[u] = __ldcs(at + vector);
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int source = (step + u) * rows_a_step + (lane >> job.log_lanes);
        if (step + u < steps && (owned >> source & 1u) != 0)
          reinterpret_cast<uint4*>(job.values + (base + source) * job.value_step)[vector] = value[u];
      }
    }
  }
  if (blockIdx.x == 0) count_gathered(job.indptr, job.total, job.stats);
}

/// Vectors of a call up to which a lane has one.
constexpr int64_t kFewVectors = 16384;

const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&gather_vectors), 0},
                                {reinterpret_cast<const void*>(&gather_few<false>), 0},
                                {reinterpret_cast<const void*>(&gather_few<true>), 0},
                                {reinterpret_cast<const void*>(&gather_rows), 0}};

/// A key that scores NaN, as nan_row writes it, in words.
uint32_t nan_word(KeyFormat format) {
  switch (format) {
    case KeyFormat::fp8: return 0x7F7F7F7Fu;
    case KeyFormat::fp8_fnuz: return 0x80808080u;
    case KeyFormat::bf16: return 0x7FC07FC0u;
    case KeyFormat::f16: return 0x7E007E00u;
    case KeyFormat::f32: return kCanonicalNan;
    default: return 0;  // mxfp4: its scales say so
  }
}

bool aligned(const void* data, int64_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }

/// Whether rows are whole vectors at both ends; then how.
bool vectors_of(const GatherJob& job, GatherVectors* v) {
  const DenseKeys& out = job.a.out;
  const KeySource& from = job.keys;
  const int64_t bytes = job.layout.value, vectors = bytes / 16;
  const bool whole = bytes % 16 == 0 && vectors <= 32 && (vectors & (vectors - 1)) == 0 && vectors > 0;
  const int64_t element = bytes / std::max<int64_t>(out.values.shape[1], 1);
  v->value_step = out.values.stride[0] * element;
  const bool values_suit = aligned(from.values, 16) && from.page_stride % 16 == 0 && from.value_step % 16 == 0 &&
                           aligned(out.values.data, 16) && v->value_step % 16 == 0;
  v->has_scale = job.layout.scale > 0;
  if (v->has_scale) {
    const bool wide = out.scales.dtype == DType::f32 || out.scales.dtype == DType::i32;
    v->scale_step = out.scales.stride[0] * (wide ? 4 : 1);
    const bool scales_suit = job.layout.scale == 4 && aligned(from.scales, 4) && from.scale_step % 4 == 0 &&
                             aligned(out.scales.data, 4) && v->scale_step % 4 == 0;
    if (!scales_suit) return false;
  }
  if (!whole || !values_suit || !from.paged || job.layout.tile > 0 || from.format == KeyFormat::q8_0) return false;
  v->keys = from, v->indptr = job.a.indptr, v->total = job.a.total;
  v->page_size = divisor(static_cast<uint32_t>(from.page_size));
  if (job.a.indptr.shape[0] == 2 && job.a.indptr.stride[0] == 1 && from.count > 0) v->only = whole_of(job.a.indptr);
  v->values = static_cast<uint8_t*>(out.values.data), v->scales = static_cast<uint8_t*>(out.scales.data);
  while (1 << v->log_lanes < vectors) ++v->log_lanes;
  v->nan = nan_word(from.format), v->scale = from.format == KeyFormat::mxfp4 ? 0xFFFFFFFFu : kCanonicalNan;
  v->stats = job.stats;
  return true;
}

}  // namespace

KernelList gather_kernels() { return {kEntries, 4}; }

void gather_k(const GatherK& a, const Exec& exec) {
  const Launch launch("gather_k", exec);
  const KeyCache& cache = a.keys.cache;
  const GatherJob job{a, source_of(a.keys), page_layout(a.out.format, cache.layout, cache.page_size, cache.head_dim),
                      exec.stats};
  GatherVectors vectors{};
  if (!vectors_of(job, &vectors)) {
    gather_rows<<<launch.blocks((a.total + 3) / 4, 8), 128, 0, launch.stream()>>>(job);
    TOPKEY_CUDA_LAUNCHED("gather_k");
    return;
  }
  const int64_t lanes = a.total << vectors.log_lanes, few = (lanes + 127) / 128;
  if (lanes <= kFewVectors && launch.blocks(few, 8) >= few) {
    const auto kernel = vectors.only.data != nullptr ? gather_few<true> : gather_few<false>;
    kernel<<<static_cast<uint32_t>(few), 128, 0, launch.stream()>>>(vectors);
  } else {
    gather_vectors<<<launch.blocks((a.total + 127) / 128, 8), 128, 0, launch.stream()>>>(vectors);
  }
  TOPKEY_CUDA_LAUNCHED("gather_k");
}

}  // namespace topkey::cuda
