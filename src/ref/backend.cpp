// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The reference backend's row of the table. Every shape; no workspace; one thread; allocates as it likes.
#include "backend_table.h"
#include "ref/cache.h"
#include "ref/pool.h"
#include "ref/quantize.h"
#include "ref/rows.h"
#include "ref/score.h"
#include "ref/search.h"
#include "ref/select.h"

namespace topkey::ref {
namespace {

const char* unusable() { return nullptr; }
const char* detail() { return ""; }

const char* why_not(Op, const Shape&) { return nullptr; }
const char* arithmetic(KeyFormat, DType) { return "ref"; }
constexpr const char* kStrategies[] = {"sort", nullptr};
int32_t numerics(KeyFormat) { return 1; }
size_t workspace_bytes(Op, const Shape&) { return 0; }

}  // namespace

constinit const Backend kBackend = {.name = "ref",
                                    .device = Device::cpu,
                                    .one_thread = true,
                                    .unusable = unusable,
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

}  // namespace topkey::ref
