// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See winners.h and radix.h.
#include "cpu/winners.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/radix.h"

namespace topkey::cpu {

int64_t select_best(const Entries* parts, int64_t num_parts, int64_t k, const Forced& forced, Entries out, Cut* cut) {
  int64_t all = 0;
  for (int64_t p = 0; p < num_parts; ++p) all += parts[p].size;
  KthKey kth = kth_of(k, all);
  *cut = Cut{};
  if (kth.none) return 0;
  for (int d = 0; d < kDigits && !kth.all; ++d) {
    Histogram h;
    for (int64_t p = 0; p < num_parts; ++p) count_digit(parts[p], forced, kDigit[d], kth, h);
    descend(h.fold(), kDigit[d], &kth);
  }
  *cut = {kth.key, kth.equal > kth.needed && kth.key != 0xFFFFFFFFu};
  int64_t kept = 0;
  for (int64_t p = 0; p < num_parts; ++p) keep_best(parts[p], forced, kth.key, &kth.needed, out, &kept);
  return kept;
}

void Winners::shrink() {
  Cut cut;
  entries_.size = select_best(&entries_, 1, wanted_.k, wanted_.forced, entries_, &cut);
  // What an earlier cut left out is worth remembering only while the cut stays where it is.
  cut_ = {cut.key, cut.tied || (cut_.tied && cut_.key == cut.key)};
  open_ = wanted_.count_ties && cut.key == 0 && heard_ == 0;
  // Later keys have higher positions, so an equal score loses: only what is greater than the k-th may still come in.
  const float infinity = std::numeric_limits<float>::infinity();
  if (wanted_.k <= 0 || cut.key == 0xFFFFFFFFu) {
    gate_ = canonical_nan();  // nothing can: all are forced
  } else if (cut.key == 0) {
    gate_ = -infinity;  // the k-th is NaN: any number beats it
  } else {
    const float kth = score_of_key(cut.key);
    gate_ = wanted_.count_ties ? kth : kth == infinity ? canonical_nan() : std::nextafter(kth, infinity);
  }
  if (wanted_.shared == nullptr || wanted_.k <= 0) return;
  const uint32_t highest = raise_gate(wanted_.shared, cut.key);
  // What is known from this cut alone is a little more: later equals lose.
  if (highest > cut.key) heard_ = std::max(heard_, highest);
  if (heard_ > 0) hear(heard_);
}

/// Equals of what others found may lie before theirs, so they come in.
void Winners::hear(uint32_t key) {
  heard_ = key;
  const float score = score_of_key(key);
  // A gate of NaN lets nothing in already; a key above every number's (all k are forced) becomes such a gate.
  if (open_ || gate_ < score || std::isnan(score)) gate_ = score;
  open_ = false;
}

void Winners::append_all(const float* score, const int32_t* position, int64_t n) {
  while (n > 0) {
    if (entries_.size == capacity_) shrink();
    const int64_t room = std::min(n, capacity_ - entries_.size);
    std::memcpy(entries_.score + entries_.size, score, static_cast<size_t>(room) * sizeof(float));
    std::memcpy(entries_.position + entries_.size, position, static_cast<size_t>(room) * sizeof(int32_t));
    entries_.size += room;
    score += room;
    position += room;
    n -= room;
  }
}

void Winners::finish() {
  if (entries_.size > wanted_.k) shrink();
}

}  // namespace topkey::cpu
