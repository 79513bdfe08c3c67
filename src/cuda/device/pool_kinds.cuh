// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What pool_k and compress_k are made of: the tokens of a pool or window, each found by request and position in the rows
// of the call or in the state.
#pragma once
#include "cuda/device/claims.cuh"
#include "cuda/device/divisor.cuh"
#include "cuda/device/vector.cuh"
#include "topkey/pool.h"

namespace topkey::cuda {

/// Tokens of a pool or window, at most: a warp's list of them lies in shared memory.
constexpr int kMaxTokens = 1024;

/// The rows of a call as tokens. Rows of a request are adjacent.
struct Batch {
  Rows rows;
  Tensor positions;

  __device__ int64_t request(int64_t row) const { return window_of(rows, row, 0).request; }
  /// -1: a padding row, or no position that a sequence can have.
  __device__ int64_t position(int64_t row) const {
    constexpr int64_t kLast = int64_t{1} << 48;
    const int64_t position = integer(positions, row);
    return position < 0 || position > kLast || request(row) < 0 ? -1 : position;
  }
};

/// A row whose pool or window is looked for, by so many lanes: its request, and which rows before it belong to the same.
template <int kLanes>
struct Seeker {
  using Lanes = Together<kLanes>;

  const Batch& batch;
  int64_t row, request, first;

  __device__ Seeker(const Batch& b, int64_t r) : batch(b), row(r), request(b.request(r)), first(0) {
    if (request < 0 || b.rows.request.data != nullptr) return;
    first = b.rows.q_indptr.data != nullptr ? integer(b.rows.q_indptr, request)
                                            : request * (b.rows.next_n > 1 ? b.rows.next_n : 1);
  }
  __device__ bool own(int64_t r) const {
    if (r < 0 || r < first) return false;
    return batch.rows.request.data == nullptr || integer(batch.rows.request, r) == request;
  }
  /// The nearest row at or before `from` that holds this position, -1 where none does. By all lanes.
  __device__ int64_t find(int64_t from, int64_t wanted) const {
    for (int64_t base = from; base >= 0; base -= kLanes) {
      const int64_t r = base - Lanes::lane();
      const bool same = own(r);
      const unsigned others = Lanes::ballot(!same);
      const unsigned hits = Lanes::ballot(same && integer(batch.positions, r) == wanted);
      const int end = others != 0 ? __ffs(static_cast<int>(others)) - 1 : kLanes;
      const int hit = hits != 0 ? __ffs(static_cast<int>(hits)) - 1 : kLanes;
      if (hit < end) return base - hit;
      if (end < kLanes) return -1;
    }
    return -1;
  }
  /// For the `count` positions that end with `last`, ascending: sources[j] = its row, or ~entry(position) where no row
  /// holds it. False where entry gives -1 for one of them. By all lanes.
  template <class Entry>
  __device__ bool collect(int64_t last, int count, int64_t* sources, const Entry& entry) const {
    Lanes::sync();  // the list before has been read
    int found = 0;  // consecutive positions stand in consecutive rows nearly always
    for (bool all = true; all && found < count;) {
      const int i = found + Lanes::lane();
      const int64_t r = row - i;
      const bool here = i < count && own(r) && integer(batch.positions, r) == last - i;
      const unsigned misses = Lanes::ballot(!here);
      const int hits = misses != 0 ? __ffs(static_cast<int>(misses)) - 1 : kLanes;
      if (Lanes::lane() < hits) sources[count - 1 - i] = r;
      found += hits;
      all = hits == kLanes;
    }
    const bool more = found < count && own(row - found);
    for (int i = found; i < count; ++i) {
      int64_t source = more ? find(row - found, last - i) : -1;
      if (source < 0) {
        const int64_t at = entry(last - i);
        if (at < 0) return false;
        source = ~at;
      }
      if (Lanes::lane() == 0) sources[count - 1 - i] = source;
    }
    Lanes::sync();
    return true;
  }
};

/// What both operations have.
struct Common {
  Batch batch;
  Tensor slot_mapping, state_slots;
  KeyCache cache;
  PageLayout layout;
  Recipe recipe;
  int64_t entries;  ///< of the state
  int tokens;       ///< of a pool or window
  int64_t scratch;  ///< bytes a warp, for tiled pages
  uint64_t* stats;
  VectorRecipe vectors;  ///< where `vector_each` is not 0: so many numbers a lane has of a vector in registers
  int vector_each;
  Claims key_claims, state_claims;  ///< of cache slots and state slots
  int rows_each;                    ///< neighbouring rows that a warp takes at a time, 1 to 32
  Divisor page;                     ///< keys of one; in vectors' kernels

