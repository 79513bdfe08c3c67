// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `select` on Hopper where positions alone decide the order of the answer, in one launch: a cluster of thread blocks
// a row. Each block reads its slice of the scores once and keeps it in shared memory; only bins, counts and the few keys
// about the cut travel, through the peers' shared memory (device/pick_cut.cuh). A row costs two sends of each block to all,
// and two meetings of the cluster for each round that a guess which missed costs.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/device/pick_cut.cuh"
#include "cuda/pick_sm90.h"
#include "cuda/stages.h"
#include "cuda/tuning.h"

namespace topkey::cuda {
namespace {

struct PickJob {
  LookParams look;
  Emission emission;
  Tensor scores;     ///< f32 [R, N], unit stride
  KeptRows kept;     ///< in place of it
  int log_blocks;    ///< 1 << so many a row
  uint32_t vectors;  ///< that a block has room for
  bool whole;        ///< every row sees all columns, and its request is its number
  bool plain;        ///< the answer is positions alone
};

/// More of it is in PickShared.
struct PickRow {
  int32_t row, low;
  uint32_t n, topk;  ///< n: live keys
};

/// The row's first live score.
[[maybe_unused]] __device__ __forceinline__ const float* scores_of(const PickJob& job, const PickRow& row) {
  if (job.kept.facts != nullptr) return job.kept.scores + (row.row - job.kept.first_row) * job.kept.chunk;
  return element<float>(job.scores, row.row, row.low);
}

[[maybe_unused]] __device__ __noinline__ void look_at_window(const PickJob& job, PickShared& s, int32_t row) {
  int64_t skipped = 0;
  const RowFact f = window_fact(job.look, row, &skipped);
  s.start = f.start, s.request = f.request, s.skipped = skipped;
  s.low = f.low, s.n = f.n, s.topk = f.topk;
}
/// What thread 0 leaves in s is visible behind the next barrier.
[[maybe_unused]] __device__ __forceinline__ PickRow look_at(const PickJob& job, PickShared& s, int32_t row) {
  if (job.kept.facts != nullptr) {
    const RowFact& f = job.kept.facts[row];
    if (threadIdx.x == 0) s.start = f.start, s.request = f.request, s.skipped = 0;
    return {static_cast<int32_t>(job.kept.first_row) + row, f.low, f.n, f.topk};
  }
  if (job.whole) {
    if (threadIdx.x == 0) s.start = 0, s.request = row, s.skipped = 0;
    return {row, 0, static_cast<uint32_t>(job.look.width), static_cast<uint32_t>(job.look.topk)};
  }
  if (threadIdx.x == 0) look_at_window(job, s, row);
  __syncthreads();
  return {row, s.low, s.n, s.topk};
}

/// All blocks of the row count its NaNs, thread 0 of one the rest.
[[maybe_unused]] __device__ __noinline__ void count_facts(const PickJob& job, const PickShared& s, Peers peers,
                                                          PickRow row) {
  const bool scored = row.n > 0 && (row.n > row.topk || job.look.needs_scores);
  // Of kept rows all else is counted already.
  if (threadIdx.x == 0 && peers.rank == 0 && job.kept.facts == nullptr) {
    count(job.look.stats, kRows, 1);
    count(job.look.stats, kSkippedPages, static_cast<uint64_t>(s.skipped));
    if (scored) count(job.look.stats, kScoredKeys, row.n);
  }
  const float* scores = scores_of(job, row);
  uint32_t nans = 0;
  const uint32_t threads = kPickThreads * peers.count;
  for (uint32_t i = peers.rank * kPickThreads + threadIdx.x; scored && i < row.n; i += threads)
    nans += is_nan(scores[i]);
  count(job.look.stats, kNanScores, nans);
}

/// One row's answers, behind a barrier.
[[maybe_unused]] __device__ __forceinline__ RowWriter writer_of(const PickJob& job, const PickShared& s, int32_t row) {
  return RowWriter(job.emission, row, s.request, s.start);
}
/// By one block; nothing is read of what others wrote.
[[maybe_unused]] __device__ __noinline__ void close_row(const PickJob& job, const PickShared& s, int32_t row,
                                                        uint32_t used) {
  writer_of(job, s, row).fill(used);
}

/// All live keys win, or none is wanted.
[[maybe_unused]] __device__ __noinline__ void answer_short(const PickJob& job, const PickShared& s, Peers peers,
                                                           PickRow row) {
  __syncthreads();
  const uint32_t used = min(row.n, row.topk), threads = kPickThreads * peers.count;
  const RowWriter writer = writer_of(job, s, row.row);
  const float* score = scores_of(job, row);
  for (uint32_t i = peers.rank * kPickThreads + threadIdx.x; i < used; i += threads)
    writer.put(i, int64_t{row.low} + i, job.look.needs_scores ? canonical(score[i]) : 0.0f);
  if (peers.rank == 0) close_row(job, s, row.row, used);
}

[[maybe_unused]] __device__ __forceinline__ void write_all(const PickJob& job, int32_t row, PickPart p, OwnCut own,
                                                           Before before) {
  const RowWriter writer = writer_of(job, p.s, row);
  const int64_t first = int64_t{p.slice.origin} + p.slice.first_word();
  each_winner(p.s, own, before, [&](uint32_t rank, uint32_t bit) {
    writer.put(rank, first + bit, canonical(__uint_as_float(p.slice.raw(p.vectors, bit))));
  });
}
/// Positions and nothing else, what most callers want, take few instructions.
[[maybe_unused]] __device__ __forceinline__ void write_winners(const PickJob& job, int32_t row, const PickPart& p,
                                                               const OwnCut& own, const Before& before) {
  if (!job.plain) return write_all(job, row, p, own, before);
  if ((own.marks.above | own.marks.inside) == 0) return;
  int32_t* indices = element<int32_t>(job.emission.out.indices, row, 0);
  const int32_t first = p.slice.origin + static_cast<int32_t>(p.slice.first_word()) - static_cast<int32_t>(p.s.start);
  each_winner(p.s, own, before,
              [&](uint32_t rank, uint32_t bit) { indices[rank] = first + static_cast<int32_t>(bit); });
}

[[maybe_unused]] __device__ __forceinline__ void pick_row(const PickJob& job, PickShared& s, uint4* vectors,
                                                          const Peers& peers, const PickRow& row, bool begun) {
  const float* scores = scores_of(job, row);
  const PickPart p{s, vectors, peers, Slice(scores, row.low, row.n, peers.rank, job.log_blocks)};
  load_slice(p.slice, vectors);
  s.bins[threadIdx.x] = 0;
  const LinearBins bins = guess_bins(s, scores, row.n, row.topk);
  wait_slice();
  count_linear(p.slice, vectors, bins, s.bins);
  if (!begun) cluster_wait();
  share_bins<false>(s, peers);
  const OwnCut own = find_cut(p, bins, row.topk);
  const Before before = tell_peers(p, own);
  if (own.cut.ranks()) rank_candidates(s, own.cut);
  write_winners(job, row.row, p, own, before);
  if (peers.rank != 0) return;
  if (row.topk < static_cast<uint32_t>(job.emission.topk) || job.emission.out.counts.data != nullptr)
    close_row(job, s, row.row, row.topk);
  if (job.look.stats == nullptr || threadIdx.x != 0) return;
  count(job.look.stats, kTiedCuts, own.cut.ranks() ? s.last_key == s.lost_key : own.cut.need < own.cut.inside);
}

/// kResident: blocks that an SM's registers hold; three where there are many, lest the memory wait for the barriers.
template <int kResident>
__global__ __launch_bounds__(kPickThreads, kResident) void pick_by_cluster(const __grid_constant__ PickJob job) {
#ifdef TOPKEY_HAS_WGMMA
  extern __shared__ uint4 memory[];
  PickShared& s = *reinterpret_cast<PickShared*>(memory);
  uint4* vectors = memory + sizeof(PickShared) / sizeof(uint4);
  Peers peers{1u << job.log_blocks, cluster_rank(), reinterpret_cast<uint16_t*>(vectors + job.vectors)};
  if (threadIdx.x == 0) init_told(s), fence_new_barriers();
  __syncwarp();
  cluster_arrive();
  bool begun = false;  // all of the cluster's blocks are known to have
  const int32_t rows = static_cast<int32_t>(job.kept.facts != nullptr ? job.kept.count : job.look.rows.count);
  for (int32_t r = static_cast<int32_t>(blockIdx.x >> job.log_blocks); r < rows;
       r += static_cast<int32_t>(gridDim.x >> job.log_blocks)) {
    const PickRow row = look_at(job, s, r);
    if (job.look.stats != nullptr) count_facts(job, s, peers, row);
    if (row.n <= row.topk || row.topk == 0) {
      answer_short(job, s, peers, row);
    } else {
      pick_row(job, s, vectors, peers, row, begun);
      begun = true, peers.parity ^= 1;
    }
    __syncthreads();
  }
#endif
}
static_assert(sizeof(PickShared) % sizeof(uint4) == 0);

constexpr int kMostShared = 227 * 1024;
constexpr int64_t kMostRows = 1 << 24;
const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&pick_by_cluster<2>), kMostShared, true},
                                {reinterpret_cast<const void*>(&pick_by_cluster<3>), kMostShared, true}};

