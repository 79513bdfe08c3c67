// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The score arithmetic `bf16mma` and `f16mma`: the products and the head sum, included by score and search alike, so that
// both give the same bits. A warp holds kTiles x 16 keys in registers as the rows of m16n8k16 products and walks over
// heads, eight at a time; d runs upwards by 16. Inside a step of 16 both operands are permuted in the same way (lane c of
// a group of four holds d = 4c .. 4c+3), so that codes are read 4 bytes at a time. Past D both hold zeros.
// Head sum: lane c adds heads h with h % 8 / 2 == c, h ascending, by FMA from +0; then (s0 + s1) + (s2 + s3).
#pragma once
#include "cuda/device/convert.cuh"
#include "cuda/device/pages.cuh"

namespace topkey::cuda {

template <int kTiles, int kSteps>
struct KeyTile {
  uint32_t a[kTiles][kSteps][4];
};

/// How D suits a kernel: it is the kernel's own; any multiple of 16 up to it; anything up to it, at any address; rows of
/// tiled pages, which are in pieces of 16 bytes.
enum class Fit { exact, steps, ragged, tiled };

/// How much further apart than 16 bytes the pieces of tiled rows are, in units of 16 bytes; 0 where no key is.
template <int kRows>
struct Tiled {
  int spread[kRows];
  int tile, scale_bytes;
  template <class Codes>
  __device__ __forceinline__ int gap(int i, int d) const {
    return Codes::offset(d) / 16 * 16 * spread[i];
  }
};

/// Reads this lane's part of kTiles x 16 keys whose scales are in the operands; scales: where those of each key begin.
template <class Codes, Fit kFit, int kTiles, int kSteps>
__device__ __forceinline__ void load_scaled_keys(KeyTile<kTiles, kSteps>& tile,
                                                 const uint8_t* const (&rows)[2 * kTiles],
                                                 const uint8_t* const (&scales)[2 * kTiles], int dim,
                                                 const Tiled<2 * kTiles>& tiled) {
  const int c = threadIdx.x & 3;
  uint8_t bytes[2 * kTiles][kSteps / 2];
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    const uint8_t* own = rows[i] + Codes::offset(4 * c);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const bool there = kFit == Fit::exact || s * 16 < dim;
      Four f{0, 0};
      const uint8_t* at = kFit == Fit::tiled ? own + tiled.template gap<Codes>(i, s * 16) : own;
      if (there) f = kFit == Fit::ragged ? Codes::read_bytes(at, s * 16) : Codes::read(at, s * 16);
      tile.a[i / 2][s][i % 2] = f.low;
      int64_t scale = s / 2;
      if (kFit == Fit::tiled && tiled.spread[i] > 0) scale = scale_gap(tiled.tile, tiled.scale_bytes, scale);
      if (s % 2 == 0) bytes[i][s / 2] = there ? __ldg(scales[i] + scale) : 0;
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const Four f = Codes::operand({tile.a[i / 2][s][i % 2], 0}, Codes::scale_pair(bytes[i][s / 2]));
      tile.a[i / 2][s][i % 2] = f.low, tile.a[i / 2][s][2 + i % 2] = f.high;
    }
  }
}

/// Reads this lane's part of kTiles x 16 keys. rows: addresses of keys g, g + 8 (and g + 16, g + 24); where there is no
/// key, of anything that can be read. All reads are under way before the first is looked at. Returns a bit for each of
/// these keys: one of its codes is NaN.
template <class Codes, Fit kFit, int kTiles, int kSteps>
__device__ __forceinline__ uint32_t load_keys(KeyTile<kTiles, kSteps>& tile, const uint8_t* const (&rows)[2 * kTiles],
                                              int dim, const Tiled<2 * kTiles>& tiled) {
  const int c = threadIdx.x & 3;
  bool nans[2 * kTiles] = {};
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    const uint8_t* own = rows[i] + 4 * c * Codes::kBytes;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      Four f{0, 0};
      if constexpr (kFit == Fit::ragged) {
        if (s * 16 + 4 * c < dim) f = Codes::load_part(own, s * 16, dim - s * 16 - 4 * c, nans[i]);
      } else if (kFit == Fit::exact || s * 16 < dim) {
        f = Codes::read(kFit == Fit::tiled ? own + tiled.template gap<Codes>(i, s * 16) : own, s * 16);
      }
      tile.a[i / 2][s][i % 2] = f.low, tile.a[i / 2][s][2 + i % 2] = f.high;
    }
  }
  uint32_t bad = 0;
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
#pragma unroll
    for (int s = 0; s < kSteps && kFit != Fit::ragged; ++s) {
      const Four f = Codes::operand({tile.a[i / 2][s][i % 2], tile.a[i / 2][s][2 + i % 2]}, nans[i]);
      tile.a[i / 2][s][i % 2] = f.low, tile.a[i / 2][s][2 + i % 2] = f.high;
    }
    bad |= nans[i] ? 1u << i : 0u;
  }
  bad |= __shfl_xor_sync(~0u, bad, 1);
  return bad | __shfl_xor_sync(~0u, bad, 2);
}