  /// Reads what is soon asked of a row, all at once, so that memory is waited for once.
  __device__ __forceinline__ void fetch(int64_t row) const {
    int64_t all = integer(slot_mapping, row) ^ integer(batch.positions, row);
    if (batch.rows.request.data != nullptr) all ^= integer(batch.rows.request, row);
    if (state_slots.data != nullptr) all ^= integer(state_slots, row);
    wait_for(all);
  }
  /// State slot of a real row; -1: none.
  __device__ int64_t state_slot(int64_t row) const {
    return state_slots.data == nullptr || batch.position(row) < 0 ? -1 : integer(state_slots, row);
  }
};

/// a / b of a >= 0.
__device__ __forceinline__ int64_t quotient(int64_t a, const Divisor& b) {
  return a >> 32 == 0 ? b.quotient(static_cast<uint32_t>(a)) : quotient(a, int64_t{b.value});
}

struct Pools {
  Common c;
  Tensor k, gate, ape, tail;
  Divisor pool, ring;  ///< tokens of a pool, entries of a request's tail
  bool fours;          ///< four numbers at a time may be read and written

  static constexpr bool kNarrow = true;  ///< a joined vector is rounded to bf16
  static constexpr int kAtOnce = 4;      ///< tokens that are read at once
  __device__ bool wants(int64_t) const { return true; }
  /// Number of tokens found, 0 where one is missing or the row completes nothing.
  template <int kLanes>
  __device__ int collect(int64_t row, int64_t* sources) const {
    const int64_t last = c.batch.position(row);
    if (last < 0 || last + 1 - quotient(last + 1, pool) * c.tokens != 0) return 0;
    const int64_t own = c.state_slot(row);
    const auto entry = [&](int64_t position) {
      if (own < 0 || own >= c.entries) return int64_t{-1};
      return (quotient(own, ring) - quotient(position, ring)) * ring.value + position;
    };
    return Seeker<kLanes>(c.batch, row).collect(last, c.tokens, sources, entry) ? c.tokens : 0;
  }
  __device__ int64_t rope_position(int64_t) const { return 0; }
  __device__ uint16_t* tail_at(int64_t entry, int half) const {
    const int64_t block = quotient(entry, ring);
    return element<uint16_t>(tail, block, half, entry - block * ring.value);
  }
  struct Found {
    const Pools& p;
    const int64_t* sources;

    __device__ const uint16_t* part(int j, int half) const {
      const int64_t source = sources[j];
      return source < 0 ? p.tail_at(~source, half) : element<uint16_t>(half == 0 ? p.k : p.gate, source);
    }
    /// This lane's numbers of token j, as they are in memory.
    template <int kEach>
    struct Raw {
      RawLine<kEach> k, gate, ape;
      __device__ __forceinline__ float value(int j, int e) const { return k.four[j].value(DType::bf16, e); }
      __device__ __forceinline__ float score(int j, int e) const {
        return gate.four[j].value(DType::bf16, e) + ape.four[j].value(DType::f32, e);
      }
    };
    template <int kEach>
    __device__ __forceinline__ void read(int j, Raw<kEach>& raw) const {
      const int64_t source = sources[j];
      const uint16_t *k = nullptr, *gate = nullptr;
      if (source < 0) {
        k = p.tail_at(~source, 0), gate = k + p.tail.stride[1];
      } else {
        k = element<uint16_t>(p.k, source), gate = element<uint16_t>(p.gate, source);
      }
      raw.k.read(Lines{reinterpret_cast<const uint8_t*>(k), 0, DType::bf16, p.fours}, 0);
      raw.gate.read(Lines{reinterpret_cast<const uint8_t*>(gate), 0, DType::bf16, p.fours}, 0);
      raw.ape.read(Lines{reinterpret_cast<const uint8_t*>(element<float>(p.ape, j)), 0, DType::f32, p.fours}, 0);
    }
    __device__ float value(int j, int d) const { return bf16_to_float(part(j, 0)[d]); }
    __device__ float score(int j, int d) const { return bf16_to_float(part(j, 1)[d]) + *element<float>(p.ape, j, d); }
  };
  __device__ Found found(int64_t, int, const int64_t* sources) const { return {*this, sources}; }
  template <int kLanes>
  __device__ void leave(int64_t row, int64_t entry) const {
    const uint16_t* from[2] = {element<uint16_t>(k, row), element<uint16_t>(gate, row)};
    uint16_t* to[2] = {tail_at(entry, 0), tail_at(entry, 1)};
    for (int d = 4 * Together<kLanes>::lane(); d < c.recipe.head_dim; d += 4 * kLanes) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int left = c.recipe.head_dim - d;
        if (fours) {
          *reinterpret_cast<uint2*>(to[half] + d) = *reinterpret_cast<const uint2*>(from[half] + d);
        } else {
          for (int e = 0; e < 4 && e < left; ++e) to[half][d + e] = from[half][d + e];
        }
      }
    }
  }
};

