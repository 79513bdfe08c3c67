// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Where the k-th best of normal scores would be: a guess for the bounds of bins, which are right wherever they lie.
#pragma once

namespace topkey::cuda {

/// What a share p of normal numbers exceeds, 0 < p < 1, in deviations from the mean. A well-known rational approximation,
/// good to 3e-3.
__device__ inline float upper_quantile(float p) {
  const float square = -2.0f * __logf(p < 0.5f ? p : 1.0f - p), t = square * rsqrtf(square);
  const float upper = t - __fdividef(2.30753f + 0.27061f * t, 1.0f + t * (0.99229f + t * 0.04481f));
  return p < 0.5f ? upper : -upper;
}

}  // namespace topkey::cuda
