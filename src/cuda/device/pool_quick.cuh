// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Pools as engines ask for them: four tokens, 128 numbers, fp8, a request id a row. A warp a row, a lane with four channels
// of all tokens: they are read at once, and what the row needs of the call's tensors before that also at once. What is
// seldom (a slot that comes again, tokens that lie in no run of rows) is looked at by pool_kinds.cuh.
#pragma once
#include "cuda/device/join.cuh"
#include "cuda/device/pool_kinds.cuh"

namespace topkey::cuda {

constexpr int kQuickTokens = 4;

struct QuickPools {
  Pools pools;  ///< the same call, for what is seldom
  VectorRecipe recipe;
  Whole slots, positions, requests, state_slots;
  const uint8_t *k, *gate;
  const float* ape;
  uint8_t *tail, *pages;
  int64_t k_step, gate_step, ape_step;                                 ///< from row to row: bytes, bytes, numbers
  int64_t tail_block, tail_half, tail_entry, page_stride, scale_base;  ///< bytes
  uint32_t rows, slot_count, value_step, scale_step;
  bool leaves;  ///< there is a state
};

/// A real row's position; -1 for others.
__device__ __forceinline__ int64_t real_position(int64_t position, int64_t request) {
  constexpr int64_t kLast = int64_t{1} << 48;
  return position < 0 || position > kLast || request < 0 ? -1 : position;
}

/// A lane's four numbers of a line.
__device__ __forceinline__ void read_four(RawFour& four, DType dtype, const uint8_t* line) {
  four.read(Lines{nullptr, 0, dtype, true}, line, 4 * lane_id());
}

/// What is read of a row before anything is known of it, all at once. Of rows behind it: the 32 next ones and 32 more.
struct QuickRow {
  uint32_t row;
  int64_t slot, position, request, own;     ///< own: its entry of the state
  int64_t position_before, request_before;  ///< of row - lane, of the first four lanes
  RawFour k, gate, ape[kQuickTokens];
  int64_t last;  ///< its position if it is a real row, else -1

  __device__ __forceinline__ QuickRow(const QuickPools& job, uint32_t r) : row(r) {
    const uint32_t lane = lane_id() % kQuickTokens, before = row >= lane ? row - lane : row;
    slot = job.slots[row], position = job.positions[row], request = job.requests[row];
    own = job.leaves ? job.state_slots[row] : -1;
    position_before = job.positions[before], request_before = job.requests[before];
    read_four(k, DType::bf16, job.k + row * job.k_step), read_four(gate, DType::bf16, job.gate + row * job.gate_step);
#pragma unroll
    for (int j = 0; j < kQuickTokens; ++j)
      read_four(ape[j], DType::f32, reinterpret_cast<const uint8_t*>(job.ape + j * job.ape_step));
  }
  /// When all that is there.
  __device__ __forceinline__ void settle() { last = real_position(position, request); }
};

/// How many of the last tokens are the rows that end with this one; *ends: no other row before them can hold a token.
template <class Row>
__device__ __forceinline__ int found_of(const Row& r, bool* ends) {
  const uint32_t lane = lane_id();
  const bool same = lane <= r.row && r.request_before == r.request;
  const uint32_t hits = __ballot_sync(kWarp, same && r.position_before == r.last - lane) & ((1u << kQuickTokens) - 1);
  const uint32_t others = __ballot_sync(kWarp, !same);
  const int run = __ffs(static_cast<int>(~hits)) - 1;
  *ends = run == kQuickTokens || (others >> run & 1u) != 0;
  return run;
}

/// Whether a row behind has the same cache slot; and, where it is asked, whether a real one has the same entry of the state.
struct QuickAgain {
  bool key = false, state = false;

  template <class Row>
  __device__ __forceinline__ QuickAgain(const QuickPools& job, const Row& r, bool states) {
    for (uint32_t base = r.row + 1; base < job.rows; base += 64) {
      int64_t slot[2], own[2], position[2], request[2];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const uint32_t i = min(base + 32 * u + lane_id(), job.rows - 1);
        slot[u] = job.slots[i];
        if (states) own[u] = job.state_slots[i], position[u] = job.positions[i], request[u] = job.requests[i];
      }
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const bool there = base + 32 * u + lane_id() < job.rows;
        key |= __any_sync(kWarp, there && slot[u] == r.slot);
        if (states) state |= __any_sync(kWarp, there && own[u] == r.own && real_position(position[u], request[u]) >= 0);
      }
    }
  }
};

