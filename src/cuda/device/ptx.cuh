// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Every line of inline PTX of the portable backend.
#pragma once
#include <cstdint>

namespace topkey::cuda {

/// d += a * b, 16 x 8 x 16, f32 sums. a, b: pairs of bf16 (kHalf: f16).
template <bool kHalf>
__device__ __forceinline__ void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kHalf) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}
/// Product of two pairs of bf16; subnormal numbers are kept.
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
  return d;
}
/// Numbers by the hardware's conversions; of NaNs any.
__device__ __forceinline__ float f16_number(uint32_t bits) {
  float x;
  asm("{ .reg .b16 t; cvt.u16.u32 t, %1; cvt.f32.f16 %0, t; }" : "=f"(x) : "r"(bits));
  return x;
}
__device__ __forceinline__ uint32_t f16_bits(float x) {
  uint32_t two;  // the conversion of two is the faster one
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(0.0f), "f"(x));
  return two;
}
/// The first in the lower half.
__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
  uint32_t two;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
}
/// 1 / x, its last bit perhaps wrong: what a division starts from.
__device__ __forceinline__ float reciprocal_about(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// The larger one; NaN if one is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}
/// Adds to a word of shared memory, by one thread of a warp; what it was before.
__device__ __forceinline__ uint32_t add_shared(uint32_t* at, uint32_t n) {
  uint32_t before;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(at))), "r"(n)
               : "memory");
  return before;
}
/// If a score, given by its bits, is at least `least`: its bits to shared address `to`, and `index` to kGap bytes behind
/// it; then to the next word. Four instructions without a branch. Of one's own words: nothing else is ordered by it.
template <int kGap>
__device__ __forceinline__ void store_over(uint32_t& to, uint32_t bits, float least, uint32_t index) {
  asm volatile(
      "{ .reg .pred p; setp.ge.f32 p, %1, %2;\n"
      "@p st.shared.f32 [%0], %1; @p st.shared.u32 [%0 + %4], %3; @p add.u32 %0, %0, 4; }"
      : "+r"(to)
      : "f"(__uint_as_float(bits)), "f"(least), "r"(index), "n"(kGap)
      : "memory");
}
/// A hint: memory that is soon read or written is asked for, and nothing waits. Where its page lies is looked up meanwhile,
/// which takes as long as a read.
__device__ __forceinline__ void prefetch_to_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
/// Behind it the number is there.
__device__ __forceinline__ void wait_for(int64_t x) { asm volatile("" ::"l"(x)); }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
/// float_to_e4m3 of four numbers that are no NaN, by the hardware; the first in the lowest byte.
__device__ __forceinline__ uint32_t e4m3_word(const float (&x)[4]) {
  uint32_t word;
  asm("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, "
      "h}; }"
      : "=r"(word)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
  return word;
}
#endif
/// x <= 0 ? 0 : x; NaN stays NaN.
__device__ __forceinline__ float relu(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace topkey::cuda
