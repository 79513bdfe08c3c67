// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `search` for few query rows of which only the keys of candidate blocks are scored: a cluster of thread blocks a
// row. Entry i of a row is key i % size of its i / size-th candidate, ids ascending without repeats, so that entries ascend
// with position; those past the window or in an absent page are not live. Each warp fetches its own 16 keys of a unit of
// 64 from wherever they are; the cluster settles the cut of what its blocks keep (device/made_cut.cuh).
#include <algorithm>

#include "cuda/check.h"
#include "cuda/decode_blocks.h"
#include "cuda/device/made_cut.cuh"
#include "cuda/device/tiles_sm90.cuh"
#include "cuda/stages.h"

namespace topkey::cuda {
namespace {

constexpr int kStages = 4;  ///< units under way in a warpgroup
constexpr int kGroups = kPickThreads / 128;
constexpr uint32_t kNoBlock = 0xFFFFFFFFu;  ///< behind all ids

struct AdmittedJob : PlainDecode {
  AdmittedBlocks admitted;
  const uint8_t* codes;  ///< of page 0
  uint32_t ids_room;     ///< ids a row, rounded up to a power of two
  int32_t size_shift;    ///< 1 << so many keys a block, < 0: another number
};
struct AdmittedShared {
  MadeShared made;
  alignas(16) float scale[kGroups][kStages][kTileKeys];
  uint32_t lives[kGroups][kStages][4];  ///< a bit for each of a warp's 16 keys
  uint32_t kept;                        ///< ids of the row that are in its window
};
static_assert(sizeof(AdmittedShared) % sizeof(uint4) == 0);
template <int kHeads>
struct AdmittedMemory {
  uint8_t* codes;  ///< [groups][stages][64, 128]
  uint8_t* q;      ///< [kHeads, 128]
  float* weights;  ///< [kHeads] halved
  AdmittedShared* s;
  uint32_t* ids;
  uint4* vectors;
};
template <int kHeads>
constexpr size_t fixed_bytes() {
  return 1024 + kGroups * kStages * kTileKeys * kCodePitch + kHeads * (kCodePitch + 4) + sizeof(AdmittedShared);
}

/// Ids of the row, as given: of each turn of all threads one, and the next.
struct IdBatch {
  static constexpr int kTurns = 4;
  uint32_t id[kTurns], next[kTurns];
};
/// From id `base` on. All loads are under way at once: nothing is waited for, no branch.
[[maybe_unused]] __device__ __forceinline__ IdBatch load_ids(const AdmittedJob& job, int32_t row, uint32_t base) {
  const auto* from = reinterpret_cast<const uint32_t*>(job.admitted.ids) + row * job.admitted.step;
  const uint32_t last = static_cast<uint32_t>(job.admitted.count) - 1;
  IdBatch batch;
#pragma unroll
  for (int e = 0; e < IdBatch::kTurns; ++e) {
    const uint32_t i = base + e * kPickThreads + threadIdx.x;
    batch.id[e] = __ldg(from + min(i, last)), batch.next[e] = __ldg(from + min(i + 1, last));
  }
  return batch;
}
/// Those in the window, which has `blocks`, and kNoBlock in place of others, which `kept` does not count. True if they
/// ascend, all kNoBlock behind them.
[[maybe_unused]] __device__ __forceinline__ bool keep_ids(const AdmittedJob& job, int32_t row, IdBatch batch,
                                                          uint32_t blocks, uint32_t* ids, uint32_t* kept) {
  const auto count = static_cast<uint32_t>(job.admitted.count);
  bool ascends = true;
  uint32_t own = 0;
#pragma unroll 1
  for (uint32_t base = 0;;) {
#pragma unroll
    for (int e = 0; e < IdBatch::kTurns; ++e) {
      const uint32_t i = base + e * kPickThreads + threadIdx.x;
      const uint32_t id = i < count && batch.id[e] < blocks ? batch.id[e] : kNoBlock;
      const uint32_t next = i + 1 < count && batch.next[e] < blocks ? batch.next[e] : kNoBlock;
      if (i < job.ids_room) ids[i] = id;
      ascends = ascends & ((id < next) | (next == kNoBlock)), own += id != kNoBlock;
    }
    base += IdBatch::kTurns * kPickThreads;
    if (base >= job.ids_room) break;
    batch = load_ids(job, row, base);
  }
  own = __reduce_add_sync(~0u, own);
  if (threadIdx.x % 32 == 0 && own != 0) atomicAdd(kept, own);
  return ascends;
}
/// Puts them in order, repeats behind all others.
[[maybe_unused]] static __device__ __noinline__ void order_ids(uint32_t* ids, uint32_t size, uint32_t* kept) {
  const auto sort = [&] {
    for (uint32_t width = 2; width <= size; width *= 2) {
      for (uint32_t step = width / 2; step > 0; step /= 2) {
        for (uint32_t pair = threadIdx.x; pair < size / 2; pair += kPickThreads) {
          const uint32_t low = pair / step * (step * 2) + pair % step, high = low + step, a = ids[low], b = ids[high];
          if ((a > b) == ((low & width) == 0)) ids[low] = b, ids[high] = a;
        }
        __syncthreads();
      }
    }
  };
  sort();
  uint32_t repeats = 0;  // a bit for each of this thread's ids
  uint32_t turn = 0;
  for (uint32_t i = threadIdx.x; i < size; i += kPickThreads, ++turn)
    repeats |= (i > 0 && ids[i] == ids[i - 1] ? 1u : 0u) << turn;
  __syncthreads();
  turn = 0;
  for (uint32_t i = threadIdx.x; i < size; i += kPickThreads, ++turn) {
    if ((repeats >> turn & 1u) != 0) ids[i] = kNoBlock;
  }
  __syncthreads();
  sort();
  for (uint32_t i = threadIdx.x; i < size; i += kPickThreads) {
    if (i == 0 && ids[0] == kNoBlock) *kept = 0;
    if (ids[i] != kNoBlock && (i + 1 == size || ids[i + 1] == kNoBlock)) *kept = i + 1;
  }
  __syncthreads();
}

/// Position of entry i, which a kept block has; it may be past the window.
[[maybe_unused]] __device__ __forceinline__ uint32_t position_of(const AdmittedJob& job, const uint32_t* ids,
                                                                 uint32_t i) {
  if (job.size_shift >= 0) return (ids[i >> job.size_shift] << job.size_shift) + (i & ((1u << job.size_shift) - 1));
  const auto size = static_cast<uint32_t>(job.admitted.size);
  const uint32_t block = i / size;
  return ids[block] * size + (i - block * size);
}

/// The row's codes on their way, and this thread's weight.
template <int kHeads>
__device__ __forceinline__ float begin_query(const AdmittedJob& job, const AdmittedMemory<kHeads>& m, int32_t row) {
  const uint32_t head = threadIdx.x / 8, chunk = threadIdx.x % 8, heads = static_cast<uint32_t>(job.heads);
  if (head < kHeads) {
    const bool present = head < heads;
    const uint8_t* from = job.q + row * job.q_row + (present ? head * job.q_head + chunk * 16 : 0);
    copy_16(shared_address(m.q + chunk_at(head, chunk)), from, present ? 16 : 0);
  }
  return threadIdx.x < heads ? __ldg(job.weights + row * job.w_row + threadIdx.x) : 0.0f;
}

/// A block's part of its row.
struct AdmittedSlice {
  int32_t row;
  uint32_t end;           ///< of the row
  uint32_t entries;       ///< of the row
  uint32_t first, units;  ///< of the block
};

/// A warpgroup's units: fetches them, and scores them.
template <int kHeads>
class AdmittedScorer {
 public:
  __device__ __forceinline__ AdmittedScorer(const AdmittedJob& job, const AdmittedMemory<kHeads>& m,
                                            const AdmittedSlice& slice)
      : job_(job), m_(m), slice_(slice), table_(pages_of_row(job, slice.row)), group_(threadIdx.x / 128) {}

