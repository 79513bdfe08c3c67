// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `merge`: the parts' entries in any order, so ties go by position and not by index: the cut is found by score, then
// among its equals by position; the winners are sorted. Rows of parts that are ascending, and whose entries fit one
// block's registers, go a quicker way (device/merge_quick.cuh).
#include <algorithm>
#include <type_traits>

#include "cuda/check.h"
#include "cuda/device/emit.cuh"
#include "cuda/device/merge_quick.cuh"
#include "cuda/room.h"
#include "cuda/stages.h"
#include "cuda/tuning.h"

namespace topkey::cuda {
namespace {

struct Job {
  MergeTopk a;
  Emission emission;
  uint64_t* sort;  ///< null: in shared memory
  int64_t sort_length;
};

/// Entries of one row as numbers of the order, read so many at a time (device/select.cuh).
template <int kReads>
struct Parts {
  static constexpr int kBatch = kReads;
  const Job& job;
  int64_t row;
  uint32_t width;  ///< entries a part
  int64_t start, end;

  __device__ int32_t position(uint32_t i) const { return *element<int32_t>(job.a.indices, i / width, row, i % width); }
  __device__ float score(uint32_t i) const {
    return canonical(*element<float>(job.a.scores, i / width, row, i % width));
  }
  /// Only a merge with keys forced at the end has been given an end.
  __device__ bool forced(int64_t position) const {
    return position - start < job.a.force_first || (job.a.force_last > 0 && end - position <= job.a.force_last);
  }
  __device__ uint32_t key(uint32_t i) const {
    const int32_t at = position(i);
    if (at < 0) return kNotLive;
    return forced(at) ? kForcedKey : key_of(score(i));
  }
  __device__ uint32_t raw(uint32_t i) const { return key(i); }
  __device__ uint32_t key_of_raw(uint32_t raw, uint32_t) const { return raw; }
  /// Score of the entry at this position: the number of a forced key does not say it.
  __device__ float score_at(uint32_t at, uint32_t n) const {
    for (uint32_t i = 0; i < n; ++i) {
      if (static_cast<uint32_t>(position(i)) == at) return score(i);
    }
    return __uint_as_float(kCanonicalNan);
  }
};
/// Of them, those equal to a key: the lower the position, the larger the number.
template <int kReads>
struct Equals {
  static constexpr int kBatch = kReads;
  Parts<kReads> parts;
  uint32_t equal;

  __device__ uint32_t key(uint32_t i) const {
    return parts.key(i) == equal ? ~static_cast<uint32_t>(parts.position(i)) : kNotLive;
  }
  __device__ uint32_t raw(uint32_t i) const { return key(i); }
  __device__ uint32_t key_of_raw(uint32_t raw, uint32_t) const { return raw; }
};

struct Shared {
  SelectRoom select;
  uint32_t taken;
};

/// Published blocks of all parts, sorted by id, of equal ids the best first: the first of each id stands for it.
struct MergedBlocks {
  static constexpr int kBatch = 4, kEach = 4;
  const uint64_t* sorted;
  uint32_t newest;

