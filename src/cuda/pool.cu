// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `pool`: the tokens of a pool or window joined (device/join.cuh) and produced like any key, a team of lanes a key
// row where its vector stays in registers, else a warp. Two launches: all key rows are made from the state as it was, then
// the state is written; few rows on Hopper in one.
#include <algorithm>
#include <type_traits>

#include "cuda/check.h"
#include "cuda/claims.h"
#include "cuda/device/join.cuh"
#include "cuda/device/pool_kinds.cuh"
#include "cuda/device/pool_quick.cuh"
#include "cuda/device/ptx_sm90.cuh"
#include "cuda/launch.h"
#include "cuda/producer.h"
#include "cuda/stages.h"
#include "cuda/vectors.h"
#include "cuda/workspace.h"

namespace topkey::cuda {
namespace {

/// Rows that one cluster of at most 8 thread blocks takes.
constexpr int64_t kRowsAtOnce = 64;

/// Not inlined: rarely asked.
template <int kLanes, class Kind>
__device__ __noinline__ bool can_be_made(const Kind& kind, int64_t row, int64_t* sources) {
  return kind.wants(row) && kind.template collect<kLanes>(row, sources) > 0;
}

/// True if a later row that can be made has the same slot: of equal slots the last key row is stored, whole. Where a later
/// row has it, its tokens are looked for in `sources`, and *used is set. The table knows the last row that has the slot,
/// whether it can be made or not.
template <int kLanes, class Kind>
__device__ bool made_again(const Kind& kind, int64_t row, int64_t rows, int64_t slot, int64_t* sources, bool* used) {
  const auto slots_of = [&](int64_t i) { return integer(kind.c.slot_mapping, i); };
  const Claims& claims = kind.c.key_claims;
  if (claims.rows != nullptr && claims.is_last(slots_of, static_cast<uint32_t>(row), slot)) return false;
  for (int64_t base = row + 1; base < rows; base += kLanes) {
    const int64_t i = base + Together<kLanes>::lane();
    unsigned same = Together<kLanes>::ballot(i < rows && slots_of(i) == slot);
    for (; same != 0; same &= same - 1) {
      const int64_t later = base + __ffs(static_cast<int>(same)) - 1;
      *used = true;
      if (can_be_made<kLanes>(kind, later, sources)) return true;
    }
  }
  return false;
}

/// A key row that is to be made: whence and whither.
struct Making {
  int count;  ///< tokens; 0: nothing is made
  int64_t slot, position;
};
/// What `row` completes, if anything, by so many lanes. counts: the statistics are told.
template <int kLanes, class Kind>
__device__ __forceinline__ Making look_at(const Kind& kind, int64_t row, int64_t rows, int64_t* sources,
                                          bool counts = true) {
  const Common& c = kind.c;
  Making m{0, integer(c.slot_mapping, row), 0};
  const int64_t slots = c.cache.pages.shape[0] * c.cache.page_size;
  if (m.slot < 0 || !kind.wants(row)) return m;
  m.count = m.slot < slots ? kind.template collect<kLanes>(row, sources) : 0;
  m.position = m.count > 0 ? kind.rope_position(row) : 0;
  if (counts && Together<kLanes>::lane() == 0) {
    count(c.stats, kSkippedSlots, m.count == 0);
    const bool outside = m.count > 0 && c.recipe.rope.dim > 0 && m.position >= c.recipe.rope.cos_sin.shape[0];
    count(c.stats, kSkippedPages, outside);
  }
  if (m.count == 0) return m;
  bool used = false;
  if (made_again<kLanes>(kind, row, rows, m.slot, sources, &used)) {
    m.count = 0;
  } else if (used) {
    can_be_made<kLanes>(kind, row, sources);
  }
  return m;
}

/// The key row that `row` completes, if it does, to its slot, by a warp.
template <class Kind>
__device__ void make_row(const Kind& kind, int64_t row, int64_t rows, int64_t* sources, float* x, uint8_t* scratch) {
  const Common& c = kind.c;
  const Making m = look_at<32>(kind, row, rows, sources);
  if (m.count == 0) return;
  const int64_t number = quotient(m.slot, c.cache.page_size), offset = m.slot - number * c.cache.page_size;
  uint8_t* page = static_cast<uint8_t*>(c.cache.pages.data) + number * c.cache.pages.stride[0];
  join(kind.found(row, m.count, sources), m.count, c.recipe.head_dim, x);
  if (Kind::kNarrow) {
    for (int d = lane_id(); d < c.recipe.head_dim; d += 32) x[d] = round_to_bf16(x[d]);
    __syncwarp();
  }
  transform(c.recipe, m.position, x);
  quantize_to_page(c.recipe, x, c.layout, page, offset, scratch);
  __syncwarp();
}

/// The same for vectors in registers, each team of a warp with a row of its own; -1: none.
template <class Kind, int kEach>
__device__ __forceinline__ void make_vectors(const Kind& kind, int64_t row, int64_t rows, int64_t* sources) {
  const Common& c = kind.c;
  Making m{0, 0, 0};
  if (row >= 0) m = look_at<kTeamLanes>(kind, row, rows, sources);
  __syncwarp();
  if (!__any_sync(kWarp, m.count > 0)) return;
  Rotation<kEach> rotation;
  rotation.read(c.vectors, m.position);
  RawNorm<kEach> norm;
  norm.read(c.vectors);
  float x[kEach][4] = {};
  if (m.count > 0) join_vector<Kind::kNarrow, Kind::kAtOnce>(kind.found(row, m.count, sources), m.count, x);
  __syncwarp();
  transform_vector(c.vectors, norm, rotation, x);
  const int64_t number = quotient(m.slot, c.page), offset = m.slot - number * c.page.value;
  uint8_t* page = static_cast<uint8_t*>(c.cache.pages.data) + number * c.cache.pages.stride[0];
  quantize_vector(c.vectors, x, page + offset * c.layout.value_step,
                  page + c.layout.scale_base + offset * c.layout.scale_step, m.count > 0);
  __syncwarp();
}

/// What a warp has in shared memory.
struct WarpRoom {
  int64_t* sources;
  float* x;
  uint8_t* scratch;

