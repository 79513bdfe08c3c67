// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `pool`, the pools that engines ask for: few rows and their state in one launch, four warps or one a row; of many
// rows the keys, a warp a key. What is seldom goes the way of pool.cu.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/device/pool_make.cuh"
#include "cuda/device/ptx_sm90.cuh"
#include "cuda/pool_quick.h"
#include "cuda/stages.h"
#include "cuda/vectors.h"

namespace topkey::cuda {
namespace {

/// Not inlined: what is seldom. By a warp, of which one team works.
__device__ __noinline__ void make_seldom(const QuickPools& job, uint32_t row, int64_t* room) {
  make_vectors<Pools, 4>(job.pools, team_number() == 0 ? int64_t{row} : -1, job.rows, room);
}

/// What a row's pool is: not made, made of these tokens, or nothing that is usual.
enum class Quick { none, made, seldom };
template <class Row>
__device__ __forceinline__ Quick look_quickly(const QuickPools& job, const Row& r, bool again, QuickTokens* tokens) {
  bool ends = false;
  const int found = found_of(r, &ends);
  if (r.slot < 0) return Quick::none;
  const bool whole = r.slot < job.slot_count && r.last % kQuickTokens == kQuickTokens - 1;
  const bool has_state = r.own >= 0 && r.own < job.pools.c.entries;
  if (whole && (!ends || again || r.last >> 32 != 0 || r.own >> 32 > 0)) return Quick::seldom;
  const bool made = whole && (found == kQuickTokens || has_state);
  if (made) *tokens = tokens_of(job, r, found);
  return made ? Quick::made : Quick::none;
}

/// A joined vector to its slot, by a warp.
__device__ __forceinline__ void put_quick(const QuickPools& job, int64_t slot, float (&x)[1][4]) {
  const Divisor& size = job.pools.c.page;
  const uint32_t page = size.quotient(static_cast<uint32_t>(slot)),
                 offset = static_cast<uint32_t>(slot) - page * size.value;
  uint8_t* at = job.pages + page * job.page_stride;
  hadamard_vector<32>(job.recipe, x);
  VectorRecipe recipe = job.recipe;
  recipe.format = KeyFormat::fp8, recipe.rule.code = RuleFacts::divide, recipe.rule.whole_bf16 = true;
  const float scale = quantize_e4m3<32>(recipe, x, at + int64_t{offset} * job.value_step, true);
  if (lane_id() == 0) put_scale(at + job.scale_base + int64_t{offset} * job.scale_step, scale);
}

/// Many rows, of which a warp looks at 32 neighbours at a time: few complete a pool. The state is left by another launch.
__global__ __launch_bounds__(128, 8) void quick_pools(const __grid_constant__ QuickPools job) {
  __shared__ int64_t room[4][kQuickTokens];
  uint32_t missed = 0;
  const Claims& claims = job.pools.c.key_claims;
  const auto slots_of = [&](int64_t i) { return job.slots[i]; };
  for (uint32_t base = (blockIdx.x * 4 + threadIdx.x / 32) * 32; base < job.rows; base += gridDim.x * 128) {
    const uint32_t i = base + lane_id();
    uint32_t seldom = 0;
    for (uint32_t rest = __ballot_sync(kWarp, i < job.rows && job.slots[i] >= 0); rest != 0; rest &= rest - 1) {
      QuickRow r(job, base + __ffs(static_cast<int>(rest)) - 1);
      r.settle();
      bool again = false;
      if (claims.rows == nullptr) {
        again = QuickAgain(job, r, false).key;
      } else if (r.slot < job.slot_count) {
        again = !claims.is_last(slots_of, r.row, r.slot);
      }
      QuickTokens tokens;
      const Quick quick = look_quickly(job, r, again, &tokens);
      if (quick == Quick::made) {
        float x[1][4];
        join_quick(tokens, r, x);
        put_quick(job, r.slot, x);
      } else if (quick == Quick::seldom) {
        seldom |= rest & -rest;
      } else {
        missed += lane_id() == 0;
      }
    }
    for (; seldom != 0; seldom &= seldom - 1)
      make_seldom(job, base + __ffs(static_cast<int>(seldom)) - 1, room[threadIdx.x / 32]);
  }
  count(job.pools.c.stats, kSkippedSlots, missed);
  if (blockIdx.x == 0 && threadIdx.x == 0) count(job.pools.c.stats, kRows, job.rows);
}

/// Rows of one thread block, at most, and of a call up to which a row has four warps.
constexpr int kQuickRows = 8;

/// Behind it all rows' pools are made, as far as they read the state.
__device__ __forceinline__ void all_have_read() {
  if (gridDim.x == 1) {
    __syncthreads();
  } else {
#ifdef TOPKEY_HAS_WGMMA
    cluster_barrier();
#endif
  }
}
/// Where a row leaves its numbers; null: nowhere.
template <class Row>
__device__ __forceinline__ uint8_t* left_at(const QuickPools& job, const Row& r, bool again) {
  if (r.last < 0 || r.own < 0 || r.own >= job.pools.c.entries || again) return nullptr;
  const Divisor& ring = job.pools.ring;
  const int64_t block = quotient(r.own, ring);
  return job.tail + block * job.tail_block + (r.own - block * ring.value) * job.tail_entry;
}
/// By one thread of a row.
template <class Row>
__device__ __forceinline__ void count_quick(const QuickPools& job, const Row& r, Quick quick) {
  uint64_t* stats = job.pools.c.stats;
  count(stats, kSkippedSlots, r.slot >= 0 && quick == Quick::none);
  count(stats, kSkippedSlots, r.last >= 0 && r.own >= job.pools.c.entries);
  if (r.row == 0) count(stats, kRows, job.rows);
}

/// Few rows and their state, four warps a row: one thread block, or a cluster of them; all have read the state before any
/// writes it.
__global__ __launch_bounds__(512) void quick_pools_and_tail(const __grid_constant__ QuickPools job) {
  __shared__ int64_t room[4][kQuickTokens];
  __shared__ float4 joined[4][32];
  const uint32_t own = threadIdx.x / 128, row = blockIdx.x * (blockDim.x / 128) + own;
  const bool there = row < job.rows, first = threadIdx.x % 128 < 32;
  const QuickChannel r(job, there ? row : 0);
  const QuickAgain behind(job, r, true);
  QuickTokens tokens;
  const Quick quick = there ? look_quickly(job, r, behind.key, &tokens) : Quick::none;
  if (quick == Quick::made) reinterpret_cast<float*>(joined[own])[r.channel] = r.join(tokens);
  if (quick == Quick::seldom && first) make_seldom(job, row, room[own]);
  all_have_read();
  if (!there) return;
  if (uint8_t* to = left_at(job, r, behind.state)) {
    reinterpret_cast<uint16_t*>(to)[r.channel] = r.k;
    reinterpret_cast<uint16_t*>(to + job.tail_half)[r.channel] = r.gate;
  }
  if (threadIdx.x % 128 == 0) count_quick(job, r, quick);
  if (quick != Quick::made || !first) return;
  const float4 four = joined[own][lane_id()];
  float x[1][4] = {{four.x, four.y, four.z, four.w}};
  put_quick(job, r.slot, x);
}

/// The same with a warp a row.
__global__ __launch_bounds__(32 * kQuickRows) void quick_rows_and_tail(const __grid_constant__ QuickPools job) {
  __shared__ int64_t room[kQuickRows][kQuickTokens];
  const uint32_t own = threadIdx.x / 32, row = blockIdx.x * (blockDim.x / 32) + own;
  const bool there = row < job.rows;
  QuickRow r(job, there ? row : 0);
  const QuickAgain behind(job, r, true);
  r.settle();
  QuickTokens tokens;
  const Quick quick = there ? look_quickly(job, r, behind.key, &tokens) : Quick::none;
  float x[1][4];
  if (quick == Quick::made) join_quick(tokens, r, x);
  if (quick == Quick::seldom) make_seldom(job, row, room[own]);
  all_have_read();
  if (!there) return;
  if (uint8_t* to = left_at(job, r, behind.state)) {
    reinterpret_cast<uint2*>(to)[lane_id()] = {r.k.bits[0], r.k.bits[1]};
    reinterpret_cast<uint2*>(to + job.tail_half)[lane_id()] = {r.gate.bits[0], r.gate.bits[1]};
  }
  if (lane_id() == 0) count_quick(job, r, quick);
  if (quick == Quick::made) put_quick(job, r.slot, x);
}

const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&quick_pools), 0},
                                {reinterpret_cast<const void*>(&quick_pools_and_tail), 0},
                                {reinterpret_cast<const void*>(&quick_rows_and_tail), 0}};

