// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `search` for few query rows of short contexts on Hopper, in the form that engines call most (plain_decode.h): a
// cluster of thread blocks a row, so that nothing is to be cleared, cut or carried through memory, and blocks tell each
// other by stores to shared memory that the receiver counts. Each block scores its slice of the row and keeps the scores; the cluster settles the cut as it does
// for given scores (device/pick_cut.cuh).
#include <algorithm>

#include "cuda/check.h"
#include "cuda/device/pick_cut.cuh"
#include "cuda/device/tiles_sm90.cuh"
#include "cuda/plain_decode.h"
#include "cuda/stages.h"

namespace topkey::cuda {
namespace {

constexpr int kShortThreads = kPickThreads + 32;  ///< a warp brings keys
constexpr int kShortStages = 16;                  ///< units under way in a block
constexpr int kShortGroups = kPickThreads / 128;
constexpr int64_t kShortKeys = 8192;

/// Of usual scores (no NaN, nothing huge) the sum and the squares; live keys.
struct ScoreSums {
  float sum, squares;
  uint32_t live;
};
struct ShortShared {
  PickShared pick;
  alignas(16) uint16_t bins_of_peers[kMaxCluster * kPickBins];
  alignas(16) float scale[kShortStages][kTileKeys];
  uint64_t full[kShortStages], empty[kShortStages];
  uint32_t absent[kShortStages];  ///< the unit's page does not exist
  float of_warps[2][kPickWarps];
  uint32_t live_of_warps[kPickWarps];
  uint4 of_peers[kMaxCluster];  ///< ScoreSums
  uint64_t sums_told;
};
template <int kHeads>
struct ShortMemory {
  uint8_t* codes;  ///< [stages][64, 128]
  uint8_t* q;      ///< [kHeads, 128]
  float* weights;  ///< [kHeads] halved
  ShortShared* s;
  uint4* vectors;
};
template <int kHeads>
constexpr size_t fixed_bytes() {
  return 1024 + kShortStages * kTileKeys * kCodePitch + kHeads * (kCodePitch + 4) + sizeof(ShortShared);
}
static_assert(sizeof(ShortShared) % sizeof(uint4) == 0);

/// Page ids of a whole row, by one warp: asked for before its length is known.
constexpr int kPagesOfLane = static_cast<int>(kShortKeys / kTileKeys / 32);
struct RowPages {
  int32_t of[kPagesOfLane];
};
[[maybe_unused]] __device__ __forceinline__ RowPages read_pages(const PlainDecode& job, int32_t row) {
  const int32_t* table = pages_of_row(job, row) + (threadIdx.x & 31);
  const int32_t last = (job.max_len - 1) >> job.page_shift;
  RowPages pages;
#pragma unroll
  for (int e = 0; e < kPagesOfLane; ++e)
    pages.of[e] = static_cast<int32_t>(threadIdx.x & 31) + e * 32 <= last ? __ldg(table + e * 32) : -1;
  return pages;
}
/// A block's units of its row.
struct ShortSlice {
  uint32_t first, units;
};
/// Where 64 keys are.
struct UnitKeys {
  bool absent;
  int32_t page, in_page;
};
/// Of a unit of the row, by a whole warp; each lane may ask for another one.
[[maybe_unused]] __device__ __forceinline__ UnitKeys find_unit(const PlainDecode& job, const RowPages& pages,
                                                               uint32_t unit) {
  const uint32_t key = unit * kTileKeys, column = key >> job.page_shift;
  int32_t page = -1;
#pragma unroll
  for (uint32_t e = 0; e < kPagesOfLane; ++e) {
    const int32_t of_lane = __shfl_sync(~0u, pages.of[e], column % 32);
    if (column / 32 == e) page = of_lane;
  }
  return {page < 0 || page >= job.num_pages, page, static_cast<int32_t>(key & ((1u << job.page_shift) - 1))};
}
/// By one thread: a unit's keys on their way to a stage that is free.
[[maybe_unused]] __device__ __forceinline__ void ask_unit(const PlainDecode& job, const KeyBoxes& boxes, ShortShared& s,
                                                          uint8_t* codes, const UnitKeys& unit, uint32_t stage) {
  s.absent[stage] = unit.absent;
  if (unit.absent) return arrive_at(&s.full[stage]);
  arrive_expecting(&s.full[stage], kTileKeys * (kCodePitch + 4));
  copy_box(shared_address(codes + stage * (kTileKeys * kCodePitch)), &boxes, 0, unit.in_page, unit.page,
           &s.full[stage]);
  copy_bulk(shared_address(s.scale[stage]), job.scales + unit.page * job.page_stride + int64_t{unit.in_page} * 4,
            kTileKeys * 4, &s.full[stage]);
}
/// The first units, each by a warp of the warpgroup that scores it: one warp alone takes 3,000 cycles for eight of them. More
/// at once make the first ones come later.
constexpr uint32_t kFirstUnits = 2 * kShortGroups;
[[maybe_unused]] __device__ __forceinline__ uint32_t first_unit_of_warp() {
  const uint32_t warp = threadIdx.x / 32;
  return warp / 4 + warp % 4 * kShortGroups;
}
static_assert(kShortStages == kPickWarps && kShortGroups == 4);
/// One warp: all others.
[[maybe_unused]] __device__ __forceinline__ void bring_keys(const PlainDecode& job, const KeyBoxes& boxes,
                                                            ShortShared& s, uint8_t* codes, const RowPages& pages,
                                                            ShortSlice slice) {
  const uint32_t lane = threadIdx.x & 31;
#pragma unroll 1
  for (uint32_t base = kFirstUnits; base < slice.units; base += 32) {
    const UnitKeys keys = find_unit(job, pages, slice.first + base + lane);
    const uint32_t count = min(32u, slice.units - base);
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) {
      if (lane == i) {
        const uint32_t stage = (base + i) % kShortStages;
        wait_at(&s.empty[stage], ((base + i) / kShortStages & 1) ^ 1);
        ask_unit(job, boxes, s, codes, keys, stage);
      }
      __syncwarp();
    }
  }
}

/// The row's codes and weights on their way.
template <int kHeads>
__device__ __forceinline__ float begin_query(const PlainDecode& job, const ShortMemory<kHeads>& m, int32_t row) {
  const uint32_t head = threadIdx.x / 8, chunk = threadIdx.x % 8;
  if (head < kHeads) {
    const bool present = head < static_cast<uint32_t>(job.heads);
    const uint8_t* from = job.q + row * job.q_row + (present ? head * job.q_head + chunk * 16 : 0);
    copy_16(shared_address(m.q + chunk_at(head, chunk)), from, present ? 16 : 0);
  }
  commit_copies();
  return threadIdx.x < static_cast<uint32_t>(job.heads) ? __ldg(job.weights + row * job.w_row + threadIdx.x) : 0.0f;
}

/// This warpgroup's units: scores to the block's slice. Returns what this lane's add up to.
template <int kHeads>
__device__ __forceinline__ ScoreSums score_units(const ShortMemory<kHeads>& m, const Slice& slice, uint32_t units) {
  ShortShared& s = *m.s;
  const uint32_t thread = threadIdx.x % 128, own = thread / 32 * 16 + thread % 32 / 4 + 8 * (thread & 1);
  ScoreSums sums{0.0f, 0.0f, 0};
#pragma unroll 1
  for (uint32_t unit = threadIdx.x / 128; unit < units; unit += kShortGroups) {
    const uint32_t stage = unit % kShortStages;
    wait_at(&s.full[stage], unit / kShortStages & 1);
    float dots[kHeads / 2], heads[2];
    issue_dots<kHeads, 128>(dots, operand_at(shared_address(m.codes + stage * (kTileKeys * kCodePitch))),
                            operand_at(shared_address(m.q)));
    const float scale = s.scale[stage][own];
    const bool absent = s.absent[stage] != 0;
    wgmma_wait<0>();
    __syncwarp();
    if ((thread & 31) == 0) arrive_at(&s.empty[stage]);
    add_heads<kHeads>(dots, m.weights, heads);
    heads[0] = join_groups(heads[0]), heads[1] = join_groups(heads[1]);
    const float score = canonical(((thread & 1) != 0 ? heads[1] : heads[0]) * scale);
    const uint32_t i = unit * kTileKeys + own;
    const bool live = !absent && slice.live(slice.first * 4 + i), counts = live && fabsf(score) < 1e15f;
    if ((thread & 2) != 0) continue;
    if (i / 4 < slice.count)
      reinterpret_cast<uint32_t*>(m.vectors + slice.place(i / 4))[i % 4] =
          live ? __float_as_uint(score) : kNotLiveScore;
    const float x = counts ? score : 0.0f;
    sums.sum += x, sums.squares += x * x, sums.live += live ? 1 : 0;
  }
  return sums;
}

/// Adds up halves of a warp: lanes 0 to 15, and lanes 16 to 31.
[[maybe_unused]] __device__ __forceinline__ float add_halves(float x) {
#pragma unroll
  for (int step = 8; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
/// What all blocks' lanes add up to, the same in all: a barrier of the block, then what peers send. Sums are in the lower
/// half of a warp and squares in the upper one, so that one shuffle moves both.
[[maybe_unused]] __device__ __forceinline__ ScoreSums add_cluster(ShortShared& s, const Peers& peers, ScoreSums m) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = lane / 16;
  const float lanes =
      add_halves((half != 0 ? m.squares : m.sum) + __shfl_xor_sync(~0u, half != 0 ? m.sum : m.squares, 16));
  const uint32_t live = __reduce_add_sync(~0u, m.live);
  if (lane % 16 == 0) s.of_warps[half][warp] = lanes;
  if (lane == 0) s.live_of_warps[warp] = live;
  cluster_wait();  // all blocks have begun
  __syncthreads();
  if (warp == 0) {
    const float all = add_halves(s.of_warps[half][lane % 16]);
    const uint32_t sum = __float_as_uint(__shfl_sync(~0u, all, 0)),
                   squares = __float_as_uint(__shfl_sync(~0u, all, 16));
    const uint4 own{sum, squares, sum_of(s.live_of_warps, kPickWarps), 0};
    if (lane < peers.count)
      send_peer(peer_address(s.of_peers + peers.rank, lane), own, peer_address(&s.sums_told, lane));
    if (lane == 0) arrive_expecting(&s.sums_told, peers.count * static_cast<uint32_t>(sizeof own));
  }
  wait_soon_at(&s.sums_told, 0);
  const bool there = lane % 16 < peers.count;
  const uint4 of_peer = s.of_peers[lane % 16];
  const float all = add_halves(there ? __uint_as_float(half != 0 ? of_peer.y : of_peer.x) : 0.0f);
  return {__shfl_sync(~0u, all, 0), __shfl_sync(~0u, all, 16),
          __reduce_add_sync(~0u, lane < peers.count ? of_peer.z : 0)};
}
static_assert(kPickWarps == 16 && kMaxCluster == 16);

/// All live keys win: the marks of a cut that has none inside.
[[maybe_unused]] __device__ __noinline__ OwnCut all_live(const PickPart& p) {
  Marks marks{0, 0};
  for (uint32_t bit = 0; bit < 4 * p.slice.own(); ++bit)
    marks.above |= (p.slice.raw(p.vectors, bit) != kNotLiveScore ? 1u : 0u) << bit;
  return {{0, 0, 0}, marks, 0};
}

template <int kHeads>
__global__ __launch_bounds__(kShortThreads, 1) void decode_short(const __grid_constant__ KeyBoxes boxes,
                                                                 const __grid_constant__ PlainDecode job) {
#ifdef TOPKEY_HAS_WGMMA
  extern __shared__ uint8_t memory[];
  ShortMemory<kHeads> m;
  m.codes = align_tile(memory);
  m.q = m.codes + kShortStages * kTileKeys * kCodePitch;
  m.weights = reinterpret_cast<float*>(m.q + kHeads * kCodePitch);
  m.s = reinterpret_cast<ShortShared*>(m.weights + kHeads);
  m.vectors = reinterpret_cast<uint4*>(m.s + 1);
  ShortShared& s = *m.s;
  const Peers peers{job.blocks, cluster_rank(), s.bins_of_peers};
  const int32_t row = static_cast<int32_t>(blockIdx.x / job.blocks);
  const int32_t end = max(0, min(end_of_row(job, row), job.max_len));
  const bool brings = threadIdx.x >= kPickThreads;
  const uint32_t lane = threadIdx.x & 31;
  if (threadIdx.x == 0) init_told(s.pick), init_barrier(&s.sums_told, 1), fence_new_barriers();
  __syncwarp();
  cluster_arrive();
  const RowPages pages = read_pages(job, row);
  float weight = 0.0f;
  if (brings) {
    if (lane == 0) prefetch_map(&boxes);
  } else {
    weight = begin_query(job, m, row);
    if (lane == 0) {
      init_barrier(&s.full[first_unit_of_warp()], 1), init_barrier(&s.empty[first_unit_of_warp()], 4);
      fence_tensor_reads();
    }
    s.pick.bins[threadIdx.x] = 0;
  }
  if (end <= job.whole) {
    if (peers.rank == 0) answer_whole_row(job, row, end, threadIdx.x, kShortThreads);
    return;
  }
  const uint32_t n = static_cast<uint32_t>(end), all = (n + kTileKeys - 1) / kTileKeys;
  const uint32_t each = (all + job.blocks - 1) / job.blocks, first = min(all, peers.rank * each);
  const uint32_t units = min(each, all - first);
  if (brings) {
    if (units <= kFirstUnits) return arrive_named_barrier(1, kShortThreads);
    named_barrier(1, kShortThreads);
    return bring_keys(job, boxes, s, m.codes, pages, {first, units});
  }
  const UnitKeys keys = find_unit(job, pages, first + first_unit_of_warp());
  if (lane == 0 && first_unit_of_warp() < min(units, kFirstUnits))
    ask_unit(job, boxes, s, m.codes, keys, first_unit_of_warp());
  if (threadIdx.x < kHeads) m.weights[threadIdx.x] = 0.5f * weight;
  wait_copies<0>();
  fence_tensor_reads();
  named_barrier(1, kShortThreads);
  const PickPart p{s.pick, m.vectors, peers, Slice(n, first * (kTileKeys / 4), each * (kTileKeys / 4))};
  const float quantile = quantile_of(static_cast<uint32_t>(job.topk), n);
  const ScoreSums sums = add_cluster(s, peers, score_units(m, p.slice, units));
  const uint32_t live = sums.live, k = static_cast<uint32_t>(job.topk);
  OwnCut own;
  if (live <= k) {
    own = all_live(p);
  } else {
    const LinearBins bins = bins_of({sums.sum, sums.squares, static_cast<float>(live)}, quantile);
    count_linear(p.slice, m.vectors, bins, s.pick.bins);
    share_bins<false>(s.pick, peers);
    own = find_cut(p, bins, k);
  }
  const Before before = tell_peers(p, own);
  if (own.cut.ranks()) rank_candidates(s.pick, own.cut);
  int32_t* out = job.out + row * job.out_row;
  const int32_t position = p.slice.origin + static_cast<int32_t>(p.slice.first_word());
  if ((own.marks.above | own.marks.inside) != 0)
    each_winner(s.pick, own, before,
                [&](uint32_t rank, uint32_t bit) { out[rank] = position + static_cast<int32_t>(bit); });
  if (peers.rank != 0) return;
  for (uint32_t j = min(live, k) + threadIdx.x; j < static_cast<uint32_t>(job.columns); j += kPickThreads)
    out[j] = job.fill;
#endif
}

constexpr int kMostShared = 227 * 1024;
const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&decode_short<32>), kMostShared, true},
                                {reinterpret_cast<const void*>(&decode_short<64>), kMostShared, true}};

