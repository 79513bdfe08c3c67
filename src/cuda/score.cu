// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `score` on tensor cores (arithmetic bf16mma and f16mma): keys in registers, a few rows' queries in shared memory.
// Plain FMA (arithmetic f32) is in score_f32.cu. Search and logits run these same kernels.
#include "cuda/check.h"
#include "cuda/device/dot_portable.cuh"
#include "cuda/device/select.cuh"
#include "cuda/score.h"
#include "cuda/score_job.cuh"
#include "cuda/stages.h"

namespace topkey::cuda {
namespace {

/// What a tile's pieces depend on, of one row.
struct CutFact {
  int32_t low;
  uint32_t n;
  int32_t table_row;
};

/// Pieces before each tile of rows, and in all; one thread block. So many tiles at a time that each thread reads one row.
__global__ __launch_bounds__(kSelectThreads) void cut_work(const __grid_constant__ ScoreJob job) {
  __shared__ uint32_t warps[kSelectThreads / 32];
  __shared__ CutFact facts[kSelectThreads];
  const int64_t tiles = (job.group.count + job.tile_rows - 1) / job.tile_rows;
  const int tiles_a_turn = kSelectThreads / job.tile_rows, thread = static_cast<int>(threadIdx.x);
  uint64_t before = 0;
  for (int64_t base = 0; base < tiles; base += tiles_a_turn) {
    const int64_t first = base * job.tile_rows, left = job.group.count - first;
    if (thread < tiles_a_turn * job.tile_rows && thread < left) {
      const RowFact& f = job.p.facts[first + thread];
      facts[thread] = {f.low, f.n, f.table_row};
    }
    __syncthreads();
    const int own_first = thread * job.tile_rows;
    const bool owns = thread < tiles_a_turn && own_first < left;
    uint32_t own = 0;
    if (owns) {
      const int rows =
          static_cast<int>(min(static_cast<long long>(job.tile_rows), static_cast<long long>(left - own_first)));
      own = span_of(facts + own_first, rows, job.p.ids != nullptr, job.group.first_key, job.group.chunk, job.piece)
                .pieces;
    }
    uint32_t total = 0;
    const uint32_t at = block_scan(own, warps, &total);
    if (owns) job.p.work[base + thread] = before + at;
    before += total;
  }
  if (threadIdx.x == 0) job.p.work[tiles] = before;
}

__device__ __forceinline__ int steps_of(const ScoreJob& job) { return (job.p.keys.head_dim + 15) / 16; }
/// Steps over d in pairs: one 16-byte load of a query's operands.
__device__ __forceinline__ int pairs_of(const ScoreJob& job) { return (steps_of(job) + 1) / 2; }

/// Elements d .. d+3 and d+16 .. d+19 of one head, as operands.
template <class Codes>
__device__ __forceinline__ void read_query(const ScoreJob& job, int64_t row, int head, int d, Four (&f)[2]) {
  const Tensor &values = job.p.q.values, &scales = job.p.q.scales;
  const int dim = job.p.keys.head_dim;
  const uint8_t* of_head = static_cast<const uint8_t*>(values.data) + row * values.stride[0] * Codes::kBytes +
                           head * values.stride[1] * Codes::kBytes;
  if constexpr (Codes::kBlockScales) {
    if (d >= dim) return;  // both lie in the same block of 32
    const uint32_t scale = Codes::scale_pair(scale_at(scales, row, head)[d / 32]);
    f[0] = Codes::operand(Codes::read_bytes(of_head, d), scale);
    f[1] = Codes::operand(Codes::read_bytes(of_head, d + 16), scale);
  } else {
    if (d < dim) f[0] = query_operand<Codes>(of_head, d, dim - d);
    if (d + 16 < dim) f[1] = query_operand<Codes>(of_head, d + 16, dim - d - 16);
  }
}

/// Queries of heads [8 * first, 8 * last) of `rows` rows as the tensor core's second operand, and their weights. A warp
/// takes an operand block (eight heads, 32 elements of d) at a time.
template <class Codes>
__device__ void load_queries(const ScoreJob& job, int64_t row, int rows, int first, int last, uint4* q,
                             float* weights) {
  const Tensor& w = job.p.q.weights;
  const int pairs = pairs_of(job), tiles = last - first, block = job.head_block;
  const int lane = threadIdx.x % 32;
  for (int r = 0; r < rows; ++r) {
    for (int at = threadIdx.x / 32; at < tiles * pairs; at += blockDim.x / 32) {
      const int tile = at / pairs, pair = at - tile * pairs;
      const int head = 8 * (first + tile) + lane / 4, d = pair * 32 + 4 * (lane % 4);
      Four f[2] = {{0, 0}, {0, 0}};
      if (head < job.heads) read_query<Codes>(job, row + r, head, d, f);
      q[((r * block + tile) * pairs + pair) * 32 + lane] = {f[0].low, f[0].high, f[1].low, f[1].high};
    }
    for (int at = threadIdx.x; at < tiles * 8; at += blockDim.x) {
      const int head = 8 * first + at;
      weights[r * block * 8 + at] = head < job.heads ? real(w, row + r, head) : 0.0f;
    }
  }
}

/// The same for all heads, which are a multiple of 8, of queries at 4-byte addresses and D = 16 * kSteps. A warp reads
/// several operand blocks before it looks at the first.
template <class Codes, int kSteps>
__device__ void load_whole_queries(const ScoreJob& job, int64_t row, int rows, uint4* q, float* weights) {
  if constexpr (Codes::kBlockScales) {
    load_queries<Codes>(job, row, rows, 0, job.head_tiles, q, weights);
  } else {
    constexpr int kPairs = kSteps / 2, kBatch = 6;
    const Tensor &values = job.p.q.values, &w = job.p.q.weights;
    const int lane = threadIdx.x % 32, blocks = rows * job.head_tiles * kPairs, warps = blockDim.x / 32;
    const uint8_t* from = static_cast<const uint8_t*>(values.data) + row * values.stride[0] * Codes::kBytes;
    for (int base = threadIdx.x / 32; base < blocks; base += kBatch * warps) {
      Four f[kBatch][2];
      const uint8_t* head[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int at = min(base + u * warps, blocks - 1), of_tile = at / kPairs, d = at % kPairs * 32 + 4 * (lane % 4);
        const int r = of_tile / job.head_tiles, h = (of_tile - r * job.head_tiles) * 8 + lane / 4;
        head[u] = from + (r * values.stride[0] + h * values.stride[1]) * Codes::kBytes + Codes::offset(d);
        f[u][0] = Codes::read(head[u], 0), f[u][1] = Codes::read(head[u], 16);
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (base + u * warps >= blocks) break;
        bool nan = false;
        Four a = Codes::operand(f[u][0], nan), b = Codes::operand(f[u][1], nan);
        if (nan) a = query_operand<Codes>(head[u], 0, 4), b = query_operand<Codes>(head[u], 16, 4);
        q[(base + u * warps) * 32 + lane] = {a.low, a.high, b.low, b.high};
      }
    }
    const int heads = job.head_tiles * 8;
    for (int at = threadIdx.x; at < rows * heads; at += blockDim.x) weights[at] = real(w, row + at / heads, at % heads);
  }
}

/// The tile that a block works on.
struct TileRoom {
  RowFact facts[kWideTileRows];
  /// What a row looks at: indices [first, last) of this chunk; where rows share positions, index 0 is position `low`.
  struct Look {
    int32_t low;
    uint32_t first, last;
  } looks[kWideTileRows];
  TileSpan span;
};

__device__ void enter_tile(const ScoreJob& job, uint32_t tile, int rows, TileRoom& room) {
  const uint32_t* from = reinterpret_cast<const uint32_t*>(job.p.facts + int64_t{tile} * job.tile_rows);
  const int words = rows * static_cast<int>(sizeof(RowFact) / sizeof(uint32_t));
  for (int i = threadIdx.x; i < words; i += blockDim.x) reinterpret_cast<uint32_t*>(room.facts)[i] = from[i];
  __syncthreads();
  if (threadIdx.x == 0)
    room.span = span_of(room.facts, rows, job.p.ids != nullptr, job.group.first_key, job.group.chunk, job.piece);
  __syncthreads();
  if (threadIdx.x < rows) {
    const RowFact& f = room.facts[threadIdx.x];
    const Span s = chunk_of(f, job.group.first_key, job.group.chunk);
    room.looks[threadIdx.x] = {room.span.shared ? f.low : 0, s.first, s.last};
  }
  __syncthreads();
}

/// Keys that one lane of the four which share g, g + 8, ... knows: lane c of them c, and c + 4 if there are so many.
template <int kTiles>
constexpr int kOwn = (kTiles + 1) / 2;
/// Where key i of these stands among its warp's keys.
__device__ __forceinline__ uint32_t offset_of(int i) {
  return static_cast<uint32_t>(i / 2 * 16 + i % 2 * 8) + (threadIdx.x & 31) / 4;
}

/// This warp's keys to its registers; `own` are this lane's keys if it has any. Returns a bit for each of the four lanes'
/// keys: one of its codes is NaN, and its products do not say so.
template <class Codes, Fit kFit, int kTiles, int kSteps>
__device__ __forceinline__ uint32_t fetch_keys(const ScoreJob& job, const OwnKey (&own)[kOwn<kTiles>],
                                               KeyTile<kTiles, kSteps>& tile) {
  // Where there is no key, the facts are read in its place: they are there, aligned and long enough with what follows.
  const uint8_t* nothing = reinterpret_cast<const uint8_t*>(job.p.facts);
  const auto all = [&](bool scales, const uint8_t*(&to)[2 * kTiles]) {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const KeyBytes& bytes = own[i / 4].bytes;
      const uint8_t* mine = bytes.values == nullptr ? nothing : scales ? bytes.scale : bytes.values;
      to[i] = reinterpret_cast<const uint8_t*>(
          __shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine), (threadIdx.x & 28) + i % 4));
    }
  };
  const uint8_t* rows[2 * kTiles];
  all(false, rows);
  Tiled<2 * kTiles> tiled{};
  if constexpr (kFit == Fit::tiled) {
    const PageLayout& layout = job.p.keys.layout;
    tiled.tile = static_cast<int>(layout.tile), tiled.scale_bytes = static_cast<int>(layout.scale);
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) tiled.spread[i] = rows[i] == nothing ? 0 : tiled.tile - 1;
  }
  if constexpr (Codes::kBlockScales) {
    const uint8_t* scales[2 * kTiles];
    all(true, scales);
    load_scaled_keys<Codes, kFit>(tile, rows, scales, job.p.keys.head_dim, tiled);
    return 0;
  } else {
    return load_keys<Codes, kFit>(tile, rows, job.p.keys.head_dim, tiled);
  }
}

