// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See winners.h. Radix selection: three histograms over 11, 11 and 10 bits of the ordered key find the k-th key exactly.
#include "cpu/winners.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace topkey::cpu {
namespace {

constexpr int kBins = 2048;

struct Digit {
  int shift;
  uint32_t mask;
};
constexpr Digit kDigits[] = {{21, 2047}, {10, 2047}, {0, 1023}};

/// Histogram of one digit over the entries whose higher digits equal `prefix`.
void count_digit(const Entries* parts, int64_t num_parts, const Forced& forced, const Digit& digit, uint32_t prefix,
                 uint32_t prefix_mask, uint32_t* bins) {
  std::memset(bins, 0, kBins * sizeof *bins);
  for (int64_t p = 0; p < num_parts; ++p) {
    for (int64_t i = 0; i < parts[p].size; ++i) {
      const uint32_t key = forced.key(parts[p].score[i], parts[p].position[i]);
      if ((key & prefix_mask) == prefix) ++bins[key >> digit.shift & digit.mask];
    }
  }
}

/// The k-th largest key (1 <= k <= entries), how many of its equals are still needed, and how many there are.
void find_cut(const Entries* parts, int64_t num_parts, int64_t k, const Forced& forced, uint32_t* key, int64_t* needed,
              int64_t* equal) {
  uint32_t bins[kBins];
  uint32_t prefix = 0, prefix_mask = 0;
  int64_t rest = k;
  for (const Digit& digit : kDigits) {
    count_digit(parts, num_parts, forced, digit, prefix, prefix_mask, bins);
    uint32_t bin = digit.mask;
    while (rest > bins[bin]) rest -= bins[bin--];
    prefix |= bin << digit.shift;
    prefix_mask |= digit.mask << digit.shift;
    *equal = bins[bin];
  }
  *key = prefix;
  *needed = rest;
}

}  // namespace

int64_t select_best(const Entries* parts, int64_t num_parts, int64_t k, const Forced& forced, Entries out, Cut* cut) {
  int64_t all = 0;
  for (int64_t p = 0; p < num_parts; ++p) all += parts[p].size;
  uint32_t key = 0;
  int64_t needed = all, equal = 0;
  if (all > k && k > 0) {
    find_cut(parts, num_parts, k, forced, &key, &needed, &equal);
    cut->tied = equal > needed && key != 0xFFFFFFFFu;
  }
  cut->key = key;
  if (k <= 0) return 0;
  int64_t kept = 0;
  for (int64_t p = 0; p < num_parts; ++p) {
    const Entries& part = parts[p];
    for (int64_t i = 0; i < part.size; ++i) {
      const float score = part.score[i];
      const int32_t position = part.position[i];
      const uint32_t own = forced.key(score, position);
      const bool tie = own == key && needed > 0;
      needed -= tie;
      if (own > key || tie) {
        out.score[kept] = score;
        out.position[kept] = position;
        ++kept;
      }
    }
  }
  return kept;
}

void Winners::shrink() {
  Cut cut;
  entries_.size = select_best(&entries_, 1, k_, forced_, entries_, &cut);
  // What an earlier cut left out is worth remembering only while the cut stays where it is.
  cut_ = {cut.key, cut.tied || (cut_.tied && cut_.key == cut.key)};
  open_ = count_ties_ && cut.key == 0;
  // Later keys have higher positions, so an equal score loses: only what is greater than the k-th may still come in.
  const float infinity = std::numeric_limits<float>::infinity();
  if (k_ <= 0 || cut.key == 0xFFFFFFFFu) {
    gate_ = canonical_nan();  // nothing can: all are forced
  } else if (cut.key == 0) {
    gate_ = -infinity;  // the k-th is NaN: any number beats it
  } else {
    const float kth = score_of_key(cut.key);
    gate_ = count_ties_ ? kth : kth == infinity ? canonical_nan() : std::nextafter(kth, infinity);
  }
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
  if (entries_.size > k_) shrink();
}

}  // namespace topkey::cpu
