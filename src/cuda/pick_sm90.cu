// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `select` on Hopper where positions alone decide the order of the answer, in one launch: a cluster of thread blocks
// a row. Each block reads its slice of the scores once and keeps it in shared memory; only bins, counts and the few keys
// about the cut travel, through the peers' shared memory (device/pick_cut.cuh). Two barriers of the cluster a row, and one
// more for each round that a guess which missed costs.
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
  Tensor scores;   ///< f32 [R, N], unit stride
  int log_blocks;  ///< 1 << so many a row
  bool whole;      ///< every row sees all columns, and its request is its number
};

struct PickRow {
  int64_t row, start, request;
  int32_t low;
  uint32_t n, topk;  ///< n: live keys
};

[[maybe_unused]] __device__ __noinline__ void look_at_window(const PickJob& job, PickShared& s, int64_t row) {
  int64_t skipped = 0;
  const RowFact f = window_fact(job.look, row, &skipped);
  s.start = f.start, s.request = f.request, s.skipped = skipped;
  s.low = static_cast<uint32_t>(f.low), s.n = f.n, s.topk = f.topk;
}
[[maybe_unused]] __device__ __forceinline__ PickRow look_at(const PickJob& job, PickShared& s, int64_t row) {
  if (job.whole) return {row, 0, row, 0, static_cast<uint32_t>(job.look.width), static_cast<uint32_t>(job.look.topk)};
  if (threadIdx.x == 0) look_at_window(job, s, row);
  __syncthreads();
  return {row, s.start, s.request, static_cast<int32_t>(s.low), s.n, s.topk};
}

/// All blocks of the row count its NaNs, one the rest.
[[maybe_unused]] __device__ __noinline__ void count_facts(const PickJob& job, const PickShared& s, Peers peers,
                                                          PickRow row) {
  const bool scored = row.n > 0 && (row.n > row.topk || job.look.needs_scores);
  if (threadIdx.x == 0 && peers.rank == 0) {
    count(job.look.stats, kRows, 1);
    if (!job.whole) count(job.look.stats, kSkippedPages, static_cast<uint64_t>(s.skipped));
    if (scored) count(job.look.stats, kScoredKeys, row.n);
  }
  const float* scores = element<float>(job.scores, row.row, row.low);
  uint32_t nans = 0;
  const uint32_t threads = kPickThreads * peers.count;
  for (uint32_t i = peers.rank * kPickThreads + threadIdx.x; scored && i < row.n; i += threads)
    nans += is_nan(scores[i]);
  count(job.look.stats, kNanScores, nans);
}

/// Answers of one row. What most callers want, positions and nothing else, takes few instructions.
struct PickWriter {
  const PickJob& job;
  PickRow row;
  int32_t* plain;  ///< null: the answer has more than positions

  __device__ PickWriter(const PickJob& j, const PickRow& r) : job(j), row(r) {
    const Selection& out = j.emission.out;
    const bool few = out.slots.data == nullptr && out.scores.data == nullptr && out.indices.data != nullptr &&
                     out.index_base.data == nullptr && out.indices.stride[1] == 1;
    plain = few ? element<int32_t>(out.indices, r.row, 0) : nullptr;
  }
  /// raw() is the score.
  template <class Raw>
  __device__ __forceinline__ void put(uint32_t j, int32_t position, const Raw& raw) const {
    if (plain != nullptr) {
      plain[j] = position - static_cast<int32_t>(row.start);
    } else {
      put_all(job, row, j, position, raw());
    }
  }
  __device__ __noinline__ static void put_all(const PickJob& job, PickRow row, uint32_t j, int32_t position,
                                              float score) {
    RowWriter(job.emission, row.row, row.request, row.start).put(j, position, canonical(score));
  }
  /// By one block; nothing is read of what others wrote.
  __device__ __noinline__ static void close(const PickJob& job, PickRow row, uint32_t used) {
    if (used < static_cast<uint32_t>(job.emission.topk) || job.emission.out.counts.data != nullptr)
      RowWriter(job.emission, row.row, row.request, row.start).fill(used);
  }
};