/// What this lane's key is multiplied with behind the head sum.
template <class Codes>
__device__ __forceinline__ float outer_scale(const OwnKey& key) {
  if constexpr (Codes::kBlockScales) return Codes::kUp;
  if (!Codes::kOuterScale || key.bytes.values == nullptr) return 1.0f;
  return __uint_as_float(load_word(key.bytes.scale, reinterpret_cast<uint64_t>(key.bytes.scale) % 4 == 0));
}

/// This lane's keys of a piece, for whoever holds any.
template <int kTiles>
struct OwnKeys {
  OwnKey key[kOwn<kTiles>];
  int32_t place[kOwn<kTiles>];  ///< of rows that share positions the position, else the index
  int32_t index[kOwn<kTiles>];  ///< in the row at hand; -1: it does not look at the key
  float scale[kOwn<kTiles>];
  uint32_t first;  ///< where the warp's keys stand in the piece

  __device__ static bool holds(int o) { return static_cast<int>(threadIdx.x & 3) + 4 * o < 2 * kTiles; }
  __device__ __forceinline__ uint32_t offset(int o) const { return first + offset_of((threadIdx.x & 3) + 4 * o); }
  /// False where none of the warp's keys is there.
  __device__ __forceinline__ bool find(const ScoreJob& job, const TileRoom& room, const Piece& piece,
                                       int64_t tile_row) {
    first = threadIdx.x / 32 * 16 * kTiles;
    bool inside = false;
#pragma unroll
    for (int o = 0; o < kOwn<kTiles>; ++o) {
      key[o] = {0, {nullptr, nullptr}, false};
      if (holds(o)) key[o] = own_key(job, room.span, room.facts, piece, tile_row, offset(o));
      place[o] = static_cast<int32_t>(piece.at + offset(o));
      inside = inside || key[o].inside;
    }
    return __any_sync(~0u, inside);
  }
  /// Whether row r of the tile looks at any of the warp's keys.
  __device__ __forceinline__ bool enter_row(const TileRoom& room, int r) {
    const TileRoom::Look look = room.looks[r];
    bool some = false;
#pragma unroll
    for (int o = 0; o < kOwn<kTiles>; ++o) {
      const int32_t at = place[o] - look.low;
      const bool looks =
          key[o].inside && at >= static_cast<int32_t>(look.first) && at < static_cast<int32_t>(look.last);
      index[o] = looks ? at : -1;
      some = some || looks;
    }
    return __any_sync(~0u, some);
  }
};

