// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `pool`: the tokens of a pool or window, each found by request and position, joined (device/join.cuh) and produced
// like any key, a warp a key row. Two launches: all key rows are made from the state as it was, then the state is written.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/device/join.cuh"
#include "cuda/launch.h"
#include "cuda/producer.h"
#include "cuda/stages.h"

namespace topkey::cuda {
namespace {

/// Tokens of a pool or window, at most: a warp's list of them lies in shared memory.
constexpr int kMaxTokens = 1024;

/// The rows of a call as tokens. Rows of a request are adjacent.
struct Batch {
  Rows rows;
  Tensor positions;

  __device__ int64_t request(int64_t row) const { return window_of(rows, row, 0).request; }
  /// -1: a padding row, or no position that a sequence can have.
  __device__ int64_t position(int64_t row) const {
    constexpr int64_t kLast = int64_t{1} << 48;
    const int64_t position = integer(positions, row);
    return position < 0 || position > kLast || request(row) < 0 ? -1 : position;
  }
};

/// A row whose pool or window is looked for: its request, and which rows before it belong to the same.
struct Seeker {
  const Batch& batch;
  int64_t row, request, first;

  __device__ Seeker(const Batch& b, int64_t r) : batch(b), row(r), request(b.request(r)), first(0) {
    if (request < 0 || b.rows.request.data != nullptr) return;
    first = b.rows.q_indptr.data != nullptr ? integer(b.rows.q_indptr, request)
                                            : request * (b.rows.next_n > 1 ? b.rows.next_n : 1);
  }
  __device__ bool own(int64_t r) const {
    if (r < 0 || r < first) return false;
    return batch.rows.request.data == nullptr || integer(batch.rows.request, r) == request;
  }
  /// The nearest row at or before `from` that holds this position, -1 where none does. By the whole warp.
  __device__ int64_t find(int64_t from, int64_t wanted) const {
    for (int64_t base = from; base >= 0; base -= 32) {
      const int64_t r = base - lane_id();
      const bool same = own(r);
      const unsigned others = __ballot_sync(kWarp, !same);
      const unsigned hits = __ballot_sync(kWarp, same && integer(batch.positions, r) == wanted);
      const int end = others != 0 ? __ffs(static_cast<int>(others)) - 1 : 32;
      const int hit = hits != 0 ? __ffs(static_cast<int>(hits)) - 1 : 32;
      if (hit < end) return base - hit;
      if (end < 32) return -1;
    }
    return -1;
  }
  /// For the `count` positions that end with `last`, ascending: sources[j] = its row, or ~entry(position) where no row
  /// holds it. False where entry gives -1 for one of them. By the whole warp.
  template <class Entry>
  __device__ bool collect(int64_t last, int count, int64_t* sources, const Entry& entry) const {
    __syncwarp();   // the list before has been read
    int found = 0;  // consecutive positions stand in consecutive rows nearly always
    for (bool all = true; all && found < count;) {
      const int i = found + lane_id();
      const int64_t r = row - i;
      const bool here = i < count && own(r) && integer(batch.positions, r) == last - i;
      const unsigned misses = __ballot_sync(kWarp, !here);
      const int hits = misses != 0 ? __ffs(static_cast<int>(misses)) - 1 : 32;
      if (lane_id() < hits) sources[count - 1 - i] = r;
      found += hits;
      all = hits == 32;
    }
    for (int i = found; i < count; ++i) {
      int64_t source = find(row - found, last - i);
      if (source < 0) {
        const int64_t at = entry(last - i);
        if (at < 0) return false;
        source = ~at;
      }
      if (lane_id() == 0) sources[count - 1 - i] = source;
    }
    __syncwarp();
    return true;
  }
};

/// What both operations have.
struct Common {
  Batch batch;
  Tensor slot_mapping, state_slots;
  KeyCache cache;
  PageLayout layout;
  Recipe recipe;
  int64_t entries;  ///< of the state
  int tokens;       ///< of a pool or window
  int64_t scratch;  ///< bytes a warp, for tiled pages
  uint64_t* stats;

  /// State slot of a real row; -1: none.
  __device__ int64_t state_slot(int64_t row) const {
    return state_slots.data == nullptr || batch.position(row) < 0 ? -1 : integer(state_slots, row);
  }
};

// ---- pool_k
// ----------------------------------------------------------------------------------------------------------------

struct Pools {
  Common c;
  Tensor k, gate, ape, tail;