/// All live keys win, or none is wanted.
[[maybe_unused]] __device__ __noinline__ void answer_short(const PickJob& job, Peers peers, PickRow row) {
  const uint32_t used = min(row.n, row.topk), threads = kPickThreads * peers.count;
  const PickWriter writer(job, row);
  for (uint32_t i = peers.rank * kPickThreads + threadIdx.x; i < used; i += threads) {
    const float* score = element<float>(job.scores, row.row, row.low);
    writer.put(i, row.low + static_cast<int32_t>(i), [&] { return job.look.needs_scores ? score[i] : 0.0f; });
  }
  if (peers.rank == 0) PickWriter::close(job, row, used);
}

[[maybe_unused]] __device__ __forceinline__ uint32_t of_peer(const uint32_t* word, const Peers& peers) {
  return threadIdx.x < peers.count ? load_peer(peer_address(word, threadIdx.x)) : 0;
}

/// Cut and what of it is this thread's; `turn` becomes that of the bins which tell it.
[[maybe_unused]] __device__ __forceinline__ PickCut find_cut_of_row(const PickRow& row, PickShared& s,
                                                                    const Slice& slice, const uint4* vectors,
                                                                    const LinearBins& bins, const Peers& peers,
                                                                    int* turn, Marks* marks, uint32_t* told) {
  const PickFound found = find_bin(s, s.bins[*turn], peers, row.topk);
  PickCut cut{found.inside, row.topk - found.above, found.bin};
  if (found.inside != 0 && cut.settled()) {
    *told = of_peer(s.bins[*turn] + cut.bin, peers);
    const float low = static_cast<float>(cut.bin);
    // No score is over the last bin.
    const float high = cut.bin == kPickBins - 1 ? __uint_as_float(kCanonicalNan) : low + 1.0f;
    *marks = mark_scores(slice, vectors, [&](uint32_t raw, uint32_t) {
      const float at = bins.place(raw);
      return at >= high ? 1u : at >= low ? 2u : 0u;
    });
    return cut;
  }
  const KeyCut by_key = narrow_by_key(s, slice, vectors, peers, row.topk, *turn);
  const KeyBins interval = by_key.interval;
  cut = by_key.cut, *turn = by_key.turn;
  *told = of_peer(s.bins[*turn] + cut.bin, peers);
  *marks = mark_scores(slice, vectors, [&](uint32_t raw, uint32_t word) {
    const uint32_t key = KeyBins::key(slice, raw, word);
    return key > interval.high ? 1u : key >= interval.low ? 2u : 0u;
  });
  return cut;
}

/// This thread's winners, ascending.
[[maybe_unused]] __device__ __forceinline__ void write_winners(const PickJob& job, const PickRow& row,
                                                               const PickShared& s, const Slice& slice,
                                                               const uint4* vectors, const PickCut& cut, Marks marks,
                                                               Before before) {
  uint32_t rest = marks.above | marks.inside;
  if (rest == 0) return;
  uint32_t rank = before.above + winners_inside(s, cut, before.inside), number = before.inside;
  const int32_t first = slice.origin + static_cast<int32_t>(slice.first_word());
  const PickWriter writer(job, row);
  for (; rest != 0; rest &= rest - 1) {
    const uint32_t bit = __ffs(static_cast<int>(rest)) - 1;
    const bool inside = (marks.inside >> bit & 1u) != 0;
    const bool wins = !inside || wins_inside(s, cut, number);
    number += inside;
    if (!wins) continue;
    writer.put(rank++, first + static_cast<int32_t>(bit), [&] { return __uint_as_float(slice.raw(vectors, bit)); });
  }
}

[[maybe_unused]] __device__ __forceinline__ void pick_row(const PickJob& job, PickShared& s, uint4* vectors,
                                                          const Peers& peers, const PickRow& row, int* turn) {
  const float* scores = element<float>(job.scores, row.row, row.low);
  const Slice slice(scores, row.low, row.n, peers.rank, job.log_blocks);
  load_slice(slice, vectors);
  s.bins[*turn][threadIdx.x] = 0;
  const LinearBins bins = guess_bins(s, scores, row.n, row.topk);
  wait_slice();
  count_linear(slice, vectors, bins, s.bins[*turn]);
  peers.meet();
  Marks marks;
  uint32_t told = 0;
  const PickCut cut = find_cut_of_row(row, s, slice, vectors, bins, peers, turn, &marks, &told);
  const Before before = tell_peers(s, slice, vectors, peers, cut, marks, told);
  if (cut.ranks()) rank_candidates(s, cut);
  write_winners(job, row, s, slice, vectors, cut, marks, before);
  if (peers.rank != 0) return;
  PickWriter::close(job, row, row.topk);
  const bool tied = cut.ranks() ? s.last_key == s.lost_key : cut.need < cut.inside;
  if (threadIdx.x == 0) count(job.look.stats, kTiedCuts, tied);
}

