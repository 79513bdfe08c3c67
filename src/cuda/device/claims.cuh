// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Which row of a call has a slot last, where many rows are stored: an open hash table of row numbers in the workspace.
#pragma once
#include <cstdint>

namespace topkey::cuda {

struct Claims {
  uint32_t* rows;  ///< row number + 1, 0 = free; null: there is no table
  uint32_t mask;   ///< places of it - 1

  /// Eight neighbouring slots share a sector of memory: rows of a sequence lie side by side nearly always.
  __device__ __forceinline__ uint32_t place(int64_t slot) const {
    const uint64_t spread = static_cast<uint64_t>(slot >> 3) * 0x9E3779B97F4A7C15u;
    return (static_cast<uint32_t>(spread >> 32) << 3 | static_cast<uint32_t>(slot & 7)) & mask;
  }
  /// Where else a slot may be: an odd step, so that all places come, and the same of another sector first.
  __device__ __forceinline__ uint32_t next(uint32_t at) const { return (at + 9) & mask; }
  /// slots(row): of a row that has claimed one.
  template <class Slots>
  __device__ void claim(const Slots& slots, uint32_t row, int64_t slot) const {
    for (uint32_t at = place(slot);; at = next(at)) {
      const uint32_t held = atomicCAS(rows + at, 0u, row + 1);
      if (held == 0) return;
      if (slots(held - 1) != slot) continue;
      atomicMax(rows + at, row + 1);
      return;
    }
  }
  /// Of a row that has claimed the slot, in a launch before.
  template <class Slots>
  __device__ bool is_last(const Slots& slots, uint32_t row, int64_t slot) const {
    for (uint32_t at = place(slot);; at = next(at)) {
      const uint32_t held = rows[at];
      if (held == row + 1) return true;
      if (held == 0 || slots(held - 1) == slot) return false;
    }
  }
};

}  // namespace topkey::cuda