  __device__ uint32_t id(uint32_t i) const { return static_cast<uint32_t>(sorted[i] >> 32); }
  __device__ uint32_t key(uint32_t i) const {
    if (i > 0 && id(i - 1) == id(i)) return kNotLive;
    return id(i) == newest ? kForcedKey : ~static_cast<uint32_t>(sorted[i]);
  }
  __device__ uint32_t raw(uint32_t i) const { return key(i); }
  __device__ uint32_t key_of_raw(uint32_t raw, uint32_t) const { return raw; }
};

/// The best blocks of a row to out.blocks. The highest id is the newest block of the row: every part publishes it.
__device__ void merge_blocks(const Job& job, int64_t row, Shared& s, uint64_t* sort) {
  const Tensor &ids = job.a.block_ids, &out = job.a.out.blocks;
  const uint32_t width = static_cast<uint32_t>(ids.shape[2]), n = static_cast<uint32_t>(ids.shape[0]) * width;
  const uint32_t size = power_of_two(n), wanted = static_cast<uint32_t>(out.shape[1]);
  if (threadIdx.x == 0) s.taken = 0;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
    const int32_t id = *element<int32_t>(ids, i / width, row, i % width);
    if (id < 0) continue;
    const uint32_t key = key_of(canonical(*element<float>(job.a.block_scores, i / width, row, i % width)));
    sort[atomicAdd(&s.taken, 1u)] = static_cast<uint64_t>(id) << 32 | ~key;
  }
  __syncthreads();
  const uint32_t used = s.taken;
  for (uint32_t i = used + threadIdx.x; i < size; i += blockDim.x) sort[i] = UINT64_MAX;
  __syncthreads();
  sort_block(sort, size);
  Cut cut{};
  if (used > 0) {
    const MergedBlocks blocks{sort, static_cast<uint32_t>(sort[used - 1] >> 32)};
    cut = find_cut(blocks, used, wanted, s.select);
    hand_out(blocks, used, cut, s.select,
             [&](uint32_t j, uint32_t i) { *element<int32_t>(out, row, j) = static_cast<int32_t>(blocks.id(i)); });
  }
  for (uint32_t j = cut.count + threadIdx.x; j < wanted; j += blockDim.x) *element<int32_t>(out, row, j) = -1;
  __syncthreads();  // the sorted blocks have been read
}

/// The winners of a row that is none of padding.
template <int kReads>
__device__ void merge_entries(const Job& job, int64_t row, const Window& w, Shared& s, uint64_t* sort) {
  const uint32_t width = static_cast<uint32_t>(job.a.scores.shape[2]),
                 n = static_cast<uint32_t>(job.a.scores.shape[0]) * width;
  const Parts<kReads> parts{job, row, width, w.start, w.end};
  const RowWriter writer(job.emission, row, w.request, w.start);
  const Cut cut = find_cut(parts, n, static_cast<uint32_t>(job.emission.topk), s.select);
  uint32_t lowest = 0;  // of the equals' numbers that win
  if (cut.need > 0) {
    const Cut among = find_cut(Equals<kReads>{parts, cut.key}, n, cut.need, s.select);
    lowest = among.key + (among.need == 0);
  }
  const uint32_t size = power_of_two(cut.count);
  const bool by_score = job.emission.out.order == Order::score;
  if (threadIdx.x == 0) s.taken = 0;
  for (uint32_t i = cut.count + threadIdx.x; i < size; i += blockDim.x) sort[i] = UINT64_MAX;
  __syncthreads();
  uint32_t nans = 0;
  for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
    const uint32_t key = parts.key(i);
    if (key == kNotLive) continue;
    nans += is_nan(parts.score(i));
    const uint32_t position = static_cast<uint32_t>(parts.position(i));
    if (key < cut.key || (key == cut.key && (cut.need == 0 || ~position < lowest))) continue;
    const uint32_t at = atomicAdd(&s.taken, 1u);
    if (at < cut.count)
      sort[at] = by_score ? static_cast<uint64_t>(~key) << 32 | position : static_cast<uint64_t>(position) << 32 | key;
  }
  __syncthreads();
  sort_block(sort, size);
  for (uint32_t j = threadIdx.x; j < cut.count; j += blockDim.x) {
    const uint32_t low = static_cast<uint32_t>(sort[j]), high = static_cast<uint32_t>(sort[j] >> 32);
    const uint32_t key = by_score ? ~high : low, position = by_score ? low : high;
    writer.put(j, position, key == kForcedKey ? parts.score_at(position, n) : score_of_key(key));
  }
  __syncthreads();
  writer.fill(cut.count);
  count(job.emission.stats, kNanScores, nans);
  if (threadIdx.x != 0) return;
  count(job.emission.stats, kScoredKeys, cut.live);
  count(job.emission.stats, kTiedCuts, cut.tied && cut.key != kForcedKey);
}

__device__ void merge_row(const Job& job, int64_t row, Shared& s, uint64_t* sort) {
  const Window w = window_of(job.a.rows, row, 0);
  const Tensor& blocks = job.a.out.blocks;
  if (w.request >= 0) {
    if (blocks.data != nullptr) merge_blocks(job, row, s, sort);
    return merge_entries<4>(job, row, w, s, sort);
  }
  RowWriter(job.emission, row, w.request, w.start).fill(0);
  for (int64_t j = threadIdx.x; blocks.data != nullptr && j < blocks.shape[1]; j += blockDim.x)
    *element<int32_t>(blocks, row, j) = -1;
}

__global__ __launch_bounds__(kSelectThreads) void merge_rows(const __grid_constant__ Job job) {
  extern __shared__ uint64_t memory[];
  __shared__ Shared s;
  uint64_t* sort = job.sort != nullptr ? job.sort + blockIdx.x * job.sort_length : memory;
  for (int64_t row = blockIdx.x; row < job.a.rows.count; row += gridDim.x) {
    merge_row(job, row, s, sort);
    __syncthreads();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) count(job.emission.stats, kRows, static_cast<uint64_t>(job.a.rows.count));
}

