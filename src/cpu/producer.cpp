// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See producer.h. Compiles producer-inl.h once per ISA and picks one table at the first use; rules and scratch are
// plain C++.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/producer.cpp"
#include "cpu/producer.h"

#include "hwy/foreach_target.h"  // must come before highway.h
#include "hwy/highway.h"

// These use highway.h, so they come after it.
#include "cpu/producer-inl.h"

HWY_BEFORE_NAMESPACE();
namespace topkey::cpu {
namespace HWY_NAMESPACE {

ProducerKernels MakeProducerKernels() { return {hwy::TargetName(HWY_TARGET), Widen, Produce}; }

}  // namespace HWY_NAMESPACE
}  // namespace topkey::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <cmath>

#include "cpu/isa.h"
#include "cpu/view.h"

namespace topkey::cpu {

HWY_EXPORT(MakeProducerKernels);

const ProducerKernels& producer_kernels() {
  static const ProducerKernels table = [] {
    choose_isa();
    return HWY_DYNAMIC_DISPATCH(MakeProducerKernels)();
  }();
  return table;
}

Recipe make_recipe(int64_t dim, DType input, const Norm& norm, const Rope& rope, bool hadamard) {
  Recipe r{};
  r.dim = dim;
  r.input = input;
  r.norm = norm.kind;
  r.eps = norm.eps;
  r.rope_dim = rope.dim;
  r.rope_base = rope.trailing ? dim - rope.dim : 0;
  r.rope_interleaved = rope.interleaved;
  if (hadamard) r.hadamard_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
  return r;
}

// The table of docs/formats.md. How a code is made of x and s (x / s, x * 2^-e, x * (1 / s)) is not in it: with s =
// 2^e all three are the correctly rounded value of the same number, and rules that keep another s divide.
void set_query_rule(Recipe& r, KeyFormat format, QuantRule rule) {
  if (format == KeyFormat::mxfp4) {
    r.codes = Codes::mxfp4;
    r.roped_bf16 = true;
    return;
  }
  r.codes = format == KeyFormat::fp8 ? Codes::fp8 : Codes::fp8_fnuz;
  r.power_of_two = true;
  const bool v32 = rule == QuantRule::automatic || rule == QuantRule::v32_query;
  r.roped_bf16 = v32 || rule == QuantRule::v4_query;
  r.whole_bf16 = rule == QuantRule::kpool_query;
  r.by_reciprocal = v32 || rule == QuantRule::kpool_query;
  r.floor = v32 ? 1e-10f : 1e-4f;
}

void set_key_rule(Recipe& r, KeyFormat format, QuantRule rule, ScaleRule scale) {
  switch (format) {
    case KeyFormat::fp8: r.codes = Codes::fp8; break;
    case KeyFormat::mxfp4: r.codes = Codes::mxfp4; break;
    case KeyFormat::bf16: r.codes = Codes::bf16; break;
    case KeyFormat::f16: r.codes = Codes::f16; break;
    case KeyFormat::f32: r.codes = Codes::f32; break;
    case KeyFormat::q8_0: r.codes = Codes::q8_0; break;
    case KeyFormat::fp8_fnuz: r.codes = Codes::fp8_fnuz; break;
  }
  r.power_of_two = scale == ScaleRule::ue8m0;
  r.whole_bf16 = rule == QuantRule::v4_key || rule == QuantRule::kpool_key || format == KeyFormat::mxfp4;
  r.by_reciprocal = rule == QuantRule::kpool_key && r.power_of_two;
  r.floor = 1e-4f;
}

bool position_outside(const Rope& rope, int64_t row) {
  if (rope.dim == 0) return false;
  const int64_t position = integer_at(rope.positions, row);
  return position < 0 || position >= rope.cos_sin.shape[0];
}

int64_t positions_outside(const Rope& rope, int64_t rows) {
  int64_t outside = 0;
  for (int64_t r = 0; rope.dim > 0 && r < rows; ++r) outside += position_outside(rope, r);
  return outside;
}

int64_t producer_members(const Recipe& recipe, int64_t vectors) {
  constexpr int64_t kElements = int64_t{64} * 1024;  // 20 to 80 us by what the recipe does
  const int64_t useful = std::max<int64_t>(1, vectors * recipe.dim / kElements);
  return recipe.dim <= kStackDim ? useful : std::min(useful, kWideMembers);
}

Producer::Producer(const Recipe& recipe, const Norm& norm, const Rope& rope, Stack& stack, const Exec& exec,
                   int32_t rank)
    : kernels_(producer_kernels()), recipe_(recipe), rope_(rope) {
  const int64_t padded = padded_dim(recipe.dim);
  x_ = recipe.dim <= kStackDim ? stack.floats : static_cast<float*>(exec.workspace) + rank * scratch_floats(recipe.dim);
  rotation_ = x_ + padded;
  if (recipe.norm == NormKind::none) return;
  const auto widened = [&](const Tensor& t, float* to) -> const float* {
    if (t.data == nullptr) return nullptr;
    kernels_.widen(t.dtype, t.data, recipe.dim, to);
    return to;
  };
  weight_ = widened(norm.weight, x_ + 2 * padded);
  bias_ = widened(norm.bias, x_ + 3 * padded);
}

const float* Producer::rotation_of(int64_t row) const {
  if (position_outside(rope_, row)) return nullptr;
  const Tensor& table = rope_.cos_sin;
  const int64_t at = integer_at(rope_.positions, row) * table.stride[0];
  if (table.dtype == DType::f32) return static_cast<const float*>(table.data) + at;
  kernels_.widen(table.dtype, static_cast<const uint16_t*>(table.data) + at, recipe_.rope_dim, rotation_);
  return rotation_;
}

}  // namespace topkey::cpu
#endif
