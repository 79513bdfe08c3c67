// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What this build can run on this machine, and the names under which its arithmetic is pinned.
#pragma once
#include <string>
#include <vector>

#include "topkey/format.h"
#include "topkey/types.h"

namespace topkey {

struct BackendInfo {
  std::string name;  ///< "ref", "cpu", ...
  Device device;
  std::string unusable;  ///< why it cannot run on this machine; empty = it can
  std::string detail;    ///< what it found there: the ISA of `cpu` by Highway's name ("AVX2", "AVX3", ...)
};

/// Every backend of this build, in the order in which they are chosen.
inline std::vector<BackendInfo> backends() {
  std::vector<BackendInfo> list;
  for (int32_t i = 0; const char* name = topkey_backend_name(i); ++i) {
    const char* reason = topkey_backend_unusable(i);
    list.push_back(
        {name, static_cast<Device>(topkey_backend_device(i)), reason ? reason : "", topkey_backend_detail(i)});
  }
  return list;
}

/// "fp8/cuda.sm90/1": changes exactly when score bits of that backend and format may change; traces and bench files
/// carry it. Null for a backend that is not in this build.
inline const char* numerics_version(const char* backend, KeyFormat format) {
  return topkey_numerics_version(backend, static_cast<int32_t>(format));
}

/// Name of the score arithmetic (docs/numerics.md) that `backend` uses for keys of `format` and queries of `q`; null
/// if it cannot.
inline const char* arithmetic(const char* backend, KeyFormat format, DType q) {
  return topkey_arithmetic(backend, static_cast<int32_t>(format), static_cast<int32_t>(q));
}

/// Loads every kernel of the device now, so that the very first call may be a captured one. May allocate; call once
/// at start. A device without a usable backend throws `unsupported`.
inline void prepare(Device device, int32_t device_id = 0) {
  border::check(topkey_prepare(static_cast<int32_t>(device), device_id));
}

}  // namespace topkey
