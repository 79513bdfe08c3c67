// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// One vector through norm, rope, Hadamard, amax and quantisation: what quantize_q, quantize_k and store_k share. f32,
// each step rounded once, in the order of docs/formats.md, so that the bytes are the same on every backend and ISA. A
// call makes one Recipe; each member of its team makes a Producer over scratch of its own and runs its vectors
// through it.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/team.h"
#include "topkey/topkey.h"

namespace topkey::cpu {

enum class Codes { fp8, fp8_fnuz, mxfp4, q8_0, bf16, f16, f32 };

/// What a call does to each of its vectors.
struct Recipe {
  int64_t dim;
  DType input;  ///< of the vectors; norm results and roped dims are rounded to it
  Codes codes;
  NormKind norm;
  float eps;
  int64_t rope_dim, rope_base;  ///< dims rotated (0 = none), and the first of them
  bool rope_interleaved;
  bool roped_bf16;       ///< roped dims are rounded to bf16 too
  float hadamard_scale;  ///< D^-0.5; 0 = no Hadamard
  bool whole_bf16;       ///< fp8 and mxfp4: rounded to bf16 before amax
  // fp8 only: s = max(amax, floor) times f32(1/448), or over 448 (fp8_fnuz: 224); then up to a power of two or as it
  // is.
  bool by_reciprocal, power_of_two;
  float floor;
};

/// The steps up to quantisation. `rope` as the caller gave it, dim 0 = none.
Recipe make_recipe(int64_t dim, DType input, const Norm& norm, const Rope& rope, bool hadamard);
void set_query_rule(Recipe& recipe, KeyFormat format, QuantRule rule);
void set_key_rule(Recipe& recipe, KeyFormat format, QuantRule rule, ScaleRule scale);

/// Where one vector's codes go, and the D/32 scales of mxfp4.
struct CodesOut {
  void* codes;
  uint8_t* block_scales;
};

/// The vector code, one table per ISA.
struct ProducerKernels {
  const char* isa;
  /// n values of a float dtype, widened exactly, then zeros up to a multiple of 32.
  void (*widen)(DType dtype, const void* from, int64_t n, float* to);
  /// One vector [dim] at `from` to its codes in `to`; returns the fp8 scale (0 for other codes). cos_sin: this
  /// vector's row of the table as f32, null where its position is outside (the vector becomes NaN); weight, bias null
  /// = absent. x: scratch for dim floats. x, weight and bias are padded to 32 floats and 128-byte aligned.
  float (*produce)(const Recipe& recipe, const void* from, const float* cos_sin, const float* weight, const float* bias,
                   float* x, const CodesOut& to);
};
const ProducerKernels& producer_kernels();

/// Vectors up to kStackDim use scratch on the stack; longer ones a part of the caller's workspace, which has room for
/// kWideMembers.
constexpr int64_t kStackDim = 1024, kWideMembers = 16;
constexpr int64_t padded_dim(int64_t dim) { return (dim + 31) / 32 * 32; }
/// x, the row of cos | sin, norm weight and bias.
constexpr int64_t scratch_floats(int64_t dim) { return 4 * padded_dim(dim); }
/// What quantize_q, quantize_k and store_k need of exec.workspace: 0 up to kStackDim, else 256 bytes for each
/// (padded) dim.
constexpr size_t producer_workspace(int64_t dim) {
  return dim <= kStackDim ? 0 : static_cast<size_t>(kWideMembers * scratch_floats(dim)) * sizeof(float);
}

/// True if the rope of this row has a position outside its table: the vector becomes NaN and is counted.
bool position_outside(const Rope& rope, int64_t row);
/// How many of `rows` rows have one.
int64_t positions_outside(const Rope& rope, int64_t rows);

/// How many members are worth having for `vectors` vectors, and may be: no less than 20 us of work each.
int64_t producer_members(const Recipe& recipe, int64_t vectors);

/// Asks for a vector that is wanted a few rows later: the hardware's prefetchers look ahead less far than one row's
/// work takes (a third of the time of a plain store_k). Bytes past 512 follow by themselves.
inline void prefetch_vector(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < std::min<int64_t>(bytes, 512); i += 64)
    __builtin_prefetch(static_cast<const char*>(from) + i);
}
constexpr int64_t kPrefetchRows = 8;

/// One member's way of running vectors. Make it where its member runs: the scratch is a local of that thread.
class Producer {
 public:
  struct Stack {
    alignas(128) float floats[scratch_floats(kStackDim)];  // left as it is: only what is written is read
  };
  Producer(const Recipe& recipe, const Norm& norm, const Rope& rope, Stack& stack, const Exec& exec, int32_t rank);
  /// The vector at `from`, whose rope position is that of `row`, to codes at `to` (and block scales, for mxfp4).
  /// Returns the fp8 scale.
  float operator()(const void* from, int64_t row, void* to, uint8_t* block_scales = nullptr) const {
    return kernels_.produce(recipe_, from, recipe_.rope_dim > 0 ? rotation_of(row) : nullptr, weight_, bias_, x_,
                            {to, block_scales});
  }
  /// Room for a row's codes and scales that its own production leaves alone until it writes them: where the row of cos
  /// | sin is widened.
  uint8_t* spare() const { return reinterpret_cast<uint8_t*>(rotation_); }

 private:
  const float* rotation_of(int64_t row) const;

  const ProducerKernels& kernels_;
  const Recipe& recipe_;
  const Rope& rope_;
  float* x_;
  float* rotation_;
  const float* weight_ = nullptr;
  const float* bias_ = nullptr;
};

}  // namespace topkey::cpu