/// The writer of a plain merge's rows.
struct PlainWriter {
  int32_t* positions;
  float* scores;  ///< null: not wanted
  int32_t fill_value;
  uint32_t topk;

  __device__ PlainWriter(const Emission& e, int64_t row)
      : positions(element<int32_t>(e.out.indices, row)),
        scores(e.out.scores.data != nullptr ? element<float>(e.out.scores, row) : nullptr),
        fill_value(e.out.fill == Fill::value ? e.out.fill_value : -1),
        topk(static_cast<uint32_t>(e.topk)) {}
  __device__ __forceinline__ void put(uint32_t j, uint32_t position, float score) const {
    positions[j] = static_cast<int32_t>(position);
    if (scores != nullptr) scores[j] = score;
  }
  __device__ void fill(uint32_t used) const {
    for (uint32_t j = used + threadIdx.x; j < topk; j += kSelectThreads)
      put(j, fill_value, __uint_as_float(0xFF800000u));
  }
};

/// One row, by all threads of a block.
template <int kEach, bool kPlain>
class RowMerge {
 public:
  __device__ __forceinline__ RowMerge(const Job& job, const QuickMerge& m, int64_t row, QuickRoom& room,
                                      uint32_t* memory)
      : job_(job),
        m_(m),
        row_(row),
        room_(room),
        memory_(memory),
        topk_(static_cast<uint32_t>(job.emission.topk)),
        places_(topk_, m.parts, kEach),
        chunks_(m.parts * m.per_part, m.per_part) {
    entries_.shared = reinterpret_cast<int32_t*>(memory + places_.entries) + threadIdx.x;
  }

  /// False: an entry is not behind its predecessor in its part. Nothing is written then.
  __device__ __forceinline__ bool run() {
    const bool unsorted = load();
    if (room_.request < 0) {
      writer().fill(0);
      return true;
    }
    if (unsorted) atomicMax(&room_.unsorted, 1u);
    const uint32_t nans = rank();
    __syncthreads();
    if (room_.unsorted != 0) return false;
    const uint32_t live = room_.live, wanted = live < topk_ ? live : topk_;
    QuickCut cut{kNotLive, 0, 0, false};
    if (live > topk_) {
      const uint32_t low = room_.low + 1, floor = room_.floor;
      cut = quick_cut(entries_, chunks_, Span{floor > low ? floor : low, ~0u, room_.high, topk_, 0}, room_);
    }
    const Writer to = writer();
    if (!put_by_map(cut, to)) put_by_lists(cut, wanted, to);
    to.fill(wanted);
    if (kPlain) return true;
    count(job_.emission.stats, kNanScores, nans);
    if (threadIdx.x != 0) return true;
    count(job_.emission.stats, kScoredKeys, live);
    count(job_.emission.stats, kTiedCuts, cut.tied && cut.key != kForcedKey);
    return true;
  }

 private:
  using Writer = std::conditional_t<kPlain, PlainWriter, RowWriter>;
  static constexpr bool kMaps = kPlain && !Entries<kEach>::kShares;

  __device__ __forceinline__ Writer writer() const {
    if constexpr (kPlain) {
      return PlainWriter(job_.emission, row_);
    } else {
      return RowWriter(job_.emission, row_, room_.request, room_.start);
    }
  }

  /// All entries, and whose row it is. Returns whether this thread has seen one that is not behind its predecessor.
  __device__ __forceinline__ bool load() {
    return entries_.load(m_, row_, chunks_, [&] {
      room_.clear();
      if (threadIdx.x == 0 && kPlain) {
        room_.request = m_.requests != nullptr ? m_.requests[row_] : 0;
      } else if (threadIdx.x == 0) {
        const Window w = window_of(job_.a.rows, row_, 0);
        room_.request = w.request, room_.start = w.start, room_.end = w.end;
      }
      __syncthreads();
    });
  }

  /// Scores become numbers of the order, whose bounds are told. Returns how many are NaN.
  __device__ __forceinline__ uint32_t rank() {
    uint32_t nans = 0;
    if constexpr (kPlain) {
      entries_.rank([](int32_t) { return false; });
    } else {
      const Parts<2> all{job_, row_, 0, room_.start, room_.end};
      const bool forces = all.start != 0 || job_.a.force_first > 0 || job_.a.force_last > 0;
      nans = entries_.rank([&](int32_t position) { return forces && all.forced(position); });
    }
    entries_.bound(m_.best, room_);
    if (kMaps) entries_.bound_positions(room_);
    return nans;
  }

