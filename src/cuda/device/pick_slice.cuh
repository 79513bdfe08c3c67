// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What one thread block of a cluster has of a row of scores (pick_sm90.cu): its slice of them in shared memory, each
// thread at most 32 scores side by side; and the bins that speak of where a cut lies.
#pragma once
#include "cuda/device/order.cuh"
#include "cuda/device/ptx_sm90.cuh"
#include "cuda/device/quantile.cuh"
#include "cuda/device/warp.cuh"

namespace topkey::cuda {

constexpr int kPickThreads = 512, kPickWarps = kPickThreads / 32;
/// Scores of a thread at most, a bit of a word each: 8 vectors of 4.
constexpr int kPickVectors = 8;
constexpr int kPickBins = kPickThreads;  ///< a thread adds up one
constexpr int kPickCandidates = 256;     ///< keys of the cut's bin that blocks tell each other
constexpr int kMaxCluster = 16;

struct PickFound {
  uint32_t bin, above, inside;  ///< keys above the bin, and in it; none inside: the key is in no bin
};

struct PickShared {
  uint32_t
      bins[2]
          [kPickBins +
           4];  ///< in turns: peers may still read those of the round before. A row begins with 0; 4: what is in none
  uint64_t candidates[kPickCandidates];
  float4 moments[kPickWarps];
  uint32_t warps[kPickWarps];
  uint32_t above[kMaxCluster];  ///< keys above the cut's bin, of each block
  uint32_t wins[kPickCandidates / 32];
  PickFound found;
  uint32_t inside_before;           ///< keys in the cut's bin, of the blocks before this one
  uint32_t last_key, lost_key;      ///< of the worst winner and of the best loser in the cut's bin
  int64_t start, request, skipped;  ///< of the row
  int32_t low;
  uint32_t n, topk;
};

/// Vectors of 4 scores, from 16-byte aligned addresses: all of a row, and which of them are this block's.
struct Slice {
  const float* from;      ///< vector 0 of the row; before `lead` and from `last` on nothing may be read
  uint32_t lead, last;    ///< words of the row's window
  uint32_t first, count;  ///< vectors of this block
  int shift;              ///< a thread has 1 << shift of them
  int32_t origin;         ///< position of word 0
  bool made = false;

  __device__ Slice(const float* window, int32_t low, uint32_t n, uint32_t rank, int log_blocks) {
    lead = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(window) / 4 % 4), last = lead + n;
    from = window - lead, origin = low - static_cast<int32_t>(lead);
    const uint32_t vectors = (last + 3) / 4, each = (vectors + (1u << log_blocks) - 1) >> log_blocks;
    first = min(vectors, rank * each), count = min(vectors - first, each);
    shift = shift_of(each);
  }
  /// Of a row that begins at word 0: vectors [first, first + each) or what there is of them. Scores that were made here:
  /// kNotLiveScore is no key.
  __device__ Slice(uint32_t n, uint32_t first_vector, uint32_t each)
      : from(nullptr), lead(0), last(n), origin(0), made(true) {
    const uint32_t vectors = (n + 3) / 4;
    first = min(vectors, first_vector), count = min(vectors - first, each), shift = shift_of(each);
  }
  __device__ static int shift_of(uint32_t each) {
    return each <= kPickThreads ? 0 : each <= 2 * kPickThreads ? 1 : each <= 4 * kPickThreads ? 2 : 3;
  }
  /// The first vector of this thread, and the word of its first score.
  __device__ uint32_t begin() const { return threadIdx.x << shift; }
  __device__ uint32_t first_word() const { return (first + begin()) * 4; }
  /// Vectors of this thread.
  __device__ uint32_t own() const { return min(1u << shift, count - min(begin(), count)); }
  __device__ bool live(uint32_t word) const { return word >= lead && word < last; }
  /// Where the block's vector i lies: a thread's side by side, turned so that eight threads meet in no bank.
  __device__ uint32_t place(uint32_t i) const {
    const uint32_t of_thread = i >> shift << shift;
    return of_thread + ((i + (of_thread >> 3)) & ((1u << shift) - 1));
  }
  /// The thread's score of bit `bit`.
  __device__ uint32_t raw(const uint4* vectors, uint32_t bit) const {
    return reinterpret_cast<const uint32_t*>(vectors + place(begin() + bit / 4))[bit % 4];
  }
};