  __device__ __forceinline__ MadeSums run(const Slice& to) {
    MadeSums sums;
    Spot spots[kStages];
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) spots[stage] = find(group_ + stage * kGroups);
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) fetch(spots[stage], stage);
    Spot next = find(group_ + kStages * kGroups);
    uint32_t stage = 0;
#pragma unroll 1
    for (uint32_t unit = group_; unit < slice_.units; unit += kGroups) {
      if (unit == group_) {
        wait_copies<kStages - 1>();
      } else {
        wait_copies<kStages - 2>();
      }
      fence_tensor_reads();
      named_barrier(1 + static_cast<int>(group_), 128);
      if (unit != group_) {
        // All have read the unit before: its stage is free.
        fetch(next, stage == 0 ? kStages - 1 : stage - 1);
        next = find(unit + kStages * kGroups);
      }
      score(unit, stage, to, sums);
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    return sums;
  }

 private:
  /// Where a key lies: this lane's of the warp's 16 of a unit, and of the lane 16 further.
  struct Spot {
    int32_t page;  ///< as the table has it; -1: there is no key
    uint32_t in_page;
  };
  /// Without a branch: several may be under way. Nothing of the page is looked at.
  __device__ __forceinline__ Spot find(uint32_t unit) const {
    const uint32_t i = (slice_.first + unit) * kTileKeys + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16;
    const bool inside = (unit < slice_.units) & (i < slice_.entries);
    const uint32_t position = position_of(job_, m_.ids, inside ? i : 0);
    const bool live = inside & (position < slice_.end);
    const int32_t page = __ldg(table_ + (live ? position >> job_.page_shift : 0));
    return {live ? page : -1, position & ((1u << job_.page_shift) - 1)};
  }
  /// By whole warps; always one group of copies.
  __device__ __forceinline__ void fetch(const Spot& spot, uint32_t stage) {
    AdmittedShared& s = *m_.s;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const bool live = spot.page >= 0 && spot.page < job_.num_pages;
    const int64_t page = spot.page * job_.page_stride, at = live ? page + int64_t{spot.in_page} * kCodePitch : -1;
    uint8_t* codes = m_.codes + (group_ * kStages + stage) * (kTileKeys * kCodePitch);
#pragma unroll
    for (uint32_t turn = 0; turn < 4; ++turn) {
      const uint32_t key = turn * 4 + lane / 8;
      const int64_t from = __shfl_sync(~0u, at, static_cast<int>(key));
      copy_16(shared_address(codes + chunk_at(warp * 16 + key, lane % 8)),
              job_.codes + (from < 0 ? 0 : from + lane % 8 * 16), from < 0 ? 0 : 16);
    }
    if (lane < 16)
      copy_4(shared_address(&s.scale[group_][stage][warp * 16 + lane]),
             job_.scales + (live ? page + int64_t{spot.in_page} * 4 : 0), live ? 4 : 0);
    const uint32_t lives = __ballot_sync(~0u, live);
    if (lane == 0) s.lives[group_][stage][warp] = lives;
    commit_copies();
  }
  __device__ __forceinline__ void score(uint32_t unit, uint32_t stage, const Slice& to, MadeSums& sums) {
#ifdef TOPKEY_HAS_WGMMA
    const AdmittedShared& s = *m_.s;
    const uint32_t thread = threadIdx.x % 128, of_warp = thread % 32 / 4 + 8 * (thread & 1);
    const uint32_t own = thread / 32 * 16 + of_warp;
    float dots[kHeads / 2], heads[2];
    issue_dots<kHeads, 128>(
        dots, operand_at(shared_address(m_.codes + (group_ * kStages + stage) * (kTileKeys * kCodePitch))),
        operand_at(shared_address(m_.q)));
    const float scale = s.scale[group_][stage][own];
    const bool live = (s.lives[group_][stage][thread / 32] >> of_warp & 1u) != 0;
    wgmma_wait<0>();
    add_heads<kHeads>(dots, m_.weights, heads);
    heads[0] = join_groups(heads[0]), heads[1] = join_groups(heads[1]);
    const float value = canonical(((thread & 1) != 0 ? heads[1] : heads[0]) * scale);
    const uint32_t i = unit * kTileKeys + own;
    if ((thread & 2) == 0) {
      if (i / 4 < to.count)
        reinterpret_cast<uint32_t*>(m_.vectors + to.place(i / 4))[i % 4] =
            live ? __float_as_uint(value) : kNotLiveScore;
      sums.add(value, live);
    }
    __syncwarp();
#endif
  }

