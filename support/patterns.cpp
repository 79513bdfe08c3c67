// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Score patterns. Each is written for the fault it provokes: plateaus and ties for buckets that overflow, sorted rows
// for heaps and thresholds that never settle, decoys for guesses from a sample, bit patterns for kernels that order
// floats by their bits.
#include "support/patterns.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "topkey/number.h"

namespace topkey::support {
namespace {

constexpr const char* kNames[kNumPatterns] = {
    "normal",          "relu_plateau",   "ties_at_cut", "all_equal", "ascending", "descending",       "bit_reversed",
    "plus_minus_zero", "plus_minus_inf", "nans",        "denormals", "decoy",     "few_mantissa_bits"};

/// Half of topk distinct winners, then one value for about four times topk keys, the rest below; at random places.
void fill_ties_at_cut(float* scores, int64_t count, int64_t topk, Random& random) {
  std::vector<int64_t> places(static_cast<size_t>(count));
  std::iota(places.begin(), places.end(), int64_t{0});
  random.shuffle(places);
  const int64_t winners = std::min(count, topk / 2), tied = std::min(count, winners + 4 * topk + 1);
  for (int64_t i = 0; i < count; ++i) {
    const float value = i < winners ? 2.F + static_cast<float>(i) : i < tied ? 1.F : -std::abs(random.normal());
    scores[places[static_cast<size_t>(i)]] = value;
  }
}

void fill_permuted(float* scores, const std::vector<int64_t>& ranks) {
  for (size_t i = 0; i < ranks.size(); ++i) scores[i] = static_cast<float>(ranks[i]) - 7.5F;
}

float any_nan(Random& random) {
  const uint32_t payload = 1 + static_cast<uint32_t>(random.below(0x7FFFFF));
  return float_of(static_cast<uint32_t>(random.below(2)) << 31 | 0x7F800000u | payload);
}

float one_score(Pattern pattern, Random& random, uint32_t few_bits) {
  switch (pattern) {
    case Pattern::relu_plateau: return random.chance(0.9) ? 0.F : std::abs(random.normal());
    case Pattern::plus_minus_zero: return random.chance(0.5) ? 0.F : -0.F;
    case Pattern::plus_minus_inf: {
      const uint64_t pick = random.below(5);
      const float inf = std::numeric_limits<float>::infinity();
      return pick == 0 ? inf : pick == 1 ? -inf : random.normal();
    }
    case Pattern::nans: return random.chance(0.5) ? any_nan(random) : random.normal();
    case Pattern::denormals:
      return float_of(static_cast<uint32_t>(random.below(2)) << 31 | static_cast<uint32_t>(random.below(0x800100)));
    case Pattern::few_mantissa_bits: return float_of(0x3F900000u | static_cast<uint32_t>(random.below(few_bits)));
    default: return random.normal();
  }
}

}  // namespace

const char* pattern_name(Pattern pattern) {
  const auto i = static_cast<int32_t>(pattern);
  return i >= 0 && i < kNumPatterns ? kNames[i] : "?";
}

bool pattern_of(std::string_view name, Pattern* pattern) {
  for (int32_t i = 0; i < kNumPatterns; ++i) {
    if (name != kNames[i]) continue;
    *pattern = static_cast<Pattern>(i);
    return true;
  }
  return false;
}

std::vector<Pattern> all_patterns() {
  std::vector<Pattern> all;
  for (int32_t i = 0; i < kNumPatterns; ++i) all.push_back(static_cast<Pattern>(i));
  return all;
}

std::vector<int64_t> bit_reversed_order(int64_t n) {
  int bits = 0;
  while ((int64_t{1} << bits) < n) ++bits;
  std::vector<int64_t> order;
  order.reserve(static_cast<size_t>(n));
  for (int64_t i = 0; i < int64_t{1} << bits; ++i) {
    int64_t reversed = 0;
    for (int b = 0; b < bits; ++b) reversed |= (i >> b & 1) << (bits - 1 - b);
    if (reversed < n) order.push_back(reversed);
  }
  return order;
}

std::vector<int64_t> decoy_order(int64_t n, Random& random) {
  // Samples of 2, 4, ..., 1024 evenly spread positions are nested in these 1024.
  std::vector<bool> sampled(static_cast<size_t>(n), false);
  const int64_t sample = std::min<int64_t>(1024, (n + 1) / 2);
  for (int64_t s = 0; s < sample; ++s) sampled[static_cast<size_t>(s * n / sample)] = true;
  std::vector<int64_t> low, high;
  for (int64_t i = 0; i < n; ++i) (sampled[static_cast<size_t>(i)] ? low : high).push_back(i);
  random.shuffle(high);
  std::vector<int64_t> rank(static_cast<size_t>(n));
  int64_t next = 0;
  for (const auto* part : {&low, &high}) {
    for (int64_t position : *part) rank[static_cast<size_t>(position)] = next++;
  }
  return rank;
}

void fill_scores(Pattern pattern, float* scores, int64_t count, int64_t topk, uint64_t seed) {
  Random random(seed);
  std::vector<int64_t> ranks(static_cast<size_t>(count));
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  switch (pattern) {
    case Pattern::ties_at_cut: return fill_ties_at_cut(scores, count, topk, random);
    case Pattern::all_equal: std::fill_n(scores, count, random.normal()); return;
    case Pattern::ascending: return fill_permuted(scores, ranks);
    case Pattern::descending: std::reverse(ranks.begin(), ranks.end()); return fill_permuted(scores, ranks);
    case Pattern::bit_reversed: return fill_permuted(scores, bit_reversed_order(count));
    case Pattern::decoy: return fill_permuted(scores, decoy_order(count, random));
    default: break;
  }
  const uint32_t few_bits = random.chance(0.5) ? 2 : 1024;
  for (int64_t i = 0; i < count; ++i) scores[i] = one_score(pattern, random, few_bits);
}

}  // namespace topkey::support
