// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The steps of producer.cuh for vectors of 64 or 128 numbers in registers, four vectors a warp: eight lanes have one, lane
// p of them numbers 4p .. 4p + 3 of each 32. So pairs of a rotation, four of seven strides of a Hadamard and the sums by d
// mod 32 stay in a lane, and each read or write is of four numbers. Every step rounds as docs/formats.md says. The last
// steps are there for a whole warp too (kLanes), whose lanes have four numbers each.
#pragma once
#include "cuda/device/producer.cuh"
#include "cuda/device/ptx.cuh"

namespace topkey::cuda {

constexpr int kTeamLanes = 8;  ///< of one vector
constexpr int kTeams = 32 / kTeamLanes;
__device__ __forceinline__ int team_lane() { return static_cast<int>(threadIdx.x % kTeamLanes); }
__device__ __forceinline__ int team_number() { return lane_id() / kTeamLanes; }
/// Number e of the j-th four in this lane.
template <int kLanes = kTeamLanes>
__device__ __forceinline__ int number_at(int j, int e) {
  return 4 * (kLanes * j + static_cast<int>(threadIdx.x % kLanes)) + e;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 890
__device__ __forceinline__ uint32_t e4m3_word(const float (&x)[4]) {
  return float_to_e4m3(x[0]) | float_to_e4m3(x[1]) << 8 | float_to_e4m3(x[2]) << 16 |
         static_cast<uint32_t>(float_to_e4m3(x[3])) << 24;
}
#endif

// Conversions that take few instructions: a launch of few rows waits for its code as long as for its data. Of NaNs only
// that they are some is kept.
/// float_to_e2m1 of a number that is no NaN: nearest, ties to the even code.
__device__ __forceinline__ uint32_t e2m1_of(float x) {
  const float a = fabsf(x);
  const uint32_t magnitude =
      (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return magnitude | (__float_as_uint(x) >> 28 & 8u);
}
static __device__ __noinline__ uint32_t fnuz_of(float x) { return float_to_e4m3fnuz(x); }

/// What lanes that look for something together do: a warp, or a team.
template <int kLanes>
struct Together {
  static constexpr uint32_t kAll = kLanes == 32 ? ~0u : (1u << kLanes % 32) - 1;
  __device__ static int lane() { return static_cast<int>(threadIdx.x % kLanes); }
  __device__ static int shift() { return lane_id() - lane(); }
  __device__ static uint32_t ballot(bool x) { return __ballot_sync(kAll << shift(), x) >> shift() & kAll; }
  __device__ static bool any(bool x) { return ballot(x) != 0; }
  __device__ static void sync() { __syncwarp(kAll << shift()); }
};

/// Each rounded to the input's dtype; two at a time.
__device__ __forceinline__ void to_input(DType dtype, float (&x)[4]) {
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    if (dtype == DType::bf16) {
      const uint32_t two = bf16_pair(x[e], x[e + 1]);
      x[e] = __uint_as_float(two << 16), x[e + 1] = __uint_as_float(two & 0xFFFF0000u);
    } else if (dtype == DType::f16) {
      x[e] = f16_number(f16_bits(x[e])), x[e + 1] = f16_number(f16_bits(x[e + 1]));
    }
  }
}

/// What a kernel needs of a tensor whose last stride is 1.
struct Lines {
  const uint8_t* data;
  int64_t step;  ///< bytes from one line to the next
  DType dtype;   ///< f32, bf16 or f16
  bool fours;    ///< four numbers at a time may be read
};
/// Integers side by side.
struct Whole {
  const uint8_t* data;
  bool wide;  ///< i64, else i32
  __device__ __forceinline__ int64_t operator[](int64_t i) const {
    return wide ? reinterpret_cast<const int64_t*>(data)[i] : reinterpret_cast<const int32_t*>(data)[i];
  }
};

/// Recipe without its tensors.
struct VectorRecipe {
  Lines weight, bias, cos_sin;
  Whole positions;
  int64_t rope_rows;
  float eps, hadamard_scale;
  int32_t rope_dim, rope_base;
  NormKind norm;
  bool weighted, biased;
  DType input;
  RuleFacts rule;
  ScaleRule scale;
  KeyFormat format;
  bool interleaved, hadamard;
};

/// What most calls ask, known when the code is compiled: bf16 in, fp8 out, the first 64 numbers rotated in two halves,
/// Hadamard, tables and weights of f32; and no norm (queries), or a layer norm with weight and bias (keys). Fewer
/// instructions, and no branch between the reads: a launch of few rows waits for memory as seldom as it can.
enum class Usual { no, plain, normed };
inline Usual usual_of(const VectorRecipe& p) {
  const auto f32 = [](const Lines& t) { return t.dtype == DType::f32 && t.fours; };
  const bool usual = p.input == DType::bf16 && p.rope_dim == 64 && p.rope_base == 0 && !p.interleaved && p.hadamard &&
                     p.format == KeyFormat::fp8 && !p.rule.whole_bf16 && p.rule.code == RuleFacts::divide &&
                     f32(p.cos_sin);
  if (!usual) return Usual::no;
  if (p.norm == NormKind::none) return Usual::plain;
  return p.norm == NormKind::layer && p.weighted && p.biased && f32(p.weight) && f32(p.bias) ? Usual::normed
                                                                                             : Usual::no;
}
template <Usual kUsual>
__device__ __forceinline__ VectorRecipe told(VectorRecipe p) {
  if (kUsual == Usual::no) return p;
  p.input = DType::bf16, p.rope_dim = 64, p.rope_base = 0, p.interleaved = false, p.hadamard = true;
  p.format = KeyFormat::fp8, p.rule.whole_bf16 = false, p.rule.code = RuleFacts::divide;
  p.weight.dtype = p.bias.dtype = p.cos_sin.dtype = DType::f32;
  p.weight.fours = p.bias.fours = p.cos_sin.fours = true;
  p.weighted = p.biased = kUsual == Usual::normed;
  p.norm = kUsual == Usual::plain ? NormKind::none : NormKind::layer;
  return p;
}

/// Numbers as they are in memory: many reads may be under way before the first is looked at. Of two bytes: two a word.
struct RawFour {
  uint32_t bits[4];

  /// Four from number `at` of a line on.
  __device__ __forceinline__ void read(const Lines& t, const uint8_t* line, int at) {
    if (t.dtype == DType::f32) {
      const auto* from = reinterpret_cast<const uint32_t*>(line) + at;
      if (t.fours) {
        const uint4 v = *reinterpret_cast<const uint4*>(from);
        bits[0] = v.x, bits[1] = v.y, bits[2] = v.z, bits[3] = v.w;
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) bits[e] = from[e];
      }
    } else {
      const auto* from = reinterpret_cast<const uint16_t*>(line) + at;
      if (t.fours) {
        const uint2 v = *reinterpret_cast<const uint2*>(from);
        bits[0] = v.x, bits[1] = v.y;
      } else {
        bits[0] = from[0] | static_cast<uint32_t>(from[1]) << 16;
        bits[1] = from[2] | static_cast<uint32_t>(from[3]) << 16;
      }
    }
  }
  __device__ __forceinline__ float value(DType dtype, int e) const {
    if (dtype == DType::f32) return __uint_as_float(bits[e]);
    const uint32_t two = bits[e / 2];
    if (dtype == DType::f16) return f16_number(e % 2 == 0 ? two & 0xFFFFu : two >> 16);
    return __uint_as_float(e % 2 == 0 ? two << 16 : two & 0xFFFF0000u);
  }
};
template <int kEach>
struct RawLine {
  RawFour four[kEach];

