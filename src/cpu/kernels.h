// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The vector code of the search: three functions per ISA behind one table, chosen once by Highway for the machine (or
// by TOPKEY_CPU_ISA, for tests). Everything around them is plain C++ of the baseline ISA.
//
// A *panel* holds panel_keys decoded keys transposed, [dim][panel_keys] f32: keys lie in lanes, so that each (key,
// head) has one FMA chain over d in one lane, on every ISA alike. That order is the bit contract of arithmetic `f32`
// (docs/numerics.md).
#pragma once
#include <cstdint>

#include "topkey/format.h"

namespace topkey::cpu {

/// Where the bytes of keys are, one pointer a key: values in their format, and for mxfp4 its D/32 scales.
struct KeyRows {
  const uint8_t* const* values;
  const uint8_t* const* scales;
};

/// mxfp4 values of q and of keys are held as kMxfp4Down times themselves, so that 6 * 2^127 is an f32; scores are put
/// right by kMxfp4Up, their key scale. Powers of two: no bit but those of the extremes depends on them.
constexpr float kMxfp4Down = 0.25f, kMxfp4Up = 16.0f;

/// Keys to ask the memory for while others are scored: nothing else can guess where pages lie. Spread over the work,
/// since a core has room for a dozen of such wishes at a time.
struct Ahead {
  const uint8_t* const* rows;
  const uint8_t* const* scales;  ///< null: none of their own
  int64_t count, bytes;          ///< keys; bytes of a row
};

struct ScoreJob {
  const float* panels;
  int64_t count, dim;  ///< panels of panel_keys keys each
  const float* q;      ///< one query row, packed
  const float* weights;
  int64_t heads;        ///< real ones
  const float* kscale;  ///< null = 1
  float* out;           ///< [count * panel_keys]
  Ahead ahead;
};

struct Kernels {
  const char* isa;
  int64_t panel_keys;  ///< keys of a panel, a multiple of 8
  int64_t head_block;  ///< heads that share one pass over a panel; queries are packed [blocks][dim][head_block]

  /// `count` (a multiple of 8) keys in `format` to panels of panel_keys keys each.
  void (*decode)(KeyFormat format, KeyRows rows, int64_t count, int64_t dim, float* panels);
  /// Queries are values like keys: 8 heads of `format` to out[8 / head_block][dim][head_block]; scratch[8 * dim].
  void (*pack)(KeyFormat format, KeyRows heads, int64_t dim, float* scratch, float* out);
  void (*score)(const ScoreJob& job);
  /// Indices i < n with scores[i] >= gate, ascending, into accepted[n]; their number. A NaN score or gate accepts
  /// nothing.
  int64_t (*gate)(const float* scores, int64_t n, float gate, int32_t* accepted);
};

const Kernels& kernels();

}  // namespace topkey::cpu