/// A row's finished sums of this warp's keys to where scores go. bad: see fetch_keys.
template <class Codes, int kTiles>
__device__ __forceinline__ void put_sums(const ScoreJob& job, const OwnKeys<kTiles>& own, int64_t group_row,
                                         bool scored, const float (&sums)[kTiles][2], uint32_t bad) {
  const int c = threadIdx.x & 3;
  float sum[kOwn<kTiles>] = {};
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    const float joined = join_heads(sums[i / 2][i % 2]);
    if (c == i % 4) sum[i / 4] = joined;
  }
  // Most searches: the row's own part of the buffer, and no mask.
  const bool plain = job.p.sink.scores != nullptr && job.p.sink.mask.data == nullptr;
  float* row = job.p.sink.scores + group_row * job.group.chunk - job.group.first_key;
#pragma unroll
  for (int o = 0; o < kOwn<kTiles>; ++o) {
    if (Codes::kOuterScale || Codes::kBlockScales) sum[o] = sum[o] * own.scale[o];
    if (bad >> (c + 4 * o) & 1u) sum[o] = __uint_as_float(kCanonicalNan);
    if (!scored) sum[o] = 0.0f;
    if (own.index[o] < 0) continue;
    if (plain) {
      row[own.index[o]] = own.key[o].bytes.values != nullptr ? canonical(sum[o]) : __uint_as_float(kNotLiveScore);
    } else {
      put_score(job, group_row, own.key[o], own.index[o], sum[o]);
    }
  }
}

