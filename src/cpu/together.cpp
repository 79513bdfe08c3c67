// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See together.h.
#include "cpu/together.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

namespace topkey::cpu {
namespace {

void add(Histogram& h, uint32_t* shared) {
  const uint32_t* bins = h.fold();
  for (int b = 0; b < kBins; ++b) {
    if (bins[b] != 0) std::atomic_ref<uint32_t>(shared[b]).fetch_add(bins[b], std::memory_order_relaxed);
  }
}

class Selecting {
 public:
  Selecting(const Member& member, int64_t workers, const TeamRoom& room, const TeamList* lists, int64_t n)
      : room_(room), lists_(lists), n_(n) {
    int64_t all = 0;
    for (int64_t l = 0; l < n; ++l) all += lists[l].parts;
    if (member.rank() >= workers) return;
    first_ = all * member.rank() / workers;
    last_ = all * (member.rank() + 1) / workers;
    for_each_list([&](int64_t l, int64_t, int64_t) {
      int64_t entries = 0;
      for (int64_t p = 0; p < lists_[l].parts; ++p) entries += lists_[l].part(p).entries.size;
      kth_[l] = kth_of(lists_[l].k, entries);
      size_[l] = kth_[l].none ? 0 : std::min(entries, lists_[l].k);
    });
  }

  /// Adds this member's parts to the histogram of one digit.
  void count(int digit) {
    for_each_list([&](int64_t l, int64_t first, int64_t last) {
      if (kth_[l].all || kth_[l].none || (digit == 0 && lists_[l].counted)) return;
      Histogram h;
      for (int64_t p = first; p < last; ++p) {
        count_digit(lists_[l].part(p).entries, lists_[l].forced, kDigit[digit], kth_[l], h);
      }
      add(h, room_.bins_of(l, digit));
    });
  }

  /// Once all have counted it; after the first digit, few entries are left to look at.
  void descend_and_drop(int digit) {
    for_each_list([&](int64_t l, int64_t first, int64_t last) {
      if (kth_[l].all || kth_[l].none) return;
      descend(room_.bins_of(l, digit), kDigit[digit], &kth_[l]);
      for (int64_t p = first; p < last && digit == 0; ++p) drop_below(lists_[l].part(p).entries, l);
    });
  }

  void count_kept() {
    for_each_list([&](int64_t l, int64_t first, int64_t last) {
      for (int64_t p = first; p < last; ++p) {
        PartEntries& part = lists_[l].part(p);
        part.above = part.equal = 0;
        if (kth_[l].none) continue;
        for_each_key(part.entries, lists_[l].forced, [&](const uint32_t* keys, int64_t, int64_t n) {
          for (int64_t i = 0; i < n; ++i) {
            part.above += keys[i] > kth_[l].key;
            part.equal += keys[i] == kth_[l].key;
          }
        });
      }
    });
  }

  /// Each part's place follows from the counts of the parts before it.
  void write() {
    for_each_list([&](int64_t l, int64_t first, int64_t last) {
      const TeamList& list = lists_[l];
      const KthKey& kth = kth_[l];
      int64_t above = 0, equal = 0;
      for (int64_t p = 0; p < first; ++p) above += list.part(p).above, equal += list.part(p).equal;
      for (int64_t p = first; p < last; ++p) {
        PartEntries& part = list.part(p);
        const int64_t at = above + std::min(equal, kth.needed);
        int64_t ties = std::max<int64_t>(kth.needed - equal, 0), kept = 0;
        // In its own place first: keep_best writes one entry too many, which here would be another member's.
        if (!kth.none) keep_best(part.entries, list.forced, kth.key, &ties, part.entries, &kept);
        std::memcpy(room_.score + l * room_.most + at, part.entries.score, static_cast<size_t>(kept) * sizeof(float));
        std::memcpy(room_.position + l * room_.most + at, part.entries.position,
                    static_cast<size_t>(kept) * sizeof(int32_t));
        above += part.above, equal += part.equal;
      }
      if (first == 0) room_.found[l] = {size_[l], {kth.key, kth.equal > kth.needed && kth.key != 0xFFFFFFFFu}};
    });
  }

 private:
  /// Calls f(list, first part, last part) for the parts that are this member's.
  template <class F>
  void for_each_list(F&& f) {
    int64_t base = 0;
    for (int64_t l = 0; l < n_; base += lists_[l++].parts) {
      const int64_t first = std::max<int64_t>(first_ - base, 0), last = std::min(last_ - base, lists_[l].parts);
      if (first < last) f(l, first, last);
    }
  }

  void drop_below(Entries& e, int64_t l) {
    int64_t kept = 0;
    const uint32_t lowest = kth_[l].key;
    for_each_key(e, lists_[l].forced, [&](const uint32_t* keys, int64_t first, int64_t n) {
      keep_chunk(e, first, keys, n, e, &kept, [&](uint32_t key) { return key >= lowest; });
    });
    e.size = kept;
  }

  const TeamRoom& room_;
  const TeamList* lists_;
  int64_t n_, first_ = 0, last_ = 0;  ///< this member's parts, all lists' numbered through
  KthKey kth_[kMostLists];
  int64_t size_[kMostLists] = {};
};

}  // namespace

void count_part(const Entries& part, const Forced& forced, int64_t k, uint32_t* bins, SharedGate* gate) {
  Histogram h;
  count_digit(part, forced, kDigit[0], KthKey{}, h);
  add(h, bins);
  int64_t found = 0;
  uint32_t bin = kBins;
  // Others add meanwhile; whatever is seen of that is there.
  while (bin > 0 && found < k) found += std::atomic_ref<uint32_t>(bins[--bin]).load(std::memory_order_relaxed);
  // Keys below that of -inf would be read back as NaN.
  if (k <= 0 || found < k || bin << kDigit[0].shift <= key_of(-std::numeric_limits<float>::infinity())) return;
  raise_gate(gate, bin << kDigit[0].shift);
}

void TeamRoom::clear(int64_t list) const {
  std::memset(bins_of(list, 0), 0, static_cast<size_t>(kDigits) * kBins * sizeof *bins);
}

void select_together(const Member& member, int64_t workers, const TeamRoom& room, const TeamList* lists, int64_t n) {
  Selecting selecting(member, workers, room, lists, n);
  for (int digit = 0; digit < kDigits; ++digit) {
    selecting.count(digit);
    // Also for the sizes of parts, which are read before and changed after.
    member.barrier();
    selecting.descend_and_drop(digit);
  }
  selecting.count_kept();
  member.barrier();
  selecting.write();
  member.barrier();
}

}  // namespace topkey::cpu