/// Addresses of the tokens of a pool, in ascending order.
struct QuickTokens {
  const uint8_t *k[kQuickTokens - 1], *gate[kQuickTokens - 1];  ///< but for the last, which is the row
};
/// `found` of the tokens are the rows that end with `row`, the others lie in the tail.
template <class Row>
__device__ __forceinline__ QuickTokens tokens_of(const QuickPools& job, const Row& r, int found) {
  QuickTokens t;
  const Divisor& ring = job.pools.ring;
  const uint32_t first = static_cast<uint32_t>(r.last) - (kQuickTokens - 1), own = static_cast<uint32_t>(r.own);
  const uint32_t entry = first - ring.quotient(first) * ring.value;
  const uint8_t* tail =
      job.tail + (found < kQuickTokens ? ring.quotient(own) : 0) * job.tail_block + entry * job.tail_entry;
#pragma unroll
  for (int j = 0; j < kQuickTokens - 1; ++j) {
    const uint32_t from = r.row - (kQuickTokens - 1 - j);
    const bool here = kQuickTokens - 1 - j < found;
    t.k[j] = here ? job.k + from * job.k_step : tail + j * job.tail_entry;
    t.gate[j] = here ? job.gate + from * job.gate_step : tail + j * job.tail_entry + job.tail_half;
  }
  return t;
}
/// Four quotients by what a division does where exponents are moderate: nearest. Elsewhere by divisions, one after the
/// other. The divisors are sums of powers of e of which one is 1.
__device__ __forceinline__ void divide_four(const float (&a)[4], const float (&b)[4], float (&q)[4]) {
  bool moderate = true;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float y = reciprocal_about(b[e]), inverse = __fmaf_rn(y, __fmaf_rn(-b[e], y, 1.0f), y);
    q[e] = a[e] * inverse;
    q[e] = __fmaf_rn(inverse, __fmaf_rn(-b[e], q[e], a[e]), q[e]);
    moderate &= fabsf(a[e]) > 1e-20f && fabsf(a[e]) < 1e20f && b[e] < 8.0f;
  }
  if (moderate) return;
#pragma unroll
  for (int e = 0; e < 4; ++e) q[e] = a[e] / b[e];
}

/// One lane's four channels of four tokens joined, of which the last is the row itself; rounded to bf16.
__device__ __forceinline__ void join_quick(const QuickTokens& t, const QuickRow& r, float (&x)[1][4]) {
  RawFour k[kQuickTokens], gate[kQuickTokens];
#pragma unroll
  for (int j = 0; j < kQuickTokens - 1; ++j)
    read_four(k[j], DType::bf16, t.k[j]), read_four(gate[j], DType::bf16, t.gate[j]);
  k[kQuickTokens - 1] = r.k, gate[kQuickTokens - 1] = r.gate;
  float sums[4], weights[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    float score[kQuickTokens], most = 0.0f, sum = 0.0f, weight = 0.0f;
#pragma unroll
    for (int j = 0; j < kQuickTokens; ++j) {
      score[j] = gate[j].value(DType::bf16, e) + r.ape[j].value(DType::f32, e);
      most = j == 0 || score[j] > most ? score[j] : most;
    }
#pragma unroll
    for (int j = 0; j < kQuickTokens; ++j) {
      const float p = exp_of_negative(score[j] - most);
      sum = sum + k[j].value(DType::bf16, e) * p;
      weight = weight + p;
    }
    sums[e] = sum, weights[e] = weight;
  }
  divide_four(sums, weights, x[0]);
  to_input(DType::bf16, x[0]);
}

/// The same for few rows, of which four warps have one: a channel a lane.
struct QuickChannel {
  uint32_t row, channel;
  int64_t slot, position, request, own;
  int64_t position_before, request_before;
  uint16_t k, gate;
  float ape[kQuickTokens];
  int64_t last;

  __device__ __forceinline__ QuickChannel(const QuickPools& job, uint32_t r) : row(r), channel(threadIdx.x % 128) {
    const uint32_t lane = lane_id() % kQuickTokens, before = row >= lane ? row - lane : row;
    slot = job.slots[row], position = job.positions[row], request = job.requests[row], own = job.state_slots[row];
    position_before = job.positions[before], request_before = job.requests[before];
    k = reinterpret_cast<const uint16_t*>(job.k + row * job.k_step)[channel];
    gate = reinterpret_cast<const uint16_t*>(job.gate + row * job.gate_step)[channel];
#pragma unroll
    for (int j = 0; j < kQuickTokens; ++j) ape[j] = job.ape[j * job.ape_step + channel];
    prefetch_to_l2(job.tail), prefetch_to_l2(job.pages);
    __syncwarp();
    last = real_position(position, request);
  }
  __device__ __forceinline__ float join(const QuickTokens& t) const {
    uint16_t ks[kQuickTokens], gates[kQuickTokens];
#pragma unroll
    for (int j = 0; j < kQuickTokens - 1; ++j) {
      ks[j] = reinterpret_cast<const uint16_t*>(t.k[j])[channel];
      gates[j] = reinterpret_cast<const uint16_t*>(t.gate[j])[channel];
    }
    ks[kQuickTokens - 1] = k, gates[kQuickTokens - 1] = gate;
    float score[kQuickTokens], most = 0.0f, sum = 0.0f, weight = 0.0f;
#pragma unroll
    for (int j = 0; j < kQuickTokens; ++j) {
      score[j] = bf16_to_float(gates[j]) + ape[j];
      most = j == 0 || score[j] > most ? score[j] : most;
    }
#pragma unroll
    for (int j = 0; j < kQuickTokens; ++j) {
      const float p = exp_of_negative(score[j] - most);
      sum = sum + bf16_to_float(ks[j]) * p;
      weight = weight + p;
    }
    float pair[4] = {sum / weight, 0.0f, 0.0f, 0.0f};
    to_input(DType::bf16, pair);
    return pair[0];
  }
};

}  // namespace topkey::cuda