/// One piece of work: this warp's keys for all rows of the piece. kWideTiles: all heads' queries of all rows are in shared
/// memory, and they are a multiple of 16.
template <class Codes, Fit kFit, int kTiles, int kSteps>
__device__ void score_piece(const ScoreJob& job, const TileRoom& room, const Piece& piece, int64_t tile_row, uint4* q,
                            float* weights) {
  constexpr bool kWide = kTiles == kWideTiles;
  const int steps = steps_of(job), pairs = pairs_of(job);
  OwnKeys<kTiles> own;
  const bool inside = own.find(job, room, piece, tile_row);
  // Queries come in parts: all warps must walk along.
  const bool blocked = !kWide && job.head_block < job.head_tiles;
  if (!blocked && !inside) return;
#pragma unroll
  for (int o = 0; o < kOwn<kTiles>; ++o) own.scale[o] = outer_scale<Codes>(own.key[o]);
  KeyTile<kTiles, kSteps> tile;
  const uint32_t bad = fetch_keys<Codes, kFit>(job, own.key, tile);
  for (int r = piece.first; r < piece.last; ++r) {
    const bool wanted = own.enter_row(room, r), scored = room.facts[r].scored;
    float sums[kTiles][2] = {};
    if constexpr (kWide) {
      const int at = r * job.head_tiles;
      if (wanted && scored)
        add_whole_heads<Codes::kHalf>(tile, q + at * (kSteps / 2) * 32, weights + at * 8, job.head_tiles, sums);
    } else {
      for (int first = 0; first < job.head_tiles; first += job.head_block) {
        const int last = min(first + job.head_block, job.head_tiles);
        if (blocked) {
          __syncthreads();
          load_queries<Codes>(job, job.group.first_row + tile_row + r, 1, first, last, q, weights);
          __syncthreads();
        }
        const int at = blocked ? 0 : r * job.head_block;
        if (wanted && scored)
          add_heads<Codes::kHalf, kFit == Fit::exact>(tile, q + at * pairs * 32, weights + at * 8, first, last,
                                                      job.heads, steps, sums);
      }
    }
    if (wanted) put_sums<Codes>(job, own, tile_row + r, scored, sums, bad);
  }
}

