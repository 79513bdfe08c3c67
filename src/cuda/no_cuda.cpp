// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The twin of the CUDA backends in a build without CUDA: their rows of the table, with the reason.
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

#define X(op, Args) .op = nullptr,
#define TOPKEY_ABSENT(label)                                                                           \
  {                                                                                                    \
    .name = label, .device = Device::cuda, .one_thread = true, .unusable = unusable, .detail = detail, \
    .why_not = why_not, .arithmetic = arithmetic, .strategies = kStrategies, .numerics = numerics,     \
    .workspace_bytes = workspace_bytes, .prepare = nullptr, .memory = nullptr, TOPKEY_OPERATIONS(X)    \
  }
constinit const Backend kHopper = TOPKEY_ABSENT("cuda.sm90");
constinit const Backend kPortable = TOPKEY_ABSENT("cuda.portable");
#undef X

}  // namespace topkey::cuda
