// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The stage `pool` written a second time, and what a backend has written held against it. A call is replayed token by
// token, as an engine's decode would do it: a row reads the tokens before it, makes its key, leaves its own state. All
// in double, weights before sums, the Hadamard transform as a matrix; sharing no code with the library.
#pragma once
#include <cstdint>
#include <map>
#include <vector>

#include "support/array.h"
#include "support/compare.h"

namespace topkey::support {

/// A key before quantisation, and how far from it a backend may be there (one bf16 step of what was joined, and its
/// own roundings).
struct JoinedKey {
  std::vector<double> joined;  ///< the softmax of the tokens, before any other step
  std::vector<double> value, slack;
};
struct Replay {
  std::map<int64_t, JoinedKey> keys;   ///< by slot: the last one made for it
  int64_t skipped = 0, positions = 0;  ///< kSkippedSlots; rope positions outside their table
  Array state;                         ///< as the call must leave it
};
/// `before`: the tail (state), dense row-major, as it was before the call; absent where the call has none.
Replay replay(const PoolK& args, const Array& before);
Replay replay(const CompressK& args, const Array& before);

/// The written cache decoded, the written state bit for bit, the call's own statistics (from zero; null = not looked
/// at).
Report compare_replay(const PoolK& args, const Replay& want, const uint64_t* stats = nullptr);
Report compare_replay(const CompressK& args, const Replay& want, const uint64_t* stats = nullptr);
/// Every column, by the formula.
Report compare_expansion(const ExpandPools& args, const Tensor& pools, const uint64_t* stats = nullptr);

}  // namespace topkey::support
