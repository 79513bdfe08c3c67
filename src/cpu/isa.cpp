// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See isa.h.
#include "cpu/isa.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "hwy/highway.h"

namespace topkey::cpu {
namespace {

std::string apply() {
  const char* wanted = std::getenv("TOPKEY_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return {};
  // What is compiled and what the machine can run; the static target runs anywhere.
  const uint64_t usable = (static_cast<uint64_t>(hwy::SupportedTargets()) & static_cast<uint64_t>(HWY_TARGETS)) |
                          static_cast<uint64_t>(HWY_STATIC_TARGET);
  std::string have;
  for (uint64_t rest = usable; rest != 0; rest &= rest - 1) {
    const int64_t target = static_cast<int64_t>(rest & (~rest + 1));  // SCALAR is bit 62
    const char* name = hwy::TargetName(target);
    if (std::strcmp(name, wanted) == 0) {
      hwy::DisableTargets(~target);
      return {};
    }
    have += std::string(have.empty() ? "" : ", ") + name;
  }
  return std::string("TOPKEY_CPU_ISA asks for ") + wanted + ", this machine and build have " + have;
}

const std::string& problem() {
  static const std::string sentence = apply();
  return sentence;
}

}  // namespace

void choose_isa() { problem(); }

const char* isa_problem() { return problem().empty() ? nullptr : problem().c_str(); }

}  // namespace topkey::cpu
