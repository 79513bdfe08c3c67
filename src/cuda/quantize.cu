// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `quantize`: each query head and each key through device/producer.cuh into dense codes, a warp a vector.
#include "cuda/check.h"
#include "cuda/launch.h"
#include "cuda/producer.h"
#include "cuda/stages.h"

namespace topkey::cuda {
namespace {

struct QueryJob {
  QuantizeQ a;
  Recipe recipe;
  uint64_t* stats;
};
struct KeyJob {
  QuantizeK a;
  Recipe recipe;
  int64_t element_bytes;
  uint64_t* stats;
};

/// weights_out of one head: f32 products in the rule's order.
__device__ float scaled_weight(const QueryJob& job, float w, float q_scale) {
  const bool fp8 = is_e4m3(job.a.format);
  const float softmax = job.a.softmax_scale == 0.0f ? 1.0f : job.a.softmax_scale;
  const float head = job.a.head_scale == 0.0f ? 1.0f : job.a.head_scale;
  const float ws = fp8 ? w * q_scale : w;
  return one_nan(fp8 && job.recipe.rule.joined_scales ? ws * (softmax * head) : (ws * softmax) * head);
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
      *element<float>(job.a.weights_out, row, h) = scaled_weight(job, real(job.a.weights, row, h), q_scale);
    __syncwarp();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) count(job.stats, kRows, static_cast<uint64_t>(rows));
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
    {reinterpret_cast<const void*>(&quantize_queries), static_cast<int>(kMaxProducerDim) * 4},
    {reinterpret_cast<const void*>(&quantize_keys), static_cast<int>(kMaxProducerDim) * 4}};

}  // namespace

KernelList quantize_kernels() { return {kEntries, 2}; }

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
  const int warps = warps_for(dim);
  quantize_queries<<<launch.blocks((vectors + warps - 1) / warps, 8), 32 * warps, shared_for(dim), launch.stream()>>>(
      job);
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
