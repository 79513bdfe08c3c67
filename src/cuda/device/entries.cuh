// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What the selection selects from, each as numbers of the order by index, indices ascending with position: given scores,
// a search's kept scores behind the winners of the chunks before, winners of parts, and the candidate blocks of any.
#pragma once
#include "cuda/device/facts.cuh"
#include "cuda/device/lists.cuh"
#include "cuda/device/order.cuh"

namespace topkey::cuda {

/// Where the keys of a row and a chunk stand.
struct RowKeys {
  const RowFact* f;
  const int32_t* ids;
  uint32_t id_block, first_key;
  int32_t force_first, force_last;

  __device__ int64_t position(uint32_t i) const { return position_of(*f, ids, id_block, first_key + i); }
  __device__ bool forces() const { return (force_first | force_last) != 0; }
  __device__ bool forced(int64_t position) const {
    return distance_of(*f, position) < force_first || f->whole_end - global_of(f->shard, position) <= force_last;
  }
};

/// Given scores [R, N] and a mask.
struct GivenScores {
  RowKeys keys;
  Tensor scores, mask;
  int64_t row;

  __device__ int64_t position(uint32_t i) const { return keys.position(i); }
  __device__ bool live(int64_t at, float* addend) const { return !masked(mask, row, at, addend); }
  __device__ float score(uint32_t i) const {
    float addend;
    const int64_t at = position(i);
    live(at, &addend);
    const float given = real(scores, row, at);
    return canonical(mask.data != nullptr ? given + addend : given);
  }
  __device__ uint32_t raw(uint32_t i) const {
    float addend;
    return live(position(i), &addend) ? __float_as_uint(score(i)) : kNotLiveScore;
  }
};

/// Scores that lie in order, behind the winners so far: a chunk of a search's, or a row of given ones.
struct KeptScores {
  RowKeys keys;
  const float* scores;
  const uint32_t* list_values;
  const int32_t* list_positions;
  uint32_t list;
  bool given;  ///< not canonical yet, and all live

  __device__ int64_t position(uint32_t i) const { return i < list ? list_positions[i] : keys.position(i - list); }
  __device__ uint32_t raw(uint32_t i) const {
    // One read, no branch: many of them are under way at a time.
    const uint32_t* at = i < list ? list_values + i : reinterpret_cast<const uint32_t*>(scores) + (i - list);
    const uint32_t bits = __ldg(at);
    return given ? __float_as_uint(canonical(__uint_as_float(bits))) : bits;
  }
  __device__ float score(uint32_t i) const { return __uint_as_float(raw(i)); }
};

/// Winners of a long row's parts, one part behind the other: part p's are at [p * length, p * length + its entries).
struct PartScores {
  RowKeys keys;
  const uint32_t* values;
  const int32_t* positions;
  const PartState* states;
  uint32_t length;

  __device__ int64_t position(uint32_t i) const { return positions[i]; }
  __device__ uint32_t raw(uint32_t i) const {
    const uint32_t part = i / length, value = __ldg(values + i);
    return i - part * length < __ldg(&states[part].entries) ? value : kNotLiveScore;
  }
  __device__ float score(uint32_t i) const { return __uint_as_float(raw(i)); }
};

/// Keys of any of them as entries of the selection.
template <class Scores>
struct Entries {
  static constexpr int kBatch = 8, kEach = 8;
  Scores s;

  __device__ uint32_t raw(uint32_t i) const { return s.raw(i); }
  __device__ uint32_t key(uint32_t i) const { return key_of_raw(raw(i), i); }
  __device__ uint32_t key_of_raw(uint32_t raw, uint32_t i) const {
    if (raw == kNotLiveScore) return kNotLive;
    if (s.keys.forces() && s.keys.forced(s.position(i))) return kForcedKey;
    return key_of(__uint_as_float(raw));
  }
};

/// The candidate blocks that the same keys lie in. Index i: first the blocks of the list, then the block that the chunk
/// before ended in, then one for each key of this chunk (only the first of its block counts), then the newest block.
template <class Scores>
struct Blocks {
  static constexpr int kBatch = 1, kEach = 1;
  Scores s;    ///< of this chunk alone
  uint32_t n;  ///< keys of it
  uint32_t block_size;
  const uint32_t* list_values;
  const int32_t* list_ids;
  uint32_t list;
  int32_t open_block;  ///< -1 = none
  uint32_t open_key;
  bool last;  ///< the row ends with this chunk

  __device__ int32_t block(uint32_t i) const {
    return static_cast<int32_t>(static_cast<uint32_t>(distance_of(*s.keys.f, s.position(i))) / block_size);
  }
  __device__ int32_t newest() const {
    const int64_t size = s.keys.f->whole_end - s.keys.f->whole_start;
    return static_cast<int32_t>((size - 1) / block_size);
  }
  __device__ uint32_t plain_key(uint32_t i) const {
    const uint32_t raw = s.raw(i);
    return raw == kNotLiveScore ? kNotLive : key_of(__uint_as_float(raw));
  }
  __device__ uint32_t size() const { return list + 1 + n + 1; }
  __device__ uint32_t raw(uint32_t i) const { return key(i); }
  __device__ uint32_t key_of_raw(uint32_t raw, uint32_t) const { return raw; }
  __device__ int32_t id(uint32_t i) const {
    if (i < list) return list_ids[i];
    if (i == list) return open_block;
    return i - list - 1 < n ? block(i - list - 1) : newest();
  }
  __device__ uint32_t key(uint32_t i) const {
    if (i < list) return list_values[i];
    if (i == list) return open_block >= 0 && (n == 0 || block(0) != open_block) ? open_key : kNotLive;
    i -= list + 1;
    if (i == n) return last && (n == 0 || block(n - 1) != newest()) ? kForcedKey : kNotLive;
    const int32_t own = block(i);
    if (i > 0 && block(i - 1) == own) return kNotLive;
    const uint32_t best = best_from(i);
    if (i < n) return best;
    return !last ? kNotLive : own == newest() ? kForcedKey : best;  // a block that may go on waits for the next chunk
  }
  /// Best key of the block whose first key of this chunk is i, which becomes the first behind it.
  __device__ uint32_t best_from(uint32_t& i) const {
    const int32_t own = block(i);
    uint32_t best = i == 0 && own == open_block ? open_key : kNotLive;
    for (; i < n && block(i) == own; ++i) {
      const uint32_t other = plain_key(i);
      best = other > best ? other : best;
    }
    return best;
  }
  /// Score of the published block that stands at index i; NaN without a live key.
  __device__ float score(uint32_t i) const {
    uint32_t best = kNotLive;
    if (i <= list) {
      best = i < list ? list_values[i] : open_key;
    } else if (i - list - 1 < n) {
      uint32_t first = i - list - 1;
      best = best_from(first);
    }
    return best == kNotLive ? __uint_as_float(kCanonicalNan) : score_of_key(best);
  }
};

}  // namespace topkey::cuda
