// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A selection that all members of a team make together: what is left of a few rows that were cut into slices. The parts
// of every list are dealt out; each member counts its own, the histograms meet in one by addition, and each writes what
// it keeps at its own place. Exact, in position order, the same bits for any team: sums and places depend on the parts
// alone.
#pragma once
#include <cstdint>

#include "cpu/radix.h"
#include "cpu/team.h"

namespace topkey::cpu {

/// Entries of one part of one list, and what its member found in them.
struct PartEntries {
  Entries entries;
  int64_t above, equal;  ///< entries before the k-th key, and its equals
};

/// What the task of one part of a sliced row left: keys, blocks where they are published, and the last cut.
struct alignas(64) Part {
  PartEntries keys, blocks;
  Cut cut;
};

/// One list to select from, the same for every member.
struct TeamList {
  Part* first;
  int64_t step, parts;  ///< Parts from one part to the next, and how many
  bool blocks;          ///< the parts' blocks, not their keys
  int64_t k;
  Forced forced;
  bool counted;  ///< the first digit's histogram is there already: count_part was called for every part

  PartEntries& part(int64_t p) const { return blocks ? first[p * step].blocks : first[p * step].keys; }
};

/// What a selection has found, in the workspace.
struct alignas(64) TeamFound {
  int64_t size;
  Cut cut;
};

/// Shared memory of up to `lists` selections at a time.
struct TeamRoom {
  int64_t lists, most;  ///< most: entries that one list can keep
  uint32_t* bins;       ///< [lists][kDigits][kBins], all zero before a selection, and again after clear()
  TeamFound* found;     ///< [lists]
  float* score;         ///< [lists][most]
  int32_t* position;    ///< [lists][most]

  uint32_t* bins_of(int64_t list, int digit) const { return bins + (list * kDigits + digit) * kBins; }
  Entries entries(int64_t list) const { return {score + list * most, position + list * most, found[list].size}; }
  void clear(int64_t list) const;
};

constexpr int64_t kMostLists = 8;  // at a time

/// Adds a part to the first digit's histogram of a list. Where k entries are known by then, tells `gate` a key that
/// they all reach.
void count_part(const Entries& part, const Forced& forced, int64_t k, uint32_t* bins, SharedGate* gate);

/// Selects from lists[0..n), n <= room.lists: found and entries of list l are complete when it returns, on every
/// member. Every member of the team calls it; the first `workers` of them work. The parts' entries are used up.
void select_together(const Member& member, int64_t workers, const TeamRoom& room, const TeamList* lists, int64_t n);

}  // namespace topkey::cpu
