// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Seeded test data: a random generator with the same numbers under every standard library, and the named patterns of
// scores that have broken public top-k kernels. Tests, the command line (`make-trace`, `check --random`), benchmarks
// and fuzzers share them.
#pragma once
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace topkey::support {

/// xoshiro256** seeded by splitmix64. std::normal_distribution and friends give other numbers under other libraries;
/// this does not.
class Random {
 public:
  explicit Random(uint64_t seed) {
    for (uint64_t& word : state_) {
      uint64_t z = seed += 0x9E3779B97F4A7C15u;
      z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
      z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
      word = z ^ (z >> 31);
    }
  }
  uint64_t next() {
    const uint64_t result = rotate(state_[1] * 5, 7) * 9, t = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= t;
    state_[3] = rotate(state_[3], 45);
    return result;
  }
  /// 0 <= result < n; n > 0. The bias of a plain remainder is under n * 2^-64.
  uint64_t below(uint64_t n) { return next() % n; }
  /// lo <= result <= hi.
  int64_t between(int64_t lo, int64_t hi) {
    return static_cast<int64_t>(static_cast<uint64_t>(lo) +
                                below(static_cast<uint64_t>(hi) - static_cast<uint64_t>(lo) + 1));
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  bool chance(double probability) { return uniform() < probability; }
  /// Mean 0, variance 1, within +-6: the sum of twelve uniforms, since log and cos differ between libraries.
  float normal() {
    int64_t sum = 0;
    for (int i = 0; i < 3; ++i) {
      for (uint64_t bits = next(), j = 0; j < 4; ++j, bits >>= 16) sum += static_cast<int64_t>(bits & 0xFFFF);
    }
    return static_cast<float>(sum - int64_t{6} * 0xFFFF) * 0x1p-16F;
  }
  template <class T>
  void shuffle(std::vector<T>& values) {
    for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[below(i)]);
  }

 private:
  static uint64_t rotate(uint64_t x, int by) { return (x << by) | (x >> (64 - by)); }
  uint64_t state_[4];
};

enum class Pattern : int32_t {
  normal,
  relu_plateau,  ///< 90 % exact zeros
  ties_at_cut,   ///< the topk-th score is shared by many keys
  all_equal,
  ascending,
  descending,
  bit_reversed,     ///< a permutation that no prefix and no stride samples fairly
  plus_minus_zero,  ///< +0 and -0, which are equal
  plus_minus_inf,   ///< a fifth each, the rest normal
  nans,             ///< both signs, any payload, among normal scores
  denormals,
  decoy,              ///< the evenly spread sample that a threshold might be guessed from holds the row's worst keys
  few_mantissa_bits,  ///< near-equal scores that share every coarse prefix
};
inline constexpr int kNumPatterns = 13;

/// "normal", "relu_plateau", ...: the enumerator's own word.
const char* pattern_name(Pattern pattern);
/// False if `name` is none.
bool pattern_of(std::string_view name, Pattern* pattern);
/// All of them, in order.
std::vector<Pattern> all_patterns();

/// Fills scores[0, count) with the pattern; `topk` says where its cut should hurt.
void fill_scores(Pattern pattern, float* scores, int64_t count, int64_t topk, uint64_t seed);
/// What position i of n gets in `bit_reversed`: a permutation of 0..n-1 for every n.
std::vector<int64_t> bit_reversed_order(int64_t n);
/// Permutation for `decoy`: position -> rank from the bottom; evenly spread positions have the lowest ranks.
std::vector<int64_t> decoy_order(int64_t n, Random& random);

}  // namespace topkey::support
