// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `pool`: the tokens of a pool or window joined (device/join.cuh) and produced like any key, a warp a key row. Two
// launches: all key rows are made from the state as it was, then the state is written; few rows on Hopper in one.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/claims.h"
#include "cuda/device/join.cuh"
#include "cuda/device/pool_kinds.cuh"
#include "cuda/device/ptx_sm90.cuh"
#include "cuda/launch.h"
#include "cuda/producer.h"
#include "cuda/stages.h"
#include "cuda/vectors.h"
#include "cuda/workspace.h"

namespace topkey::cuda {
namespace {

/// Rows that one cluster of at most 8 thread blocks takes, a warp each.
constexpr int64_t kRowsAtOnce = 64;

/// Not inlined: rarely asked.
template <class Kind>
__device__ __noinline__ bool can_be_made(const Kind& kind, int64_t row, int64_t* sources) {
  return kind.wants(row) && kind.collect(row, sources) > 0;
}

/// True if a later row that can be made has the same slot: of equal slots the last key row is stored, whole. Where a later
/// row has it, its tokens are looked for in `sources`, and *used is set. The table knows the last row that has the slot,
/// whether it can be made or not.
template <class Kind>
__device__ bool made_again(const Kind& kind, int64_t row, int64_t rows, int64_t slot, int64_t* sources, bool* used) {
  const auto slots_of = [&](int64_t i) { return integer(kind.c.slot_mapping, i); };
  const Claims& claims = kind.c.key_claims;
  if (claims.rows != nullptr && claims.is_last(slots_of, static_cast<uint32_t>(row), slot)) return false;
  for (int64_t base = row + 1; base < rows; base += 32) {
    const int64_t i = base + lane_id();
    unsigned same = __ballot_sync(kWarp, i < rows && slots_of(i) == slot);
    for (; same != 0; same &= same - 1) {
      const int64_t later = base + __ffs(static_cast<int>(same)) - 1;
      *used = true;
      if (can_be_made(kind, later, sources)) return true;
    }
  }
  return false;
}

/// The key row that `row` completes, if it does, to its slot.
template <class Kind, int kEach>
__device__ void make_row(const Kind& kind, int64_t row, int64_t rows, int64_t* sources, float* x, uint8_t* scratch) {
  const Common& c = kind.c;
  const int64_t slot = integer(c.slot_mapping, row), slots = c.cache.pages.shape[0] * c.cache.page_size;
  if (slot < 0 || !kind.wants(row)) return;
  const int count = slot < slots ? kind.collect(row, sources) : 0;
  const int64_t position = count > 0 ? kind.rope_position(row) : 0;
  if (lane_id() == 0) {
    topkey::cuda::count(c.stats, kSkippedSlots, count == 0);
    const bool outside = count > 0 && c.recipe.rope.dim > 0 && position >= c.recipe.rope.cos_sin.shape[0];
    topkey::cuda::count(c.stats, kSkippedPages, outside);
  }
  if (count == 0) return;
  bool used = false;
  if (made_again(kind, row, rows, slot, sources, &used)) return;
  if (used) can_be_made(kind, row, sources);
  const int64_t number = quotient(slot, c.cache.page_size), offset = slot - number * c.cache.page_size;
  uint8_t* page = static_cast<uint8_t*>(c.cache.pages.data) + number * c.cache.pages.stride[0];
  if constexpr (kEach > 0) {
    Rotation<kEach> rotation{};
    if (c.vectors.rope_dim > 0) rotation.read(c.vectors, position);
    float own[kEach];
    join_lanes<Kind::kNarrow>(kind.found(row, count, sources), count, own);
    transform_vector(c.vectors, rotation, own);
    quantize_vector(c.vectors, own, page + offset * c.layout.value_step,
                    page + c.layout.scale_base + offset * c.layout.scale_step);
  } else {
    join(kind.found(row, count, sources), count, c.recipe.head_dim, x);
    if (Kind::kNarrow) {
      for (int d = lane_id(); d < c.recipe.head_dim; d += 32) x[d] = round_to_bf16(x[d]);
      __syncwarp();
    }
    transform(c.recipe, position, x);
    quantize_to_page(c.recipe, x, c.layout, page, offset, scratch);
  }
  __syncwarp();
}

/// What a warp has in shared memory.
struct WarpRoom {
  int64_t* sources;
  float* x;
  uint8_t* scratch;

  __device__ WarpRoom(const Common& c, int64_t* memory) {
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
    sources = memory + warp * c.tokens;
    x = reinterpret_cast<float*>(memory + warps * c.tokens) + warp * c.recipe.head_dim;
    scratch = reinterpret_cast<uint8_t*>(memory + warps * c.tokens) + warps * c.recipe.head_dim * 4 + warp * c.scratch;
  }
};

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
    for (uint32_t rest = __ballot_sync(kWarp, own); rest != 0; rest &= rest - 1)
      make_row<Kind, kEach>(kind, base + __ffs(static_cast<int>(rest)) - 1, rows, room.sources, room.x, room.scratch);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) count(c.stats, kRows, static_cast<uint64_t>(rows));
}

template <class Kind, int kEach>
__global__ __launch_bounds__(128) void make_keys(const __grid_constant__ Kind kind) {
  extern __shared__ int64_t memory[];
  make_all<Kind, kEach>(kind, memory);
}

