// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See winners.h. Radix selection: three histograms over 11, 11 and 10 bits of the ordered key find the k-th key
// exactly.
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

/// Entries to choose from.
struct Pool {
  const Entries* parts;
  int64_t num_parts;
  const Forced* forced;
};

/// The digits of a key that are already known.
struct Prefix {
  uint32_t key = 0, mask = 0;
};

/// Histogram of one digit over the entries whose higher digits are those of the prefix.
void count_digit(const Pool& pool, const Digit& digit, const Prefix& prefix, uint32_t* bins) {
  std::memset(bins, 0, kBins * sizeof *bins);
  for (int64_t p = 0; p < pool.num_parts; ++p) {
    const Entries& part = pool.parts[p];
    for (int64_t i = 0; i < part.size; ++i) {
      const uint32_t key = pool.forced->key(part.score[i], part.position[i]);
      if ((key & prefix.mask) == prefix.key) ++bins[key >> digit.shift & digit.mask];
    }
  }
}

struct KthKey {
  uint32_t key;
  int64_t needed, equal;  ///< how many of its equals are among the first k, and how many there are
};

/// The k-th largest key, 1 <= k <= entries.
KthKey find_kth(const Pool& pool, int64_t k) {
  uint32_t bins[kBins];
  Prefix prefix;
  KthKey kth{0, k, 0};
  for (const Digit& digit : kDigits) {
    count_digit(pool, digit, prefix, bins);
    uint32_t bin = digit.mask;
    while (kth.needed > bins[bin]) kth.needed -= bins[bin--];
    prefix.key |= bin << digit.shift;
    prefix.mask |= digit.mask << digit.shift;
    kth.equal = bins[bin];
  }
  kth.key = prefix.key;
  return kth;
}

}  // namespace

int64_t select_best(const Entries* parts, int64_t num_parts, int64_t k, const Forced& forced, Entries out, Cut* cut) {
  int64_t all = 0;
  for (int64_t p = 0; p < num_parts; ++p) all += parts[p].size;
  KthKey kth{0, all, 0};
  if (all > k && k > 0) {
    kth = find_kth({parts, num_parts, &forced}, k);
    cut->tied = kth.equal > kth.needed && kth.key != 0xFFFFFFFFu;
  }
  cut->key = kth.key;
  if (k <= 0) return 0;
  int64_t kept = 0;
  for (int64_t p = 0; p < num_parts; ++p) {
    const Entries& part = parts[p];
    for (int64_t i = 0; i < part.size; ++i) {
      const float score = part.score[i];
      const int32_t position = part.position[i];
      const uint32_t own = forced.key(score, position);
      const bool tie = own == kth.key && kth.needed > 0;
      kth.needed -= tie;
      if (own > kth.key || tie) {
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
