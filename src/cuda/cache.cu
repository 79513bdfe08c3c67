// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `cache`: key rows into pages. Vectors of 64 or 128 numbers stay in registers, four a warp (device/vector.cuh);
// ready codes, tiled pages, odd dims and strides take the way through shared memory, a warp a row.
#include "cuda/check.h"
#include "cuda/claims.h"
#include "cuda/device/divisor.cuh"
#include "cuda/device/key_rows.cuh"
#include "cuda/launch.h"
#include "cuda/producer.h"
#include "cuda/stages.h"
#include "cuda/vectors.h"
#include "cuda/workspace.h"

namespace topkey::cuda {
namespace {

struct StoreJob {
  StoreK a;
  Recipe recipe;
  PageLayout layout;
  bool ready;       ///< codes are given
  int64_t scratch;  ///< bytes a warp, for tiled pages
  Claims claims;
  uint64_t* stats;
};
/// Where and whence vectors go.
struct StoreVectors {
  VectorRecipe recipe;
  Lines k;
  Whole slots;
  uint32_t rows, slot_count;
  Divisor page_size;
  uint8_t* pages;
  int64_t page_stride;
  uint32_t value_step, scale_step;
  int64_t scale_base;
  Claims claims;
  uint64_t* stats;
};

/// True if a later row has the same slot: of equal slots the last row is stored, whole. By a warp, of one row.
template <class Slots>
__device__ __forceinline__ bool comes_again(const Claims& claims, const Slots& slots, int64_t row, int64_t rows,
                                            int64_t slot) {
  if (claims.rows != nullptr) return !claims.is_last(slots, static_cast<uint32_t>(row), slot);
  for (int64_t base = row + 1; base < rows; base += 32) {
    const int64_t i = base + lane_id();
    if (__any_sync(kWarp, i < rows && slots(i) == slot)) return true;
  }
  return false;
}

__global__ void store_rows(const __grid_constant__ StoreJob job) {
  extern __shared__ float memory[];
  const StoreK& a = job.a;
  const int dim = job.recipe.head_dim, warps = blockDim.x / 32;
  float* x = memory + threadIdx.x / 32 * dim;
  uint8_t* scratch = reinterpret_cast<uint8_t*>(memory + warps * dim) + threadIdx.x / 32 * job.scratch;
  const PageLayout& layout = job.layout;
  const auto slots_of = [&](int64_t i) { return integer(a.slot_mapping, i); };
  const int64_t rows = a.slot_mapping.shape[0], slots = a.cache.pages.shape[0] * a.cache.page_size;
  for (int64_t row = int64_t{blockIdx.x} * warps + threadIdx.x / 32; row < rows; row += int64_t{gridDim.x} * warps) {
    const int64_t slot = integer(a.slot_mapping, row);
    if (lane_id() == 0) count(job.stats, kSkippedSlots, slot >= slots);
    if (slot < 0 || slot >= slots) continue;
    const int64_t offset = slot % a.cache.page_size;
    uint8_t* page = static_cast<uint8_t*>(a.cache.pages.data) + slot / a.cache.page_size * a.cache.pages.stride[0];
    const bool again = comes_again(job.claims, slots_of, row, rows, slot);
    if (job.ready) {
      const RowBytes from = dense_row(a.k, a.k_scales, layout, row);
      if (!again) copy_to_page(page + value_start(layout, offset), page + scale_start(layout, offset), from, layout);
      continue;
    }
    for (int d = lane_id(); d < dim; d += 32) x[d] = real(a.k, row, d);
    __syncwarp();
    const bool wild = transform(job.recipe, rope_position(job.recipe, row), x);
    if (lane_id() == 0) count(job.stats, kSkippedPages, wild);
    if (!again) quantize_to_page(job.recipe, x, layout, page, offset, scratch);
    __syncwarp();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) count(job.stats, kRows, static_cast<uint64_t>(rows));
}

/// Of row first + lane and every 32nd behind it the slot, as one that a row may have; -1: none.
struct SlotsBehind {
  const StoreVectors& job;
  uint32_t row;
  int64_t any;