  __device__ __forceinline__ void read(const Lines& t, int64_t line) {
    const uint8_t* at = t.data + line * t.step;
#pragma unroll
    for (int j = 0; j < kEach; ++j) four[j].read(t, at, number_at(j, 0));
  }
};
/// Weight and bias of a norm, as far as there are any.
template <int kEach>
struct RawNorm {
  RawLine<kEach> weight, bias;

  __device__ __forceinline__ void read(const VectorRecipe& p) {
    if (p.norm == NormKind::none) return;
    if (p.weighted) weight.read(p.weight, 0);
    if (p.biased) bias.read(p.bias, 0);
  }
};

/// The sum of a vector's partial sums by d mod 32, of which a lane has four, in each of its lanes: halves 16, 8, 4, 2, 1.
/// A sum of two does not depend on their order.
__device__ __forceinline__ float add_halves(float (&sum)[4]) {
#pragma unroll
  for (int half = kTeamLanes / 2; half > 0; half /= 2) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] = sum[e] + __shfl_xor_sync(kWarp, sum[e], half);
  }
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

template <int kEach>
__device__ __forceinline__ void norm_vector(const VectorRecipe& p, const RawNorm<kEach>& raw, float (&x)[kEach][4]) {
  constexpr float kCount = 32.0f * kEach;
  if (p.norm == NormKind::layer) {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < 4 * kEach; ++i) sum[i % 4] = sum[i % 4] + x[i / 4][i % 4];
    const float mean = add_halves(sum) / kCount;
#pragma unroll
    for (int i = 0; i < 4 * kEach; ++i) x[i / 4][i % 4] = x[i / 4][i % 4] - mean;
  }
  float squares[4];  // no sum of squares is -0: they need not start at 0