__global__ __launch_bounds__(kPickThreads, 3) void pick_by_cluster(const __grid_constant__ PickJob job) {
#ifdef TOPKEY_HAS_WGMMA
  extern __shared__ uint4 memory[];
  PickShared& s = *reinterpret_cast<PickShared*>(memory);
  uint4* vectors = memory + sizeof(PickShared) / sizeof(uint4);
  const Peers peers{1u << job.log_blocks, cluster_rank()};
  int turn = 0;
  for (int64_t r = blockIdx.x >> job.log_blocks; r < job.look.rows.count; r += gridDim.x >> job.log_blocks) {
    const PickRow row = look_at(job, s, r);
    if (job.look.stats != nullptr) count_facts(job, s, peers, row);
    if (row.n <= row.topk || row.topk == 0) {
      answer_short(job, peers, row);
    } else {
      pick_row(job, s, vectors, peers, row, &turn);
    }
    turn ^= 1;
    __syncthreads();
  }
#endif
}
static_assert(sizeof(PickShared) % sizeof(uint4) == 0);

constexpr int kMostShared = 227 * 1024;
const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&pick_by_cluster), kMostShared, true}};

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

size_t shared_of(int64_t vectors, int log_blocks) {
  int64_t each = 1;
  while (kPickThreads * each < vectors_of_block(vectors, log_blocks)) each *= 2;
  return sizeof(PickShared) + static_cast<size_t>(kPickThreads * each) * sizeof(uint4);
}

bool sees_all(const LookParams& look) {
  const Rows& r = look.rows;
  return r.end.data == nullptr && r.length.data == nullptr && r.start.data == nullptr && r.request.data == nullptr &&
         r.q_indptr.data == nullptr && r.next_n <= 1 && (r.max_len <= 0 || r.max_len >= look.width) &&
         look.row_topk.data == nullptr;
}

}  // namespace

KernelList pick_sm90_kernels() { return {kEntries, 1}; }

bool pick_in_clusters(const LookParams& look, const Tensor& scores, const Emission& emission, const Launch& launch) {
  const Selection& out = emission.out;
  const Admit& admit = look.admit;
  const bool simple = scores.dtype == DType::f32 && (scores.stride[1] == 1 || scores.shape[1] <= 1) &&
                      admit.mask.data == nullptr && !present(admit.candidates) && admit.force_first == 0 &&
                      admit.force_last == 0 && out.blocks.data == nullptr && out.order != Order::score &&
                      out.fill != Fill::repeat;
  const int64_t keys = look.rows.max_len > 0 ? std::min(look.width, look.rows.max_len) : look.width;
  if (!simple || !launch.hopper() || keys > kMaxCluster * kPickThreads * kPickVectors * 4) return false;
  const bool aligned = look.rows.start.data == nullptr && reinterpret_cast<uintptr_t>(scores.data) % 16 == 0 &&
                       (scores.stride[0] % 4 == 0 || scores.shape[0] <= 1);
  const int64_t vectors = std::max<int64_t>((keys + (aligned ? 3 : 6)) / 4, 1);
  PickJob job{look, emission, scores, choose_blocks(look.rows.count, vectors, launch), sees_all(look)};
  if (job.log_blocks < 0) return false;
  const int64_t blocks = int64_t{1} << job.log_blocks;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  const int64_t grid = launch.blocks(look.rows.count * blocks, kClustersPerSm) / blocks * blocks;
  config.gridDim = dim3(static_cast<unsigned>(grid)), config.blockDim = dim3(kPickThreads);
  config.dynamicSmemBytes = shared_of(vectors, job.log_blocks), config.stream = launch.stream();
  config.attrs = &attribute, config.numAttrs = 1;
  int clusters = 1;
  // Not every Hopper GPU, or part of one, has so many SMs side by side.
  if (blocks > kUsualCluster) TOPKEY_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, pick_by_cluster, &config));
  if (clusters == 0) return false;
  TOPKEY_CUDA_CHECK(cudaLaunchKernelEx(&config, pick_by_cluster, job));
  return true;
}

}  // namespace topkey::cuda
