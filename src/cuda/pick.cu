// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `select`, and the second half of `search`: one thread block a row picks the winners exactly (device/select.cuh)
// and writes every output, or, where more of the row's keys are to come, what the next chunk needs.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/device/entries.cuh"
#include "cuda/device/select.cuh"
#include "cuda/search_parts.h"
#include "cuda/stages.h"
#include "cuda/tuning.h"

namespace topkey::cuda {
namespace {

struct Job {
  PickParams p;
  Group group;
  int turn;  ///< which list is read; the other is written
  bool sort_in_room;
  int64_t parts;  ///< most that a row is cut into, 1 = none is
};

struct Shared {
  SelectRoom select;
  uint32_t tied, open_key;
};

/// A row in this chunk.
struct RowTask {
  int64_t row, group_row;
  const RowFact* f;  ///< in memory: every thread would hold it in registers
  uint32_t n;        ///< keys of this chunk
  bool last;
  RowState state;
};

__device__ inline const uint32_t* list_values(const WinnerList& l, int64_t row) { return l.values + row * l.length; }
__device__ inline const int32_t* list_ids(const WinnerList& l, int64_t row) { return l.positions + row * l.length; }

template <class Scores>
__device__ void count_nans(const Job& job, const Scores& scores, uint32_t n) {
  if (job.p.emission.stats == nullptr) return;
  uint32_t own = 0;
  for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
    const uint32_t raw = scores.raw(i);
    own += raw != kNotLiveScore && is_nan(__uint_as_float(raw));
  }
  if (own != 0) count(job.p.emission.stats, kNanScores, own);
}

/// Winners of a finished row to the outputs.
template <class Scores>
__device__ void write_row(const Job& job, const RowTask& t, const Scores& scores, uint32_t n, const Cut& cut, Shared& s,
                          uint64_t* sort) {
  const Entries<Scores> entries{scores};
  const RowWriter writer(job.p.emission, t.row, t.f->request, t.f->start);
  if (threadIdx.x == 0) s.tied = cut.tied && cut.key != kForcedKey;
  __syncthreads();
  // An equal of a winner may have been left out before.
  const auto look_back = [&](uint32_t key) {
    if (key == t.state.dropped) s.tied = 1;
  };
  if (job.p.emission.out.order == Order::score) {
    if (job.sort_in_room) sort = job.p.room.sort + blockIdx.x * job.p.room.sort_length;
    const uint32_t size = power_of_two(cut.count);
    for (uint32_t i = cut.count + threadIdx.x; i < size; i += blockDim.x) sort[i] = UINT64_MAX;
    hand_out(entries, n, cut, s.select, [&](uint32_t j, uint32_t i) {
      const uint32_t key = entries.key(i);
      look_back(key);
      sort[j] = static_cast<uint64_t>(~key) << 32 | i;  // best first, then the lowest index
    });
    sort_block(sort, size);
    for (uint32_t j = threadIdx.x; j < cut.count; j += blockDim.x) {
      const uint32_t i = static_cast<uint32_t>(sort[j]);
      writer.put(j, scores.position(i), scores.score(i));
    }
    __syncthreads();
  } else {
    hand_out(entries, n, cut, s.select, [&](uint32_t j, uint32_t i) {
      if (t.state.dropped != 0) look_back(entries.key(i));
      writer.put(j, scores.position(i), scores.score(i));
    });
  }
  writer.fill(cut.count);
  if (threadIdx.x == 0 && t.f->scored) count(job.p.emission.stats, kTiedCuts, s.tied);
}

/// Where what is carried on goes: a list of winners, and what was dropped.
struct Carry {
  uint32_t* values;
  int32_t* positions;
};

/// The best of n keys: to the outputs where `carry` is null, else there.
template <class Scores>
__device__ void pick_entries(const Job& job, RowTask& t, const Scores& scores, uint32_t n, const Carry* carry,
                             Shared& s, uint64_t* sort) {
  const Entries<Scores> entries{scores};
  const Cut cut = find_cut(entries, n, t.f->topk, s.select);
  if (carry == nullptr) {
    write_row(job, t, scores, n, cut, s, sort);
    return;
  }
  hand_out(entries, n, cut, s.select, [&](uint32_t j, uint32_t i) {
    carry->values[j] = scores.raw(i);
    carry->positions[j] = static_cast<int32_t>(scores.position(i));
  });
  t.state.entries = cut.count;
  if (cut.tied && cut.key != kForcedKey) t.state.dropped = cut.key;
}

template <class Scores>
__device__ void pick_blocks(const Job& job, RowTask& t, const Scores& chunk, Shared& s) {
  const Tensor& out = job.p.emission.out.blocks;
  const uint32_t wanted = static_cast<uint32_t>(out.shape[1]);
  const WinnerList &from = job.p.room.block_lists[job.turn], &to = job.p.room.block_lists[1 - job.turn];
  Blocks<Scores> blocks{chunk,
                        t.n,
                        static_cast<uint32_t>(job.p.emission.out.block_size),
                        list_values(from, t.group_row),
                        list_ids(from, t.group_row),
                        t.state.blocks,
                        t.state.open_block,
                        t.state.open_key,
                        t.last};
  const bool empty = t.f->whole_end <= t.f->whole_start;  // no newest block
  const Tensor& out_scores = job.p.block_scores;
  Cut cut{};
  if (!empty) cut = find_cut(blocks, blocks.size(), wanted, s.select);
  if (t.last) {
    if (!empty) {
      hand_out(blocks, blocks.size(), cut, s.select, [&](uint32_t j, uint32_t i) {
        *element<int32_t>(out, t.row, j) = blocks.id(i);
        if (out_scores.data != nullptr) *element<float>(out_scores, t.row, j) = blocks.score(i);
      });
    }
    for (uint32_t j = cut.count + threadIdx.x; j < wanted; j += blockDim.x) {
      *element<int32_t>(out, t.row, j) = -1;
      if (out_scores.data != nullptr) *element<float>(out_scores, t.row, j) = __uint_as_float(0xFF800000u);
    }
    return;
  }
  hand_out(blocks, blocks.size(), cut, s.select, [&](uint32_t j, uint32_t i) {
    to.values[t.group_row * to.length + j] = blocks.key(i);
    to.positions[t.group_row * to.length + j] = blocks.id(i);
  });
  // The block that this chunk ends in stays open.
  if (threadIdx.x == 0) s.open_key = kNotLive;
  __syncthreads();
  const int32_t open = blocks.block(t.n - 1);
  uint32_t best = open == t.state.open_block ? t.state.open_key : kNotLive;
  for (uint32_t i = threadIdx.x; i < t.n; i += blockDim.x) {
    if (blocks.block(i) == open) best = max(best, blocks.plain_key(i));
  }
  if (best != kNotLive) atomicMax(&s.open_key, best);
  __syncthreads();
  t.state.blocks = cut.count, t.state.open_block = open, t.state.open_key = s.open_key;
}

/// False where the row has no keys in this chunk and was answered before.
__device__ bool find_task(const Job& job, int64_t r, RowTask& t) {
  t.group_row = r, t.row = job.group.first_row + r;
  t.f = job.p.room.facts + r;
  if (job.group.first_key > 0 && job.group.first_key >= t.f->n) return false;
  const uint32_t rest = t.f->n - min(job.group.first_key, t.f->n);
  t.n = min(rest, job.group.chunk);
  t.last = rest <= job.group.chunk;
  t.state = {0, 0, 0, -1, kNotLive};
  if (job.group.first_key > 0) t.state = job.p.room.states[r];
  return true;
}

__device__ RowKeys keys_of(const Job& job, const RowTask& t, const RowFact* f) {
  const int32_t* ids = job.p.room.ids != nullptr ? job.p.room.ids + t.group_row * job.p.room.id_stride : nullptr;
  return {f,
          ids,
          static_cast<uint32_t>(job.p.admit.candidate_block_size),
          job.group.first_key,
          job.p.admit.force_first,
          job.p.admit.force_last};
}

__device__ RowKeys keys_from(const Job& job, const RowTask& t, const RowFact* f, uint32_t first) {
  RowKeys keys = keys_of(job, t, f);
  keys.first_key += first;
  return keys;
}
/// Given f32 scores in order, nothing masked: they are read like a search's.
__device__ KeptScores flat_of(const Job& job, const RowTask& t, const RowFact* f, uint32_t first) {
  const RowKeys keys = keys_from(job, t, f, first);
  return {keys, element<float>(job.p.scores, t.row, int64_t{f->low} + keys.first_key), nullptr, nullptr, 0, true};
}
__device__ KeptScores kept_of(const Job& job, const RowTask& t, const RowFact* f, uint32_t first) {
  return {keys_from(job, t, f, first),
          job.p.room.scores + t.group_row * job.group.chunk + first,
          nullptr,
          nullptr,
          0,
          false};
}

/// A row is in parts where more than one part's keys is there and the room has lists for them.
__device__ bool in_parts(const Job& job, const RowTask& t) { return job.parts > 1 && t.n > kPartKeys; }

/// One part of a long row: its winners to its list.
template <bool kGiven>
__global__ __launch_bounds__(kSelectThreads) void pick_part(const __grid_constant__ Job job) {
  __shared__ Shared s;
  const Room& room = job.p.room;
  const int64_t parts = job.parts;
  for (int64_t at = blockIdx.x; at < job.group.count * parts; at += gridDim.x) {
    RowTask t;
    const uint32_t first = static_cast<uint32_t>(at % parts * kPartKeys);
    if (!find_task(job, at / parts, t) || !in_parts(job, t) || first >= t.n) continue;
    const uint32_t n = min(static_cast<uint32_t>(kPartKeys), t.n - first);
    const int64_t list = at * room.part_lists.length;
    const Carry carry{room.part_lists.values + list, room.part_lists.positions + list};
    const KeptScores scores = kGiven ? flat_of(job, t, t.f, first) : kept_of(job, t, t.f, first);
    if (t.f->scored) count_nans(job, scores, n);
    pick_entries(job, t, scores, n, &carry, s, nullptr);
    if (threadIdx.x == 0) room.part_states[at] = {t.state.entries, t.state.dropped};
    __syncthreads();
  }
}

/// The whole row out of its parts' winners.
__device__ void join_parts(const Job& job, RowTask& t, Shared& s, uint64_t* sort) {
  const Room& room = job.p.room;
  const uint32_t parts = (t.n + static_cast<uint32_t>(kPartKeys) - 1) / static_cast<uint32_t>(kPartKeys);
  const int64_t first = t.group_row * job.parts, length = room.part_lists.length;
  const PartState* states = room.part_states + first;
  for (uint32_t p = 0; p < parts; ++p) t.state.dropped = max(t.state.dropped, states[p].dropped);
  const PartScores scores{keys_of(job, t, t.f), room.part_lists.values + first * length,
                          room.part_lists.positions + first * length, states, static_cast<uint32_t>(length)};
  pick_entries(job, t, scores, parts * static_cast<uint32_t>(length), nullptr, s, sort);
}

__global__ __launch_bounds__(kSelectThreads) void pick_given(const __grid_constant__ Job job) {
  extern __shared__ uint64_t sort[];
  __shared__ Shared s;
  for (int64_t r = blockIdx.x; r < job.group.count; r += gridDim.x) {
    RowTask t;
    if (!find_task(job, r, t)) continue;
    const GivenScores scores{keys_from(job, t, t.f, 0), job.p.scores, job.p.mask, t.row};
    if (t.f->scored) count_nans(job, scores, t.n);
    if (job.p.has_entries) pick_entries(job, t, scores, t.n, nullptr, s, sort);
    if (job.p.has_blocks) pick_blocks(job, t, scores, s);
    __syncthreads();
  }
}

/// Rows of a search, or of flat given scores.
template <bool kGiven>
__global__ __launch_bounds__(kSelectThreads) void pick_kept(const __grid_constant__ Job job) {
  extern __shared__ uint64_t sort[];
  __shared__ Shared s;
  for (int64_t r = blockIdx.x; r < job.group.count; r += gridDim.x) {
    RowTask t;
    if (!find_task(job, r, t)) continue;
    const KeptScores scores = kGiven ? flat_of(job, t, t.f, 0) : kept_of(job, t, t.f, 0);
    if (job.p.has_entries && in_parts(job, t)) {
      join_parts(job, t, s, sort);
    } else if (!job.p.has_entries) {
      if (t.f->scored) count_nans(job, scores, t.n);
    } else {
      if (t.f->scored) count_nans(job, scores, t.n);
      const WinnerList &from = job.p.room.lists[job.turn], &to = job.p.room.lists[1 - job.turn];
      KeptScores all = scores;
      all.list_values = list_values(from, r), all.list_positions = list_ids(from, r), all.list = t.state.entries;
      const Carry carry{to.values + r * to.length, to.positions + r * to.length};
      pick_entries(job, t, all, all.list + t.n, t.last ? nullptr : &carry, s, sort);
    }
    if (job.p.has_blocks) pick_blocks(job, t, scores, s);
    __syncthreads();
    if (threadIdx.x == 0 && !t.last) job.p.room.states[r] = t.state;
    __syncthreads();
  }
}

const KernelEntry kEntries[] = {{reinterpret_cast<const void*>(&pick_given), kSharedSort * 8},
                                {reinterpret_cast<const void*>(&pick_kept<false>), kSharedSort * 8},
                                {reinterpret_cast<const void*>(&pick_kept<true>), kSharedSort * 8},
                                {reinterpret_cast<const void*>(&pick_part<true>), 0},
                                {reinterpret_cast<const void*>(&pick_part<false>), 0}};

}  // namespace

