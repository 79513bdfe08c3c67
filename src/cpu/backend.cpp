// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The CPU backend's row of the table: arithmetic `f32` on every ISA, the same bits on each.
#include "backend_table.h"
#include "cpu/cache.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"
#include "cpu/merge.h"
#include "cpu/pool.h"
#include "cpu/producer.h"
#include "cpu/quantize.h"
#include "cpu/rows.h"
#include "cpu/search.h"

namespace topkey::cpu {
namespace {

const char* detail() { return kernels().isa; }

const char* why_not(Op, const Shape&) { return nullptr; }
const char* arithmetic(KeyFormat, DType) { return "f32"; }
int32_t numerics(KeyFormat) { return 1; }
/// radix: its own choice; the others say who merges rows that were cut into slices (search.cpp).
constexpr const char* kStrategies[] = {"radix", "radix.rows", "radix.team", nullptr};

size_t workspace_bytes(Op op, const Shape& shape) {
  switch (op) {
    case Op::mqa_logits:
    case Op::paged_mqa_logits:
    case Op::topk:
    case Op::select_blocks:
    case Op::mqa_topk:
    case Op::paged_mqa_topk:
    case Op::merge_topk: return search_workspace_bytes(op, shape);
    case Op::quantize_q:
    case Op::quantize_k:
    case Op::store_k: return producer_workspace(shape.head_dim);
    case Op::pool_k:
    case Op::compress_k: return pool_workspace_bytes(shape.head_dim);
    default: return 0;
  }
}

}  // namespace

constinit const Backend kBackend = {.name = "cpu",
                                    .device = Device::cpu,
                                    .one_thread = false,
                                    .unusable = isa_problem,
                                    .detail = detail,
                                    .why_not = why_not,
                                    .arithmetic = arithmetic,
                                    .strategies = kStrategies,
                                    .numerics = numerics,
                                    .workspace_bytes = workspace_bytes,
                                    .prepare = nullptr,
                                    .memory = nullptr,
#define X(op, Args) .op = op,
                                    TOPKEY_OPERATIONS(X)
#undef X
};

}  // namespace topkey::cpu
