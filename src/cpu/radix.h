// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The steps of an exact radix selection: histograms over 11, 11 and 10 bits of the ordered key find the k-th key, then
// a stable pass keeps what is before it. One thread takes them in turn (select_best), a team takes them together
// (together.cpp). Loops are free of branches on the data: scores near the cut are coin tosses, and a wrong guess costs
// as much as the rest of the step.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cpu/winners.h"

namespace topkey::cpu {

constexpr int kBins = 2048;
/// Adding to one word again and again is slow: neighbours count in histograms of their own, and keys that are not
/// counted go to words behind the bins, in turn.
constexpr int kUncounted = 8, kWays = 2;
struct Histogram {
  uint32_t ways[kWays][kBins + kUncounted] = {};

  /// Sums in the first way; nothing may be counted after.
  const uint32_t* fold() {
    for (int b = 0; b < kBins; ++b) ways[0][b] += ways[1][b];
    return ways[0];
  }
};
constexpr int kDigits = 3;

struct Digit {
  int shift;
  uint32_t mask;
};
constexpr Digit kDigit[kDigits] = {{21, 2047}, {10, 2047}, {0, 1023}};

/// The k-th largest key as far as it is known: its digits so far, and how many keys with those digits are among the
/// first k. all: fewer than k + 1 keys exist, every one is kept; none: k <= 0.
struct KthKey {
  uint32_t key = 0, mask = 0;
  int64_t needed = 0, equal = 0;
  bool all = false, none = false;
};
inline KthKey kth_of(int64_t k, int64_t entries) {
  KthKey kth;
  kth.none = k <= 0;
  kth.all = !kth.none && entries <= k;
  kth.needed = kth.all ? entries : k;
  return kth;
}
/// Learns one more digit from the histogram of keys that have the digits known so far.
inline void descend(const uint32_t* bins, const Digit& digit, KthKey* kth) {
  uint32_t bin = digit.mask;
  while (kth->needed > bins[bin]) kth->needed -= bins[bin--];
  kth->key |= bin << digit.shift;
  kth->mask |= digit.mask << digit.shift;
  kth->equal = bins[bin];
}

constexpr int64_t kKeyChunk = 512;  // keys made at a time: 2 KiB on the stack

/// Calls f(keys, first, n) for entries [first, first + n), chunk by chunk. Positions ascend, so the two ends tell
/// whether any of them is forced; where none is, the loop becomes vector code.
template <class F>
void for_each_key(const Entries& e, const Forced& forced, F&& f) {
  uint32_t keys[kKeyChunk];
  const bool any = e.size > 0 && (forced.has(e.position[0]) || forced.has(e.position[e.size - 1]));
  for (int64_t first = 0; first < e.size; first += kKeyChunk) {
    const int64_t n = std::min(kKeyChunk, e.size - first);
    const float* score = e.score + first;
    const int32_t* position = e.position + first;
    if (any) {
      for (int64_t i = 0; i < n; ++i) keys[i] = forced.key(score[i], position[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) keys[i] = key_of(score[i]);
    }
    f(keys, first, n);
  }
}

/// Counts the entries with the known digits of `kth`.
inline void count_digit(const Entries& e, const Forced& forced, const Digit& digit, const KthKey& kth, Histogram& h) {
  // Copies: what is written below might be these for all that a compiler knows.
  const int shift = digit.shift;
  const uint32_t mask = digit.mask, known = kth.mask, prefix = kth.key;
  for_each_key(e, forced, [&h, shift, mask, known, prefix](const uint32_t* keys, int64_t, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t other = static_cast<uint32_t>(kBins) + static_cast<uint32_t>(i % kUncounted);
      const uint32_t counted = 0u - static_cast<uint32_t>((keys[i] & known) == prefix);
      ++h.ways[i % kWays][((keys[i] >> shift & mask) & counted) | (other & ~counted)];
    }
  });
}

/// Appends entry first + i to out, from *at on, where keep(keys[i]).
template <class Keep>
void keep_chunk(const Entries& e, int64_t first, const uint32_t* keys, int64_t n, const Entries& out, int64_t* at,
                Keep&& keep) {
  int64_t to = *at;
  for (int64_t i = 0; i < n; ++i) {
    out.score[to] = e.score[first + i];
    out.position[to] = e.position[first + i];
    to += keep(keys[i]);
  }
  *at = to;
}

/// Appends to out, from *kept on, the entries greater than the k-th, and its first *ties equals. out may be e's own
/// arrays; it has room for one entry more than is kept, unless all are.
inline void keep_best(const Entries& e, const Forced& forced, uint32_t kth, int64_t* ties, const Entries& out,
                      int64_t* kept) {
  for_each_key(e, forced, [&](const uint32_t* keys, int64_t first, int64_t n) {
    int64_t equal = 0;
    for (int64_t i = 0; i < n; ++i) equal += keys[i] == kth;
    // Chunks where the ties run out are rare, and the only ones where an entry depends on those before it.
    if (*ties == 0) {
      keep_chunk(e, first, keys, n, out, kept, [&](uint32_t key) { return key > kth; });
    } else if (equal <= *ties) {
      keep_chunk(e, first, keys, n, out, kept, [&](uint32_t key) { return key >= kth; });
      *ties -= equal;
    } else {
      keep_chunk(e, first, keys, n, out, kept, [&](uint32_t key) {
        const bool tie = key == kth && *ties > 0;
        *ties -= tie;
        return key > kth || tie;
      });
    }
  });
}

}  // namespace topkey::cpu