  static constexpr bool kNarrow = true;  ///< a joined vector is rounded to bf16
  __device__ bool wants(int64_t) const { return true; }
  /// Number of tokens found, 0 where one is missing or the row completes nothing.
  __device__ int collect(int64_t row, int64_t* sources) const {
    const int64_t last = c.batch.position(row);
    if (last < 0 || (last + 1) % c.tokens != 0) return 0;
    const int64_t own = c.state_slot(row), ring = tail.data != nullptr ? tail.shape[2] : 1;
    const auto entry = [&](int64_t position) {
      return own < 0 || own >= c.entries ? -1 : own / ring * ring + position % ring;
    };
    return Seeker(c.batch, row).collect(last, c.tokens, sources, entry) ? c.tokens : 0;
  }
  __device__ int64_t rope_position(int64_t) const { return 0; }
  __device__ uint16_t* tail_at(int64_t entry, int half) const {
    const int64_t ring = tail.shape[2];
    return element<uint16_t>(tail, entry / ring, half, entry % ring);
  }
  struct Found {
    const Pools& p;
    const int64_t* sources;

    __device__ const uint16_t* part(int j, int half) const {
      const int64_t source = sources[j];
      return source < 0 ? p.tail_at(~source, half) : element<uint16_t>(half == 0 ? p.k : p.gate, source);
    }
    __device__ float value(int j, int d) const { return bf16_to_float(part(j, 0)[d]); }
    __device__ float score(int j, int d) const { return bf16_to_float(part(j, 1)[d]) + *element<float>(p.ape, j, d); }
  };
  __device__ Found found(int64_t, int, const int64_t* sources) const { return {*this, sources}; }
  __device__ void leave(int64_t row, int64_t entry) const {
    for (int d = lane_id(); d < c.recipe.head_dim; d += 32) {
      tail_at(entry, 0)[d] = *element<uint16_t>(k, row, d);
      tail_at(entry, 1)[d] = *element<uint16_t>(gate, row, d);
    }
  }
};

// ---- compress_k
// ------------------------------------------------------------------------------------------------------------

struct Windows {
  Common c;
  Tensor kv, score, ape, state, state_table;
  int width, ratio;

  static constexpr bool kNarrow = false;
  __device__ bool wants(int64_t row) const { return integer(c.state_slots, row) >= 0; }
  __device__ int collect(int64_t row, int64_t* sources) const {
    const int64_t last = c.batch.position(row), slot = integer(c.state_slots, row), block = state.shape[1];
    if (last < 0 || (last + 1) % ratio != 0 || slot >= c.entries) return 0;
    const int count = last + 1 < c.tokens ? static_cast<int>(last + 1) : c.tokens;  // positions before 0 take no part
    const Seeker seeker(c.batch, row);
    const auto entry = [&](int64_t position) {
      if (state_table.data == nullptr) return slot / block * block + position % block;
      return slot_of(state_table, seeker.request, block, position, c.entries - 1);
    };
    return seeker.collect(last, count, sources, entry) ? count : 0;
  }
  __device__ int64_t rope_position(int64_t row) const { return c.batch.position(row) / ratio * ratio; }
  __device__ float* state_at(int64_t entry) const {
    return element<float>(state, entry / state.shape[1], entry % state.shape[1]);
  }
  /// Score of a row of the call with its ape, as the state keeps it.
  __device__ float score_of(int64_t row, int64_t position, int i) const {
    return real(score, row, i) + *element<float>(ape, position % ratio, i);
  }
  struct Found {
    const Windows& w;
    const int64_t* sources;
    int64_t first;  ///< position of token 0
    int missing;    ///< tokens of the window that lie before position 0