/// Dots of the eight heads of one operand block with all keys of the tile. kExact: D is 16 * kSteps, nothing is asked.
template <bool kHalf, bool kExact, int kTiles, int kSteps>
__device__ __forceinline__ void dot_eight(const KeyTile<kTiles, kSteps>& tile, const uint4* q, int steps,
                                          float (&dots)[kTiles][4]) {
#pragma unroll
  for (int p = 0; p < kSteps / 2; ++p) {
    if (!kExact && 2 * p >= steps) break;
    const uint4 b = q[p * 32];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) mma_16816<kHalf>(dots[t], tile.a[t][2 * p], b.x, b.y);
    if (!kExact && 2 * p + 1 >= steps) break;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) mma_16816<kHalf>(dots[t], tile.a[t][2 * p + 1], b.z, b.w);
  }
}

/// Adds the two of these heads that this lane owns, `head` and the next; of all heads there are `heads`. A head that only
/// pads the last eight must not be added: its zeros times an infinite key are NaN. kWhole: none does.
template <bool kWhole, int kTiles>
__device__ __forceinline__ void add_eight(const float (&dots)[kTiles][4], float2 weights, int head, int heads,
                                          float (&sums)[kTiles][2]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (!kWhole && head + e >= heads) continue;
    const float w = e == 0 ? weights.x : weights.y;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      sums[t][0] = __fmaf_rn(w, relu(dots[t][e]), sums[t][0]);
      sums[t][1] = __fmaf_rn(w, relu(dots[t][2 + e]), sums[t][1]);
    }
  }
}
__device__ __forceinline__ float2 two_weights(const float* weights) {
  return *reinterpret_cast<const float2*>(weights);
}

/// Adds heads [8 * first, 8 * last) of one query to the sums of the keys g, g + 8 of each tile. q: operands of these heads,
/// [heads / 8][pairs of steps][lane]; weights of head 8 * first on; heads: how many there are in all. Two blocks of eight
/// are multiplied at a time, so that enough products are under way; they are added one after the other.
template <bool kHalf, bool kExact, int kTiles, int kSteps>
__device__ __forceinline__ void add_heads(const KeyTile<kTiles, kSteps>& tile, const uint4* q, const float* weights,
                                          int first, int last, int heads, int steps, float (&sums)[kTiles][2]) {
  const int lane = threadIdx.x & 31, c = lane & 3, step = (kExact ? kSteps / 2 : (steps + 1) / 2) * 32;
  q += lane, weights += 2 * c;
  int j = first;
  for (; j + 2 <= last; j += 2, q += 2 * step, weights += 16) {
    float a[kTiles][4] = {}, b[kTiles][4] = {};
    dot_eight<kHalf, kExact>(tile, q, steps, a);
    dot_eight<kHalf, kExact>(tile, q + step, steps, b);
    add_eight<false>(a, two_weights(weights), 8 * j + 2 * c, heads, sums);
    add_eight<false>(b, two_weights(weights + 8), 8 * j + 8 + 2 * c, heads, sums);
  }
  if (j == last) return;
  float a[kTiles][4] = {};
  dot_eight<kHalf, kExact>(tile, q, steps, a);
  add_eight<false>(a, two_weights(weights), 8 * j + 2 * c, heads, sums);
}

/// The same for an even number of eights, all of them whole, and D = 16 * kSteps: the dots of one eight are added while
/// those of the next are multiplied.
template <bool kHalf, int kTiles, int kSteps>
__device__ __forceinline__ void add_whole_heads(const KeyTile<kTiles, kSteps>& tile, const uint4* q,
                                                const float* weights, int eights, float (&sums)[kTiles][2]) {
  constexpr int kStep = kSteps / 2 * 32;
  q += threadIdx.x & 31, weights += 2 * (threadIdx.x & 3);
  float a[kTiles][4] = {};
  dot_eight<kHalf, true>(tile, q, kSteps, a);
#pragma unroll 1
  for (int j = 2; j < eights; j += 2, q += 2 * kStep, weights += 16) {
    float b[kTiles][4] = {};
    dot_eight<kHalf, true>(tile, q + kStep, kSteps, b);
    add_eight<true>(a, two_weights(weights), 0, 0, sums);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) a[t][0] = a[t][1] = a[t][2] = a[t][3] = 0.0f;
    dot_eight<kHalf, true>(tile, q + 2 * kStep, kSteps, a);
    add_eight<true>(b, two_weights(weights + 8), 0, 0, sums);
  }
  float b[kTiles][4] = {};
  dot_eight<kHalf, true>(tile, q + kStep, kSteps, b);
  add_eight<true>(a, two_weights(weights), 0, 0, sums);
  add_eight<true>(b, two_weights(weights + 8), 0, 0, sums);
}

/// The fixed tree over the four lanes that share a key.
__device__ __forceinline__ float join_heads(float sum) {
  sum = sum + __shfl_xor_sync(~0u, sum, 1);
  return sum + __shfl_xor_sync(~0u, sum, 2);
}

}  // namespace topkey::cuda
