// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `merge`: the parts' entries as words (inverted key, position), whose ascending order is the order of the
// selection; the first k of them by nth_element. Positions of parts interleave, so the running selection of search
// does not apply.
#include <algorithm>

#include "cpu/emit.h"
#include "cpu/merge.h"
#include "cpu/team.h"

namespace topkey::cpu {
namespace {

constexpr int64_t kShared = 64;  // bytes before the members' scratch: what a strict call found

struct MergeScratch {
  uint64_t* words;  ///< [W * K]
  float* score;     ///< [min(topk, W * K)]
  int32_t* position;
  uint64_t* order;
};

MergeScratch take_scratch(Arena& arena, int64_t entries, int64_t topk) {
  const int64_t k = std::min(topk, entries);
  MergeScratch s{};
  s.words = arena.take<uint64_t>(entries);
  s.score = arena.take<float>(k);
  s.position = arena.take<int32_t>(k);
  s.order = arena.take<uint64_t>(k);
  return s;
}
int64_t scratch_bytes(int64_t entries, int64_t topk) {
  Arena arena(nullptr, 0);
  take_scratch(arena, entries, topk);
  return static_cast<int64_t>(arena.used());
}

/// Words that a row needs at most.
int64_t entries_of(const MergeTopk& a) {
  const int64_t blocks = a.out.blocks.data != nullptr ? a.block_ids.shape[0] * a.block_ids.shape[2] : 0;
  return std::max(a.scores.shape[0] * a.scores.shape[2], blocks);
}

int64_t collect(const MergeTopk& a, int64_t row, uint64_t* words, Counts& counts) {
  int64_t n = 0;
  for (int64_t part = 0; part < a.scores.shape[0]; ++part) {
    const float* scores =
        static_cast<const float*>(a.scores.data) + part * a.scores.stride[0] + row * a.scores.stride[1];
    const int32_t* indices =
        static_cast<const int32_t*>(a.indices.data) + part * a.indices.stride[0] + row * a.indices.stride[1];
    for (int64_t i = 0; i < a.scores.shape[2]; ++i) {
      if (indices[i] < 0) continue;
      const uint32_t key = key_of(scores[i]);
      counts.add(kNanScores, key == 0);
      words[n++] = static_cast<uint64_t>(~key) << 32 | static_cast<uint32_t>(indices[i]);
    }
  }
  counts.add(kScoredKeys, n);
  return n;
}

int64_t position_of(uint64_t word) { return static_cast<uint32_t>(word); }
bool by_position(uint64_t x, uint64_t y) { return position_of(x) < position_of(y); }

Forced forced_of(const MergeTopk& a, const RowFact& fact) {
  Forced f;
  if (a.force_first > 0) f.first = fact.start + a.force_first;
  if (a.force_last > 0) f.last = fact.end - a.force_last;
  return f;
}

/// Moves the k best of all words to the front, in position order: forced ones first, then the smallest.
void choose(uint64_t* words, int64_t all, int64_t k, const Forced& forced, Counts& counts) {
  if (k < all) {
    const int64_t f =
        std::partition(words, words + all, [&](uint64_t w) { return forced.has(position_of(w)); }) - words;
    if (f > k) {
      std::nth_element(words, words + k, words + f, by_position);
    } else {
      std::nth_element(words + f, words + k, words + all);
      const bool cut = k > f;  // the last one kept is there by its score
      counts.add(kTiedCuts, cut && *std::max_element(words + f, words + k) >> 32 == words[k] >> 32);
    }
  }
  std::sort(words, words + k, by_position);
}

/// Best key of each block that a part publishes, one word a block; then as entries are chosen, the newest one forced.
void merge_blocks(const MergeTopk& a, int64_t row, const MergeScratch& s) {
  int64_t n = 0;
  for (int64_t part = 0; part < a.block_ids.shape[0]; ++part) {
    const float* scores = static_cast<const float*>(a.block_scores.data) + part * a.block_scores.stride[0] +
                          row * a.block_scores.stride[1];
    const int32_t* ids =
        static_cast<const int32_t*>(a.block_ids.data) + part * a.block_ids.stride[0] + row * a.block_ids.stride[1];
    for (int64_t i = 0; i < a.block_ids.shape[2]; ++i) {
      if (ids[i] >= 0) s.words[n++] = static_cast<uint64_t>(ids[i]) << 32 | static_cast<uint32_t>(~key_of(scores[i]));
    }
  }
  std::sort(s.words, s.words + n);  // equal blocks together, the best score first
  const auto same_block = [](uint64_t x, uint64_t y) { return x >> 32 == y >> 32; };
  n = std::unique(s.words, s.words + n, same_block) - s.words;
  Forced newest;
  if (n > 0) newest.last = static_cast<int64_t>(s.words[n - 1] >> 32);
  for (int64_t i = 0; i < n; ++i) s.words[i] = s.words[i] << 32 | s.words[i] >> 32;
  const int64_t k = std::min(n, a.out.blocks.shape[1]);
  Counts none;
  choose(s.words, n, k, newest, none);
  int32_t* cells = static_cast<int32_t*>(a.out.blocks.data) + row * a.out.blocks.stride[0];
  for (int64_t i = 0; i < k; ++i) cells[i] = static_cast<int32_t>(position_of(s.words[i]));
  std::fill(cells + k, cells + a.out.blocks.shape[1], -1);
}

void merge_row(const MergeTopk& a, const Emitter& emitter, int64_t row, const MergeScratch& s, Counts& counts) {
  const RowFact fact = read_row(a.rows, row, 0);
  const Forced forced = forced_of(a, fact);
  const int64_t all = fact.request < 0 ? 0 : collect(a, row, s.words, counts);
  const int64_t k = std::min<int64_t>(a.topk, all);
  choose(s.words, all, k, forced, counts);
  for (int64_t i = 0; i < k; ++i) {
    s.score[i] = score_of_key(~static_cast<uint32_t>(s.words[i] >> 32));
    s.position[i] = static_cast<int32_t>(position_of(s.words[i]));
  }
  counts.add(kRows);
  emit_row(emitter, row, fact, {s.score, s.position, k}, forced, counts);
  if (a.out.blocks.data == nullptr || emitter.dry) return;
  if (fact.request < 0) {
    emit_blocks(a.out.blocks, {}, row, {});
  } else {
    merge_blocks(a, row, s);
  }
}

}  // namespace

size_t merge_workspace_bytes(int64_t entries, int64_t topk) {
  constexpr int64_t kWorkers = 16, kMost = int64_t{60} << 20;
  const int64_t each = scratch_bytes(entries, topk);
  return static_cast<size_t>(kShared + std::max(each, std::min(kWorkers * each, kMost)));
}

void merge_topk(const MergeTopk& a, const Exec& exec) {
  const int64_t entries = entries_of(a);
  const int64_t each = std::max<int64_t>(scratch_bytes(entries, a.topk), 1);
  const int64_t fit = (static_cast<int64_t>(exec.workspace_bytes) - kShared) / each;
  int64_t wild = 0;
  auto body = [&](const Member& member) {
    int64_t* shared_wild = static_cast<int64_t*>(exec.workspace);
    const int64_t workers = std::clamp<int64_t>(fit, 1, member.size());
    const int64_t own = std::min<int64_t>(member.rank(), workers - 1);
    Arena arena(static_cast<char*>(exec.workspace) + kShared + own * each, static_cast<size_t>(each));
    const MergeScratch scratch = take_scratch(arena, entries, a.topk);
    Emitter emitter{&a.out, a.topk, Shard{}, true, scratch.order};
    Counts counts;
    int64_t found = 0;
    if (exec.strict) {
      // Rank 0 runs it dry first; all learn whether anything was wild.
      emitter.dry = true;
      for (int64_t r = 0; member.rank() == 0 && r < a.rows.count; ++r) merge_row(a, emitter, r, scratch, counts);
      if (member.rank() == 0) *shared_wild = static_cast<int64_t>(counts.words[kSkippedSlots]);
      member.barrier();
      found = *shared_wild;
      emitter.dry = false;
      counts = Counts{};
    }
    for (int64_t r = member.rank(); found == 0 && member.rank() < workers && r < a.rows.count; r += workers) {
      merge_row(a, emitter, r, scratch, counts);
    }
    if (found == 0) counts.publish(exec);
    member.barrier();
    if (member.rank() == 0 || exec.team != nullptr) wild = found;
  };
  run_team(exec, team_size(exec, a.rows.count * entries / 16384), body);
  if (wild > 0) raise_wild("merge_topk", wild);
}

}  // namespace topkey::cpu
