// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Backends by name, and numbers as a person reads them.
#include "command.h"

#include <fmt/core.h>

#include <chrono>
#include <cstdlib>
#include <variant>

#include "support/run.h"

namespace topkey::cli {
namespace {

std::string asked_for(const std::string& forced) {
  const char* fallback = std::getenv("TOPKEY_BACKEND");
  return !forced.empty() || fallback == nullptr ? forced : fallback;
}

/// A Failure unless `name` is a backend of this build that this machine can use.
void require_usable(const std::string& name) {
  std::string names;
  for (const BackendInfo& backend : backends()) {
    names += (names.empty() ? "" : ", ") + backend.name;
    if (backend.name != name) continue;
    if (backend.unusable.empty()) return;
    throw Failure(fmt::format("backend {} cannot be used here: {}", name, backend.unusable), kUnusable);
  }
  throw Failure(fmt::format("there is no backend {} in this build, only {}", support::shown(name), names), kUnusable);
}

}  // namespace

std::vector<std::string> usable_backends(const std::string& forced) {
  if (const std::string name = asked_for(forced); !name.empty()) {
    require_usable(name);
    return {name};
  }
  std::vector<std::string> names;
  for (const BackendInfo& backend : backends()) {
    if (backend.unusable.empty()) names.push_back(backend.name);
  }
  return names;
}

Exec exec_on(const std::string& name) {
  Exec exec{};
  exec.backend = name.c_str();
  for (const BackendInfo& backend : backends()) {
    if (backend.name == name) exec.device = backend.device;
  }
  return exec;
}

std::string why_not(const support::CallArgs& args, const Exec& exec) {
  try {
    std::visit([&](const auto& a) { support::workspace_bytes(a, exec); }, args);
    return "";
  } catch (const Error& error) {
    if (error.status() != Status::unsupported) throw;
    return error.what();
  }
}

std::string choose_backend(const support::CallArgs& args, const std::string& forced) {
  std::string reason = "no backend can be used here";
  for (const std::string& name : usable_backends(forced)) {
    const std::string why = why_not(args, exec_on(name));
    if (why.empty()) return name;
    reason = fmt::format("backend {} cannot run this: {}", name, why);
  }
  throw Failure(reason, kUnusable);
}

std::string without_op(const std::string& op, const std::string& sentence) {
  return sentence.rfind(op + ": ", 0) == 0 ? sentence.substr(op.size() + 2) : sentence;
}

std::string duration(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.0f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.1f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

std::string short_count(double count) {
  if (count < 10e3) return fmt::format("{:.0f}", count);
  if (count < 1e6) return fmt::format("{:.1f} thousand", count / 1e3);
  if (count < 1e9) return fmt::format("{:.1f} million", count / 1e6);
  return fmt::format("{:.2f} billion", count / 1e9);
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace topkey::cli
