// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The reference backend's row of the table. Every shape; no workspace; one thread; allocates as it likes.
#include "backend_table.h"
#include "ref/cache.h"
#include "ref/quantize.h"
#include "ref/rows.h"
#include "ref/score.h"
#include "ref/search.h"
#include "ref/select.h"

namespace topkey::ref {
namespace {

const char* unusable() { return nullptr; }
const char* detail() { return ""; }

const char* why_not(Op, const Shape& shape) {
  return shape.format == KeyFormat::mxfp4 ? "it does not have mxfp4 keys yet" : nullptr;
}

const char* arithmetic(KeyFormat format, DType) { return format == KeyFormat::mxfp4 ? nullptr : "ref"; }
constexpr const char* kStrategies[] = {"sort", nullptr};
int32_t numerics(KeyFormat format) { return format == KeyFormat::mxfp4 ? 0 : 1; }
size_t workspace_bytes(Op, const Shape&) { return 0; }

}  // namespace

constinit const Backend kBackend = {
    "ref",      Device::cpu,     true,       unusable,         detail,      why_not,       arithmetic, kStrategies,
    numerics,   workspace_bytes, nullptr,    nullptr,          expand_rows, to_slots,      quantize_q, quantize_k,
    store_k,    gather_k,        mqa_logits, paged_mqa_logits, topk,        select_blocks, mqa_topk,   paged_mqa_topk,
    merge_topk,
};

}  // namespace topkey::ref
