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
#include "cuda/device/pool_make.cuh"
#include "cuda/device/ptx_sm90.cuh"
#include "cuda/launch.h"
#include "cuda/pool_quick.h"
#include "cuda/producer.h"
#include "cuda/stages.h"
#include "cuda/vectors.h"
#include "cuda/workspace.h"

namespace topkey::cuda {
namespace {

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

constexpr int kMostShared = kMostProducerShared + kMaxTokens * 8;
#define TOPKEY_KIND(Kind)                                                       \
  {reinterpret_cast<const void*>(&make_keys<Kind, 0>), kMostShared},            \
      {reinterpret_cast<const void*>(&make_keys<Kind, 2>), kMostShared},        \
      {reinterpret_cast<const void*>(&make_keys<Kind, 4>), kMostShared},        \
      {reinterpret_cast<const void*>(&leave_state<Kind>), 0},                   \
      {reinterpret_cast<const void*>(&make_and_leave<Kind, 2>), kMostShared}, { \
    reinterpret_cast<const void*>(&make_and_leave<Kind, 4>), kMostShared        \
  }
const KernelEntry kEntries[] = {TOPKEY_KIND(Pools), TOPKEY_KIND(Windows)};

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
    make_quickly(quick, launch);
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
  uintptr_t narrow = at(a.k) | at(a.gate) | at(a.tail),
            steps = static_cast<uintptr_t>(a.k.stride[0] | a.gate.stride[0]);
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