  __device__ __forceinline__ bool put_by_map(const QuickCut& cut, const Writer& to) {
    if constexpr (kMaps) {
      return room_.last < 32 * m_.map_words &&
             write_by_map(entries_, chunks_, cut, memory_, room_,
                          [&](uint32_t place, uint32_t position) { to.put(place, position, 0.0f); });
    } else {
      return false;
    }
  }

  /// Lists of winners, one a part, become half as many until two are left, which go to the writer. Ends with a barrier.
  __device__ __forceinline__ void put_by_lists(const QuickCut& cut, uint32_t wanted, const Writer& to) {
    WinnerLists lists{memory_ + places_.lists, memory_ + places_.lists + topk_};
    WinnerLists next{memory_ + places_.entries, memory_ + places_.entries + topk_};
    if (threadIdx.x == 0) room_.starts[m_.parts] = wanted;
    keep_winners<!kPlain>(m_, row_, entries_, chunks_, cut, lists, room_);
    __syncthreads();
    uint32_t step = 1;
    for (; step * 2 < m_.parts; step *= 2) {
      merge_pairs(lists, wanted, step, m_.parts, room_.starts, [&](uint32_t place, uint32_t position, uint32_t score) {
        next.positions[place] = position;
        next.scores[place] = score;
      });
      __syncthreads();
      const WinnerLists merged = next;
      next = lists, lists = merged;
    }
    merge_pairs(lists, wanted, step, m_.parts, room_.starts, [&](uint32_t place, uint32_t position, uint32_t score) {
      to.put(place, position, __uint_as_float(score));
    });
    __syncthreads();
  }

  const Job& job_;
  const QuickMerge& m_;
  const int64_t row_;
  QuickRoom& room_;
  uint32_t* const memory_;
  const uint32_t topk_;
  const MergeRoom places_;
  const Chunks chunks_;
  Entries<kEach> entries_;
};

template <int kEach, bool kPlain>
__global__ __launch_bounds__(kSelectThreads) void merge_rows_quickly(const __grid_constant__ Job job,
                                                                     const __grid_constant__ QuickMerge m) {
  extern __shared__ uint64_t memory[];
  __shared__ Shared s;
  __shared__ QuickRoom room;
  for (int64_t row = blockIdx.x; row < job.a.rows.count; row += gridDim.x) {
    if (!RowMerge<kEach, kPlain>(job, m, row, room, reinterpret_cast<uint32_t*>(memory)).run())
      merge_entries<2>(job, row, kPlain ? Window{room.request, 0, 0} : Window{room.request, room.start, room.end}, s,
                       memory);  // more would spill
    __syncthreads();
  }
  if (!kPlain && blockIdx.x == 0 && threadIdx.x == 0)
    count(job.emission.stats, kRows, static_cast<uint64_t>(job.a.rows.count));
}

/// Entries of each thread where a row has so many chunks.
int each_of(int64_t chunks) {
  const int64_t each = (chunks + kSelectThreads / 32 - 1) / (kSelectThreads / 32);
  return each <= 4 ? 4 : each <= 8 ? 8 : kMergeEach;
}

static_assert(kMergeMap * 4 <= kMergeBytes);
bool plain_merge(const MergeTopk& a, const Emission& emission) {
  const Tensor &request = a.rows.request, &scores = a.out.scores;
  return a.rows.start.data == nullptr && a.rows.q_indptr.data == nullptr && a.force_first == 0 && a.force_last == 0 &&
         (request.data == nullptr || (request.dtype == DType::i32 && request.stride[0] == 1)) &&
         a.out.slots.data == nullptr && a.out.counts.data == nullptr && a.out.index_base.data == nullptr &&
         a.out.indices.data != nullptr && a.out.indices.dtype == DType::i32 && a.out.indices.stride[1] == 1 &&
         (scores.data == nullptr || (scores.dtype == DType::f32 && scores.stride[1] == 1)) &&
         a.out.fill != Fill::repeat && emission.stats == nullptr;
}