  const AdmittedJob& job_;
  const AdmittedMemory<kHeads>& m_;
  const AdmittedSlice& slice_;
  const int32_t* table_;
  const uint32_t group_;
};

template <int kHeads>
__device__ __forceinline__ void answer_row(const AdmittedJob& job, const AdmittedMemory<kHeads>& m, const Peers& peers,
                                           int32_t row) {
  AdmittedShared& s = *m.s;
  cluster_arrive();
  const float weight = begin_query(job, m, row);
  const IdBatch batch = load_ids(job, row, 0);
  const auto end = static_cast<uint32_t>(max(0, min(end_of_row(job, row), job.max_len)));
  s.made.pick.bins[threadIdx.x] = 0;
  const auto size = static_cast<uint32_t>(job.admitted.size);
  const uint32_t blocks = job.size_shift >= 0 ? (end + size - 1) >> job.size_shift : (end + size - 1) / size;
  const bool ascends = keep_ids(job, row, batch, blocks, m.ids, &s.kept);
  if (threadIdx.x < kHeads) m.weights[threadIdx.x] = 0.5f * weight;
  wait_copies<0>();
  fence_tensor_reads();
  if (__syncthreads_or(!ascends) != 0) order_ids(m.ids, job.ids_room, &s.kept);
  const uint32_t n = s.kept * size, all = (n + kTileKeys - 1) / kTileKeys, each = (all + peers.count - 1) / peers.count;
  const uint32_t first = min(all, peers.rank * each);
  const AdmittedSlice slice{row, end, n, first, min(each, all - first)};
  const PickPart p{s.made.pick, m.vectors, peers, Slice(n, first * (kTileKeys / 4), each * (kTileKeys / 4))};
  const MadeSums sums = AdmittedScorer<kHeads>(job, m, slice).run(p.slice);
  int32_t* out = job.out + row * job.out_row;
  const uint32_t own = p.slice.first_word();
  const uint32_t used = pick_made(s.made, p, sums, static_cast<uint32_t>(job.topk), [&](uint32_t rank, uint32_t bit) {
    out[rank] = static_cast<int32_t>(position_of(job, m.ids, own + bit));
    if (job.scores != nullptr) job.scores[row * job.scores_row + rank] = __uint_as_float(p.slice.raw(m.vectors, bit));
  });
  if (threadIdx.x == 0) s.kept = 0;  // for the next row
  if (peers.rank != 0) return;
  for (uint32_t j = used + threadIdx.x; j < static_cast<uint32_t>(job.columns); j += kPickThreads) {
    out[j] = job.fill;
    if (job.scores != nullptr) job.scores[row * job.scores_row + j] = __uint_as_float(0xFF800000u);  // -inf
  }
}

template <int kHeads>
__global__ __launch_bounds__(kPickThreads, 1) void decode_admitted_keys(const __grid_constant__ AdmittedJob job) {
#ifdef TOPKEY_HAS_WGMMA
  extern __shared__ uint8_t memory[];
  AdmittedMemory<kHeads> m;
  m.codes = align_tile(memory);
  m.q = m.codes + kGroups * kStages * kTileKeys * kCodePitch;
  m.weights = reinterpret_cast<float*>(m.q + kHeads * kCodePitch);
  m.s = reinterpret_cast<AdmittedShared*>(m.weights + kHeads);
  m.ids = reinterpret_cast<uint32_t*>(m.s + 1);
  m.vectors = reinterpret_cast<uint4*>(m.ids + job.ids_room);
  Peers peers{job.blocks, cluster_rank(), m.s->made.bins_of_peers};
  if (threadIdx.x == 0) m.s->kept = 0, init_made(m.s->made);
  __syncthreads();
  for (int32_t row = static_cast<int32_t>(blockIdx.x / job.blocks); row < job.rows;
       row += static_cast<int32_t>(gridDim.x / job.blocks)) {
    answer_row(job, m, peers, row);
    peers.parity ^= 1;
    __syncthreads();
  }
#endif
}

constexpr int kMostShared = 227 * 1024;
const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&decode_admitted_keys<32>), kMostShared, true},
                                {reinterpret_cast<const void*>(&decode_admitted_keys<64>), kMostShared, true}};