  __device__ WarpRoom(const Common& c, int64_t* memory) {
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
    sources = memory + warp * c.tokens * (c.vector_each > 0 ? kTeams : 1);  // of vectors nothing else is there
    x = reinterpret_cast<float*>(memory + warps * c.tokens) + warp * c.recipe.head_dim;
    scratch = reinterpret_cast<uint8_t*>(memory + warps * c.tokens) + warps * c.recipe.head_dim * 4 + warp * c.scratch;
  }
};

/// The team's one of the rows whose bits are set, which it takes away: the first for the first team; -1: none.
__device__ __forceinline__ int take_bit(uint32_t& bits) {
  int own = -1;
#pragma unroll
  for (int team = 0; team < kTeams; ++team) {
    if (team == team_number()) own = __ffs(static_cast<int>(bits)) - 1;
    bits &= bits - 1;
  }
  return own;
}

/// kEach > 0: vectors in registers. A warp looks at several neighbouring rows' slots at a time: of pools few have one.
template <class Kind, int kEach>
__device__ __forceinline__ void make_all(const Kind& kind, int64_t* memory) {
  const Common& c = kind.c;
  const WarpRoom room(c, memory);
  const int64_t rows = c.slot_mapping.shape[0], warps = int64_t{gridDim.x} * (blockDim.x / 32);
  const int64_t warp = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  for (int64_t base = warp * c.rows_each; base < rows; base += warps * c.rows_each) {
    const int64_t i = base + lane_id();
    const bool mine = lane_id() < c.rows_each && i < rows;
    if (mine) c.fetch(i);
    const bool own = mine && integer(c.slot_mapping, i) >= 0;
    uint32_t rest = __ballot_sync(kWarp, own);
    while (rest != 0) {
      if constexpr (kEach > 0) {
        const int bit = take_bit(rest);
        make_vectors<Kind, kEach>(kind, bit < 0 ? -1 : base + bit, rows, room.sources + team_number() * c.tokens);
      } else {
        make_row(kind, base + __ffs(static_cast<int>(rest)) - 1, rows, room.sources, room.x, room.scratch);
        rest &= rest - 1;
      }
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) count(c.stats, kRows, static_cast<uint64_t>(rows));
}

template <class Kind, int kEach>
__global__ __launch_bounds__(128) void make_keys(const __grid_constant__ Kind kind) {
  extern __shared__ int64_t memory[];
  make_all<Kind, kEach>(kind, memory);
}

/// Each row's part of the state, by so many lanes; of equal slots the last row's.
template <int kLanes, class Kind>
__device__ __forceinline__ void leave_all(const Kind& kind) {
  using Lanes = Together<kLanes>;
  const Common& c = kind.c;
  const auto slots_of = [&](int64_t i) { return integer(c.state_slots, i); };
  const int64_t rows = c.slot_mapping.shape[0], a_block = blockDim.x / kLanes;
  for (int64_t row = blockIdx.x * a_block + threadIdx.x / kLanes; row < rows; row += gridDim.x * a_block) {
    const int64_t slot = c.state_slot(row);
    if (Lanes::lane() == 0) count(c.stats, kSkippedSlots, slot >= c.entries && slot >= 0);
    if (slot < 0 || slot >= c.entries) continue;
    bool again = false;
    const bool last =
        c.state_claims.rows != nullptr && c.state_claims.is_last(slots_of, static_cast<uint32_t>(row), slot);
    for (int64_t base = row + 1; !last && base < rows && !again; base += kLanes) {
      const int64_t i = base + Lanes::lane();
      again = Lanes::any(i < rows && slots_of(i) == slot && c.batch.position(i) >= 0);
    }
    if (!again) kind.template leave<kLanes>(row, slot);
  }
}

template <class Kind>
__global__ __launch_bounds__(128) void leave_state(const __grid_constant__ Kind kind) {
  leave_all<32>(kind);
}

/// Both for few rows, by one cluster of thread blocks: all have read the state before any writes it.
template <class Kind, int kEach>
__global__ __launch_bounds__(256) void make_and_leave(const __grid_constant__ Kind kind) {
#ifdef TOPKEY_HAS_WGMMA
  extern __shared__ int64_t memory[];
  make_all<Kind, kEach>(kind, memory);
  __syncwarp();
  if (gridDim.x > 1) {
    cluster_barrier();
  } else {
    __syncthreads();
  }
  leave_all<kTeamLanes>(kind);
#endif
}

/// Not inlined: what is seldom. False: nothing is made; else the tokens' addresses in `room`, k and gate of each.
__device__ __noinline__ bool make_seldom(const QuickPools& job, uint32_t row, int64_t* room, bool counts) {
  if (look_at<32>(job.pools, row, job.rows, room, counts).count == 0) return false;
  const Pools::Found found{job.pools, room};
  const int64_t own = reinterpret_cast<int64_t>(found.part(lane_id() / 2 % kQuickTokens, lane_id() % 2));
  __syncwarp();
  if (lane_id() < 2 * kQuickTokens) room[lane_id()] = own;
  __syncwarp();
  return true;
}

/// Whether a row's pool is made; then where its tokens lie. By a warp.
template <class Row>
__device__ __forceinline__ bool look_quickly(const QuickPools& job, const Row& r, bool again, int64_t* room, bool counts,
                                             QuickTokens* tokens) {
  const bool inside = r.slot < job.slot_count, whole = r.last % kQuickTokens == kQuickTokens - 1;
  const bool has_state = r.own >= 0 && r.own < job.pools.c.entries;
  bool ends = false;
  const int found = found_of(r, &ends);
  if (r.slot < 0) return false;
  bool make = inside && whole && (found == kQuickTokens || has_state);
  const bool seldom = inside && whole && (!ends || (make && again));
  if (seldom) make = make_seldom(job, r.row, room, counts);
  if (!seldom && counts && lane_id() == 0) count(job.pools.c.stats, kSkippedSlots, !make);
  if (!make) return false;
  *tokens = tokens_of(job, r, found);
#pragma unroll
  for (int j = 0; seldom && j < kQuickTokens - 1; ++j) {
    tokens->k[j] = reinterpret_cast<const uint8_t*>(room[2 * j]);
    tokens->gate[j] = reinterpret_cast<const uint8_t*>(room[2 * j + 1]);
  }
  return true;
}

/// A joined vector to its slot, by a warp.
__device__ __forceinline__ void put_quick(const QuickPools& job, int64_t slot, float (&x)[1][4]) {
  const Divisor& size = job.pools.c.page;
  const uint32_t page = size.quotient(static_cast<uint32_t>(slot)), offset = static_cast<uint32_t>(slot) - page * size.value;
  uint8_t* at = job.pages + page * job.page_stride;
  hadamard_vector<32>(job.recipe, x);
  VectorRecipe recipe = job.recipe;
  recipe.format = KeyFormat::fp8, recipe.rule.code = RuleFacts::divide, recipe.rule.whole_bf16 = true;
  const float scale = quantize_e4m3<32>(recipe, x, at + int64_t{offset} * job.value_step, true);
  if (lane_id() == 0) put_scale(at + job.scale_base + int64_t{offset} * job.scale_step, scale);
}

/// Many rows, of which a warp looks at 32 neighbours at a time: few complete a pool. The state is left by another launch.
__global__ __launch_bounds__(128) void quick_pools(const __grid_constant__ QuickPools job) {
  __shared__ int64_t room[4][2 * kQuickTokens];
  const Claims& claims = job.pools.c.key_claims;
  const auto slots_of = [&](int64_t i) { return job.slots[i]; };
  for (uint32_t base = (blockIdx.x * 4 + threadIdx.x / 32) * 32; base < job.rows; base += gridDim.x * 128) {
    const uint32_t i = base + lane_id();
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
      if (look_quickly(job, r, again, room[threadIdx.x / 32], true, &tokens)) {
        float x[1][4];
        join_quick(tokens, r, x);
        put_quick(job, r.slot, x);
      }
      __syncwarp();
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) count(job.pools.c.stats, kRows, job.rows);
}

/// Rows of one thread block, four warps each.
constexpr int kQuickRows = 8;

/// Few rows and their state: one thread block, or a cluster of them; all have read the state before any writes it.
__global__ __launch_bounds__(128 * kQuickRows) void quick_pools_and_tail(const __grid_constant__ QuickPools job) {
  __shared__ int64_t room[4 * kQuickRows][2 * kQuickTokens];
  __shared__ float4 joined[kQuickRows][32];
  const uint32_t own = threadIdx.x / 128, row = blockIdx.x * (blockDim.x / 128) + own, warp = threadIdx.x / 32;
  const bool there = row < job.rows, first = warp % 4 == 0;
  const QuickChannel r(job, there ? row : 0);
  const QuickAgain behind(job, r, true);
  QuickTokens tokens;
  const bool make = there && look_quickly(job, r, behind.key, room[warp], first, &tokens);
  if (make) reinterpret_cast<float*>(joined[own])[r.channel] = r.join(tokens);
  if (gridDim.x == 1) {
    __syncthreads();
  } else {
#ifdef TOPKEY_HAS_WGMMA
    cluster_barrier();
#endif
  }
  if (row == 0 && threadIdx.x == 0) count(job.pools.c.stats, kRows, job.rows);
  if (there && r.last >= 0 && r.own >= 0 && !behind.state) {
    if (r.own < job.pools.c.entries) {
      const Divisor& ring = job.pools.ring;
      const int64_t block = quotient(r.own, ring);
      uint8_t* to = job.tail + block * job.tail_block + (r.own - block * ring.value) * job.tail_entry;
      reinterpret_cast<uint16_t*>(to)[r.channel] = r.k;
      reinterpret_cast<uint16_t*>(to + job.tail_half)[r.channel] = r.gate;
    }
  }
  if (there && first && lane_id() == 0) count(job.pools.c.stats, kSkippedSlots, r.last >= 0 && r.own >= job.pools.c.entries);
  if (!make || !first) return;
  const float4 four = joined[own][lane_id()];
  float x[1][4] = {{four.x, four.y, four.z, four.w}};
  put_quick(job, r.slot, x);
}

constexpr int kMostShared = kMostProducerShared + kMaxTokens * 8;
#define TOPKEY_KIND(Kind)                                                       \
  {reinterpret_cast<const void*>(&make_keys<Kind, 0>), kMostShared},            \
      {reinterpret_cast<const void*>(&make_keys<Kind, 2>), kMostShared},        \
      {reinterpret_cast<const void*>(&make_keys<Kind, 4>), kMostShared},        \
      {reinterpret_cast<const void*>(&leave_state<Kind>), 0},                   \
      {reinterpret_cast<const void*>(&make_and_leave<Kind, 2>), kMostShared}, { \
    reinterpret_cast<const void*>(&make_and_leave<Kind, 4>), kMostShared        \
  }
const KernelEntry kEntries[] = {TOPKEY_KIND(Pools), TOPKEY_KIND(Windows),
                                {reinterpret_cast<const void*>(&quick_pools), 0},
                                {reinterpret_cast<const void*>(&quick_pools_and_tail), 0}};

bool side_by_side(const Tensor& t) { return t.stride[0] == 1; }

/// Whether pools are such as engines ask for; then how.
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
  q->value_step = static_cast<uint32_t>(c.layout.value_step), q->scale_step = static_cast<uint32_t>(c.layout.scale_step);
  return true;
}

/// Few rows of them and their state in one launch; false: not so.
bool run_quick(const QuickPools& job, const Launch& launch) {
  if (!job.leaves || job.rows > kRowsAtOnce || (job.rows > kQuickRows && !launch.hopper())) return false;
  uint32_t blocks = 1;
  while (blocks < 8 && launch.hopper() && 2 * blocks <= job.rows) blocks *= 2;
  if (launch.sms() < static_cast<int>(blocks)) return false;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension, attribute.val.clusterDim = {blocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(128 * ((job.rows + blocks - 1) / blocks));
  config.stream = launch.stream(), config.attrs = &attribute, config.numAttrs = blocks > 1 ? 1 : 0;
  TOPKEY_CUDA_CHECK(cudaLaunchKernelEx(&config, quick_pools_and_tail, job));
  TOPKEY_CUDA_LAUNCHED("pool_k");
  return true;
}


/// Few rows of vectors in registers on Hopper, in one launch; false: not so.
template <class Kind>
bool run_at_once(const char* op, const Kind& kind, const Launch& launch) {
  const Common& c = kind.c;
  const int64_t rows = c.slot_mapping.shape[0];
  const size_t own = kTeams * 8 * static_cast<size_t>(c.tokens);  // bytes a warp
  const int64_t warps = (rows + kTeams - 1) / kTeams;
  if (c.state_slots.data == nullptr || rows > kRowsAtOnce || !launch.hopper() || c.vector_each == 0 ||
      2 * own > 48 * 1024)
    return false;
  unsigned blocks = 1;
  while (blocks < 8 && blocks < warps) blocks *= 2;
  const unsigned each = static_cast<unsigned>((warps + blocks - 1) / blocks);
  if (launch.sms() < static_cast<int>(blocks)) return false;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension, attribute.val.clusterDim = {blocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(32 * each);
  config.dynamicSmemBytes = each * own, config.stream = launch.stream(), config.attrs = &attribute, config.numAttrs = 1;
  TOPKEY_CUDA_CHECK(
      cudaLaunchKernelEx(&config, c.vector_each == 2 ? make_and_leave<Kind, 2> : make_and_leave<Kind, 4>, kind));
  TOPKEY_CUDA_LAUNCHED(op);
  return true;
}

/// Key rows of any kind, by as many warps as shared memory lets a thread block have.
template <class Kind>
void make_rows(Kind kind, const Launch& launch) {
  Common& c = kind.c;
  const int64_t rows = c.slot_mapping.shape[0];
  while (c.rows_each < 32 && rows >= 128 * int64_t{launch.sms()} * c.rows_each) c.rows_each *= 2;
  int64_t own = 8 * int64_t{c.tokens} * (c.vector_each > 0 ? kTeams : 1);  // bytes a warp
  if (c.vector_each == 0) own += 4 * int64_t{c.recipe.head_dim} + c.scratch;
  const int64_t warps = std::clamp<int64_t>(48 * 1024 / own, 1, 4), takes = warps * c.rows_each;
  const auto kernel = c.vector_each == 0   ? make_keys<Kind, 0>
                      : c.vector_each == 2 ? make_keys<Kind, 2>
                                           : make_keys<Kind, 4>;
  kernel<<<launch.blocks((rows + takes - 1) / takes, 8), static_cast<unsigned>(32 * warps),
           static_cast<size_t>(warps * own), launch.stream()>>>(kind);
}

template <class Kind>
void run_kind(const char* op, Kind kind, const Exec& exec) {
  Common& c = kind.c;
  const int64_t rows = c.slot_mapping.shape[0];
  if (rows == 0) return;
  const Launch launch(op, exec);
  VectorRecipe recipe{};
  if (c.layout.tile == 0 && vector_recipe_of(c.recipe, &recipe)) {
    c.vectors = recipe, c.vector_each = c.recipe.head_dim / 32;
    c.page = divisor(static_cast<uint32_t>(c.cache.page_size));
  }
  c.rows_each = c.vector_each > 0 ? kTeams : 1;
  QuickPools quick{};
  bool quickly = false;
  if constexpr (std::is_same_v<Kind, Pools>) quickly = quick_of(kind, &quick);
  if (quickly ? run_quick(quick, launch) : run_at_once(op, kind, launch)) return;
  const int64_t slots = c.cache.pages.shape[0] * c.cache.page_size;
  c.key_claims = claim_slots(c.slot_mapping, slots, rows, 0, exec.workspace, launch);
  const bool leaves = c.state_slots.data != nullptr;
  if (leaves) c.state_claims = claim_slots(c.state_slots, c.entries, rows, 1, exec.workspace, launch);
  if (quickly) {
    quick.pools.c.key_claims = c.key_claims;
    quick_pools<<<launch.blocks((rows + 127) / 128, 8), 128, 0, launch.stream()>>>(quick);
  } else {
    make_rows(kind, launch);
  }
  TOPKEY_CUDA_LAUNCHED(op);
  if (!leaves) return;
  leave_state<Kind><<<launch.blocks((rows + 3) / 4, 8), 128, 0, launch.stream()>>>(kind);
  TOPKEY_CUDA_LAUNCHED(op);
}
Common common_of(const KeyCache& cache, const Tensor& slot_mapping, QuantRule rule, ScaleRule scale) {
  Common c{};
  c.slot_mapping = slot_mapping, c.cache = cache;
  c.layout = page_layout(cache.format, cache.layout, cache.page_size, cache.head_dim);
  c.scratch = scratch_for(c.layout);
  c.batch.rows.count = slot_mapping.shape[0];
  Recipe& r = c.recipe;
  r.rule = key_facts(rule, scale, cache.format), r.scale = scale, r.format = cache.format, r.head_dim = cache.head_dim;
  return c;
}

/// Whether four numbers at a time may be read and written everywhere.
bool fours_of(const PoolK& a) {
  const auto at = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data); };
  uintptr_t narrow = at(a.k) | at(a.gate) | at(a.tail), steps = static_cast<uintptr_t>(a.k.stride[0] | a.gate.stride[0]);
  if (a.tail.data != nullptr) steps |= static_cast<uintptr_t>(a.tail.stride[0] | a.tail.stride[1] | a.tail.stride[2]);
  steps |= static_cast<uintptr_t>(a.ape.stride[0]);
  return narrow % 8 == 0 && at(a.ape) % 16 == 0 && steps % 4 == 0 && a.cache.head_dim % 4 == 0;
}

QuantRule rule_of(QuantRule rule, KeyFormat format, QuantRule fp8) {
  return rule == QuantRule::automatic && format == KeyFormat::fp8 ? fp8 : rule;
}

}  // namespace

KernelList pool_kernels() { return {kEntries, sizeof kEntries / sizeof kEntries[0]}; }

size_t pool_bytes(int64_t rows) { return 2 * claim_bytes(rows); }

void pool_k(const PoolK& a, const Exec& exec) {
  const QuantRule rule = rule_of(QuantRule::automatic, a.cache.format, QuantRule::kpool_key);
  Pools p{common_of(a.cache, a.slot_mapping, rule, a.scale), a.k, a.gate, a.ape, a.tail, {}, {}, false};
  Common& c = p.c;
  c.batch.rows.request = a.request, c.batch.rows.q_indptr = a.q_indptr, c.batch.rows.next_n = a.next_n;
  c.batch.positions = a.positions, c.state_slots = a.tail_slots, c.tokens = a.pool_size, c.stats = exec.stats;
  c.entries = a.tail.data != nullptr ? a.tail.shape[0] * a.tail.shape[2] : 0;
  p.pool = divisor(static_cast<uint32_t>(a.pool_size));
  p.ring = divisor(a.tail.data != nullptr ? static_cast<uint32_t>(a.tail.shape[2]) : 1);
  p.fours = fours_of(a);
  c.recipe.input = DType::bf16, c.recipe.hadamard = true;
  c.recipe.hadamard_scale = hadamard_scale(a.cache.head_dim);
  run_kind("pool_k", p, exec);
}

void compress_k(const CompressK& a, const Exec& exec) {
  const QuantRule rule = rule_of(a.rule, a.cache.format, QuantRule::v4_key);
  const int width = static_cast<int>(a.kv.shape[1]), ratio = static_cast<int>(a.ape.shape[0]);
  Windows w{common_of(a.cache, a.slot_mapping, rule, ScaleRule::ue8m0),
            a.kv,
            a.score,
            a.ape,
            a.state,
            a.state_table,
            width,
            ratio};
  Common& c = w.c;
  c.batch.rows.q_indptr = a.query_start, c.batch.positions = a.positions, c.state_slots = a.state_slots;
  c.entries = a.state.shape[0] * a.state.shape[1], c.tokens = width / a.cache.head_dim * ratio, c.stats = exec.stats;
  Recipe& r = c.recipe;
  r.input = DType::f32, r.norm.kind = NormKind::rms, r.norm.weight = a.rms_weight, r.norm.eps = a.eps;
  r.rope.interleaved = r.rope.trailing = true;
  if (a.cos_sin.data != nullptr) r.rope.cos_sin = a.cos_sin, r.rope.dim = static_cast<int32_t>(a.cos_sin.shape[1]);
  run_kind("compress_k", w, exec);
}

}  // namespace topkey::cuda
