// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The twin of the CUDA backend in a build without CUDA: its row of the table, with the reason.
#include "backend_table.h"

namespace topkey::cuda {
namespace {

const char* unusable() { return "this build has no CUDA (CMake option TOPKEY_CUDA)"; }
const char* detail() { return ""; }
const char* why_not(Op, const Shape&) { return unusable(); }
const char* arithmetic(KeyFormat, DType) { return nullptr; }
constexpr const char* kStrategies[] = {nullptr};
int32_t numerics(KeyFormat) { return 0; }
size_t workspace_bytes(Op, const Shape&) { return 0; }

}  // namespace

constinit const Backend kPortable = {.name = "cuda.portable",
                                     .device = Device::cuda,
                                     .one_thread = true,
                                     .unusable = unusable,
                                     .detail = detail,
                                     .why_not = why_not,
                                     .arithmetic = arithmetic,
                                     .strategies = kStrategies,
                                     .numerics = numerics,
                                     .workspace_bytes = workspace_bytes,
                                     .prepare = nullptr,
                                     .clear_rows = nullptr,
#define X(op, Args) .op = nullptr,
                                     TOPKEY_OPERATIONS(X)
#undef X
};

}  // namespace topkey::cuda