/// Of a thread block.
size_t shared_of(const AdmittedJob& job, int64_t units, uint32_t blocks) {
  const int64_t entries = (units + blocks - 1) / blocks * kTileKeys;
  int64_t each = 1;  // vectors of a thread, as the slice lays them out
  while (kPickThreads * 4 * each < entries) each *= 2;
  return (job.heads <= 32 ? fixed_bytes<32>() : fixed_bytes<64>()) + job.ids_room * size_t{4} +
         static_cast<size_t>(kPickThreads * 4 * each) * 4;
}
bool fits(const AdmittedJob& job, int64_t units, uint32_t blocks) {
  return (units + blocks - 1) / blocks * kTileKeys <= int64_t{kPickThreads} * kPickVectors * 4 &&
         shared_of(job, units, blocks) <= kMostShared;
}

/// Thread blocks a row: so many that all rows' run at once, while each has a few units; the fewest that fit, where rows
/// outnumber the SMs. 0: none. A cluster lies within a part of the GPU, so SMs are left over.
uint32_t choose_blocks(const AdmittedJob& job, int64_t units, const Launch& launch) {
  struct Size {
    uint32_t blocks, of;
  };
  uint32_t least = 0;
  for (const Size& size : {Size{16, 19}, Size{8, 9}, Size{6, 7}, Size{5, 6}, Size{4, 5}, Size{3, 4}, Size{2, 2}}) {
    if (size.blocks > static_cast<uint32_t>(launch.sms()) || !fits(job, units, size.blocks)) continue;
    if (job.rows * int64_t{size.of} <= launch.sms() && units >= 4 * size.blocks) return size.blocks;
    least = size.blocks;
  }
  return fits(job, units, 1) ? 1 : least;
}

