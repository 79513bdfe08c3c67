// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Threads of a CPU call: a Team is `size` members that run the same function and meet at barriers. OpenMP makes one
// (openmp.cpp; a build without it makes teams of one, no_openmp.cpp); the caller's own threads are another
// (Exec.team). No bit of a result depends on it.
#pragma once
#include <cstdint>

#include "topkey/types.h"

namespace topkey::cpu {

class Member {
 public:
  Member(int32_t rank, int32_t size, void (*wait)(void*), void* ctx)
      : rank_(rank), size_(size), barrier_(wait), ctx_(ctx) {}
  int32_t rank() const { return rank_; }
  int32_t size() const { return size_; }
  void barrier() const {
    if (size_ > 1) barrier_(ctx_);
  }

 private:
  int32_t rank_, size_;
  void (*barrier_)(void*);
  void* ctx_;
};

using TeamFunction = void (*)(const Member&, void* arg);

/// Runs `function` on `size` threads made by OpenMP (fewer where it gives fewer: members learn the real size).
void run_openmp(int32_t size, TeamFunction function, void* arg);
/// Threads that OpenMP would use, at least 1.
int32_t openmp_threads();

/// How many members a call of this exec has when it wants `useful` of them: the caller's team is as it is.
inline int32_t team_size(const Exec& exec, int64_t useful) {
  if (exec.team != nullptr) return exec.team->size;
  const int64_t all = exec.threads > 0 ? exec.threads : openmp_threads();
  return static_cast<int32_t>(useful < all ? (useful < 1 ? 1 : useful) : all);
}

/// Runs body(member) on the call's team.
template <class Body>
void run_team(const Exec& exec, int32_t size, Body& body) {
  if (exec.team != nullptr) {
    body(Member(exec.team->rank, exec.team->size, exec.team->barrier, exec.team->ctx));
  } else if (size == 1) {
    body(Member(0, 1, nullptr, nullptr));
  } else {
    run_openmp(
        size, [](const Member& member, void* arg) { (*static_cast<Body*>(arg))(member); }, &body);
  }
}

}  // namespace topkey::cpu
