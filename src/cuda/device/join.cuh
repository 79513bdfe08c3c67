// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Several tokens to one vector, channel by channel: a softmax of their scores over their values, by one warp. f32, each
// step rounded once, tokens in the order given; exp by the formula of backend cpu, so the bits are its own.
#pragma once
#include "cuda/device/vector.cuh"

namespace topkey::cuda {

/// exp(x) for x <= 0 (NaN stays NaN): x = n ln 2 + r with |r| <= ln 2 / 2, Taylor's series of exp(r) to r^7, then times 2^n
/// in two steps, 2^(n + 64) and 2^-64, of which only the second may round (subnormals). Within 2 ulp. No FMA.
__device__ inline float exp_of_negative(float x) {
  x = max_nan(x, -104.0f);  // exp(-104) < 2^-150, which rounds to 0
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  // ln 2 in two parts; the first has 10 bits, so that its products with n are exact.
  const float high = x - n * 0.693359375f;
  const float r = high - n * -2.12194440e-4f;
  float y = 1.0f / 5040.0f;
  y = y * r + 1.0f / 720.0f;
  y = y * r + 1.0f / 120.0f;
  y = y * r + 1.0f / 24.0f;
  y = y * r + 1.0f / 6.0f;
  y = y * r + 0.5f;
  y = y * r * r + r;
  y = y + 1.0f;
  // The other bits of `shifted` are shifted out.
  const float power = __uint_as_float((__float_as_uint(shifted) << 23) + ((127u + 64u) << 23));
  return y * power * 0x1p-64f;
}

/// count >= 1 tokens to x[dim]; value(j, d) and score(j, d) are those of token j.
template <class Tokens>
__device__ void join(const Tokens& tokens, int count, int dim, float* x) {
  for (int d = lane_id(); d < dim; d += 32) {
    float most = tokens.score(0, d);
    for (int j = 1; j < count; ++j) {
      const float score = tokens.score(j, d);
      most = score > most ? score : most;
    }
    float sum = 0.0f, weights = 0.0f;
    for (int j = 0; j < count; ++j) {
      const float p = exp_of_negative(tokens.score(j, d) - most);
      sum = sum + tokens.value(j, d) * p;
      weights = weights + p;
    }
    x[d] = sum / weights;
  }
  __syncwarp();
}

/// The same for a vector in a team's registers; kNarrow: rounded to bf16. read(j, raw) brings a token's numbers of this lane.
/// Of up to kAtOnce tokens all are under way at once, and read once.
template <bool kNarrow, int kAtOnce, class Tokens, int kEach>
__device__ __forceinline__ void join_vector(const Tokens& tokens, int count, float (&x)[kEach][4]) {
  using Raw = typename Tokens::template Raw<kEach>;
  float sum[kEach][4], weights[kEach][4];
  if (count <= kAtOnce) {
    Raw raw[kAtOnce];
#pragma unroll
    for (int t = 0; t < kAtOnce; ++t) tokens.read(t < count ? t : count - 1, raw[t]);
#pragma unroll
    for (int i = 0; i < 4 * kEach; ++i) {
      float most = raw[0].score(i / 4, i % 4), s = 0.0f, w = 0.0f;
#pragma unroll
      for (int t = 1; t < kAtOnce; ++t) most = raw[t].score(i / 4, i % 4) > most ? raw[t].score(i / 4, i % 4) : most;
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) {
        const float p = exp_of_negative(raw[t].score(i / 4, i % 4) - most);
        const float product = raw[t].value(i / 4, i % 4) * p;
        if (t < count) s = s + product, w = w + p;
      }
      sum[i / 4][i % 4] = s, weights[i / 4][i % 4] = w;
    }
  } else {
    float most[kEach][4];
    Raw raw;
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      tokens.read(j, raw);
#pragma unroll
      for (int i = 0; i < 4 * kEach; ++i) {
        const float score = raw.score(i / 4, i % 4), held = most[i / 4][i % 4];
        most[i / 4][i % 4] = j == 0 || score > held ? score : held;
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * kEach; ++i) sum[i / 4][i % 4] = weights[i / 4][i % 4] = 0.0f;
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      tokens.read(j, raw);
#pragma unroll
      for (int i = 0; i < 4 * kEach; ++i) {
        const float p = exp_of_negative(raw.score(i / 4, i % 4) - most[i / 4][i % 4]);
        sum[i / 4][i % 4] = sum[i / 4][i % 4] + raw.value(i / 4, i % 4) * p;
        weights[i / 4][i % 4] = weights[i / 4][i % 4] + p;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[j][e] = sum[j][e] / weights[j][e];
    if (kNarrow) to_input(DType::bf16, x[j]);
  }
}

}  // namespace topkey::cuda