#pragma unroll
  for (int i = 0; i < 4 * kEach; ++i) {
    const float square = x[i / 4][i % 4] * x[i / 4][i % 4];
    squares[i % 4] = i < 4 ? square : squares[i % 4] + square;
  }
  const float variance = add_halves(squares) / kCount;
  const float scale = 1.0f / sqrtf(variance + p.eps);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float y = x[j][e] * scale;
      if (p.weighted) y = y * raw.weight.four[j].value(p.weight.dtype, e);
      if (p.biased) y = y + raw.bias.four[j].value(p.bias.dtype, e);
      x[j][e] = y;
    }
    to_input(p.input, x[j]);
  }
}

/// What a vector is rotated by, read before it is needed. A pair is half a multiple of 32 apart, or in neighbours.
template <int kEach>
struct Rotation {
  RawFour cosine[kEach], sine[kEach];
  bool wild;

  __device__ __forceinline__ bool turns(const VectorRecipe& p, int j) const {
    return 32 * j >= p.rope_base && 32 * j < p.rope_base + p.rope_dim;
  }
  __device__ __forceinline__ void read(const VectorRecipe& p, int64_t position) {
    wild = p.rope_dim > 0 && (position < 0 || position >= p.rope_rows);
    if (wild || p.rope_dim == 0) return;
    const uint8_t* at = p.cos_sin.data + position * p.cos_sin.step;
    const int half = p.rope_dim / 2;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (!turns(p, j)) continue;
      const int d = number_at(j, 0) - p.rope_base;
      if (p.interleaved) {
        read_two(p.cos_sin, at, d / 2, cosine[j]), read_two(p.cos_sin, at, half + d / 2, sine[j]);
      } else {
        const int i = d < half ? d : d - half;
        cosine[j].read(p.cos_sin, at, i), sine[j].read(p.cos_sin, at, half + i);
      }
    }
  }
  /// Two numbers, each for two.
  __device__ static __forceinline__ void read_two(const Lines& t, const uint8_t* line, int at, RawFour& four) {
    if (t.dtype == DType::f32) {
      const auto* from = reinterpret_cast<const uint32_t*>(line) + at;
      four.bits[0] = four.bits[1] = from[0], four.bits[2] = four.bits[3] = from[1];
    } else {
      const auto* from = reinterpret_cast<const uint16_t*>(line) + at;
      four.bits[0] = from[0] * 0x10001u, four.bits[1] = from[1] * 0x10001u;
    }
  }
  __device__ __forceinline__ void turn(const VectorRecipe& p, float (&x)[kEach][4]) const {
    const int half = p.rope_dim / 2;
    float turned[kEach][4];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool second = p.interleaved ? e % 2 == 1 : 32 * j - p.rope_base >= half;
        const float apart = half == 32 ? x[j ^ 1][e] : x[j ^ (kEach / 2)][e];
        const float own = x[j][e] * cosine[j].value(p.cos_sin.dtype, e);
        const float other = (p.interleaved ? x[j][e ^ 1] : apart) * sine[j].value(p.cos_sin.dtype, e);
        turned[j][e] = own + (second ? other : -other);
      }
      to_input(p.input, turned[j]);
      if (p.rule.roped_bf16 && p.input != DType::bf16) to_input(DType::bf16, turned[j]);
    }
    // Of a wild vector one number of each 32 is enough: their largest magnitude is NaN then.
