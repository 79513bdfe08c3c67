// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Several tokens to one vector, channel by channel: a softmax of their scores over their values, by one warp. f32, each
// step rounded once, tokens in the order given; exp by the formula of backend cpu, so the bits are its own.
#pragma once
#include "cuda/device/vector.cuh"

namespace topkey::cuda {

/// exp(x) for x <= 0 (NaN stays NaN): x = n ln 2 + r with |r| <= ln 2 / 2, Taylor's series of exp(r) to r^7, then times 2^n
/// in two steps, of which only the second may round (subnormals). Within 2 ulp. No FMA.
__device__ inline float exp_of_negative(float x) {
  x = x < -104.0f ? -104.0f : x;  // exp(-104) < 2^-150, which rounds to 0
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
  const int exponent = static_cast<int>(__float_as_uint(shifted) - 0x4B400000u), half = exponent >> 1;
  const auto power = [](int e) { return __uint_as_float(static_cast<uint32_t>(e + 127) << 23); };
  return y * power(half) * power(exponent - half);
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

/// The same for a vector in a warp's registers; kNarrow: rounded to bf16. lane(j, value, score) gives this lane's numbers.
template <bool kNarrow, class Tokens, int kEach>
__device__ __forceinline__ void join_lanes(const Tokens& tokens, int count, float (&x)[kEach]) {
  float most[kEach], sum[kEach] = {}, weights[kEach] = {}, value[kEach], score[kEach];
  tokens.lane(0, value, most);
#pragma unroll 1
  for (int j = 1; j < count; ++j) {
    tokens.lane(j, value, score);
#pragma unroll
    for (int e = 0; e < kEach; ++e) most[e] = score[e] > most[e] ? score[e] : most[e];
  }
#pragma unroll 1
  for (int j = 0; j < count; ++j) {
    tokens.lane(j, value, score);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const float p = exp_of_negative(score[e] - most[e]);
      sum[e] = sum[e] + value[e] * p;
      weights[e] = weights[e] + p;
    }
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    x[e] = sum[e] / weights[e];
    if (kNarrow) x[e] = to_bf16(x[e]);
  }
}

}  // namespace topkey::cuda
