// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The array of backends in priority order, and how one is chosen: the forced one (exec.backend, else TOPKEY_BACKEND),
// else the first of the call's device that is usable, has the operation for this shape, and has the arithmetic asked
// for.
#include <cstdlib>
#include <cstring>
#include <string>

#include "backend_table.h"

namespace topkey {

const Backend* const kBackends[] = {&cuda::kHopper, &cuda::kPortable, &cpu::kBackend, &ref::kBackend};
const int kNumBackends = sizeof(kBackends) / sizeof(kBackends[0]);

const char* op_name(Op op) noexcept {
  switch (op) {
#define X(name, Args) \
  case Op::name: return #name;
    TOPKEY_OPERATIONS(X)
#undef X
  }
  return "?";
}

const Backend* find_backend(const char* name) noexcept {
  for (const Backend* b : kBackends) {
    if (name != nullptr && std::strcmp(b->name, name) == 0) return b;
  }
  return nullptr;
}

namespace {

const char* device_name(Device device) { return device == Device::cpu ? "cpu" : "cuda"; }

/// Read once: a process does not change its mind in the middle of a run, and getenv is not safe beside setenv.
const char* backend_of_environment() {
  static const std::string name = [] {
    const char* value = std::getenv("TOPKEY_BACKEND");
    return std::string(value != nullptr ? value : "");
  }();
  return name.empty() ? nullptr : name.c_str();
}

bool has_strategy(const Backend& b, const char* name) {
  for (const char* const* s = b.strategies; *s != nullptr; ++s) {
    if (std::strcmp(*s, name) == 0) return true;
  }
  return false;
}

/// Why `b` cannot take the call; empty = it can.
std::string refusal(const Backend& b, Op op, const Shape& shape, const Exec& exec) {
  if (b.device != exec.device)
    return std::string("it runs on ") + device_name(b.device) + ", the call on " + device_name(exec.device);
  if (const char* why = b.unusable()) return why;
  if (const char* why = b.why_not(op, shape)) return why;
  if (exec.strict && b.device == Device::cuda) return "it cannot raise on what it finds on the device (exec.strict)";
  if (exec.strategy != nullptr && !has_strategy(b, exec.strategy))
    return std::string("it has no strategy '") + exec.strategy + "'";
  if (exec.arithmetic != nullptr && shape.scored) {
    const char* own = b.arithmetic(shape.format, shape.q_dtype);
    if (own == nullptr || std::strcmp(own, exec.arithmetic) != 0) {
      return std::string("its arithmetic is ") + (own ? own : "none") + ", not " + exec.arithmetic;
    }
  }
  return {};
}

/// The chosen backend, or null and the reason.
const Backend* choose(Op op, const Shape& shape, const Exec& exec, std::string* reason) {
  const char* forced = exec.backend != nullptr ? exec.backend : backend_of_environment();
  if (forced != nullptr) {
    const Backend* b = find_backend(forced);
    const std::string why = b ? refusal(*b, op, shape, exec) : "this build has no such backend";
    if (why.empty()) return b;
    *reason = std::string("backend '") + forced + "' was asked for, but " + why;
    return nullptr;
  }
  for (const Backend* b : kBackends) {
    const std::string why = refusal(*b, op, shape, exec);
    if (why.empty()) return b;
    *reason += (reason->empty() ? "no backend can run this: " : "; ") + std::string(b->name) + ": " + why;
  }
  return nullptr;
}

}  // namespace

const Backend& choose_backend(Op op, const Shape& shape, const Exec& exec) {
  std::string reason;
  const Backend* b = choose(op, shape, exec, &reason);
  if (b == nullptr) throw Error(Status::unsupported, std::string(op_name(op)) + ": " + reason);
  return *b;
}

const Memory& memory_of(const char* op, const Exec& exec) {
  const char* why = "this build has no backend there";
  for (const Backend* b : kBackends) {
    if (b->device != exec.device) continue;
    why = b->unusable();
    if (why == nullptr) return b->memory == nullptr ? kHostMemory : *b->memory;
  }
  throw Error(Status::unsupported, std::string(op) + ": exec.device must be one that is usable, got " +
                                       device_name(exec.device) + ": " + why);
}

const char* why_unsupported(Op op, const Shape& shape, const Exec& exec) {
  thread_local std::string sentence;
  std::string reason;
  if (choose(op, shape, exec, &reason) != nullptr) return nullptr;
  sentence = std::string(op_name(op)) + ": " + reason;
  return sentence.c_str();
}

}  // namespace topkey
