// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Candidate blocks on Hopper in one launch: a cluster of thread blocks a row. Each reads its slice of the row's scores once
// and keeps the best of each candidate block, kNotLiveScore where none is live; of these values the cluster picks as of any
// others (device/made_cut.cuh). The block of the newest key, which always is among the answer, has the highest id: it is
// left out, and written behind the others.
#include "cuda/pick_blocks_sm90.h"

#include <algorithm>

#include "cuda/check.h"
#include "cuda/device/made_cut.cuh"
#include "cuda/stages.h"

namespace topkey::cuda {
namespace {

/// Where the rows' scores are.
enum class From : int32_t { given, kept, plain_maxima, maxima };

struct BlockJob {
  From from;
  LookParams look;       ///< windows of rows with given scores
  const RowFact* facts;  ///< of kept ones, and of rows with maxima
  PlainDecode plain;     ///< ends of plain rows with maxima
  const float* scores;   ///< row 0's
  int64_t step;          ///< from row to row
  int32_t* ids;
  int64_t ids_row;
  int32_t columns, rows, block_size;
  uint32_t blocks;  ///< thread blocks a row
};

/// A row's scores. Value j is the best of those at [j * each - lead, (j + 1) * each - lead), as far as there are any.
struct BlockRow {
  const float* scores;
  uint32_t n, lead, each;
  uint32_t values;  ///< blocks before the newest one
  int32_t first;    ///< id of value 0
  int32_t newest;   ///< < 0: the row sees no key
  bool given;
};
struct BlockShared {
  MadeShared made;
  BlockRow row;
};
static_assert(sizeof(BlockShared) % sizeof(uint4) == 0);

/// Of keys [low, low + n) of a window.
[[maybe_unused]] __device__ __forceinline__ BlockRow row_of(const BlockJob& job, const float* scores, const RowFact& f,
                                                            bool given) {
  const int64_t size = job.block_size, offset = f.low - f.start, window = f.whole_end - f.whole_start;
  BlockRow row{scores, f.n, 0, static_cast<uint32_t>(size), 0, 0, -1, given};
  if (window <= 0) return row;
  row.newest = static_cast<int32_t>((window - 1) / size);
  if (f.n == 0) return row;
  row.first = static_cast<int32_t>(offset / size), row.lead = static_cast<uint32_t>(offset % size);
  const int64_t last = (offset + f.n - 1) / size;
  row.values = static_cast<uint32_t>(min(static_cast<long long>(last + 1), static_cast<long long>(row.newest)) -
                                     min(row.first, row.newest));
  return row;
}
/// Of a row with maxima, which has keys [0, high) of a window [0, end).
[[maybe_unused]] __device__ __forceinline__ BlockRow row_of_maxima(const BlockJob& job, int32_t r, int32_t high,
                                                                   int32_t end) {
  const int32_t size = job.block_size;
  BlockRow row{job.scores + r * job.step, 0, 0, 1, 0, 0, -1, false};
  if (end <= 0) return row;
  row.newest = (end - 1) / size;
  row.values = row.n = static_cast<uint32_t>(min(high <= 0 ? 0 : (high - 1) / size + 1, row.newest));
  return row;
}
/// By thread 0, for all.
[[maybe_unused]] __device__ __noinline__ void look_at(const BlockJob& job, BlockRow& row, int32_t r) {
  if (job.from == From::kept) {
    row = row_of(job, job.scores + r * job.step, job.facts[r], false);
    return;
  }
  if (job.from == From::maxima) {
    const RowFact& f = job.facts[r];
    row = row_of_maxima(job, r, f.high, static_cast<int32_t>(f.whole_end - f.whole_start));
    return;
  }
  int64_t skipped = 0;
  const RowFact f = window_fact(job.look, r, &skipped);
  row = row_of(job, job.scores + r * job.step + f.low, f, true);
}

/// Value j, read one score after the other.
[[maybe_unused]] __device__ __noinline__ uint32_t best_of(const BlockRow& row, uint32_t j) {
  const int64_t begin = int64_t{j} * row.each - row.lead;
  const uint32_t first = begin < 0 ? 0 : static_cast<uint32_t>(begin);
  const uint32_t last =
      static_cast<uint32_t>(min(static_cast<long long>(begin + row.each), static_cast<long long>(row.n)));
  float best = __uint_as_float(kCanonicalNan);
  bool lives = false;
  for (uint32_t i = first; i < last; ++i) {
    const float score = __ldg(row.scores + i);
    best = fmaxf(best, score), lives |= row.given | (__float_as_uint(score) != kNotLiveScore);
  }
  return is_nan(best) && !lives ? kNotLiveScore : __float_as_uint(canonical(best));
}
/// Of eight scores at an aligned address.
[[maybe_unused]] __device__ __forceinline__ uint32_t best_of_eight(const float4& a, const float4& b, bool given) {
  const float best = fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
  if (!is_nan(best)) return __float_as_uint(best + 0.0f);  // -0 is +0
  const auto dead = [](float x) { return __float_as_uint(x) == kNotLiveScore; };
  const bool none = dead(a.x) & dead(a.y) & dead(a.z) & dead(a.w) & dead(b.x) & dead(b.y) & dead(b.z) & dead(b.w);
  return none & !given ? kNotLiveScore : kCanonicalNan;
}

/// How values are made of scores.
enum class Each { one, eight, any };

/// This block's values to its slice. Returns how many of this lane's are live; sample: one of all values, spread over the
/// row by threads.
template <Each kEach>
__device__ __forceinline__ uint32_t make_values(const BlockRow& row, const Slice& slice, uint4* vectors,
                                                float* sample) {
  constexpr int kBatch = 4;
  const uint32_t words = slice.count * 4, spread = threadIdx.x * row.values / kPickThreads;
  uint32_t lives = 0;
  const float4* eights = reinterpret_cast<const float4*>(row.scores);
  if (kEach == Each::one) *sample = __ldg(row.scores + spread);
  if (kEach == Each::any) *sample = __uint_as_float(best_of(row, spread));
  if (kEach == Each::eight)
    *sample = __uint_as_float(best_of_eight(__ldg(eights + 2 * spread), __ldg(eights + 2 * spread + 1), true));
#pragma unroll 1
  for (uint32_t base = threadIdx.x; base < words; base += kBatch * kPickThreads) {
    uint32_t best[kBatch];
    float4 a[kBatch], b[kBatch];
#pragma unroll
    for (int e = 0; e < kBatch; ++e) {
      const uint32_t j = slice.first * 4 + base + e * kPickThreads;
      const bool there = base + e * kPickThreads < words && j < row.values;
      best[e] = kNotLiveScore;
      if (kEach == Each::one && there) best[e] = __float_as_uint(__ldg(row.scores + j));
      if (kEach == Each::any && there) best[e] = best_of(row, j);
      if (kEach == Each::eight && there) a[e] = __ldg(eights + 2 * j), b[e] = __ldg(eights + 2 * j + 1);
    }
#pragma unroll
    for (int e = 0; e < kBatch; ++e) {
      const uint32_t i = base + e * kPickThreads;
      if (i >= words) continue;
      const bool there = slice.first * 4 + i < row.values;
      if (kEach == Each::eight && there) best[e] = best_of_eight(a[e], b[e], row.given);
      reinterpret_cast<uint32_t*>(vectors + slice.place(i / 4))[i % 4] = best[e];
      lives += there && best[e] != kNotLiveScore;
    }
  }
  return lives;
}
[[maybe_unused]] __device__ __forceinline__ uint32_t make_all_values(const BlockRow& row, const Slice& slice,
                                                                     uint4* vectors, float* sample) {
  if (row.each == 1 && !row.given) return make_values<Each::one>(row, slice, vectors, sample);
  const bool eights =
      row.each == 8 && row.lead == 0 && reinterpret_cast<uintptr_t>(row.scores) % 16 == 0 && row.n / 8 >= row.values;
  return eights ? make_values<Each::eight>(row, slice, vectors, sample)
                : make_values<Each::any>(row, slice, vectors, sample);
}

/// Returns whether blocks told each other of the row.
[[maybe_unused]] __device__ __forceinline__ bool pick_row(const BlockJob& job, BlockShared& s, uint4* vectors,
                                                          const Peers& peers, const BlockRow& row, int32_t r) {
  int32_t* ids = job.ids + r * job.ids_row;
  uint32_t used = 0;
  const bool picks = row.values != 0 && job.columns != 1;
  if (!picks) {
    cluster_wait();
  } else {
    s.made.pick.bins[threadIdx.x] = 0;
    const uint32_t all = (row.values + 3) / 4, each = (all + peers.count - 1) / peers.count;
    const PickPart p{s.made.pick, vectors, peers, Slice(row.values, peers.rank * each, each)};
    const uint32_t k = static_cast<uint32_t>(job.columns) - 1;
    float sample;
    const uint32_t lives = make_all_values(row, p.slice, vectors, &sample);
    const LinearBins bins = bins_of_sample(s.made.pick, sample, row.values, k);
    const int32_t first = row.first + static_cast<int32_t>(p.slice.first_word());
    used = pick_guessed(s.made, p, lives, bins, k,
                        [&](uint32_t rank, uint32_t bit) { ids[rank] = first + static_cast<int32_t>(bit); });
  }
  if (peers.rank != 0) return picks;
  if (row.newest >= 0 && threadIdx.x == 0) ids[used] = row.newest;
  used += row.newest >= 0;
  for (uint32_t j = used + threadIdx.x; j < static_cast<uint32_t>(job.columns); j += kPickThreads) ids[j] = -1;
  return picks;
}

/// kResident: blocks that an SM's registers hold.
template <int kResident>
__global__ __launch_bounds__(kPickThreads,
                             kResident) void pick_blocks_by_cluster(const __grid_constant__ BlockJob job) {
#ifdef TOPKEY_HAS_WGMMA
  extern __shared__ uint4 memory[];
  BlockShared& s = *reinterpret_cast<BlockShared*>(memory);
  uint4* vectors = memory + sizeof(BlockShared) / sizeof(uint4);
  Peers peers{job.blocks, cluster_rank(), s.made.bins_of_peers};
  if (threadIdx.x == 0) init_made(s.made);
  __syncthreads();
  cudaGridDependencySynchronize();
  for (int32_t r = static_cast<int32_t>(blockIdx.x / job.blocks); r < job.rows;
       r += static_cast<int32_t>(gridDim.x / job.blocks)) {
    cluster_arrive();
    bool told;
    if (job.from == From::plain_maxima) {
      const int32_t end = end_of_row(job.plain, r);
      told = pick_row(job, s, vectors, peers, row_of_maxima(job, r, min(end, job.plain.max_len), end), r);
    } else {
      if (threadIdx.x == 0) look_at(job, s.row, r);
      __syncthreads();
      told = pick_row(job, s, vectors, peers, s.row, r);
    }
    peers.parity ^= told ? 1 : 0;
    __syncthreads();
  }
#endif
}

constexpr int kMostShared = 227 * 1024;
const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&pick_blocks_by_cluster<1>), kMostShared, true},
                                {reinterpret_cast<const void*>(&pick_blocks_by_cluster<2>), kMostShared, true}};