  __device__ SlotsBehind(const StoreVectors& j, uint32_t first) : job(j), row(first + lane_id()) { read(); }
  __device__ __forceinline__ void read() { any = job.slots[min(row, job.rows - 1)]; }
  __device__ __forceinline__ int32_t slot() const {
    return row >= job.rows || any < 0 || any >= job.slot_count ? -1 : static_cast<int32_t>(any);
  }
};

/// comes_again for the four rows from `first` on, each team's own: `slot` is -2 where it has none to store.
__device__ __forceinline__ bool comes_again_behind(SlotsBehind& behind, uint32_t first, int32_t slot) {
  bool again = false;
  for (;;) {
    const int32_t later = behind.slot();
#pragma unroll
    for (int team = 0; team < kTeams; ++team) {
      const bool same = later == __shfl_sync(kWarp, slot, team * kTeamLanes) && behind.row > first + team;
      const bool found = __any_sync(kWarp, same);
      again |= found && team_number() == team;
    }
    behind.row += 32;
    if (behind.row - lane_id() >= behind.job.rows) return again;
    behind.read();
  }
}

/// The same for vectors in registers, a team of lanes a row.
template <int kEach, Usual kUsual>
__global__ __launch_bounds__(128,
                             kUsual == Usual::no ? 3 : 5) void store_vectors(const __grid_constant__ StoreVectors job) {
  constexpr bool kKnown = kUsual != Usual::no;
  const VectorRecipe recipe = told<kUsual>(job.recipe);
  const Lines lines{job.k.data, job.k.step, kKnown ? DType::bf16 : job.k.dtype, kKnown || job.k.fours};
  const auto slots_of = [&](int64_t i) { return job.slots[i]; };
  const uint32_t warps = blockDim.x / 32, warp = blockIdx.x * warps + threadIdx.x / 32;
  if (recipe.rope_dim > 0) prefetch_to_l2(recipe.cos_sin.data);
  for (uint32_t first = warp * kTeams; first < job.rows; first += gridDim.x * warps * kTeams) {
    // All that does not wait for anything else is read at once, and nothing looked at before (hence the sync).
    const bool there = first + team_number() < job.rows;
    const uint32_t row = there ? first + team_number() : first;
    const int64_t slot = job.slots[row];
    const int64_t position = recipe.rope_dim > 0 ? recipe.positions[row] : 0;
    RawLine<kEach> k;
    k.read(lines, row);
    SlotsBehind behind(job, first);
    RawNorm<kEach> norm;
    norm.read(recipe);
    __syncwarp();
    Rotation<kEach> rotation;
    rotation.read(recipe, position);
    const bool live = there && slot >= 0 && slot < job.slot_count;
    const uint32_t page = job.page_size.quotient(static_cast<uint32_t>(slot)),
                   offset = static_cast<uint32_t>(slot) - page * job.page_size.value;
    uint8_t* at = job.pages + page * job.page_stride;
    uint8_t* scale = at + job.scale_base + int64_t{offset} * job.scale_step;
    if (live) prefetch_to_l2(scale);
    if (job.stats != nullptr && there && team_lane() == 0) {
      count(job.stats, kSkippedSlots, slot >= job.slot_count);
      count(job.stats, kSkippedPages, live && rotation.wild);
    }
    if (!__any_sync(kWarp, live)) continue;
    bool again = false;
    if (job.claims.rows == nullptr) {
      again = comes_again_behind(behind, first, live ? static_cast<int32_t>(slot) : -2);
    } else if (live) {
      again = !job.claims.is_last(slots_of, row, slot);
    }
    float x[kEach][4];
#pragma unroll
    for (int i = 0; i < 4 * kEach; ++i) x[i / 4][i % 4] = k.four[i / 4].value(lines.dtype, i % 4);
    transform_vector(recipe, norm, rotation, x);
    quantize_vector(recipe, x, at + int64_t{offset} * job.value_step, scale, live && !again);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) count(job.stats, kRows, job.rows);
}

const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&store_vectors<2, Usual::no>), 0},
                                {reinterpret_cast<const void*>(&store_vectors<4, Usual::no>), 0},
                                {reinterpret_cast<const void*>(&store_vectors<4, Usual::plain>), 0},
                                {reinterpret_cast<const void*>(&store_vectors<4, Usual::normed>), 0},
                                {reinterpret_cast<const void*>(&store_rows), kMostProducerShared}};

