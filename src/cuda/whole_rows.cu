// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `search` where no row can have more keys than are wanted, and no score is: the answer is each row's positions, so
// one launch without a workspace, in which no key is read. Two kernels: the form that engines call most is written with
// few instructions, since little else is left of such a call; the other one takes every form of rows and answers.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/device/emit.cuh"
#include "cuda/device/look.cuh"
#include "cuda/device/select.cuh"
#include "cuda/device/whole_row.cuh"
#include "cuda/search_parts.h"
#include "cuda/stages.h"

namespace topkey::cuda {
namespace {

constexpr int kWholeThreads = 512;  ///< four columns each: 2,048

/// Rows of a request side by side. Strides in elements.
struct PlainRows {
  const int32_t* ends;   ///< of each row, or of each request's newest one
  const int32_t* table;  ///< a row for each row, or for each request
  int32_t* out;          ///< 16-byte aligned
  int32_t table_row, out_row, pages, max_len, page_shift, num_pages, columns, fill;
  int32_t rows;
  // Of several rows a request:
  int32_t next_n;
  bool ends_of_rows, table_of_rows;
};

__device__ __forceinline__ void store_four(int32_t* out, int32_t j, int32_t n, int32_t fill) {
  *reinterpret_cast<int4*>(out + j) = {j < n ? j : fill, j + 1 < n ? j + 1 : fill, j + 2 < n ? j + 2 : fill,
                                       j + 3 < n ? j + 3 : fill};
}
__device__ __forceinline__ WholeRow row_of(const PlainRows& job, const int32_t* table, int32_t* out, int32_t n) {
  return {table, out, n, job.page_shift, job.num_pages, job.columns, job.fill};
}

/// A thread block a row, a warp for each 128 columns, 32 pages at most. Nothing here is but what must be: with cold caches
/// even eight instructions more, a line of them, are seen in the time. A warp writes its columns when it knows the length,
/// and again in the rare case that a page is missing; it looks at all of the row's pages, so that none waits for another.
__global__ __launch_bounds__(kWholeThreads) void plain_whole_row(const __grid_constant__ PlainRows job) {
  const uint32_t r = blockIdx.x;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), j = static_cast<int32_t>(threadIdx.x) * 4;
  const int32_t* table = job.table + uint64_t{r} * static_cast<uint32_t>(job.table_row);
  const int32_t end = __ldg(job.ends + r), page = lane < job.pages ? __ldg(table + lane) : 0;
  int32_t* out = job.out + uint64_t{r} * static_cast<uint32_t>(job.out_row);
  store_four(out, j, job.max_len, job.fill);  // as if the row were as long as it can be
  const int32_t n = min(end, job.max_len);
  if (n < job.max_len && j + 4 > n && j < job.max_len) store_four(out, j, n, job.fill);
  if (job.pages == 0) return;  // a branch, so that the vote's wait for the page ids stays behind the store
  const WholeRow row = row_of(job, table, out, n);
  if (!__any_sync(~0u, row.absent(page) && lane << job.page_shift < n)) return;
  const int32_t first = j - lane * 4;
  answer_live_keys(row, first, first + 128);
}

/// The same for any number of rows of a request, of columns and of pages.
__global__ __launch_bounds__(kWholeThreads) void plain_whole_rows(const __grid_constant__ PlainRows job) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll 1
  for (int32_t r = static_cast<int32_t>(blockIdx.x); r < job.rows; r += static_cast<int32_t>(gridDim.x)) {
    const int32_t request = r / job.next_n;
    int32_t n = __ldg(job.ends + (job.ends_of_rows ? r : request));
    if (!job.ends_of_rows) n = max(n, 0) - job.next_n + 1 + r % job.next_n;
    n = min(n, job.max_len);
    const int32_t* table = job.table + int64_t{job.table_of_rows ? r : request} * job.table_row;
    int32_t* out = job.out + int64_t{r} * job.out_row;
    const WholeRow row = row_of(job, table, out, n);
    bool absent = false;
#pragma unroll 1
    for (int32_t p = lane; p << job.page_shift < n; p += 32) absent |= row.absent(__ldg(table + p));
    if (__any_sync(~0u, absent)) {
      if (threadIdx.x < 32) answer_live_keys(row, 0, job.columns);
      continue;
    }
#pragma unroll 1
    for (int32_t j = 4 * static_cast<int32_t>(threadIdx.x); j < job.columns; j += 4 * kWholeThreads)
      store_four(out, j, n, job.fill);
  }
}

