// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `search` for few query rows of short contexts on Hopper, in the form that engines call most (plain_decode.h): a
// cluster of thread blocks a row, so that nothing is to be cleared, cut or carried through memory, and blocks meet in a
// quarter of the time. Each block scores its slice of the row and keeps the scores; the cluster settles the cut as it does
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

struct ShortShared {
  PickShared pick;
  alignas(16) float scale[kShortStages][kTileKeys];
  uint64_t full[kShortStages], empty[kShortStages];
  uint32_t absent[kShortStages];  ///< the unit's page does not exist
  float4 of_warps[kPickWarps];
  float4 of_peers[kMaxCluster];  ///< sum, squares and number of finite scores; live keys
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

/// A block's units of its row.
struct ShortSlice {
  int32_t row;
  uint32_t first, units;
};
/// One warp: its lanes find the pages of as many units, then ask for the keys in turn.
[[maybe_unused]] __device__ __forceinline__ void bring_keys(const PlainDecode& job, const KeyBoxes& boxes,
                                                            ShortShared& s, uint8_t* codes, ShortSlice slice) {
  const uint32_t lane = threadIdx.x & 31;
  const int32_t* table = pages_of_row(job, slice.row);
#pragma unroll 1
  for (uint32_t base = 0; base < slice.units; base += 32) {
    const uint32_t key = (slice.first + base + lane) * kTileKeys;
    int32_t page = -1;
    if (base + lane < slice.units) page = __ldg(table + (key >> job.page_shift));
    const uint32_t count = min(32u, slice.units - base);
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) {
      if (lane == i) {
        const uint32_t stage = (base + i) % kShortStages;
        wait_at(&s.empty[stage], ((base + i) / kShortStages & 1) ^ 1);
        const bool absent = page < 0 || page >= job.num_pages;
        s.absent[stage] = absent;
        if (absent) {
          arrive_at(&s.full[stage]);
        } else {
          const uint32_t in_page = key & ((1u << job.page_shift) - 1);
          arrive_expecting(&s.full[stage], kTileKeys * (kCodePitch + 4));
          copy_box(shared_address(codes + stage * (kTileKeys * kCodePitch)), &boxes, 0, static_cast<int32_t>(in_page),
                   page, &s.full[stage]);
          copy_bulk(shared_address(s.scale[stage]), job.scales + page * job.page_stride + int64_t{in_page} * 4,
                    kTileKeys * 4, &s.full[stage]);
        }
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

/// This warpgroup's units: scores to the block's slice. Returns what this lane's add up to: finite ones, and live keys.
template <int kHeads>
__device__ __forceinline__ float4 score_units(const ShortMemory<kHeads>& m, const Slice& slice, uint32_t units) {
  ShortShared& s = *m.s;
  const uint32_t thread = threadIdx.x % 128, own = thread / 32 * 16 + thread % 32 / 4 + 8 * (thread & 1);
  float4 sums{0.0f, 0.0f, 0.0f, 0.0f};
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
    sums.x += x, sums.y += x * x, sums.z += counts ? 1.0f : 0.0f, sums.w += live ? 1.0f : 0.0f;
  }
  return sums;
}

[[maybe_unused]] __device__ __forceinline__ float4 add_lanes(float4 m, int from) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    if (step > from) continue;
    m.x += __shfl_xor_sync(~0u, m.x, step), m.y += __shfl_xor_sync(~0u, m.y, step);
    m.z += __shfl_xor_sync(~0u, m.z, step), m.w += __shfl_xor_sync(~0u, m.w, step);
  }
  return m;
}
/// What all blocks' lanes add up to, the same in all: a barrier of the block, then one of the cluster.
[[maybe_unused]] __device__ __forceinline__ float4 add_cluster(ShortShared& s, const Peers& peers, float4 m) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  m = add_lanes(m, 16);
  if (lane == 0) s.of_warps[warp] = m;
  cluster_wait();  // all blocks have begun
  __syncthreads();
  if (warp == 0) {
    m = add_lanes(s.of_warps[lane % kPickWarps], kPickWarps / 2);
    if (lane < peers.count) {
      const uint32_t at = peer_address(s.of_peers + peers.rank, lane);
      const uint32_t words[4] = {__float_as_uint(m.x), __float_as_uint(m.y), __float_as_uint(m.z),
                                 __float_as_uint(m.w)};
#pragma unroll
      for (int w = 0; w < 4; ++w) store_peer(at + 4 * w, words[w]);
    }
  }
  peers.meet();
  const float4 none{0.0f, 0.0f, 0.0f, 0.0f};
  return add_lanes(lane < peers.count ? s.of_peers[lane] : none, 16);
}

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
  const Peers peers{job.blocks, cluster_rank()};
  const int32_t row = static_cast<int32_t>(blockIdx.x / job.blocks);
  const int32_t end = max(0, min(end_of_row(job, row), job.max_len));
  const bool brings = threadIdx.x >= kPickThreads;
  cluster_arrive();
  float weight = 0.0f;
  if (brings) {
    const uint32_t lane = threadIdx.x & 31;
    if (lane < kShortStages) init_barrier(&s.full[lane], 1), init_barrier(&s.empty[lane], 4);
    if (lane == kShortStages) prefetch_map(&boxes);
    fence_tensor_reads();
  } else {
    weight = begin_query(job, m, row);
    s.pick.bins[0][threadIdx.x] = 0;
    if (threadIdx.x < kHeads) m.weights[threadIdx.x] = 0.5f * weight;
    wait_copies<0>();
    fence_tensor_reads();
  }
  const uint32_t n = static_cast<uint32_t>(end), all = (n + kTileKeys - 1) / kTileKeys;
  const uint32_t each = (all + job.blocks - 1) / job.blocks, first = min(all, peers.rank * each);
  const uint32_t units = min(each, all - first);
  if (brings) {
    arrive_named_barrier(1, kShortThreads);
    return bring_keys(job, boxes, s, m.codes, {row, first, units});
  }
  named_barrier(1, kShortThreads);
  const PickPart p{s.pick, m.vectors, peers, Slice(n, first * (kTileKeys / 4), each * (kTileKeys / 4))};
  const float4 sums = add_cluster(s, peers, score_units(m, p.slice, units));
  const uint32_t live = static_cast<uint32_t>(sums.w), k = static_cast<uint32_t>(job.topk);
  OwnCut own;
  if (live <= k) {
    own = all_live(p);
  } else {
    const LinearBins bins = bins_of({sums.x, sums.y, sums.z}, k, live);
    count_linear(p.slice, m.vectors, bins, s.pick.bins[0]);
    peers.meet();
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