int64_t vectors_of_block(int64_t vectors, int log_blocks) { return ((vectors - 1) >> log_blocks) + 1; }

/// Blocks a row, as a power of two: so many that its slices fit, and while SMs would idle and a thread has more than one
/// vector, more. < 0: the row is too long.
int choose_blocks(int64_t rows, int64_t vectors, const Launch& launch) {
  int log_blocks = 0;
  while (vectors_of_block(vectors, log_blocks) > kPickThreads * kPickVectors) ++log_blocks;
  if (1 << log_blocks > std::min(kMaxCluster, launch.sms())) return -1;
  while (1 << log_blocks < kUsualCluster && rows << (log_blocks + 1) <= launch.sms() &&
         vectors_of_block(vectors, log_blocks) > kPickThreads)
    ++log_blocks;
  return log_blocks;
}

uint32_t room_for(int64_t vectors, int log_blocks) {
  uint32_t each = 1;
  while (int64_t{kPickThreads} * each < vectors_of_block(vectors, log_blocks)) each *= 2;
  return kPickThreads * each;
}

bool sees_all(const LookParams& look) {
  const Rows& r = look.rows;
  return r.end.data == nullptr && r.length.data == nullptr && r.start.data == nullptr && r.request.data == nullptr &&
         r.q_indptr.data == nullptr && r.next_n <= 1 && (r.max_len <= 0 || r.max_len >= look.width) &&
         look.row_topk.data == nullptr;
}

