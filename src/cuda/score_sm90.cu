// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `score` on Hopper's tensor cores (arithmetic fp8mma, device/dot_sm90.cuh): the general kernel, for every layout
// of keys, every mask and every candidate list. A warpgroup takes 64 keys at a time for a few rows whose queries lie in
// shared memory; the next keys are copied while these are multiplied. decode_sm90.cu gives the same bits where it
// applies.
#include "cuda/check.h"
#include "cuda/device/convert.cuh"
#include "cuda/device/tiles_sm90.cuh"
#include "cuda/score.h"
#include "cuda/score_job.cuh"
#include "cuda/stages.h"

namespace topkey::cuda {
namespace {

constexpr int kThreads = 128;

/// What a thread block knows of 64 keys; `position` < 0: past the piece.
struct KeyTile {
  int32_t position[kTileKeys];
  float scale[kTileKeys];
  bool live[kTileKeys];
};
struct Shared {
  KeyTile tiles[2];
  RowFact facts[kMaxTileRows];
  TileSpan span;
};

struct Room90 {
  uint8_t* q;      ///< [tile_rows][heads, 128]
  uint8_t* codes;  ///< [2][64, 128]
  float* weights;  ///< [tile_rows][heads], halved
};

/// Begins to copy the keys of a piece: two threads a key, each half of its codes.
template <int kDim>
__device__ void load_piece(const ScoreJob& job, const Shared& s, const Piece& piece, int64_t tile_row, uint8_t* codes,
                           KeyTile& tile) {
  constexpr int kChunks = kDim / 16 / 2;
  const uint32_t row = threadIdx.x / 2, first = (threadIdx.x & 1) * kChunks;
  const OwnKey key = own_key(job, s.span, s.facts, piece, tile_row, row);
  const bool live = key.bytes.values != nullptr;
  const uint8_t* from = live ? key.bytes.values : job.p.keys.values;
#pragma unroll
  for (uint32_t i = 0; i < kChunks; ++i)
    copy_chunk(codes + chunk_at(row, first + i), from + (live ? (first + i) * 16 : 0), live, job.key_alignment);
  if (first == 0) {
    tile.position[row] = key.inside ? static_cast<int32_t>(key.position) : -1;
    tile.live[row] = live;
    const bool words = reinterpret_cast<uint64_t>(key.bytes.scale) % 4 == 0;
    tile.scale[row] = live ? __uint_as_float(load_word(key.bytes.scale, words)) : 0.0f;
  }
  commit_copies();
}

/// Scores of the piece's keys for each of its rows.
template <int kHeads, int kDim>
__device__ void score_tile(const ScoreJob& job, const Shared& s, const Room90& room, int stage, const Piece& piece,
                           int64_t tile_row) {
#ifdef TOPKEY_HAS_WGMMA
  const uint32_t lane = threadIdx.x & 31, c = lane & 3, own = threadIdx.x / 32 * 16 + lane / 4 + 8 * (c & 1);
  const KeyTile& tile = s.tiles[stage];
  OwnKey key{tile.position[own], {tile.live[own] ? room.codes : nullptr, nullptr}, tile.position[own] >= 0};
  const float scale = tile.scale[own];
  const uint64_t keys = operand_at(shared_address(room.codes + stage * kTileKeys * kCodePitch));
  for (int r = piece.first; r < piece.last; ++r) {
    const RowFact& f = s.facts[r];
    float sum = 0.0f;
    if (f.scored) {
      float dots[kHeads / 2], sums[2];
      issue_dots<kHeads, kDim>(dots, keys, operand_at(shared_address(room.q + r * kHeads * kCodePitch)));
      wgmma_wait<0>();
      add_heads<kHeads>(dots, room.weights + r * kHeads, sums);
      sums[0] = join_groups(sums[0]), sums[1] = join_groups(sums[1]);
      sum = (c == 0 ? sums[0] : sums[1]) * scale;
    }
    const int64_t index = c < 2 ? index_in(job, s.span, f, piece, key, own) : -1;
    if (index >= 0) put_score(job, tile_row + r, key, index, sum);
    __syncwarp();  // the next product is one instruction of all lanes
  }
#endif
}

template <int kHeads, int kDim>
__device__ void enter_tile(const ScoreJob& job, int64_t tile_row, int rows, const Room90& room, Shared& s) {
  if (threadIdx.x == 0) {
    for (int r = 0; r < rows; ++r) s.facts[r] = job.p.facts[tile_row + r];
    s.span = span_of(s.facts, rows, job.p.ids != nullptr, job.group.first_key, job.group.chunk, job.piece);
  }
  for (int r = 0; r < rows; ++r)
    load_query<kHeads, kDim, kThreads>(job.p.q, job.group.first_row + tile_row + r, job.heads,
                                       room.q + r * kHeads * kCodePitch, room.weights + r * kHeads, threadIdx.x,
                                       job.query_alignment);
  fence_tensor_reads();
  __syncthreads();
}

template <int kHeads, int kDim>
__global__ __launch_bounds__(kThreads) void score_fp8_sm90(const __grid_constant__ ScoreJob job) {
#ifdef TOPKEY_HAS_WGMMA
  extern __shared__ uint8_t memory[];
  __shared__ Shared s;
  uint8_t* base = align_tile(memory);
  const Room90 room{base, base + job.tile_rows * kHeads * kCodePitch,
                    reinterpret_cast<float*>(base + (job.tile_rows * kHeads + 2 * kTileKeys) * kCodePitch)};
  Share share = share_of(job);
  while (share.next < share.end) {
    while (job.p.work[share.tile + 1] <= share.next) ++share.tile;
    const int64_t tile_row = int64_t{share.tile} * job.tile_rows;
    const int rows = static_cast<int>(
        min(static_cast<long long>(job.tile_rows), static_cast<long long>(job.group.count - tile_row)));
    const uint64_t first = job.p.work[share.tile], last = min(share.end, job.p.work[share.tile + 1]);
    const auto piece_at = [&](uint64_t number) {
      return piece_of(s.span, s.facts, rows, job.group.first_key, job.group.chunk, job.piece,
                      static_cast<uint32_t>(number - first));
    };
    __syncthreads();  // the tile before is done with its queries and facts
    enter_tile<kHeads, kDim>(job, tile_row, rows, room, s);
    Piece piece = piece_at(share.next);
    int stage = 0;
    load_piece<kDim>(job, s, piece, tile_row, room.codes, s.tiles[0]);
    for (; share.next < last; ++share.next, stage ^= 1) {
      wait_copies<0>();
      fence_tensor_reads();
      __syncthreads();  // this stage is whole, and nobody reads the other any more
      const Piece next = share.next + 1 < last ? piece_at(share.next + 1) : Piece{0, 0, 0};
      if (share.next + 1 < last)
        load_piece<kDim>(job, s, next, tile_row, room.codes + (stage ^ 1) * kTileKeys * kCodePitch, s.tiles[stage ^ 1]);
      score_tile<kHeads, kDim>(job, s, room, stage, piece, tile_row);
      piece = next;
    }
  }
#endif
}

using Kernel = void (*)(ScoreJob);
constexpr int kQueryBytes90 = 32 * 1024;

size_t shared_bytes(int heads, int tile_rows) {
  return static_cast<size_t>(1024 + (tile_rows * heads + 2 * kTileKeys) * kCodePitch + tile_rows * heads * 4);
}

#define TOPKEY_ENTRY(H, D) \
  { reinterpret_cast<const void*>(&score_fp8_sm90<H, D>), 1024 + kQueryBytes90 * 2 + 2 * kTileKeys* kCodePitch }
const KernelEntry kEntries[] = {TOPKEY_ENTRY(32, 64),  TOPKEY_ENTRY(64, 64),  TOPKEY_ENTRY(128, 64),
                                TOPKEY_ENTRY(32, 128), TOPKEY_ENTRY(64, 128), TOPKEY_ENTRY(128, 128)};

template <int kDim>
Kernel choose(int heads) {
  return heads == 32 ? score_fp8_sm90<32, kDim> : heads == 64 ? score_fp8_sm90<64, kDim> : score_fp8_sm90<128, kDim>;
}

}  // namespace

KernelList score_sm90_kernels() { return {kEntries, sizeof kEntries / sizeof kEntries[0]}; }

int tile_rows_sm90(int heads) {
  return std::clamp(kQueryBytes90 / (padded_heads(heads) * kCodePitch), 1, kMaxTileRows);
}

void score_sm90(ScoreJob job, int64_t pieces, const Launch& launch) {
  const int heads = padded_heads(job.heads);
  job.key_alignment = alignment_of(job.p.keys);
  job.query_alignment = alignment_of(job.p.q);
  const size_t shared = shared_bytes(heads, job.tile_rows);
  const int fit = static_cast<int>(std::clamp<size_t>(kSharedOfSm / (shared + sizeof(Shared) + 1024), 1, 8));
  const Kernel kernel = job.p.keys.head_dim == 64 ? choose<64>(heads) : choose<128>(heads);
  kernel<<<launch.blocks(pieces, fit), kThreads, shared, launch.stream()>>>(job);
  TOPKEY_CUDA_LAUNCHED("score_fp8_sm90");
}

}  // namespace topkey::cuda
