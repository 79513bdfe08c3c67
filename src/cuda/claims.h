// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The workspace of the producers that scatter rows: where they are few, each looks through the slots behind its own for
// an equal one; else slots are claimed in a table first (device/claims.cuh), so many rows at a time.
#pragma once
#include <algorithm>
#include <cstddef>

#include "cuda/device/claims.cuh"
#include "cuda/launch.h"

namespace topkey::cuda {

constexpr int64_t kSearchedRows = 512;
constexpr int64_t kClaimedRows = 4 << 20;

inline int64_t claim_places(int64_t rows) {
  int64_t places = 1;
  while (places < 2 * std::min(rows, kClaimedRows)) places *= 2;
  return places;
}
inline size_t claim_bytes(int64_t rows) {
  return rows <= kSearchedRows ? 0 : static_cast<size_t>(claim_places(rows)) * sizeof(uint32_t);
}
/// A table, number `which` in the workspace, in which every row of `slots` has claimed its own in [0, count); none for few
/// rows, nor for more than it can hold.
Claims claim_slots(const Tensor& slots, int64_t count, int64_t rows, int which, void* workspace, const Launch& launch);

}  // namespace topkey::cuda