constexpr int64_t kMostRows = 1 << 24;
constexpr int64_t kValuesOfBlock = int64_t{kPickThreads} * kPickVectors * 4;

/// Thread blocks a row so that its values fit.
uint32_t fewest_blocks(int64_t values) {
  uint32_t blocks = 1;
  while (blocks * kValuesOfBlock < values) blocks *= 2;
  return blocks;
}
/// While SMs would idle and each has many scores to read, more.
uint32_t choose_blocks(int64_t rows, int64_t values, int64_t scores, const Launch& launch) {
  int64_t blocks = fewest_blocks(values);
  while (blocks < kMaxCluster && rows * blocks * 2 <= launch.sms() &&
         (scores > blocks * 8 * kPickThreads || values > blocks * 4 * kPickThreads))
    blocks *= 2;
  return static_cast<uint32_t>(blocks);
}

size_t shared_of(int64_t values, uint32_t blocks) {
  const int64_t vectors = ((values + 3) / 4 + blocks - 1) / blocks;
  int64_t each = 1;
  while (kPickThreads * each < vectors) each *= 2;
  return sizeof(BlockShared) + static_cast<size_t>(kPickThreads * each) * sizeof(uint4);
}

struct Config {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  Config(int64_t rows, int64_t values, uint32_t blocks, const Launch& launch) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {blocks, 1, 1};
    // What comes before may still run while this is made ready; its end is waited for on the device.
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    const int64_t grid = launch.blocks(rows * blocks, 1 << 15) / blocks * blocks;
    config.gridDim = dim3(static_cast<unsigned>(grid)), config.blockDim = dim3(kPickThreads);
    config.dynamicSmemBytes = shared_of(values, blocks), config.stream = launch.stream();
    config.attrs = attributes, config.numAttrs = 2;
  }
  Config(const Config&) = delete;
  Config& operator=(const Config&) = delete;
};
/// Not every Hopper GPU, or part of one, has as many SMs side by side as large clusters want.
bool clusters_fit(int64_t values, uint32_t blocks, const Launch& launch) {
  if (blocks > kMaxCluster || blocks > static_cast<uint32_t>(launch.sms())) return false;
  if (blocks <= 8) return true;
  int clusters = 0;
  const Config c(1, values, blocks, launch);
  TOPKEY_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, pick_blocks_by_cluster<1>, &c.config));
  return clusters > 0;
}

