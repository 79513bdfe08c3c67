// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What a row of pool_k or compress_k completes, and where it goes: the steps before and behind the join, by a warp or by a
// team of lanes for a vector in registers.
#pragma once
#include "cuda/device/join.cuh"
#include "cuda/device/pool_kinds.cuh"

namespace topkey::cuda {

/// Not inlined: rarely asked.
template <int kLanes, class Kind>
__device__ __noinline__ bool can_be_made(const Kind& kind, int64_t row, int64_t* sources) {
  return kind.wants(row) && kind.template collect<kLanes>(row, sources) > 0;
}

/// True if a later row that can be made has the same slot: of equal slots the last key row is stored, whole. Where a later
/// row has it, its tokens are looked for in `sources`, and *used is set. The table knows the last row that has the slot,
/// whether it can be made or not.
template <int kLanes, class Kind>
__device__ bool made_again(const Kind& kind, int64_t row, int64_t rows, int64_t slot, int64_t* sources, bool* used) {
  const auto slots_of = [&](int64_t i) { return integer(kind.c.slot_mapping, i); };
  const Claims& claims = kind.c.key_claims;
  if (claims.rows != nullptr && claims.is_last(slots_of, static_cast<uint32_t>(row), slot)) return false;
  for (int64_t base = row + 1; base < rows; base += kLanes) {
    const int64_t i = base + Together<kLanes>::lane();
    unsigned same = Together<kLanes>::ballot(i < rows && slots_of(i) == slot);
    for (; same != 0; same &= same - 1) {
      const int64_t later = base + __ffs(static_cast<int>(same)) - 1;
      *used = true;
      if (can_be_made<kLanes>(kind, later, sources)) return true;
    }
  }
  return false;
}

/// A key row that is to be made: whence and whither.
struct Making {
  int count;  ///< tokens; 0: nothing is made
  int64_t slot, position;
};
/// What `row` completes, if anything, by so many lanes.
template <int kLanes, class Kind>
__device__ __forceinline__ Making look_at(const Kind& kind, int64_t row, int64_t rows, int64_t* sources) {
  const Common& c = kind.c;
  Making m{0, integer(c.slot_mapping, row), 0};
  const int64_t slots = c.cache.pages.shape[0] * c.cache.page_size;
  if (m.slot < 0 || !kind.wants(row)) return m;
  m.count = m.slot < slots ? kind.template collect<kLanes>(row, sources) : 0;
  m.position = m.count > 0 ? kind.rope_position(row) : 0;
  if (Together<kLanes>::lane() == 0) {
    count(c.stats, kSkippedSlots, m.count == 0);
    const bool outside = m.count > 0 && c.recipe.rope.dim > 0 && m.position >= c.recipe.rope.cos_sin.shape[0];
    count(c.stats, kSkippedPages, outside);
  }
  if (m.count == 0) return m;
  bool used = false;
  if (made_again<kLanes>(kind, row, rows, m.slot, sources, &used)) {
    m.count = 0;
  } else if (used) {
    can_be_made<kLanes>(kind, row, sources);
  }
  return m;
}

/// The same for vectors in registers, each team of a warp with a row of its own; -1: none.
template <class Kind, int kEach>
__device__ __forceinline__ void make_vectors(const Kind& kind, int64_t row, int64_t rows, int64_t* sources) {
  const Common& c = kind.c;
  Making m{0, 0, 0};
  if (row >= 0) m = look_at<kTeamLanes>(kind, row, rows, sources);
  __syncwarp();
  if (!__any_sync(kWarp, m.count > 0)) return;
  Rotation<kEach> rotation;
  rotation.read(c.vectors, m.position);
  RawNorm<kEach> norm;
  norm.read(c.vectors);
  float x[kEach][4] = {};
  if (m.count > 0) join_vector<Kind::kNarrow, Kind::kAtOnce>(kind.found(row, m.count, sources), m.count, x);
  __syncwarp();
  transform_vector(c.vectors, norm, rotation, x);
  const int64_t number = quotient(m.slot, c.page), offset = m.slot - number * c.page.value;
  uint8_t* page = static_cast<uint8_t*>(c.cache.pages.data) + number * c.cache.pages.stride[0];
  quantize_vector(c.vectors, x, page + offset * c.layout.value_step,
                  page + c.layout.scale_base + offset * c.layout.scale_step, m.count > 0);
  __syncwarp();
}

}  // namespace topkey::cuda