/// Whether vectors of the call can stay in registers; then how.
bool vectors_of(const StoreJob& whole, StoreVectors* v) {
  const StoreK& a = whole.a;
  const int64_t slots = a.cache.pages.shape[0] * a.cache.page_size;
  if (whole.ready || whole.layout.tile > 0 || slots >= int64_t{1} << 31 || a.slot_mapping.stride[0] != 1 ||
      !lines_of(a.k, &v->k) || !vector_recipe_of(whole.recipe, &v->recipe))
    return false;
  v->slots = whole_of(a.slot_mapping);
  v->rows = static_cast<uint32_t>(a.slot_mapping.shape[0]), v->slot_count = static_cast<uint32_t>(slots);
  v->page_size = divisor(static_cast<uint32_t>(a.cache.page_size));
  v->pages = static_cast<uint8_t*>(a.cache.pages.data), v->page_stride = a.cache.pages.stride[0];
  v->value_step = static_cast<uint32_t>(whole.layout.value_step);
  v->scale_step = static_cast<uint32_t>(whole.layout.scale_step), v->scale_base = whole.layout.scale_base;
  v->claims = whole.claims, v->stats = whole.stats;
  return true;
}

/// At most kClaimedRows rows: what comes later is stored later.
void store_some(StoreJob job, void* workspace, const Launch& launch) {
  const StoreK& a = job.a;
  const int64_t rows = a.slot_mapping.shape[0], slots = a.cache.pages.shape[0] * a.cache.page_size;
  job.claims = claim_slots(a.slot_mapping, slots, rows, 0, workspace, launch);
  StoreVectors vectors{};
  if (vectors_of(job, &vectors)) {
    const Usual usual = vectors.k.fours && job.recipe.head_dim == 128 ? usual_of(vectors.recipe) : Usual::no;
    const auto kernel = job.recipe.head_dim == 64 ? store_vectors<2, Usual::no>
                        : usual == Usual::normed  ? store_vectors<4, Usual::normed>
                        : usual == Usual::plain   ? store_vectors<4, Usual::plain>
                                                  : store_vectors<4, Usual::no>;
    // Few rows are spread, a warp a block.
    const int warps = rows <= int64_t{launch.sms()} * kTeams ? 1 : 4;
    kernel<<<launch.blocks((rows + warps * kTeams - 1) / (warps * kTeams), 20 / warps), 32 * warps, 0,
             launch.stream()>>>(vectors);
  } else {
    const int warps = warps_for(job.recipe.head_dim);
    const size_t shared = shared_for(job.recipe.head_dim) + static_cast<size_t>(warps * job.scratch);
    store_rows<<<launch.blocks((rows + warps - 1) / warps, 8), 32 * warps, shared, launch.stream()>>>(job);
  }
  TOPKEY_CUDA_LAUNCHED("store_k");
}

}  // namespace

KernelList cache_kernels() { return {kEntries, 5}; }

size_t store_bytes(int64_t rows) { return claim_bytes(rows); }

void store_k(const StoreK& a, const Exec& exec) {
  const int64_t rows = a.slot_mapping.shape[0], dim = a.cache.head_dim;
  if (rows == 0) return;
  const Launch launch("store_k", exec);
  const bool ready = a.k_scales.data != nullptr || a.k.dtype == DType::u8;
  StoreJob job{a, {}, page_layout(a.cache.format, a.cache.layout, a.cache.page_size, dim), ready, 0, {}, exec.stats};
  job.scratch = scratch_for(job.layout);
  Recipe& r = job.recipe;
  r.norm = a.norm, r.rope = a.rope, r.hadamard = a.hadamard, r.hadamard_scale = hadamard_scale(dim),
  r.input = a.k.dtype;
  r.rule = key_facts(a.rule, a.scale, a.cache.format), r.scale = a.scale, r.format = a.cache.format;
  r.head_dim = static_cast<int32_t>(dim);
  for (int64_t first = 0; first < rows; first += kClaimedRows) {
    StoreJob some = job;
    const int64_t count = std::min(rows - first, kClaimedRows);
    some.a.slot_mapping = lines_from(a.slot_mapping, first, count);
    some.a.k = lines_from(a.k, first, a.k.shape[0] - first);
    if (a.k_scales.data != nullptr) some.a.k_scales = lines_from(a.k_scales, first, a.k_scales.shape[0] - first);
    if (r.rope.dim > 0)
      some.recipe.rope.positions = lines_from(a.rope.positions, first, a.rope.positions.shape[0] - first);
    store_some(some, exec.workspace, launch);
  }
}

}  // namespace topkey::cuda