/// A vector that the window's edge cuts: what is outside becomes a NaN, which is in no bin.
__device__ inline void load_edge(const Slice& s, uint32_t i, uint4* vectors) {
  uint32_t* each = reinterpret_cast<uint32_t*>(vectors + s.place(i));
#pragma unroll 1
  for (uint32_t e = 0; e < 4; ++e) {
    const uint32_t word = (s.first + i) * 4 + e;
    if (s.live(word)) {
      copy_4(shared_address(each + e), s.from + word, 4);
    } else {
      each[e] = kNotLiveScore;
    }
  }
}
/// The row's first vector and its last, where the window's edge cuts them and they are this thread's. A whole one is
/// load_slice's alone: two threads must not write the same words.
static __device__ __noinline__ void load_edges(Slice s, uint4* vectors) {
  const uint32_t end = (s.last + 3) / 4 - 1 - s.first;
  const bool one = s.first == 0 && end == 0, cut = s.last % 4 != 0;
  if (threadIdx.x == 0 && s.first == 0 && (s.lead != 0 || (one && cut))) load_edge(s, 0, vectors);
  if (end < s.count && !one && cut && threadIdx.x == end >> s.shift) load_edge(s, end, vectors);
}
/// Each warp brings what its own threads have; visible to them behind wait_slice.
__device__ __forceinline__ void load_slice(const Slice& s, uint4* vectors) {
  uint32_t i = (threadIdx.x / 32 << (5 + s.shift)) + threadIdx.x % 32;
#pragma unroll 1
  for (int turn = 0; turn < 1 << s.shift && i < s.count; ++turn, i += 32) {
    const uint32_t word = (s.first + i) * 4;
    if (word >= s.lead && word + 4 <= s.last) copy_16(shared_address(vectors + s.place(i)), s.from + word, 16);
  }
  if (s.lead != 0 || s.last % 4 != 0) load_edges(s, vectors);
  commit_copies();
}
__device__ __forceinline__ void wait_slice() {
  wait_copies<0>();
  __syncwarp();
}

/// f(four scores, number of the first of them) for all of this thread's.
template <class F>
__device__ __forceinline__ void each_vector(const Slice& s, const uint4* vectors, const F& f) {
  const uint32_t begin = s.begin(), size = 1u << s.shift, turn = begin >> 3, own = s.own();
#pragma unroll 1
  for (uint32_t v = 0; v < own; ++v) f(vectors[begin + ((v + turn) & (size - 1))], v * 4);
}

/// bin = score * scale + offset, cut to whole numbers and to what bins there are; under 1 and NaN: none. One rounding, so
/// no better score is in a lower bin.
struct LinearBins {
  float scale, offset;
  __device__ __forceinline__ float place(uint32_t raw) const { return __fmaf_rn(__uint_as_float(raw), scale, offset); }
};
/// Bounds about where the k-th best of n would be, were they normal; the last bin is open. m: sum, squares and number of
/// some of them.
__device__ __forceinline__ LinearBins bins_of(float3 m, uint32_t k, uint32_t n) {
  if (m.z == 0.0f) return {0.0f, 0.0f};
  const float share = __fdividef(static_cast<float>(k), static_cast<float>(n));
  const float quantile = upper_quantile(fminf(fmaxf(share, 1e-6f), 1.0f - 1e-6f));
  const float each = __fdividef(1.0f, m.z), mean = m.x * each, variance = m.y * each - mean * mean;
  float deviation = variance > 0.0f ? variance * rsqrtf(variance) : 0.0f;
  deviation = fmaxf(deviation, fmaxf(fabsf(mean) * 1e-5f, 1e-30f));
  const float low = fminf(fmaxf(mean + (quantile - 0.75f) * deviation, -1e37f), 1e37f);
  const float scale = fminf(fmaxf(__fdividef(kPickBins / 2.0f, deviation), 1e-30f), 1e30f);
  return {scale, -low * scale};
}
/// The same from a sample that all blocks of the cluster read alike. Ends with a barrier of the block.
__device__ __forceinline__ LinearBins guess_bins(PickShared& s, const float* scores, uint32_t n, uint32_t k) {
  const float sample = __ldg(scores + threadIdx.x * n / kPickThreads);
  const bool counts = fabsf(sample) < 1e15f;
  const uint32_t lane = threadIdx.x % 32;
  float4 m{counts ? sample : 0.0f, counts ? sample * sample : 0.0f, 0.0f, 0.0f};
  m.z = static_cast<float>(__popc(__ballot_sync(~0u, counts)));
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    m.x += __shfl_xor_sync(~0u, m.x, step), m.y += __shfl_xor_sync(~0u, m.y, step);
  if (lane == 0) s.moments[threadIdx.x / 32] = m;
  __syncthreads();
  m = s.moments[lane % kPickWarps];
#pragma unroll
  for (int step = kPickWarps / 2; step > 0; step /= 2) {
    m.x += __shfl_xor_sync(~0u, m.x, step), m.y += __shfl_xor_sync(~0u, m.y, step);
    m.z += __shfl_xor_sync(~0u, m.z, step);
  }
  return bins_of({m.x, m.y, m.z}, k, n);
}
/// A thread of one vector adds all four without a branch; one of more looks for those that are in a bin first.
__device__ __forceinline__ void count_linear(const Slice& s, const uint4* vectors, LinearBins bins, uint32_t* counts) {
  constexpr float kLast = kPickBins - 1.0f;
  if (s.shift == 0) {
    if (s.own() == 0) return;
    const uint4 four = vectors[threadIdx.x];
    const float at[4] = {bins.place(four.x), bins.place(four.y), bins.place(four.z), bins.place(four.w)};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int bin = static_cast<int>(fminf(at[e], kLast));
      atomicAdd(counts + (at[e] >= 1.0f ? bin : kPickBins), 1u);
    }
    return;
  }
  OverEdge over(OverEdge::below(1.0f));
  each_vector(s, vectors, [&](const uint4& four, uint32_t) {
    over.add(bins.place(four.x)), over.add(bins.place(four.y));
    over.add(bins.place(four.z)), over.add(bins.place(four.w));
  });
  for (uint32_t hits = over.of(4 * s.own()); hits != 0; hits &= hits - 1) {
    const uint32_t bit = __ffs(static_cast<int>(hits)) - 1;
    atomicAdd(counts + static_cast<int>(fminf(bins.place(s.raw(vectors, bit)), kLast)), 1u);
  }
}