/// Where a warp has 48 keys, one block fills an SM's registers.
template <int kTiles>
constexpr int kThreads = kTiles == kWideTiles ? kWideThreads : 128;

template <class Codes, Fit kFit, int kTiles, int kSteps>
__global__ __launch_bounds__(kThreads<kTiles>,
                             kTiles == kWideTiles ? 1 : 3) void score_mma(const __grid_constant__ ScoreJob job) {
  extern __shared__ uint4 memory[];
  __shared__ TileRoom room;
  const int pairs = pairs_of(job);
  uint4* q = memory;
  float* weights = reinterpret_cast<float*>(q + job.tile_rows * job.head_block * pairs * 32);
  Share share = share_of(job);
  int64_t entered = -1;
  for (; share.next < share.end; ++share.next) {
    while (job.p.work[share.tile + 1] <= share.next) ++share.tile;
    const int64_t tile_row = int64_t{share.tile} * job.tile_rows;
    const int rows = static_cast<int>(
        min(static_cast<long long>(job.tile_rows), static_cast<long long>(job.group.count - tile_row)));
    if (entered != share.tile) {
      __syncthreads();  // the tile before is done with its queries
      enter_tile(job, share.tile, rows, room);
      if constexpr (kTiles == kWideTiles) {
        load_whole_queries<Codes, kSteps>(job, job.group.first_row + tile_row, rows, q, weights);
        __syncthreads();
      } else if (job.head_block == job.head_tiles) {
        load_queries<Codes>(job, job.group.first_row + tile_row, rows, 0, job.head_tiles, q, weights);
        __syncthreads();
      }
      entered = share.tile;
    }
    const Piece piece = piece_of(room.span, room.facts, rows, job.group.first_key, job.group.chunk, job.piece,
                                 static_cast<uint32_t>(share.next - job.p.work[share.tile]));
    score_piece<Codes, kFit, kTiles, kSteps>(job, room, piece, tile_row, q, weights);
  }
}

using Bf16Codes = PlainCodes<false>;
using F16Codes = PlainCodes<true>;
using Kernel = void (*)(ScoreJob);
/// Of a thread block of any GPU.
constexpr int kMostShared = 227 * 1024;

struct Choice {
  Kernel kernel;
  int tiles;
};
/// wide: several rows share their keys' reads, and their queries fit whole.
template <class Codes>
Choice choose(int dim, bool words, bool wide) {
  if (dim % 16 != 0 || !words) return {score_mma<Codes, Fit::ragged, 1, 16>, 1};
  if (dim == 64 && wide) return {score_mma<Codes, Fit::exact, kWideTiles, 4>, kWideTiles};
  if (dim == 128 && wide) return {score_mma<Codes, Fit::exact, kWideTiles, 8>, kWideTiles};
  if (dim == 64) return {score_mma<Codes, Fit::exact, 2, 4>, 2};
  if (dim == 128) return {score_mma<Codes, Fit::exact, 2, 8>, 2};
  return {score_mma<Codes, Fit::steps, 1, 16>, 1};
}