struct Config {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};

  Config(const AdmittedJob& job, int64_t units, uint32_t blocks, const Launch& launch) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {blocks, 1, 1};
    const int64_t grid = launch.blocks(int64_t{job.rows} * blocks, 1 << 15) / blocks * blocks;
    config.gridDim = dim3(static_cast<unsigned>(grid)), config.blockDim = dim3(kPickThreads);
    config.dynamicSmemBytes = shared_of(job, units, blocks), config.stream = launch.stream();
    config.attrs = &attribute, config.numAttrs = 1;
  }
  Config(const Config&) = delete;
  Config& operator=(const Config&) = delete;
};

}  // namespace

KernelList decode_admitted_kernels() { return {kEntries, 2}; }

bool decode_admitted(const PlainDecode& plain, const AdmittedBlocks& admitted, const uint8_t* codes,
                     const Launch& launch) {
  constexpr int64_t kMostIds = 4096;
  const int64_t entries = int64_t{admitted.count} * admitted.size, units = (entries + kTileKeys - 1) / kTileKeys;
  if (admitted.count == 0 || admitted.count > kMostIds || entries > (int64_t{1} << 20)) return false;
  AdmittedJob job{};
  static_cast<PlainDecode&>(job) = plain;
  job.admitted = admitted, job.codes = codes;
  job.ids_room = 4;  // so that what lies behind is aligned
  while (job.ids_room < static_cast<uint32_t>(admitted.count)) job.ids_room *= 2;
  const bool power = (admitted.size & (admitted.size - 1)) == 0;
  job.size_shift = power ? __builtin_ctz(static_cast<unsigned>(admitted.size)) : -1;
  job.blocks = choose_blocks(job, units, launch);
  if (job.blocks == 0) return false;
  const auto kernel = job.heads <= 32 ? decode_admitted_keys<32> : decode_admitted_keys<64>;
  int clusters = 1;
  // Not every Hopper GPU, or part of one, has so many SMs side by side.
  if (job.blocks > 8) {
    const Config probe(job, units, job.blocks, launch);
    TOPKEY_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &probe.config));
  }
  if (clusters == 0 && !fits(job, units, 8)) return false;
  if (clusters == 0) job.blocks = 8;
  const Config c(job, units, job.blocks, launch);
  TOPKEY_CUDA_CHECK(cudaLaunchKernelEx(&c.config, kernel, job));
  return true;
}

}  // namespace topkey::cuda