constexpr int kAnyThreads = 256;
struct AnyRows {
  LookParams look;
  Emission emission;
};
__device__ __forceinline__ bool readable(const KeySource& keys, const RowFact& f, int64_t position) {
  return !keys.paged || page_of(keys, f.table_row, position) >= 0;
}
__global__ __launch_bounds__(kAnyThreads) void any_whole_rows(const __grid_constant__ AnyRows job) {
  __shared__ uint32_t warps[32];
  const KeySource& keys = job.look.keys;
  for (int64_t r = blockIdx.x; r < job.look.rows.count; r += gridDim.x) {
    int64_t skipped = 0;
    const RowFact f = window_fact(job.look, r, &skipped);
    const RowWriter writer(job.emission, r, f.request, f.start);
    uint32_t used = 0;
    for (uint32_t base = 0; base < f.n; base += kAnyThreads) {
      const uint32_t i = base + threadIdx.x;
      const bool live = i < f.n && readable(keys, f, int64_t{f.low} + i);
      uint32_t all = 0;
      const uint32_t before = block_scan(live, warps, &all);
      if (live) writer.put(used + before, int64_t{f.low} + i, 0.0f);
      used += all;
    }
    __syncthreads();
    writer.fill(used);
    if (threadIdx.x != 0) continue;
    count(job.look.stats, kRows, 1);
    count(job.look.stats, kSkippedPages, static_cast<uint64_t>(skipped) + f.n - used);
  }
}

const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&plain_whole_row), 0},
                                {reinterpret_cast<const void*>(&plain_whole_rows), 0},
                                {reinterpret_cast<const void*>(&any_whole_rows), 0}};

bool flat(const Tensor& t) {
  const int last = t.ndim - 1;
  return t.data != nullptr && t.dtype == DType::i32 && (t.stride[last] == 1 || t.shape[last] == 1) &&
         t.stride[0] <= INT32_MAX;
}
bool plain_keys(const KeySource& keys, int64_t table_rows) {
  const int64_t page = keys.page_size;
  return keys.paged && (page & (page - 1)) == 0 && flat(keys.block_table) && keys.block_table.shape[0] >= table_rows;
}
bool plain_answer(const Emission& e) {
  const Selection& out = e.out;
  return flat(out.indices) && reinterpret_cast<uintptr_t>(out.indices.data) % 16 == 0 && e.topk % 4 == 0 &&
         (out.indices.stride[0] % 4 == 0 || out.indices.shape[0] == 1) && out.slots.data == nullptr &&
         out.counts.data == nullptr && out.index_base.data == nullptr && out.fill != Fill::repeat &&
         e.shard.world_size <= 1 && e.stats == nullptr;
}
/// Whether they are rows and answers of the common form; then what of them the kernel is told.
bool plain(const LookParams& look, const Emission& e, int64_t longest, PlainRows* plain) {
  const Rows& rows = look.rows;
  const KeySource& keys = look.keys;
  const Tensor& ends = rows.end.data != nullptr ? rows.end : rows.length;
  PlainRows p{};
  p.next_n = std::max(rows.next_n, 1), p.table_of_rows = keys.table_per_row || p.next_n == 1;
  p.ends_of_rows = rows.end.data == nullptr || rows.end.shape[0] == rows.count;
  if (rows.start.data != nullptr || rows.request.data != nullptr || rows.q_indptr.data != nullptr ||
      rows.count > INT32_MAX || !flat(ends) ||
      !plain_keys(keys, p.table_of_rows ? rows.count : rows.count / p.next_n) || !plain_answer(e))
    return false;
  p.ends = static_cast<const int32_t*>(ends.data), p.rows = static_cast<int32_t>(rows.count);
  p.table = static_cast<const int32_t*>(keys.block_table.data);
  p.table_row = static_cast<int32_t>(keys.block_table.stride[0]);
  p.out = static_cast<int32_t*>(e.out.indices.data), p.out_row = static_cast<int32_t>(e.out.indices.stride[0]);
  p.max_len = static_cast<int32_t>(longest), p.page_shift = __builtin_ctz(static_cast<unsigned>(keys.page_size));
  p.pages = static_cast<int32_t>((longest + keys.page_size - 1) / keys.page_size);
  p.num_pages = static_cast<int32_t>(std::min<int64_t>(keys.num_pages, INT32_MAX));
  p.columns = e.topk, p.fill = e.out.fill == Fill::value ? e.out.fill_value : -1;
  *plain = p;
  return true;
}

}  // namespace

KernelList whole_kernels() { return {kEntries, 3}; }

bool answer_whole_rows(const LookParams& look, const Emission& emission, const Launch& launch) {
  const Rows& rows = look.rows;
  const int64_t longest = rows.max_len > 0 ? std::min(look.keys.count, rows.max_len) : look.keys.count;
  if (longest > look.topk || look.needs_scores || look.has_candidates || look.admit.mask.data != nullptr) return false;
  PlainRows p;
  if (plain(look, emission, longest, &p)) {
    constexpr int64_t kMostRows = 1024;
    const bool few = launch.blocks(p.rows, kMostRows) == static_cast<uint32_t>(p.rows);
    if (few && p.next_n == 1 && p.pages <= 32 && p.columns % 128 == 0 && p.columns <= 4 * kWholeThreads) {
      plain_whole_row<<<static_cast<unsigned>(p.rows), p.columns / 4, 0, launch.stream()>>>(p);
    } else {
      plain_whole_rows<<<launch.blocks(p.rows, 2048 / kWholeThreads), kWholeThreads, 0, launch.stream()>>>(p);
    }
  } else {
    any_whole_rows<<<launch.blocks(rows.count, 8), kAnyThreads, 0, launch.stream()>>>({look, emission});
  }
  TOPKEY_CUDA_LAUNCHED("whole_rows");
  return true;
}

}  // namespace topkey::cuda