#define TOPKEY_ENTRY(...) \
  { reinterpret_cast<const void*>(&score_mma<__VA_ARGS__>), kSharedBytes - 2048 }
#define TOPKEY_WIDE(...) \
  { reinterpret_cast<const void*>(&score_mma<__VA_ARGS__>), kMostShared }
#define TOPKEY_ENTRIES(Codes)                                                                   \
  TOPKEY_WIDE(Codes, Fit::exact, kWideTiles, 4), TOPKEY_WIDE(Codes, Fit::exact, kWideTiles, 8), \
      TOPKEY_ENTRY(Codes, Fit::exact, 2, 4), TOPKEY_ENTRY(Codes, Fit::exact, 2, 8),             \
      TOPKEY_ENTRY(Codes, Fit::steps, 1, 16), TOPKEY_ENTRY(Codes, Fit::ragged, 1, 16)
const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&cut_work), 0},
                                TOPKEY_ENTRY(Fp8Codes, Fit::tiled, 1, 16),
                                TOPKEY_ENTRY(FnuzCodes, Fit::tiled, 1, 16),
                                TOPKEY_ENTRY(Mxfp4Codes, Fit::tiled, 1, 16),
                                TOPKEY_ENTRIES(Fp8Codes),
                                TOPKEY_ENTRIES(FnuzCodes),
                                TOPKEY_ENTRIES(Mxfp4Codes),
                                TOPKEY_ENTRIES(Bf16Codes),
                                TOPKEY_ENTRIES(F16Codes)};

/// How many rows' queries fit, or how many of one row's heads.
void fit_queries(ScoreJob& job, int steps) {
  const int bytes_of_eight = (steps + 1) / 2 * 32 * 16 + 32;
  const int most = kQueryBytes / bytes_of_eight;
  job.head_block = std::min(job.head_tiles, most);
  job.tile_rows = std::clamp(most / job.head_tiles, 1, kMaxTileRows);
}

/// Rows that may share their keys' reads, as far as the host can know: those of a request. Tiles of more rows than that
/// would only hold queries that wait.
int64_t most_sharing(const ScoreParams& p, const Group& group) {
  if (!p.keys.paged) return std::max<int64_t>(group.count, 1);
  if (p.by_request) return std::clamp<int64_t>(group.count / 64, 1, kWideTileRows);
  return std::max(p.next_n, 1);
}

/// Rows of a tile of which each warp takes 48 keys, all heads' queries in shared memory; 0: they do not suit, or would leave
/// SMs idle.
int wide_rows(const ScoreJob& job, const Launch& launch) {
  const KeySource& keys = job.p.keys;
  const Tensor& q = job.p.q.values;
  const int64_t bytes = q.dtype == DType::bf16 || q.dtype == DType::f16 ? 2 : 1;
  const bool words = keys.words && reinterpret_cast<uintptr_t>(q.data) % 4 == 0 && q.stride[0] * bytes % 4 == 0 &&
                     q.stride[1] * bytes % 4 == 0;
  if (!words || keys.layout.tile > 0 || (keys.head_dim != 64 && keys.head_dim != 128) || job.heads % 16 != 0) return 0;
  const int64_t of_row = job.head_tiles * (keys.head_dim / 32 * 512 + 32);
  const int64_t fit = (launch.shared_bytes() - static_cast<int64_t>(sizeof(TileRoom)) - 256) / of_row;
  const int64_t rows = std::min({int64_t{kWideTileRows}, fit, most_sharing(job.p, job.group)});
  const int64_t pieces = (job.group.count / std::max<int64_t>(rows, 1)) * (job.group.chunk / kWidePiece);
  return rows < 2 || pieces < 4 * int64_t{launch.sms()} ? 0 : static_cast<int>(rows);
}

}  // namespace

