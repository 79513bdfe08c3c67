// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The CUDA backends' rows of the table: the portable one, every operation on GPUs from compute capability 8.0 on; and
// Hopper's, which scores fp8 keys in an arithmetic of its own and shares all that does not score.
#include <algorithm>

#include "backend_table.h"
#include "cuda/launch.h"
#include "cuda/stages.h"
#include "cuda/workspace.h"

namespace topkey::cuda {

namespace {

constexpr int64_t kMaxScoredDim = 256, kMaxProducedDim = 16384;

bool produces(Op op) {
  return op == Op::quantize_q || op == Op::quantize_k || op == Op::store_k || op == Op::pool_k || op == Op::compress_k;
}

const char* why_not(Op op, const Shape& shape) {
  if (shape.scored && on_tensor_cores(shape.format, shape.q_dtype) && shape.head_dim > kMaxScoredDim) {
    return "on tensor cores it takes head_dim 256 at most";
  }
  if (produces(op) && shape.head_dim > kMaxProducedDim) return "it makes codes of head_dim 16384 at most";
  return nullptr;
}

const char* arithmetic(KeyFormat format, DType q) {
  if (!on_tensor_cores(format, q)) return "f32";
  return format == KeyFormat::f16 ? "f16mma" : "bf16mma";
}
constexpr const char* kStrategies[] = {"radix", nullptr};
int32_t numerics(KeyFormat) { return 1; }

constexpr int64_t kMaxHopperHeads = 128;

const char* hopper_why_not(Op op, const Shape& shape) {
  if (const char* why = why_not(op, shape)) return why;
  if (!shape.scored) return nullptr;
  if (shape.tiled) return "it does not have tiled pages (cuda.portable has)";
  if (shape.format != KeyFormat::fp8) return "it scores fp8 keys only (cuda.portable has the others)";
  if (shape.head_dim != 64 && shape.head_dim != 128)
    return "it takes head_dim 64 and 128 (cuda.portable has the others)";
  return shape.heads > kMaxHopperHeads ? "it takes 128 heads at most (cuda.portable takes more)" : nullptr;
}
const char* hopper_arithmetic(KeyFormat format, DType) { return format == KeyFormat::fp8 ? "fp8mma" : nullptr; }
int32_t hopper_numerics(KeyFormat format) { return format == KeyFormat::fp8 ? 1 : 0; }

void hopper_mqa_logits(const MqaLogits& a, const Exec& exec) { mqa_logits(Cores::hopper, a, exec); }
void hopper_paged_mqa_logits(const PagedMqaLogits& a, const Exec& exec) { paged_mqa_logits(Cores::hopper, a, exec); }
void hopper_mqa_topk(const MqaTopk& a, const Exec& exec) { mqa_topk(Cores::hopper, a, exec); }
void hopper_paged_mqa_topk(const PagedMqaTopk& a, const Exec& exec) { paged_mqa_topk(Cores::hopper, a, exec); }

size_t workspace_bytes(Op op, const Shape& shape) {
  switch (op) {
    case Op::mqa_logits:
    case Op::paged_mqa_logits:
    case Op::topk:
    case Op::select_blocks:
    case Op::mqa_topk:
    case Op::paged_mqa_topk:
    case Op::merge_topk: return room_bytes(op, shape);
    case Op::store_k: return store_bytes(shape.rows);
    case Op::pool_k:
    case Op::compress_k: return pool_bytes(shape.rows);
    default: return 0;
  }
}

size_t hopper_workspace_bytes(Op op, const Shape& shape) {
  const bool searches = op == Op::mqa_topk || op == Op::paged_mqa_topk;
  const size_t general = workspace_bytes(op, shape);
  if (!searches) return general;
  return std::max({general, decode_bytes(shape), decode_blocks_bytes(shape), prefill_bytes(shape)});
}

}  // namespace

constexpr Backend kPortable = {
    .name = "cuda.portable",
    .device = Device::cuda,
    .one_thread = true,
    .unusable = machine_problem,
    .detail = machine_detail,
    .why_not = why_not,
    .arithmetic = arithmetic,
    .strategies = kStrategies,
    .numerics = numerics,
    .workspace_bytes = workspace_bytes,
    .prepare = prepare,
    .memory = &kMemory,
    .expand_rows = expand_rows,
    .to_slots = to_slots,
    .quantize_q = quantize_q,
    .quantize_k = quantize_k,
    .store_k = store_k,
    .gather_k = gather_k,
    .mqa_logits = mqa_logits,
    .paged_mqa_logits = paged_mqa_logits,
    .topk = topk,
    .select_blocks = select_blocks,
    .mqa_topk = mqa_topk,
    .paged_mqa_topk = paged_mqa_topk,
    .merge_topk = merge_topk,
    .pool_k = pool_k,
    .compress_k = compress_k,
    .expand_pools = expand_pools,
};

/// Hopper's row: the portable one's with an arithmetic of its own, and what goes with it.
constexpr Backend hopper_row(Backend row) {
  row.name = "cuda.sm90";
  row.unusable = hopper_problem;
  row.why_not = hopper_why_not;
  row.arithmetic = hopper_arithmetic;
  row.numerics = hopper_numerics;
  row.workspace_bytes = hopper_workspace_bytes;
  row.mqa_logits = hopper_mqa_logits;
  row.paged_mqa_logits = hopper_paged_mqa_logits;
  row.mqa_topk = hopper_mqa_topk;
  row.paged_mqa_topk = hopper_paged_mqa_topk;
  return row;
}
constinit const Backend kHopper = hopper_row(kPortable);

}  // namespace topkey::cuda
