// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Static division of a call's items over the working members of its team. A caller's team may be larger than the work
// is worth: the others only wait at the end, so that the results are complete when any member returns.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cpu/counts.h"
#include "cpu/team.h"

namespace topkey::cpu {

struct Share {
  int32_t rank, size;  ///< among those that work; rank >= size: none of it
  int64_t first(int64_t items) const { return rank >= size ? items : cut(items, rank); }
  int64_t last(int64_t items) const { return rank >= size ? items : cut(items, rank + 1); }

 private:
  /// items * rank / size without overflow.
  int64_t cut(int64_t items, int64_t r) const { return items / size * r + items % size * r / size; }
};

/// For strict calls, before run_shared: every member of a caller's team counts alike, so that all of them raise or
/// none does; none goes on to write (perhaps over what is being counted) before all have counted.
inline void raise_if_wild(const Exec& exec, const char* op, int64_t number) {
  if (number > 0) raise_wild(op, number);
  if (exec.team != nullptr && exec.team->size > 1) exec.team->barrier(exec.team->ctx);
}

/// Runs first(share, counts) on the call's team, `useful` members at most; when all are done, second(share, counts).
/// `rows` is what the call adds to kRows. Neither may throw.
template <class First, class Second>
void run_in_two(const Exec& exec, int64_t useful, int64_t rows, const First& first, const Second& second) {
  auto body = [&](const Member& member) {
    const Share share{member.rank(), static_cast<int32_t>(std::clamp<int64_t>(useful, 1, member.size()))};
    Counts counts;
    if (share.rank == 0) counts.add(kRows, rows);
    if (share.rank < share.size) first(share, counts);
    member.barrier();
    if (share.rank < share.size) second(share, counts);
    counts.publish(exec);
    member.barrier();
  };
  run_team(exec, team_size(exec, useful), body);
}

/// Runs work(share, counts) on the call's team, `useful` members at most; `rows` is what the call adds to kRows. work
/// must not throw.
template <class Work>
void run_shared(const Exec& exec, int64_t useful, int64_t rows, const Work& work) {
  auto body = [&](const Member& member) {
    const Share share{member.rank(), static_cast<int32_t>(std::clamp<int64_t>(useful, 1, member.size()))};
    Counts counts;
    if (share.rank == 0) counts.add(kRows, rows);
    if (share.rank < share.size) work(share, counts);
    counts.publish(exec);
    member.barrier();
  };
  run_team(exec, team_size(exec, useful), body);
}

}  // namespace topkey::cpu