#pragma unroll
    for (int i = 0; i < 4 * kEach; ++i) {
      const float y = turns(p, i / 4) ? turned[i / 4][i % 4] : x[i / 4][i % 4];
      x[i / 4][i % 4] = wild && i % 4 == 0 ? __uint_as_float(kCanonicalNan) : y;
    }
  }
};

template <int kLanes = kTeamLanes, int kEach>
__device__ __forceinline__ void hadamard_vector(const VectorRecipe& p, float (&x)[kEach][4]) {
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const float a = x[j][0] + x[j][1], b = x[j][0] - x[j][1], c = x[j][2] + x[j][3], d = x[j][2] - x[j][3];
    x[j][0] = a + c, x[j][1] = b + d, x[j][2] = a - c, x[j][3] = b - d;
  }
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) {
    const float sign = (threadIdx.x & lanes) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 4 * kEach; ++i)
      x[i / 4][i % 4] = __fmaf_rn(x[i / 4][i % 4], sign, __shfl_xor_sync(kWarp, x[i / 4][i % 4], lanes));
  }
#pragma unroll
  for (int apart = 1; apart < kEach; apart *= 2) {
#pragma unroll
    for (int i = 0; i < 4 * kEach; ++i) {
      if ((i / 4 & apart) != 0) continue;
      const float a = x[i / 4][i % 4], b = x[i / 4 + apart][i % 4];
      x[i / 4][i % 4] = a + b, x[i / 4 + apart][i % 4] = a - b;
    }
  }
#pragma unroll
  for (int i = 0; i < 4 * kEach; ++i) x[i / 4][i % 4] = x[i / 4][i % 4] * p.hadamard_scale;
}

/// Norm, rope and Hadamard, as far as they are asked.
template <int kEach>
__device__ __forceinline__ void transform_vector(const VectorRecipe& p, const RawNorm<kEach>& norm,
                                                 const Rotation<kEach>& rotation, float (&x)[kEach][4]) {
  if (p.norm != NormKind::none) norm_vector(p, norm, x);
  if (p.rope_dim > 0) rotation.turn(p, x);
  if (p.hadamard) hadamard_vector(p, x);
}

/// max |x| over the lanes; NaN where one of them is inf or NaN.
template <int kLanes, int kEach>
__device__ __forceinline__ float amax_of_lanes(const float (&x)[kEach][4]) {
  float of[4] = {fabsf(x[0][0]), fabsf(x[0][1]), fabsf(x[0][2]), fabsf(x[0][3])};
#pragma unroll
  for (int i = 4; i < 4 * kEach; ++i) of[i % 4] = max_nan(of[i % 4], fabsf(x[i / 4][i % 4]));
  float most = max_nan(max_nan(of[0], of[1]), max_nan(of[2], of[3]));
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) most = max_nan(most, __shfl_xor_sync(kWarp, most, lanes));
  return most < __uint_as_float(0x7F800000u) ? most : __uint_as_float(kCanonicalNan);
}

/// A word for each four numbers of a lane, to any address; whole words where it is a multiple of 4.
template <int kLanes, int kEach>
__device__ __forceinline__ void put_words(uint8_t* to, const uint32_t (&word)[kEach]) {
  uint8_t* own = to + number_at<kLanes>(0, 0);
  if (reinterpret_cast<uintptr_t>(to) % 4 == 0) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) reinterpret_cast<uint32_t*>(own)[kLanes * j] = word[j];
  } else {
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) own[4 * kLanes * j + i] = static_cast<uint8_t>(word[j] >> (8 * i));
    }
  }
}

/// a / b, of which `inverse` is 1 / b: rounded to nearest, or so close to it that the e4m3 code is the same (for every
/// fraction of b all a next to the edge of a code were tried; see tests/gpu/producers_test.cpp). Where the code is not 0, nothing
/// here leaves the normal numbers.
__device__ __forceinline__ float quotient_by(float a, float b, float inverse) {
  const float q = a * inverse;
  return __fmaf_rn(-__fmaf_rn(q, b, -a), inverse, q);
}