/// False where the rows are too long.
bool launch_picks(BlockJob job, int64_t values, int64_t scores, const BlocksOut& out, const Launch& launch) {
  if (values > kMaxCluster * kValuesOfBlock || job.rows > kMostRows) return false;
  job.ids = static_cast<int32_t*>(out.ids.data), job.ids_row = out.ids.stride[0];
  job.columns = static_cast<int32_t>(out.ids.shape[1]), job.block_size = out.size;
  job.blocks = choose_blocks(job.rows, values, scores, launch);
  if (!clusters_fit(values, job.blocks, launch)) job.blocks = fewest_blocks(values);
  if (!clusters_fit(values, job.blocks, launch)) return false;
  const Config c(job.rows, values, job.blocks, launch);
  const bool many = c.config.gridDim.x > static_cast<unsigned>(launch.sms());
  TOPKEY_CUDA_CHECK(cudaLaunchKernelEx(&c.config, many ? pick_blocks_by_cluster<2> : pick_blocks_by_cluster<1>, job));
  return true;
}

bool simple(const BlocksOut& out, const Launch& launch) {
  return launch.hopper() && (out.ids.stride[1] == 1 || out.ids.shape[1] == 1) && out.ids.shape[1] > 0;
}
/// Blocks of so many keys, wherever the first begins.
int64_t values_of(int64_t keys, int64_t size) { return (keys + size - 1) / size + 1; }

}  // namespace