KernelList score_kernels() { return {kEntries, sizeof kEntries / sizeof kEntries[0]}; }

bool on_tensor_cores(KeyFormat format, DType q) {
  return is_e4m3(format) || format == KeyFormat::mxfp4 || (format == KeyFormat::bf16 && q == DType::bf16) ||
         (format == KeyFormat::f16 && q == DType::f16);
}

Choice choose(const KeySource& keys, bool wide) {
  if (keys.layout.tile > 0) {
    if (keys.format == KeyFormat::mxfp4) return {score_mma<Mxfp4Codes, Fit::tiled, 1, 16>, 1};
    if (keys.format == KeyFormat::fp8) return {score_mma<Fp8Codes, Fit::tiled, 1, 16>, 1};
    return {score_mma<FnuzCodes, Fit::tiled, 1, 16>, 1};
  }
  switch (keys.format) {
    case KeyFormat::fp8: return choose<Fp8Codes>(keys.head_dim, keys.words, wide);
    case KeyFormat::fp8_fnuz: return choose<FnuzCodes>(keys.head_dim, keys.words, wide);
    case KeyFormat::mxfp4: return choose<Mxfp4Codes>(keys.head_dim, keys.words, wide);
    case KeyFormat::bf16: return choose<Bf16Codes>(keys.head_dim, keys.words, wide);
    default: return choose<F16Codes>(keys.head_dim, keys.words, wide);
  }
}

void score(const ScoreParams& params, const Group& group, const Launch& launch) {
  ScoreJob job{params, group, static_cast<int>(params.q.values.shape[1]), 0, 1, 1, 128, 1, 1};
  job.head_tiles = (job.heads + 7) / 8;
  const bool hopper = params.cores == Cores::hopper;
  const bool mma = !hopper && on_tensor_cores(params.keys.format, params.q.values.dtype);
  const int steps = (params.keys.head_dim + 15) / 16, wide = mma ? wide_rows(job, launch) : 0;
  Choice choice{};
  if (wide > 0) {
    job.tile_rows = wide, job.head_block = job.head_tiles;
  } else {
    if (mma) fit_queries(job, steps);
    if (hopper) job.tile_rows = tile_rows_sm90(job.heads), job.piece = 64;
    job.tile_rows = static_cast<int>(std::min<int64_t>(job.tile_rows, most_sharing(params, group)));
  }
  if (mma) {
    choice = choose(params.keys, wide > 0);
    job.piece = wide > 0 ? kWidePiece : static_cast<uint32_t>(64 * choice.tiles);
  }
  cut_work<<<1, kSelectThreads, 0, launch.stream()>>>(job);
  TOPKEY_CUDA_LAUNCHED("cut_work");
  const int64_t most = group.count * ((int64_t{group.chunk} + job.piece - 1) / job.piece);
  if (hopper) return score_sm90(job, most, launch);
  if (!mma) {
    score_f32(job, launch.blocks(most, 8), launch);
    return;
  }
  const size_t shared = static_cast<size_t>(job.tile_rows) * static_cast<size_t>(job.head_block) *
                        static_cast<size_t>((steps + 1) / 2 * 32 * 16 + 32);
  const size_t shared_of_sm = static_cast<size_t>(launch.shared_bytes()) + 1024;
  const size_t resident = wide > 0 ? 1 : kBlocksOfRegisters;
  const int fit = static_cast<int>(std::min(resident, shared_of_sm / (shared + sizeof(TileRoom) + 1024)));
  const unsigned threads = wide > 0 ? kWideThreads : 128;
  choice.kernel<<<launch.blocks(most, std::max(fit, 1)), threads, shared, launch.stream()>>>(job);
  TOPKEY_CUDA_LAUNCHED("score_mma");
}

}  // namespace topkey::cuda
