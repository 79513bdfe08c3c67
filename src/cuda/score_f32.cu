// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `score` by plain FMA, arithmetic f32: the bits of backend cpu. A thread owns a key; per head one chain over d,
// d ascending; then one chain over heads, h ascending. For f32 and q8_0 keys, pairings of unlike dtypes, and any D.
#include "cuda/check.h"
#include "cuda/device/convert.cuh"
#include "cuda/score.h"
#include "cuda/stages.h"

namespace topkey::cuda {
namespace {

constexpr int kHeads = 4;  ///< chains at a time

template <KeyFormat format>
__device__ __forceinline__ float key_value(const uint8_t* row, int d) {
  if constexpr (format == KeyFormat::q8_0) {
    const uint8_t* block = row + d / 32 * 34;
    const float scale = f16_to_float(static_cast<uint16_t>(block[0] | block[1] << 8));
    return scale * static_cast<float>(static_cast<int8_t>(block[2 + d % 32]));  // exact
  } else if constexpr (format == KeyFormat::f32) {
    return __uint_as_float(load_word(row + 4 * d, false));
  } else {
    const uint16_t h = static_cast<uint16_t>(row[2 * d] | row[2 * d + 1] << 8);
    return format == KeyFormat::bf16 ? bf16_to_float(h) : f16_to_float(h);
  }
}

template <KeyFormat format>
__device__ float score_key(const ScoreJob& job, int64_t row, const uint8_t* key) {
  const Tensor& q = job.p.q.values;
  const int dim = job.p.keys.head_dim;
  float sum = 0.0f;
  for (int h = 0; h < job.heads; h += kHeads) {
    float dots[kHeads] = {};
    for (int d = 0; d < dim; ++d) {
      const float k = key_value<format>(key, d);
#pragma unroll
      for (int e = 0; e < kHeads; ++e) {
        if (h + e < job.heads) dots[e] = __fmaf_rn(real(q, row, h + e, d), k, dots[e]);
      }
    }
#pragma unroll
    for (int e = 0; e < kHeads; ++e) {
      if (h + e < job.heads) sum = __fmaf_rn(real(job.p.q.weights, row, h + e), relu(dots[e]), sum);
    }
  }
  return sum;
}

template <KeyFormat format>
__global__ __launch_bounds__(128) void score_plain(const __grid_constant__ ScoreJob job) {
  Share share = share_of(job);
  for (; share.next < share.end; ++share.next) {
    while (job.p.work[share.tile + 1] <= share.next) ++share.tile;
    // A tile is one row here.
    const RowFact f = job.p.facts[share.tile];
    const TileSpan span = span_of(&f, 1, job.p.ids != nullptr, job.group.first_key, job.group.chunk, job.piece);
    const Piece piece = piece_of(span, &f, 1, job.group.first_key, job.group.chunk, job.piece,
                                 static_cast<uint32_t>(share.next - job.p.work[share.tile]));
    const OwnKey key = own_key(job, span, &f, piece, share.tile, threadIdx.x);
    const int64_t index = index_in(job, span, f, piece, key, threadIdx.x);
    if (index < 0) continue;
    float sum = 0.0f;
    if (f.scored && key.bytes.values != nullptr)
      sum = score_key<format>(job, job.group.first_row + share.tile, key.bytes.values);
    put_score(job, share.tile, key, index, sum);
  }
}

const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&score_plain<KeyFormat::f32>), 0},
                                {reinterpret_cast<const void*>(&score_plain<KeyFormat::bf16>), 0},
                                {reinterpret_cast<const void*>(&score_plain<KeyFormat::f16>), 0},
                                {reinterpret_cast<const void*>(&score_plain<KeyFormat::q8_0>), 0}};

}  // namespace

KernelList score_f32_kernels() { return {kEntries, 4}; }

void score_f32(const ScoreJob& job, uint32_t blocks, const Launch& launch) {
  switch (job.p.keys.format) {
    case KeyFormat::bf16: score_plain<KeyFormat::bf16><<<blocks, 128, 0, launch.stream()>>>(job); break;
    case KeyFormat::f16: score_plain<KeyFormat::f16><<<blocks, 128, 0, launch.stream()>>>(job); break;
    case KeyFormat::q8_0: score_plain<KeyFormat::q8_0><<<blocks, 128, 0, launch.stream()>>>(job); break;
    default: score_plain<KeyFormat::f32><<<blocks, 128, 0, launch.stream()>>>(job);
  }
  TOPKEY_CUDA_LAUNCHED("score_plain");
}

}  // namespace topkey::cuda