/// Each row's part of the state; of equal slots the last row's.
template <class Kind>
__device__ __forceinline__ void leave_all(const Kind& kind) {
  const Common& c = kind.c;
  const auto slots_of = [&](int64_t i) { return integer(c.state_slots, i); };
  const int64_t rows = c.slot_mapping.shape[0], warps = int64_t{gridDim.x} * (blockDim.x / 32);
  for (int64_t row = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32; row < rows; row += warps) {
    const int64_t slot = c.state_slot(row);
    if (lane_id() == 0) count(c.stats, kSkippedSlots, slot >= c.entries && slot >= 0);
    if (slot < 0 || slot >= c.entries) continue;
    bool again = false;
    const bool last =
        c.state_claims.rows != nullptr && c.state_claims.is_last(slots_of, static_cast<uint32_t>(row), slot);
    for (int64_t base = row + 1; !last && base < rows && !again; base += 32) {
      const int64_t i = base + lane_id();
      again = __any_sync(kWarp, i < rows && slots_of(i) == slot && c.batch.position(i) >= 0);
    }
    if (!again) kind.leave(row, slot);
  }
}

template <class Kind>
__global__ __launch_bounds__(128) void leave_state(const __grid_constant__ Kind kind) {
  leave_all(kind);
}

/// Both for few rows, by one cluster of thread blocks: all have read the state before any writes it.
template <class Kind, int kEach>
__global__ __launch_bounds__(256) void make_and_leave(const __grid_constant__ Kind kind) {
#ifdef TOPKEY_HAS_WGMMA
  extern __shared__ int64_t memory[];
  make_all<Kind, kEach>(kind, memory);
  __syncwarp();
  cluster_barrier();
  leave_all(kind);
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
  const size_t own = 8 * static_cast<size_t>(c.tokens);  // bytes a warp
  if (c.state_slots.data == nullptr || rows > kRowsAtOnce || !launch.hopper() || c.vector_each == 0 ||
      8 * own > 48 * 1024)
    return false;
  unsigned blocks = 1;
  while (blocks < 8 && 8 * int64_t{blocks} < rows) blocks *= 2;
  if (launch.sms() < static_cast<int>(blocks)) return false;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension, attribute.val.clusterDim = {blocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(static_cast<unsigned>(32 * std::min<int64_t>(rows, 8)));
  config.dynamicSmemBytes = 8 * own, config.stream = launch.stream(), config.attrs = &attribute, config.numAttrs = 1;
  TOPKEY_CUDA_CHECK(
      cudaLaunchKernelEx(&config, c.vector_each == 2 ? make_and_leave<Kind, 2> : make_and_leave<Kind, 4>, kind));
  TOPKEY_CUDA_LAUNCHED(op);
  return true;
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
  }
  c.rows_each = 1;
  if (run_at_once(op, kind, launch)) return;
  const int64_t slots = c.cache.pages.shape[0] * c.cache.page_size;
  c.key_claims = claim_slots(c.slot_mapping, slots, rows, 0, exec.workspace, launch);
  const bool leaves = c.state_slots.data != nullptr;
  if (leaves) c.state_claims = claim_slots(c.state_slots, c.entries, rows, 1, exec.workspace, launch);
  while (c.rows_each < 32 && rows >= 256 * int64_t{launch.sms()} * c.rows_each) c.rows_each *= 2;
  int64_t own = 8 * int64_t{c.tokens};  // bytes a warp
  if (c.vector_each == 0) own += 4 * int64_t{c.recipe.head_dim} + c.scratch;
  const int64_t warps = std::clamp<int64_t>(48 * 1024 / own, 1, 4), takes = warps * c.rows_each;
  const auto kernel = c.vector_each == 0   ? make_keys<Kind, 0>
                      : c.vector_each == 2 ? make_keys<Kind, 2>
                                           : make_keys<Kind, 4>;
  kernel<<<launch.blocks((rows + takes - 1) / takes, 8), static_cast<unsigned>(32 * warps),
           static_cast<size_t>(warps * own), launch.stream()>>>(kind);
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

QuantRule rule_of(QuantRule rule, KeyFormat format, QuantRule fp8) {
  return rule == QuantRule::automatic && format == KeyFormat::fp8 ? fp8 : rule;
}

}  // namespace

KernelList pool_kernels() { return {kEntries, sizeof kEntries / sizeof kEntries[0]}; }

size_t pool_bytes(int64_t rows) { return 2 * claim_bytes(rows); }

void pool_k(const PoolK& a, const Exec& exec) {
  const QuantRule rule = rule_of(QuantRule::automatic, a.cache.format, QuantRule::kpool_key);
  Pools p{common_of(a.cache, a.slot_mapping, rule, a.scale), a.k, a.gate, a.ape, a.tail};
  Common& c = p.c;
  c.batch.rows.request = a.request, c.batch.rows.q_indptr = a.q_indptr, c.batch.rows.next_n = a.next_n;
  c.batch.positions = a.positions, c.state_slots = a.tail_slots, c.tokens = a.pool_size, c.stats = exec.stats;
  c.entries = a.tail.data != nullptr ? a.tail.shape[0] * a.tail.shape[2] : 0;
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