KernelList pick_blocks_kernels() { return {kEntries, 2}; }

bool pick_blocks(const LookParams& look, const Tensor& scores, const BlocksOut& out, const Launch& launch) {
  const int64_t keys = look.rows.max_len > 0 ? std::min(look.width, look.rows.max_len) : look.width;
  const bool flat = scores.dtype == DType::f32 && (scores.stride[1] == 1 || scores.shape[1] <= 1);
  if (!flat || !simple(out, launch) || look.rows.count > kMostRows) return false;
  BlockJob job{};
  job.from = From::given, job.look = look, job.rows = static_cast<int32_t>(look.rows.count);
  job.scores = static_cast<const float*>(scores.data), job.step = scores.stride[0];
  return launch_picks(job, values_of(keys, out.size), keys, out, launch);
}

bool pick_blocks(const KeptRows& kept, int64_t keys, const BlocksOut& out, const Launch& launch) {
  if (!simple(out, launch)) return false;
  BlockJob job{};
  job.from = From::kept, job.facts = kept.facts, job.rows = static_cast<int32_t>(kept.count);
  job.scores = kept.scores, job.step = kept.chunk;
  BlocksOut rows = out;
  rows.ids.data = static_cast<int32_t*>(out.ids.data) + kept.first_row * out.ids.stride[0];
  return launch_picks(job, values_of(keys, out.size), keys, rows, launch);
}

bool pick_blocks_suits(int64_t keys, const BlocksOut& out, const Launch& launch) {
  const int64_t values = values_of(keys, out.size);
  return simple(out, launch) && values <= kMaxCluster * kValuesOfBlock &&
         clusters_fit(values, fewest_blocks(values), launch);
}
bool pick_blocks(const PlainDecode& plain, const BlockMaxima& maxima, const BlocksOut& out, const Launch& launch) {
  if (!simple(out, launch)) return false;
  BlockJob job{};
  job.from = From::plain_maxima, job.plain = plain, job.rows = plain.rows;
  job.scores = maxima.values, job.step = maxima.step;
  const int64_t values = (int64_t{plain.max_len} + out.size - 1) / out.size;
  return launch_picks(job, values, values, out, launch);
}

bool pick_blocks(const FactRows& rows, int64_t keys, const BlockMaxima& maxima, const BlocksOut& out,
                 const Launch& launch) {
  if (!simple(out, launch)) return false;
  BlockJob job{};
  job.from = From::maxima, job.facts = rows.facts, job.rows = static_cast<int32_t>(rows.count);
  job.scores = maxima.values, job.step = maxima.step;
  BlocksOut blocks = out;
  blocks.ids.data = static_cast<int32_t*>(out.ids.data) + rows.first * out.ids.stride[0];
  const int64_t values = (keys + out.size - 1) / out.size;
  return launch_picks(job, values, values, blocks, launch);
}

}  // namespace topkey::cuda
