// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `quantize`: from a model's vectors to codes. Every producer of the library runs norm, rope, Hadamard, amax,
// quantise in that order, in f32, each step rounded once, and writes the same bytes on every backend (docs/formats.md
// has each formula).
#pragma once
#include "topkey/format.h"
#include "topkey/types.h"

namespace topkey {

enum class NormKind : int32_t { none, layer, rms };

/// layer: ((x - mean) * (1 / sqrt(var + eps))) * weight + bias. rms: (x * (1 / sqrt(mean(x^2) + eps))) * weight.
/// Results are rounded to the input's dtype.
struct Norm {
  NormKind kind;
  Tensor weight, bias;  ///< f32|bf16 [D]; absent = nothing is multiplied, or added; bias in layer only
  float eps;
};

/// Rotates dim dims of each vector by cos_sin[positions[t]]: (a, b) -> (a*cos - b*sin, b*cos + a*sin), rounded to the
/// input's dtype. half-split pairs (i, i + dim/2), interleaved pairs (2i, 2i + 1). Default: half-split on the leading
/// dims.
struct Rope {
  Tensor positions;  ///< i32|i64 [T]; one outside the table makes the vector NaN and is counted; strict raises
  Tensor cos_sin;    ///< f32|bf16|f16 [max_pos, dim] = cos | sin, dim/2 each
  int32_t dim;       ///< even, at most D; 0 = no rope
  bool interleaved, trailing;
};

/// Queries [R,H,D] to codes. fp8, fp8_fnuz: weights_out = weights * q_scale * softmax_scale * head_scale (the rule
/// names the order); mxfp4: q scales stay in q_scales_out; other formats: q_out in its own dtype, weights_out = weights
/// * softmax_scale * head_scale. An inf or NaN in a vector: fp8 codes 0x7F (fp8_fnuz: 0x80) and weights_out NaN; mxfp4:
/// that block's scale 255 and codes 0; plain formats carry it element by element. Outputs must not overlap inputs.
/// Cost: one pass.
struct QuantizeQ {
  uint32_t struct_size;
  Tensor q;                         ///< f32|bf16|f16 [R,H,D], unit
  Tensor weights;                   ///< f32|bf16 [R,H], unit
  float softmax_scale, head_scale;  ///< D^-0.5 and H^-0.5; 0 = 1
  QuantRule rule;
  Rope rope;      ///< positions [R]
  bool hadamard;  ///< natural order, times f32(D^-0.5); D a power of two
  KeyFormat format;
  Tensor q_out;  ///< fp8: f8_e4m3fn|u8 [R,H,D]; fp8_fnuz: u8 [R,H,D]; mxfp4: u8 [R,H,D/2]; else f32|bf16|f16 [R,H,D]
  Tensor q_scales_out;  ///< mxfp4: u8|e8m0 [R,H,D/32] or i32 [R,H]; else absent
  Tensor weights_out;   ///< f32 [R,H]
};
TOPKEY_OP(quantize_q, QuantizeQ)

/// Keys [T,D] to codes and scales, dense. An inf or NaN in a vector: fp8 codes 0x7F (fp8_fnuz: 0x80) and scale NaN;
/// mxfp4: that block's scale 255 and codes 0; q8_0: that block's d NaN, its codes 0; plain formats element by element,
/// too large = inf. Outputs must not overlap inputs. Cost: one pass.
struct QuantizeK {
  uint32_t struct_size;
  Tensor k;  ///< f32|bf16|f16 [T,D], unit
  Norm norm;
  Rope rope;  ///< positions [T]
  bool hadamard;
  ScaleRule scale;
  QuantRule rule;
  DenseKeys out;  ///< [T,...] in out.format
};
TOPKEY_OP(quantize_k, QuantizeK)

}  // namespace topkey