KernelList pick_kernels() { return {kEntries, 5}; }

void pick(const PickParams& params, const Group& group, const Launch& launch) {
  if (pick_in_stream(params, group, launch) || pick_quickly(params, group, launch)) return;
  const bool by_score = params.has_entries && params.emission.out.order == Order::score;
  const bool in_room = by_score && params.room.sort != nullptr;
  const bool kept = params.room.scores != nullptr;
  const bool flat = !kept && params.scores.dtype == DType::f32 && params.mask.data == nullptr &&
                    params.room.ids == nullptr && !present(params.admit.candidates);
  const int64_t parts = params.has_entries && (kept || flat) ? params.room.parts : 1;
  const Job job{params, group, static_cast<int>(group.first_key / std::max(group.chunk, 1u) % 2), in_room, parts};
  const size_t shared =
      by_score && !in_room
          ? size_t{8} * power_of_two(static_cast<uint32_t>(std::max<int64_t>(params.room.list_length, 1)))
          : 0;
  const int64_t rows = in_room ? std::min(group.count, params.room.sort_blocks) : group.count;
  const uint32_t blocks = launch.blocks(rows, 2), part_blocks = launch.blocks(group.count * parts, 2);
  if (parts > 1 && kept) pick_part<false><<<part_blocks, kSelectThreads, 0, launch.stream()>>>(job);
  if (parts > 1 && flat) pick_part<true><<<part_blocks, kSelectThreads, 0, launch.stream()>>>(job);
  if (kept) {
    pick_kept<false><<<blocks, kSelectThreads, shared, launch.stream()>>>(job);
  } else if (flat) {
    pick_kept<true><<<blocks, kSelectThreads, shared, launch.stream()>>>(job);
  } else {
    pick_given<<<blocks, kSelectThreads, shared, launch.stream()>>>(job);
  }
  TOPKEY_CUDA_LAUNCHED("pick");
}

}  // namespace topkey::cuda
