// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Several tokens to one vector, channel by channel: a softmax of their scores over their values. f32, each step rounded
// once, tokens in the order given; exp by one formula of plain products and sums (join-inl.h), so that the bits are
// the same on every ISA.
#pragma once
#include <cstdint>

#include "topkey/types.h"

namespace topkey::cpu {

/// One token's part: what is summed and what weighs it, [dim] each.
struct JoinToken {
  const void* value;
  const void* score;
  const float* ape;  ///< added to the score; null = it has been
  DType value_dtype, score_dtype;
};
/// Tokens of a pool or window, at most: a member's list of them lies on its stack.
constexpr int64_t kMaxTokens = 1024;

struct JoinKernels {
  const char* isa;
  /// count >= 1 tokens to x[dim].
  void (*join)(const JoinToken* tokens, int64_t count, int64_t dim, float* x);
  /// x[dim] rounded to bf16.
  void (*narrow)(const float* x, int64_t dim, uint16_t* to);
  /// One token as f32: its values, and its scores with ape added.
  void (*widen)(const JoinToken& token, int64_t dim, float* value, float* score);
};
const JoinKernels& join_kernels();

}  // namespace topkey::cpu
