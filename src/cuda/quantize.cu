// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `quantize`: each query head and each key into dense codes. Heads of 64 or 128 numbers stay in registers, four a
// warp (device/vector.cuh); others, and keys, go through shared memory, a warp a vector.
#include "cuda/check.h"
#include "cuda/device/divisor.cuh"
#include "cuda/launch.h"
#include "cuda/producer.h"
#include "cuda/stages.h"
#include "cuda/vectors.h"

namespace topkey::cuda {
namespace {

struct QueryJob {
  QuantizeQ a;
  Recipe recipe;
  uint64_t* stats;
};
/// Where heads lie: bytes from row to row and from head to head.
struct Heads {
  uint8_t* data;
  int64_t row, head;
  __device__ __forceinline__ uint8_t* at(uint32_t r, uint32_t h) const { return data + r * row + h * head; }
};
/// Of queries whose heads stay in registers.
struct QueryVectors {
  VectorRecipe recipe;
  Heads q, q_out, scales_out, weights, weights_out;
  DType q_dtype, weights_dtype;
  bool q_fours;  ///< four numbers of q at a time may be read
  uint32_t rows;
  Divisor heads;
  float softmax_scale, head_scale;
  uint64_t* stats;
};
struct KeyJob {
  QuantizeK a;
  Recipe recipe;
  int64_t element_bytes;
  uint64_t* stats;
};

/// weights_out of one head: f32 products in the rule's order. A scale of 0 is 1.
__device__ __forceinline__ float scaled_weight(const RuleFacts& rule, bool fp8, float softmax_scale, float head_scale,
                                               float w, float q_scale) {
  const float softmax = softmax_scale == 0.0f ? 1.0f : softmax_scale, head = head_scale == 0.0f ? 1.0f : head_scale;
  const float ws = fp8 ? w * q_scale : w;
  return one_nan(fp8 && rule.joined_scales ? ws * (softmax * head) : (ws * softmax) * head);
}

__global__ void quantize_queries(const __grid_constant__ QueryJob job) {
  extern __shared__ float memory[];
  const int dim = job.recipe.head_dim, warps = blockDim.x / 32;
  float* x = memory + threadIdx.x / 32 * dim;
  const int64_t rows = job.a.q.shape[0], heads = job.a.q.shape[1];
  for (int64_t v = int64_t{blockIdx.x} * warps + threadIdx.x / 32; v < rows * heads; v += int64_t{gridDim.x} * warps) {
    const int64_t row = v / heads, h = v % heads;
    for (int d = lane_id(); d < dim; d += 32) x[d] = real(job.a.q, row, h, d);
    __syncwarp();
    const bool wild = transform(job.recipe, rope_position(job.recipe, row), x);
    if (lane_id() == 0) count(job.stats, kSkippedPages, wild && h == 0);
    float q_scale = 1.0f;
    if (is_e4m3(job.a.format)) {
      q_scale = quantize_fp8(job.recipe, x, element<uint8_t>(job.a.q_out, row, h));
    } else if (job.a.format == KeyFormat::mxfp4) {
      quantize_mxfp4(job.recipe, x, element<uint8_t>(job.a.q_out, row, h), scale_at(job.a.q_scales_out, row, h));
    } else {
      for (int d = lane_id(); d < dim; d += 32) put_real(job.a.q_out, one_nan(x[d]), row, h, d);
    }
    if (lane_id() == 0)
      *element<float>(job.a.weights_out, row, h) =
          scaled_weight(job.recipe.rule, is_e4m3(job.a.format), job.a.softmax_scale, job.a.head_scale,
                        real(job.a.weights, row, h), q_scale);
    __syncwarp();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) count(job.stats, kRows, static_cast<uint64_t>(rows));
}

/// The same for heads in registers, a team of lanes a head.
template <int kEach, Usual kUsual>
__global__ __launch_bounds__(128, kUsual == Usual::no
                                      ? 4
                                      : 6) void quantize_query_vectors(const __grid_constant__ QueryVectors job) {
  const VectorRecipe recipe = told<kUsual>(job.recipe);
  constexpr bool kKnown = kUsual != Usual::no;
  const DType q_dtype = kKnown ? DType::bf16 : job.q_dtype;
  const bool fp8 = recipe.format != KeyFormat::mxfp4;
  const uint32_t vectors = job.rows * job.heads.value, warp = blockIdx.x * 4 + threadIdx.x / 32;
  if (threadIdx.x == 0) {
    prefetch_to_l2(job.q_out.data), prefetch_to_l2(job.weights_out.data);
    if (recipe.rope_dim > 0) prefetch_to_l2(recipe.cos_sin.data);
  }
  for (uint32_t first = warp * kTeams; first < vectors; first += gridDim.x * 4 * kTeams) {
    const bool there = first + team_number() < vectors;
    const uint32_t v = there ? first + team_number() : first;
    const uint32_t row = job.heads.quotient(v), h = v - row * job.heads.value;
    const int64_t position = recipe.rope_dim > 0 ? recipe.positions[row] : 0;
    RawLine<kEach> raw;
    raw.read({job.q.at(row, h), 0, q_dtype, kKnown || job.q_fours}, 0);
    const uint8_t* weight = job.weights.at(row, h);
    RawFour w;
    w.bits[0] = job.weights_dtype == DType::f32 ? *reinterpret_cast<const uint32_t*>(weight)
                                                : *reinterpret_cast<const uint16_t*>(weight);
    __syncwarp();  // nothing is looked at before all this is under way
    Rotation<kEach> rotation;
    rotation.read(recipe, position);
    if (job.stats != nullptr && there && team_lane() == 0) count(job.stats, kSkippedPages, rotation.wild && h == 0);
    float x[kEach][4];
#pragma unroll
    for (int i = 0; i < 4 * kEach; ++i) x[i / 4][i % 4] = raw.four[i / 4].value(q_dtype, i % 4);
    transform_vector(recipe, RawNorm<kEach>{}, rotation, x);
    float q_scale = 1.0f;
    if (fp8) {
      q_scale = quantize_e4m3(recipe, x, job.q_out.at(row, h), there);
    } else {
      quantize_e2m1(recipe, x, job.q_out.at(row, h), job.scales_out.at(row, h), there);
    }
    if (there && team_lane() == 0) {
      *reinterpret_cast<float*>(job.weights_out.at(row, h)) =
          scaled_weight(recipe.rule, fp8, job.softmax_scale, job.head_scale, w.value(job.weights_dtype, 0), q_scale);
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) count(job.stats, kRows, job.rows);
}

__global__ void quantize_keys(const __grid_constant__ KeyJob job) {
  extern __shared__ float memory[];
  const int dim = job.recipe.head_dim, warps = blockDim.x / 32;
  float* x = memory + threadIdx.x / 32 * dim;
  const int64_t rows = job.a.k.shape[0];
  for (int64_t row = int64_t{blockIdx.x} * warps + threadIdx.x / 32; row < rows; row += int64_t{gridDim.x} * warps) {
    for (int d = lane_id(); d < dim; d += 32) x[d] = real(job.a.k, row, d);
    __syncwarp();
    const bool wild = transform(job.recipe, rope_position(job.recipe, row), x);
    if (lane_id() == 0) count(job.stats, kSkippedPages, wild);
    const DenseKeys& out = job.a.out;
    uint8_t* values = static_cast<uint8_t*>(out.values.data) + row * out.values.stride[0] * job.element_bytes;
    quantize_row(job.recipe, x, values, scale_at(out.scales, row));
    __syncwarp();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) count(job.stats, kRows, static_cast<uint64_t>(rows));
}

const KernelEntry kEntries[] = {
    {reinterpret_cast<const void*>(&quantize_query_vectors<2, Usual::no>), 0},
    {reinterpret_cast<const void*>(&quantize_query_vectors<4, Usual::no>), 0},
    {reinterpret_cast<const void*>(&quantize_query_vectors<4, Usual::plain>), 0},
    {reinterpret_cast<const void*>(&quantize_queries), static_cast<int>(kMaxProducerDim) * 4},
    {reinterpret_cast<const void*>(&quantize_keys), static_cast<int>(kMaxProducerDim) * 4}};

Heads heads_of(const Tensor& t, int64_t bytes) {
  return {static_cast<uint8_t*>(t.data), t.stride[0] * bytes, t.ndim > 1 ? t.stride[1] * bytes : 0};
}

/// Whether heads can stay in registers; then how.
bool vectors_of(const QueryJob& whole, QueryVectors* v) {
  const QuantizeQ& a = whole.a;
  Lines lines{};
  if (!vector_recipe_of(whole.recipe, &v->recipe) || !lines_of(a.q, &lines) || !lines_of(a.weights, &lines) ||
      a.q.shape[0] * a.q.shape[1] >= int64_t{1} << 30)
    return false;
  v->q = heads_of(a.q, number_bytes(a.q.dtype)), v->weights = heads_of(a.weights, number_bytes(a.weights.dtype));
  v->q_out = heads_of(a.q_out, 1), v->weights_out = heads_of(a.weights_out, 4);
  v->scales_out = heads_of(a.q_scales_out, a.q_scales_out.dtype == DType::i32 ? 4 : 1);
  v->q_dtype = a.q.dtype, v->weights_dtype = a.weights.dtype;
  v->q_fours = (reinterpret_cast<uintptr_t>(a.q.data) | static_cast<uintptr_t>(v->q.row | v->q.head)) %
                   static_cast<uintptr_t>(4 * number_bytes(a.q.dtype)) ==
               0;
  v->rows = static_cast<uint32_t>(a.q.shape[0]), v->heads = divisor(static_cast<uint32_t>(a.q.shape[1]));
  v->softmax_scale = a.softmax_scale, v->head_scale = a.head_scale, v->stats = whole.stats;
  return true;
}

}  // namespace

KernelList quantize_kernels() { return {kEntries, sizeof kEntries / sizeof kEntries[0]}; }

void quantize_q(const QuantizeQ& a, const Exec& exec) {
  const int64_t vectors = a.q.shape[0] * a.q.shape[1], dim = a.q.shape[2];
  if (vectors == 0) return;
  const Launch launch("quantize_q", exec);
  QueryJob job{a, {}, exec.stats};
  Recipe& r = job.recipe;
  r.rope = a.rope, r.hadamard = a.hadamard, r.hadamard_scale = hadamard_scale(dim), r.input = a.q.dtype;
  r.rule = facts_of(a.rule, true, ScaleRule::ue8m0), r.scale = ScaleRule::ue8m0, r.format = a.format;
  r.rule.roped_bf16 = a.format == KeyFormat::mxfp4 || (r.rule.roped_bf16 && is_e4m3(a.format));
  r.head_dim = static_cast<int32_t>(dim);
  QueryVectors in_registers{};
  if (vectors_of(job, &in_registers)) {
    const auto kernel = dim == 64 ? quantize_query_vectors<2, Usual::no>
                        : usual_of(in_registers.recipe) == Usual::plain && in_registers.q_fours
                            ? quantize_query_vectors<4, Usual::plain>
                            : quantize_query_vectors<4, Usual::no>;
    kernel<<<launch.blocks((vectors + 4 * kTeams - 1) / (4 * kTeams), 6), 128, 0, launch.stream()>>>(in_registers);
  } else {
    const int warps = warps_for(dim);
    quantize_queries<<<launch.blocks((vectors + warps - 1) / warps, 8), 32 * warps, shared_for(dim), launch.stream()>>>(
        job);
  }
  TOPKEY_CUDA_LAUNCHED("quantize_q");
}

void quantize_k(const QuantizeK& a, const Exec& exec) {
  const int64_t rows = a.k.shape[0], dim = a.k.shape[1];
  if (rows == 0) return;
  const Launch launch("quantize_k", exec);
  KeyJob job{a, {}, 1, exec.stats};
  Recipe& r = job.recipe;
  r.norm = a.norm, r.rope = a.rope, r.hadamard = a.hadamard, r.hadamard_scale = hadamard_scale(dim),
  r.input = a.k.dtype;
  r.rule = key_facts(a.rule, a.scale, a.out.format), r.scale = a.scale, r.format = a.out.format;
  r.head_dim = static_cast<int32_t>(dim);
  if (a.out.format == KeyFormat::f32) job.element_bytes = 4;
  if (a.out.format == KeyFormat::bf16 || a.out.format == KeyFormat::f16) job.element_bytes = 2;
  const int warps = warps_for(dim);
  quantize_keys<<<launch.blocks((rows + warps - 1) / warps, 8), 32 * warps, shared_for(dim), launch.stream()>>>(job);
  TOPKEY_CUDA_LAUNCHED("quantize_k");
}

}  // namespace topkey::cuda