/// e4m3 codes; returns the scale. write: whether there is somewhere to put them.
template <int kLanes = kTeamLanes, int kEach>
__device__ __forceinline__ float quantize_e4m3(const VectorRecipe& p, float (&x)[kEach][4], uint8_t* codes,
                                               bool write) {
#pragma unroll
  for (int j = 0; p.rule.whole_bf16 && j < kEach; ++j) to_input(DType::bf16, x[j]);
  const float amax = amax_of_lanes<kLanes>(x);
  const bool fnuz = p.format == KeyFormat::fp8_fnuz, nan = is_nan(amax);
  const float a = amax > p.rule.floor ? amax : p.rule.floor;
  const float largest = fnuz ? 224.0f : 448.0f;
  const float reciprocal = fnuz ? 1.0f / 224.0f : 1.0f / 448.0f;
  float s = p.rule.by_reciprocal ? a * reciprocal : a / largest;
  // Dividing by a power of two is multiplying by its inverse: exact, or rounded once, both.
  const bool power = p.scale == ScaleRule::ue8m0;
  float inverse = 1.0f;
  if (power) {
    const int e = ceil_log2(s);
    s = exp2_int(e), inverse = exp2_int(-e);
  } else if (p.rule.code != RuleFacts::exponent) {
    inverse = 1.0f / s;
  }
  const bool divide = !power && p.rule.code == RuleFacts::divide;
  uint32_t word[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    float y[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] = divide ? quotient_by(x[j][e], s, inverse) : x[j][e] * inverse;
    if (!fnuz) {
      word[j] = nan ? 0x7F7F7F7Fu : e4m3_word(y);
    } else {
      word[j] = nan ? 0x80808080u : fnuz_of(y[0]) | fnuz_of(y[1]) << 8 | fnuz_of(y[2]) << 16 | fnuz_of(y[3]) << 24;
    }
  }
  if (write) put_words<kLanes>(codes, word);
  return nan ? amax : s;
}

/// As quantize_mxfp4; codes and scales at any address.
template <int kEach>
__device__ __forceinline__ void quantize_e2m1(const VectorRecipe& p, float (&x)[kEach][4], uint8_t* codes,
                                              uint8_t* scales, bool write) {
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    float block[1][4] = {{x[j][0], x[j][1], x[j][2], x[j][3]}};
    if (p.rule.whole_bf16) to_input(DType::bf16, block[0]);
    const float amax = amax_of_lanes<kTeamLanes>(block);
    const float floor = 6.0f * exp2_int(-126);
    int e = 128;
    uint32_t code = 0;
    if (!is_nan(amax)) {
      e = ceil_log2((amax > floor ? amax : floor) / 6.0f);
      const float up = exp2_int(-e);
#pragma unroll
      for (int i = 0; i < 4; ++i) code |= e2m1_of(block[0][i] * up) << (4 * i);
    }
    if (!write) continue;
    uint8_t* to = codes + number_at(j, 0) / 2;
    if (reinterpret_cast<uintptr_t>(codes) % 2 == 0) {
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(code);
    } else {
      to[0] = static_cast<uint8_t>(code), to[1] = static_cast<uint8_t>(code >> 8);
    }
    if (team_lane() == 0) scales[j] = static_cast<uint8_t>(e + 127);
  }
}

/// Four bytes at any address.
__device__ __forceinline__ void put_scale(uint8_t* to, float scale) {
  if (reinterpret_cast<uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<float*>(to) = scale;
  } else {
    store_word(to, __float_as_uint(scale));
  }
}

/// fp8, fp8_fnuz or mxfp4 to one row; scale at any address.
template <int kEach>
__device__ __forceinline__ void quantize_vector(const VectorRecipe& p, float (&x)[kEach][4], uint8_t* values,
                                                uint8_t* scale, bool write) {
  if (p.format == KeyFormat::mxfp4) {
    quantize_e2m1(p, x, values, scale, write);
    return;
  }
  const float s = quantize_e4m3(p, x, values, write);
  if (write && team_lane() == 0) put_scale(scale, s);
}

}  // namespace topkey::cuda
