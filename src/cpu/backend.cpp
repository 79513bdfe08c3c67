// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The CPU backend's row of the table: arithmetic `f32` on every ISA, the same bits on each.
#include "backend_table.h"
#include "cpu/cache.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"
#include "cpu/merge.h"
#include "cpu/producer.h"
#include "cpu/quantize.h"
#include "cpu/rows.h"
#include "cpu/search.h"

namespace topkey::cpu {
namespace {

const char* detail() { return kernels().isa; }

const char* why_not(Op, const Shape& shape) {
  return shape.format == KeyFormat::mxfp4 ? "it does not have mxfp4 keys yet" : nullptr;
}

const char* arithmetic(KeyFormat format, DType) { return format == KeyFormat::mxfp4 ? nullptr : "f32"; }
int32_t numerics(KeyFormat format) { return format == KeyFormat::mxfp4 ? 0 : 1; }
constexpr const char* kStrategies[] = {"radix", nullptr};

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
    default: return 0;
  }
}

}  // namespace

constinit const Backend kBackend = {
    "cpu",         Device::cpu, false,           isa_problem, detail,     why_not,          arithmetic,
    kStrategies,   numerics,    workspace_bytes, nullptr,     nullptr,    expand_rows,      to_slots,
    quantize_q,    quantize_k,  store_k,         gather_k,    mqa_logits, paged_mqa_logits, topk,
    select_blocks, mqa_topk,    paged_mqa_topk,  merge_topk,
};

}  // namespace topkey::cpu
