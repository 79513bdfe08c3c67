// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Statistics of one member's share of a call, and the words of `strict`. Members add to exec.stats when their part is
// done; a strict call is checked before anything is written, by every member alike, so that all of them raise or none
// does.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

#include "topkey/types.h"

namespace topkey::cpu {

struct Counts {
  uint64_t words[kNumStats] = {};

  void add(Stat stat, int64_t n = 1) { words[stat] += static_cast<uint64_t>(n); }
  void publish(const Exec& exec) const {
    if (exec.stats == nullptr) return;
    for (int i = 0; i < kNumStats; ++i) {
      if (words[i] != 0) std::atomic_ref<uint64_t>(exec.stats[i]).fetch_add(words[i], std::memory_order_relaxed);
    }
  }
};

/// The sentence of a strict call that met wild values.
[[noreturn]] inline void raise_wild(const char* op, int64_t number) {
  throw Error(Status::invalid_argument, std::string(op) +
                                            ": device values must be inside the caller's tables under strict, got " +
                                            std::to_string(number) + " that are not");
}

}  // namespace topkey::cpu