    /// Where the channels of token j begin: of an older window its first, of the younger its last.
    __device__ int channel(int j) const { return (missing + j) / w.ratio * w.c.recipe.head_dim; }
    __device__ float value(int j, int d) const {
      const int64_t source = sources[j];
      const int i = channel(j) + d;
      return source < 0 ? w.state_at(~source)[i] : real(w.kv, source, i);
    }
    __device__ float score(int j, int d) const {
      const int64_t source = sources[j];
      const int i = channel(j) + d;
      return source < 0 ? w.state_at(~source)[w.width + i] : w.score_of(source, first + j, i);
    }
  };
  __device__ Found found(int64_t row, int count, const int64_t* sources) const {
    return {*this, sources, c.batch.position(row) - count + 1, c.tokens - count};
  }
  __device__ void leave(int64_t row, int64_t entry) const {
    float* to = state_at(entry);
    const int64_t position = c.batch.position(row);
    for (int i = lane_id(); i < width; i += 32) {
      to[i] = real(kv, row, i);
      to[width + i] = score_of(row, position, i);
    }
  }
};

// ---- both
// ------------------------------------------------------------------------------------------------------------------

/// True if a later row that can be made has the same slot: of equal slots the last key row is stored, whole. Where a later
/// row has it, its tokens are looked for in `sources`, and *used is set.
template <class Kind>
__device__ bool made_again(const Kind& kind, int64_t row, int64_t rows, int64_t slot, int64_t* sources, bool* used) {
  for (int64_t base = row + 1; base < rows; base += 32) {
    const int64_t i = base + lane_id();
    unsigned same = __ballot_sync(kWarp, i < rows && integer(kind.c.slot_mapping, i) == slot);
    for (; same != 0; same &= same - 1) {
      const int64_t later = base + __ffs(static_cast<int>(same)) - 1;
      *used = true;
      if (kind.wants(later) && kind.collect(later, sources) > 0) return true;
    }
  }
  return false;
}

/// The key row that `row` completes, if it does, to its slot.
template <class Kind>
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
  if (used) kind.collect(row, sources);
  join(kind.found(row, count, sources), count, c.recipe.head_dim, x);
  if (Kind::kNarrow) {
    for (int d = lane_id(); d < c.recipe.head_dim; d += 32) x[d] = round_to_bf16(x[d]);
    __syncwarp();
  }
  transform(c.recipe, position, x);
  const int64_t offset = slot % c.cache.page_size;
  uint8_t* page = static_cast<uint8_t*>(c.cache.pages.data) + slot / c.cache.page_size * c.cache.pages.stride[0];
  quantize_to_page(c.recipe, x, c.layout, page, offset, scratch);
  __syncwarp();
}

template <class Kind>
__global__ void make_keys(const __grid_constant__ Kind kind) {
  extern __shared__ int64_t memory[];
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
  int64_t* sources = memory + warp * kind.c.tokens;
  float* x = reinterpret_cast<float*>(memory + warps * kind.c.tokens) + warp * kind.c.recipe.head_dim;
  const Common& c = kind.c;
  uint8_t* scratch =
      reinterpret_cast<uint8_t*>(memory + warps * c.tokens) + warps * c.recipe.head_dim * 4 + warp * c.scratch;
  const int64_t rows = kind.c.slot_mapping.shape[0];
  for (int64_t row = int64_t{blockIdx.x} * warps + warp; row < rows; row += int64_t{gridDim.x} * warps)
    make_row(kind, row, rows, sources, x, scratch);
  if (blockIdx.x == 0 && threadIdx.x == 0) count(kind.c.stats, kRows, static_cast<uint64_t>(rows));
}

/// Each row's part of the state; of equal slots the last row's.
template <class Kind>
__global__ __launch_bounds__(128) void leave_state(const __grid_constant__ Kind kind) {
  const Common& c = kind.c;
  const int64_t rows = c.slot_mapping.shape[0];
  for (int64_t row = int64_t{blockIdx.x} * 4 + threadIdx.x / 32; row < rows; row += int64_t{gridDim.x} * 4) {
    const int64_t slot = c.state_slot(row);
    if (lane_id() == 0) count(c.stats, kSkippedSlots, slot >= c.entries && slot >= 0);
    if (slot < 0 || slot >= c.entries) continue;
    bool again = false;
    for (int64_t base = row + 1; base < rows && !again; base += 32) {
      const int64_t i = base + lane_id();
      again = __any_sync(kWarp, i < rows && integer(c.state_slots, i) == slot && c.batch.position(i) >= 0);
    }
    if (!again) kind.leave(row, slot);
  }
}

constexpr int kMostShared = kMostProducerShared + kMaxTokens * 8;
const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&make_keys<Pools>), kMostShared},
                                {reinterpret_cast<const void*>(&make_keys<Windows>), kMostShared},
                                {reinterpret_cast<const void*>(&leave_state<Pools>), 0},
                                {reinterpret_cast<const void*>(&leave_state<Windows>), 0}};

template <class Kind>
void run_kind(const char* op, const Kind& kind, const Exec& exec) {
  const Common& c = kind.c;
  const int64_t rows = c.slot_mapping.shape[0];
  if (rows == 0) return;
  const Launch launch(op, exec);
  const int64_t own = 8 * int64_t{c.tokens} + 4 * int64_t{c.recipe.head_dim} + c.scratch;  // bytes a warp
  const int64_t warps = std::clamp<int64_t>(48 * 1024 / own, 1, 4);
  make_keys<Kind><<<launch.blocks((rows + warps - 1) / warps, 8), static_cast<unsigned>(32 * warps),
                    static_cast<size_t>(warps * own), launch.stream()>>>(kind);
  TOPKEY_CUDA_LAUNCHED(op);
  if (c.state_slots.data == nullptr) return;
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

KernelList pool_kernels() { return {kEntries, 4}; }

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