bool positions_alone(const Selection& out) {
  return out.slots.data == nullptr && out.scores.data == nullptr && out.indices.data != nullptr &&
         out.index_base.data == nullptr && out.indices.stride[1] == 1;
}

/// False where the rows are too long.
bool launch_clusters(PickJob job, int64_t rows, int64_t vectors, const Launch& launch) {
  if (job.log_blocks < 0) return false;
  const int64_t blocks = int64_t{1} << job.log_blocks;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  const int64_t grid = launch.blocks(rows * blocks, kClustersPerSm) / blocks * blocks;
  config.gridDim = dim3(static_cast<unsigned>(grid)), config.blockDim = dim3(kPickThreads);
  job.vectors = room_for(vectors, job.log_blocks);
  config.dynamicSmemBytes =
      sizeof(PickShared) + job.vectors * sizeof(uint4) + static_cast<size_t>(blocks) * kPickBins * sizeof(uint16_t);
  config.stream = launch.stream();
  config.attrs = &attribute, config.numAttrs = 1;
  int clusters = 1;
  // Not every Hopper GPU, or part of one, has so many SMs side by side.
  const auto kernel = grid > 2 * int64_t{launch.sms()} ? pick_by_cluster<3> : pick_by_cluster<2>;
  if (blocks > kUsualCluster) TOPKEY_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
  if (clusters == 0) return false;
  TOPKEY_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, job));
  return true;
}

/// What is asked of the answer, and of whom.
bool simple(const Selection& out, const Admit& admit) {
  return admit.mask.data == nullptr && !present(admit.candidates) && admit.force_first == 0 && admit.force_last == 0 &&
         out.blocks.data == nullptr && out.order != Order::score && out.fill != Fill::repeat;
}
constexpr int64_t kMostKeys = int64_t{kMaxCluster} * kPickThreads * kPickVectors * 4;

}  // namespace

KernelList pick_sm90_kernels() { return {kEntries, 2}; }

bool pick_in_clusters(const LookParams& look, const Tensor& scores, const Emission& emission, const Launch& launch) {
  const Selection& out = emission.out;
  const int64_t keys = look.rows.max_len > 0 ? std::min(look.width, look.rows.max_len) : look.width;
  const bool flat = scores.dtype == DType::f32 && (scores.stride[1] == 1 || scores.shape[1] <= 1);
  if (!flat || !simple(out, look.admit) || !launch.hopper() || look.rows.count > kMostRows || keys > kMostKeys)
    return false;
  const bool aligned = look.rows.start.data == nullptr && reinterpret_cast<uintptr_t>(scores.data) % 16 == 0 &&
                       (scores.stride[0] % 4 == 0 || scores.shape[0] <= 1);
  const int64_t vectors = std::max<int64_t>((keys + (aligned ? 3 : 6)) / 4, 1);
  const PickJob job{look,
                    emission,
                    scores,
                    {},
                    choose_blocks(look.rows.count, vectors, launch),
                    0,
                    sees_all(look),
                    positions_alone(out)};
  return launch_clusters(job, look.rows.count, vectors, launch);
}

bool pick_in_clusters(const LookParams& look, const KeptRows& kept, const Emission& emission, const Launch& launch) {
  if (!simple(emission.out, look.admit) || !launch.hopper() || kept.chunk > kMostKeys - 8) return false;
  const int64_t vectors = std::max<int64_t>((kept.chunk + (kept.chunk % 4 == 0 ? 3 : 6)) / 4, 1);
  const PickJob job{
      look, emission, {}, kept, choose_blocks(kept.count, vectors, launch), 0, false, positions_alone(emission.out)};
  return launch_clusters(job, kept.count, vectors, launch);
}

}  // namespace topkey::cuda