/// Thread blocks a row: so many that all rows' run at once, while each has a few units. A cluster lies within a part of
/// the GPU (10, 16 or 18 SMs of an H200), so SMs are left over: with `of` SMs a cluster all of them found room there.
uint32_t choose_blocks(int64_t rows, int64_t units, const Launch& launch) {
  struct Size {
    uint32_t blocks, of;
  };
  for (const Size& size : {Size{16, 19}, Size{8, 9}, Size{6, 7}, Size{5, 6}, Size{4, 5}, Size{3, 4}, Size{2, 2}}) {
    if (rows * size.of <= launch.sms() && units >= 4 * size.blocks) return size.blocks;
  }
  return 1;
}

}  // namespace

KernelList decode_short_kernels() { return {kEntries, 2}; }

bool decode_shortly(PlainDecode job, const KeyBoxes& boxes, const Launch& launch) {
  if (job.max_len > kShortKeys || job.scores != nullptr || job.shard.world_size > 1) return false;
  const int64_t units = (int64_t{job.max_len} + kTileKeys - 1) / kTileKeys;
  job.blocks = choose_blocks(job.rows, units, launch);
  if (job.blocks == 1 && job.rows > launch.sms()) return false;
  const bool small = job.heads <= 32;
  const int64_t entries = (units + job.blocks - 1) / job.blocks * kTileKeys;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {job.blocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(job.blocks * static_cast<unsigned>(job.rows)), config.blockDim = dim3(kShortThreads);
  config.dynamicSmemBytes = (small ? fixed_bytes<32>() : fixed_bytes<64>()) + static_cast<size_t>(entries) * 4;
  config.stream = launch.stream(), config.attrs = &attribute, config.numAttrs = 1;
  const auto kernel = small ? decode_short<32> : decode_short<64>;
  int clusters = 1;
  // Not every Hopper GPU, or part of one, has so many SMs side by side.
  if (job.blocks > 8) TOPKEY_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
  if (clusters == 0) return false;
  TOPKEY_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, boxes, job));
  return true;
}

}  // namespace topkey::cuda
