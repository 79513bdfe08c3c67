// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// "Exact inputs" (docs/numerics.md): values so small that every score arithmetic of every backend is exact, so that
// all backends must agree bit for bit, scores and indices. q and k codes are integers from -4 to 4 (they exist in
// e4m3, e2m1, bf16, f16 and int8; block scales are 1), D <= 128, H <= 128, weights and key scales are signed powers
// of two between 2^-3 and 2^3: a score is then a multiple of 2^-3 (2^-6 with the key scale) below 2^24 of them.
#pragma once
#include <cstdint>

#include "support/patterns.h"

namespace topkey::support {

inline constexpr int kExactMaxHeads = 128, kExactMaxDim = 128;

/// An integer from -4 to 4.
inline float exact_code(Random& random) { return static_cast<float>(random.between(-4, 4)); }
/// One of +-2^-3 ... +-2^3.
inline float exact_scale(Random& random) {
  static constexpr float kPowers[] = {0.125F, 0.25F, 0.5F, 1.F, 2.F, 4.F, 8.F};
  const float magnitude = kPowers[random.below(7)];
  return random.chance(0.5) ? -magnitude : magnitude;
}
/// True where the geometry keeps the promise above.
inline bool exact_geometry(int64_t heads, int64_t head_dim) {
  return heads <= kExactMaxHeads && head_dim <= kExactMaxDim;
}

}  // namespace topkey::support
