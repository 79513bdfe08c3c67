// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The exported symbols, and what every call does, in order: copy the arguments in (ABI), validate, choose a backend,
// check the workspace, run. No exception crosses this file.
#include "topkey/topkey_c.h"

#include <cstdio>
#include <string>

#include "backend_table.h"
#include "border.h"
#include "call.h"

namespace topkey {
namespace {

/// A plain buffer: keeping a sentence must not be able to fail.
thread_local char last_error[1024];
thread_local topkey_status last_status = TOPKEY_OK;

}  // namespace

const char* kept_error() noexcept { return last_error; }
topkey_status keep_error(topkey_status status, const char* sentence) noexcept {
  last_status = status;
  std::snprintf(last_error, sizeof last_error, "%s", sentence);
  return status;
}

namespace {

/// Queries of `q` go with keys of `format` (score.h).
bool can_pair(KeyFormat format, DType q) {
  switch (format) {
    case KeyFormat::fp8: return q == DType::f8_e4m3fn || q == DType::u8;
    case KeyFormat::mxfp4:
    case KeyFormat::fp8_fnuz: return q == DType::u8;
    case KeyFormat::bf16:
    case KeyFormat::f16:
    case KeyFormat::f32:
    case KeyFormat::q8_0: return q == DType::f32 || q == DType::bf16 || q == DType::f16;
  }
  return false;
}

template <class Args, class CArgs>
topkey_status call(const CArgs* args, const topkey_exec* exec) noexcept {
  return guard([&] {
    const char* name = op_name(Operation<Args>::op);
    const Args a = from_c<Args>(name, "args", args);
    const Exec e = from_c<Exec>(name, "exec", exec);
    run_checked(check_call(a, e), a, e);
  });
}

template <class Args, class CArgs>
size_t workspace(const CArgs* args, const topkey_exec* exec) noexcept {
  size_t bytes = SIZE_MAX;
  guard([&] {
    constexpr Op op = Operation<Args>::op;
    const Exec e = from_c<Exec>(op_name(op), "exec", exec);
    validate_exec(op_name(op), e);
    const Shape shape = validate(from_c<Args>(op_name(op), "args", args), Mode::query);
    bytes = choose_backend(op, shape, e).workspace_bytes(op, shape);
  });
  return bytes;
}

template <class Args, class CArgs>
const char* unsupported(const CArgs* args, const topkey_exec* exec) noexcept {
  const char* reason = nullptr;
  const topkey_status status = guard([&] {
    constexpr Op op = Operation<Args>::op;
    const Exec e = from_c<Exec>(op_name(op), "exec", exec);
    validate_exec(op_name(op), e);
    const Shape shape = validate(from_c<Args>(op_name(op), "args", args), Mode::query);
    reason = why_unsupported(op, shape, e);
  });
  return status == TOPKEY_OK ? reason : kept_error();
}

}  // namespace
}  // namespace topkey

using namespace topkey;  // the symbols below are C; their bodies are not

extern "C" {

#define X(name, Args)                                                                                  \
  topkey_status topkey_##name(const topkey_##name##_args* args, const topkey_exec* exec) {             \
    return call<Args>(args, exec);                                                                     \
  }                                                                                                    \
  size_t topkey_##name##_workspace_bytes(const topkey_##name##_args* args, const topkey_exec* exec) {  \
    return workspace<Args>(args, exec);                                                                \
  }                                                                                                    \
  const char* topkey_##name##_unsupported(const topkey_##name##_args* args, const topkey_exec* exec) { \
    return unsupported<Args>(args, exec);                                                              \
  }
TOPKEY_OPERATIONS(X)
#undef X

const char* topkey_version(void) { return TOPKEY_VERSION; }
uint32_t topkey_abi_version(void) { return TOPKEY_ABI_VERSION; }
const char* topkey_last_error(void) { return kept_error(); }
topkey_status topkey_last_status(void) { return last_status; }

const char* topkey_backend_name(int32_t index) {
  return index >= 0 && index < kNumBackends ? kBackends[index]->name : nullptr;
}
topkey_device topkey_backend_device(int32_t index) {
  return index >= 0 && index < kNumBackends ? static_cast<topkey_device>(kBackends[index]->device) : TOPKEY_DEVICE_CPU;
}
const char* topkey_backend_unusable(int32_t index) {
  return index >= 0 && index < kNumBackends ? kBackends[index]->unusable() : "this build has no such backend";
}

const char* topkey_backend_detail(int32_t index) {
  return index >= 0 && index < kNumBackends ? kBackends[index]->detail() : "";
}

const char* topkey_arithmetic(const char* backend, topkey_key_format format, topkey_dtype q_dtype) {
  const Backend* b = find_backend(backend);
  if (b == nullptr || !can_pair(static_cast<KeyFormat>(format), static_cast<DType>(q_dtype))) return nullptr;
  return b->arithmetic(static_cast<KeyFormat>(format), static_cast<DType>(q_dtype));
}

const char* topkey_numerics_version(const char* backend, topkey_key_format format) {
  thread_local char text[96];
  const Backend* b = find_backend(backend);
  if (b == nullptr || format < 0 || format > TOPKEY_FORMAT_FP8_FNUZ) return nullptr;
  const KeyFormat f = static_cast<KeyFormat>(format);
  if (b->numerics(f) == 0) return nullptr;
  std::snprintf(text, sizeof text, "%s/%s/%d", format_name(f), b->name, static_cast<int>(b->numerics(f)));
  return text;
}

topkey_status topkey_prepare(topkey_device device, int32_t device_id) {
  return guard([&] {
    std::string reasons;
    bool usable = false;
    for (int i = 0; i < kNumBackends; ++i) {
      const Backend& b = *kBackends[i];
      if (static_cast<topkey_device>(b.device) != device) continue;
      const char* why = b.unusable();
      usable = usable || why == nullptr;
      if (why == nullptr && b.prepare != nullptr) b.prepare(device_id);
      if (why != nullptr) reasons += std::string(reasons.empty() ? "" : "; ") + b.name + ": " + why;
    }
    if (usable) return;
    if (reasons.empty()) reasons = "this build has no backend for it";
    throw Error(Status::unsupported, "prepare: device must be one with a usable backend, got " +
                                         std::string(device == TOPKEY_DEVICE_CPU ? "cpu" : "cuda") + " " +
                                         std::to_string(device_id) + " (" + reasons + ")");
  });
}

}  // extern "C"