bool side_by_side(const Tensor& t) { return t.stride[0] == 1; }

}  // namespace

KernelList pool_quick_kernels() { return {kEntries, 3}; }

bool quick_of(const Pools& p, QuickPools* q) {
  const Common& c = p.c;
  const int64_t rows = c.slot_mapping.shape[0], slots = c.cache.pages.shape[0] * c.cache.page_size;
  const Tensor& request = c.batch.rows.request;
  const bool usual = c.tokens == kQuickTokens && c.vector_each == 4 && c.cache.format == KeyFormat::fp8 && p.fours &&
                     c.recipe.rule.whole_bf16 && c.recipe.rule.code == RuleFacts::divide && request.data != nullptr;
  if (!usual || rows >= int64_t{1} << 31 || slots >= int64_t{1} << 31 || !side_by_side(c.slot_mapping) ||
      !side_by_side(c.batch.positions) || !side_by_side(request) ||
      (c.state_slots.data != nullptr && !side_by_side(c.state_slots)))
    return false;
  q->pools = p, q->recipe = c.vectors, q->leaves = c.state_slots.data != nullptr;
  q->slots = whole_of(c.slot_mapping), q->positions = whole_of(c.batch.positions), q->requests = whole_of(request);
  q->state_slots = whole_of(c.state_slots), q->rows = static_cast<uint32_t>(rows);
  q->k = static_cast<const uint8_t*>(p.k.data), q->gate = static_cast<const uint8_t*>(p.gate.data);
  q->ape = static_cast<const float*>(p.ape.data), q->ape_step = p.ape.stride[0];
  q->k_step = 2 * p.k.stride[0], q->gate_step = 2 * p.gate.stride[0];
  q->tail = static_cast<uint8_t*>(p.tail.data), q->tail_block = 2 * p.tail.stride[0];
  q->tail_half = 2 * p.tail.stride[1], q->tail_entry = 2 * p.tail.stride[2];
  q->pages = static_cast<uint8_t*>(c.cache.pages.data), q->page_stride = c.cache.pages.stride[0];
  q->scale_base = c.layout.scale_base, q->slot_count = static_cast<uint32_t>(slots);
  q->value_step = static_cast<uint32_t>(c.layout.value_step),
  q->scale_step = static_cast<uint32_t>(c.layout.scale_step);
  return true;
}

bool run_quick(const QuickPools& job, const Launch& launch) {
  if (!job.leaves || job.rows > kRowsAtOnce || (job.rows > kQuickRows && !launch.hopper())) return false;
  uint32_t blocks = 1;
  while (blocks < 8 && launch.hopper() && 2 * blocks <= job.rows) blocks *= 2;
  if (launch.sms() < static_cast<int>(blocks)) return false;
  const uint32_t rows = (job.rows + blocks - 1) / blocks;
  const bool wide = rows <= 4 && job.rows <= kQuickRows;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension, attribute.val.clusterDim = {blocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3((wide ? 128 : 32) * rows);
  config.stream = launch.stream(), config.attrs = &attribute, config.numAttrs = blocks > 1 ? 1 : 0;
  TOPKEY_CUDA_CHECK(cudaLaunchKernelEx(&config, wide ? quick_pools_and_tail : quick_rows_and_tail, job));
  TOPKEY_CUDA_LAUNCHED("pool_k");
  return true;
}

void make_quickly(const QuickPools& job, const Launch& launch) {
  quick_pools<<<launch.blocks((job.rows + 127) / 128, 8), 128, 0, launch.stream()>>>(job);
}

}  // namespace topkey::cuda