/// What the quick way takes of a merge; per_part is 0 where it cannot.
QuickMerge quick_merge(const Job& job) {
  const MergeTopk& a = job.a;
  const int64_t parts = a.scores.shape[0], per_part = (a.scores.shape[2] + 31) / 32, topk = a.topk;
  QuickMerge m{};
  if (a.out.blocks.data != nullptr || a.out.order == Order::score || job.sort != nullptr || parts > kMergeParts ||
      parts * per_part > kSelectThreads / 32 * kMergeEach || topk > kSharedSort ||
      MergeRoom(topk, parts, each_of(parts * per_part)).words * 4 > kMergeBytes || a.indices.stride[2] != 1 ||
      a.scores.stride[2] != 1)
    return m;
  m.indices = static_cast<const int32_t*>(a.indices.data), m.scores = static_cast<const uint32_t*>(a.scores.data);
  m.index_part = a.indices.stride[0], m.index_row = a.indices.stride[1];
  m.score_part = a.scores.stride[0], m.score_row = a.scores.stride[1];
  m.parts = static_cast<uint32_t>(parts), m.width = static_cast<uint32_t>(a.scores.shape[2]);
  m.per_part = static_cast<uint32_t>(per_part);
  m.best = topk <= kSelectThreads ? 1 : topk <= 2 * kSelectThreads ? 2 : 0;
  m.plain = plain_merge(a, job.emission);
  // Entries that lie in shared memory leave no room for it.
  if (m.plain && a.out.scores.data == nullptr && each_of(parts * per_part) <= kMergeHeld) m.map_words = kMergeMap;
  m.requests = static_cast<const int32_t*>(a.rows.request.data);
  return m;
}

using QuickKernel = void (*)(Job, QuickMerge);
template <bool kPlain>
QuickKernel quick_kernel(int each) {
  return each == 4   ? &merge_rows_quickly<4, kPlain>
         : each == 8 ? &merge_rows_quickly<8, kPlain>
                     : &merge_rows_quickly<kMergeEach, kPlain>;
}

#define TOPKEY_QUICK(EACH, PLAIN) \
  { reinterpret_cast<const void*>(&merge_rows_quickly<EACH, PLAIN>), kMergeBytes }
const KernelEntry kEntries[] = {
    {reinterpret_cast<const void*>(&merge_rows), kSharedSort * 8},
    TOPKEY_QUICK(4, true),
    TOPKEY_QUICK(8, true),
    TOPKEY_QUICK(kMergeEach, true),
    TOPKEY_QUICK(4, false),
    TOPKEY_QUICK(8, false),
    TOPKEY_QUICK(kMergeEach, false),
};

}  // namespace

KernelList merge_kernels() { return {kEntries, sizeof kEntries / sizeof kEntries[0]}; }

void merge_topk(const MergeTopk& a, const Exec& exec) {
  if (a.rows.count == 0) return;
  const Launch launch("merge_topk", exec);
  Shape shape{};
  shape.rows = a.rows.count, shape.keys = a.scores.shape[0] * a.scores.shape[2], shape.topk = a.topk;
  if (a.out.blocks.data != nullptr) {
    shape.blocks = a.out.blocks.shape[1];
    shape.keys = std::max(shape.keys, a.block_ids.shape[0] * a.block_ids.shape[2]);
  }
  const Room room = make_room(Op::merge_topk, shape, exec.workspace);
  const Job job{a, {a.out, a.topk, Shard{}, true, exec.stats}, room.sort, room.sort_length};
  const uint32_t wanted = static_cast<uint32_t>(std::max<int64_t>(room.sorted, 1));
  const size_t shared = room.sort != nullptr ? 0 : size_t{8} * power_of_two(wanted);
  const QuickMerge quick = quick_merge(job);
  if (quick.per_part > 0) {
    const int each = each_of(a.scores.shape[0] * quick.per_part);
    const QuickKernel kernel = quick.plain ? quick_kernel<true>(each) : quick_kernel<false>(each);
    const size_t lists = 4 * static_cast<size_t>(MergeRoom(a.topk, a.scores.shape[0], each).words);
    const size_t bytes = std::max({shared, lists, size_t{4} * quick.map_words});
    kernel<<<launch.blocks(a.rows.count, 1), kSelectThreads, bytes, launch.stream()>>>(job, quick);
    TOPKEY_CUDA_LAUNCHED("merge_rows_quickly");
    return;
  }
  const uint32_t blocks =
      launch.blocks(room.sort != nullptr ? std::min(a.rows.count, room.sort_blocks) : a.rows.count, 2);
  merge_rows<<<blocks, kSelectThreads, shared, launch.stream()>>>(job);
  TOPKEY_CUDA_LAUNCHED("merge_rows");
}

}  // namespace topkey::cuda
