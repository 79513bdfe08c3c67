// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Division by a number that the host knows: a product in place of the thirty instructions of an integer division, which a
// launch of few rows would wait for.
#pragma once
#include <cstdint>

namespace topkey::cuda {

/// magic = 2^64 / value rounded up: the upper half of n * magic is n / value for every n < 2^32, as magic is too large by
/// less than 1 and n / value below the next whole number by at least 1 / value.
struct Divisor {
  uint64_t magic;
  uint32_t value;

  __device__ __forceinline__ uint32_t quotient(uint32_t n) const {
    return value == 1 ? n : static_cast<uint32_t>(__umul64hi(n, magic));
  }
};
inline Divisor divisor(uint32_t value) { return {value > 1 ? ~uint64_t{0} / value + 1 : 0, value}; }

}  // namespace topkey::cuda