/// Keys of the order from `low` on, 1 << shift of them a bin.
struct KeyBins {
  uint32_t low, high;
  int shift;
  __device__ __forceinline__ static uint32_t key(const Slice& s, uint32_t raw, uint32_t word) {
    return s.live(word) && !(s.made && raw == kNotLiveScore) ? key_of(canonical(__uint_as_float(raw))) : kNotLive;
  }
};
__device__ __forceinline__ void count_by_key(const Slice& s, const uint4* vectors, KeyBins bins, uint32_t* counts) {
  each_vector(s, vectors, [&](const uint4& four, uint32_t bit) {
    const uint32_t each[4] = {four.x, four.y, four.z, four.w}, word = s.first_word() + bit;
#pragma unroll
    for (uint32_t e = 0; e < 4; ++e) {
      const uint32_t key = KeyBins::key(s, each[e], word + e);
      if (key >= bins.low && key <= bins.high) atomicAdd(counts + ((key - bins.low) >> bins.shift), 1u);
    }
  });
}

/// Which of the thread's scores are above the cut's bin, and which in it.
struct Marks {
  uint32_t above, inside;
};
__device__ __forceinline__ Marks mark_linear(const Slice& s, const uint4* vectors, LinearBins bins, uint32_t bin) {
  const float low = static_cast<float>(bin);  // not bin 0
  // No score is over the last bin.
  OverEdge inside(OverEdge::below(low));
  OverEdge above(bin == kPickBins - 1 ? __uint_as_float(kCanonicalNan) : OverEdge::below(low + 1.0f));
  each_vector(s, vectors, [&](const uint4& four, uint32_t) {
    const float at[4] = {bins.place(four.x), bins.place(four.y), bins.place(four.z), bins.place(four.w)};
#pragma unroll
    for (int e = 0; e < 4; ++e) inside.add(at[e]), above.add(at[e]);
  });
  const uint32_t over = above.of(4 * s.own());
  return {over, inside.of(4 * s.own()) & ~over};
}
__device__ __forceinline__ Marks mark_by_key(const Slice& s, const uint4* vectors, KeyBins bins) {
  Marks marks{0, 0};
  each_vector(s, vectors, [&](const uint4& four, uint32_t bit) {
    const uint32_t each[4] = {four.x, four.y, four.z, four.w}, word = s.first_word() + bit;
#pragma unroll
    for (uint32_t e = 0; e < 4; ++e) {
      const uint32_t key = KeyBins::key(s, each[e], word + e);
      marks.above |= (key > bins.high ? 1u : 0u) << (bit + e);
      marks.inside |= (key >= bins.low && key <= bins.high ? 1u : 0u) << (bit + e);
    }
  });
  return marks;
}

}  // namespace topkey::cuda
