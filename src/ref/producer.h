// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// One vector through norm, rope, Hadamard, amax and quantisation: what quantize_q, quantize_k and store_k share. f32,
// each step rounded once, the order of docs/formats.md.
#pragma once
#include <cstdint>
#include <vector>

#include "ref/rows.h"
#include "ref/view.h"

namespace topkey::ref {

/// What one named rule does (docs/formats.md).
struct RuleFacts {
  bool roped_bf16, whole_bf16;                      ///< rounded to bf16 before amax
  float floor;                                      ///< of amax
  bool by_reciprocal;                               ///< s = a * f32(1/448), else a / 448
  enum Code { divide, exponent, reciprocal } code;  ///< x / s; x * 2^-e; x * (1 / s)
  bool joined_scales;  ///< weights: (w * s) * (softmax * head), else ((w * s) * softmax) * head
};
RuleFacts facts_of(QuantRule rule, bool query, ScaleRule scale);

struct Transform {
  const Norm* norm;  ///< null = none
  const Rope* rope;
  bool hadamard;
  DType input;      ///< norm results and roped dims are rounded to it
  bool roped_bf16;  ///< and roped dims to bf16, by rule
};
/// NaN payloads differ between machines; what is stored does not.
inline float one_nan(float x) { return is_nan_bits(bits_of(x)) ? canonical_nan() : x; }
/// In place on x[D]; row picks the rope position. A position outside the table makes the whole vector NaN.
void transform(const Transform& t, int64_t row, std::vector<float>& x);

/// Counts rope positions of `rows` rows outside the table (of rows that `skip` does not name), so that strict can
/// raise first.
template <class Skip>
void count_wild_positions(const Rope& rope, int64_t rows, Counts& counts, Skip&& skip) {
  for (int64_t r = 0; rope.dim > 0 && r < rows; ++r) {
    const int64_t position = integer(rope.positions, r);
    if (!skip(r) && (position < 0 || position >= rope.cos_sin.shape[0])) {
      counts.wild(kSkippedPages, 1, "rope position", r, position);
    }
  }
}

/// fp8 or fp8_fnuz codes [D] and the scale. An inf or NaN anywhere: NaN codes, scale NaN. Returns the scale.
float quantize_fp8(KeyFormat format, const RuleFacts& rule, ScaleRule scale, std::vector<float>& x, uint8_t* codes);
/// e2m1 pairs [D/2], low nibble first, and a ue8m0 byte for each 32: 2^e, e = ceil(log2(amax / 6)) within -127..127.
/// whole_bf16: x is first rounded to bf16. A block with an inf or NaN: scale 255, codes 0.
void quantize_mxfp4(bool whole_bf16, std::vector<float>& x, uint8_t* codes, uint8_t* scales);
/// Blocks of 34 bytes: d = a / 127 stored as f16, 32 int8 of x * (1 / d) rounded half away from zero.
void quantize_q8_0(const std::vector<float>& x, uint8_t* blocks);
/// x in `format` to the bytes of one key row; scale only where the format has one.
void quantize_row(KeyFormat format, QuantRule rule, ScaleRule scale_rule, std::vector<float>& x, uint8_t* values,
                  uint8_t* scale);

}  // namespace topkey::ref