struct Windows {
  Common c;
  Tensor kv, score, ape, state, state_table;
  int width, ratio;

  static constexpr bool kNarrow = false;
  static constexpr int kAtOnce = 1;
  __device__ bool wants(int64_t row) const { return integer(c.state_slots, row) >= 0; }
  template <int kLanes>
  __device__ int collect(int64_t row, int64_t* sources) const {
    const int64_t last = c.batch.position(row), slot = integer(c.state_slots, row), block = state.shape[1];
    if (last < 0 || (last + 1) % ratio != 0 || slot >= c.entries) return 0;
    const int count = last + 1 < c.tokens ? static_cast<int>(last + 1) : c.tokens;  // positions before 0 take no part
    const Seeker<kLanes> seeker(c.batch, row);
    const auto entry = [&](int64_t position) {
      if (state_table.data == nullptr) return slot / block * block + position % block;
      return slot_of(state_table, seeker.request, block, position, c.entries - 1);
    };
    return seeker.collect(last, count, sources, entry) ? count : 0;
  }
  __device__ int64_t rope_position(int64_t row) const { return c.batch.position(row) / ratio * ratio; }
  __device__ float* state_at(int64_t entry) const {
    return element<float>(state, entry / state.shape[1], entry % state.shape[1]);
  }
  /// Score of a row of the call with its ape, as the state keeps it.
  __device__ float score_of(int64_t row, int64_t position, int i) const {
    return real(score, row, i) + *element<float>(ape, position % ratio, i);
  }
  struct Found {
    const Windows& w;
    const int64_t* sources;
    int64_t first;  ///< position of token 0
    int missing;    ///< tokens of the window that lie before position 0

    /// This lane's numbers of token j.
    template <int kEach>
    struct Raw {
      float values[kEach][4], scores[kEach][4];
      __device__ __forceinline__ float value(int j, int e) const { return values[j][e]; }
      __device__ __forceinline__ float score(int j, int e) const { return scores[j][e]; }
    };
    template <int kEach>
    __device__ __forceinline__ void read(int j, Raw<kEach>& raw) const {
#pragma unroll
      for (int i = 0; i < 4 * kEach; ++i) {
        const int d = number_at(i / 4, i % 4);
        raw.values[i / 4][i % 4] = value(j, d), raw.scores[i / 4][i % 4] = score(j, d);
      }
    }
    /// Where the channels of token j begin: of an older window its first, of the younger its last.
    __device__ int channel(int j) const { return (missing + j) / w.ratio * w.c.recipe.head_dim; }
    __device__ float value(int j, int d) const {
      const int64_t source = sources[j];
      const int i = channel(j) + d;
      return source < 0 ? w.state_at(~source)[i] : real(w.kv, source, i);
    }
    __device__ float score(int j, int d) const {
      const int64_t source = sources[j];
      const int i = channel(j) + d;
      return source < 0 ? w.state_at(~source)[w.width + i] : w.score_of(source, first + j, i);
    }
  };
  __device__ Found found(int64_t row, int count, const int64_t* sources) const {
    return {*this, sources, c.batch.position(row) - count + 1, c.tokens - count};
  }
  template <int kLanes>
  __device__ void leave(int64_t row, int64_t entry) const {
    float* to = state_at(entry);
    const int64_t position = c.batch.position(row);
    for (int i = Together<kLanes>::lane(); i < width; i += kLanes) {
      to[i] = real(kv, row, i);
      to[width + i] = score_of(row, position, i);
    }
  }
};

}  // namespace topkey::cuda
