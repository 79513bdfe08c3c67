// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// From a trace's unquantised vectors to its codes, through the library's own producers: used to make traces and to time
// the stages.
#pragma once
#include <cstdint>
#include <vector>

#include "topkey/topkey.h"

namespace topkey::cli {

struct Vectors {
  Tensor q;        ///< bf16 [R,H,D]
  Tensor keys;     ///< bf16 [T,D] or, by request, [B,T,D]
  Tensor weights;  ///< f32 [R,H] before the q scale is folded in; absent = 1, times D^-0.5 and H^-0.5
};

/// The call that writes `to` (values, scales, weights f32). `ones` [R,H] stands in for absent weights.
QuantizeQ query_producer(const Vectors& vectors, KeyFormat format, const Query& to, const Tensor& ones);
/// The call that stores key i (row i of keys, requests one after the other) at slots[i].
StoreK page_producer(const Vectors& vectors, ScaleRule scale, const std::vector<int64_t>& slots, const KeyCache& to);
QuantizeK dense_producer(const Vectors& vectors, ScaleRule scale, const DenseKeys& to);

}  // namespace topkey::cli
