// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The one exception of the C++ interface. Wrong arguments throw before anything is written: outputs, statistics, the
// current device and an open graph capture are untouched. The library never prints, exits or aborts.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

#include "topkey/topkey_c.h"

namespace topkey {

enum class Status : int32_t {
  ok,
  invalid_argument,     ///< a shape, dtype, stride, alignment or number is wrong
  unsupported,          ///< right in itself, but no usable backend (or not the forced one) can run it
  workspace_too_small,  ///< exec.workspace_bytes is under name_workspace_bytes(args, exec)
  not_prepared,         ///< first call under stream capture without prepare()
  device_error,         ///< the device or its driver failed
  peer_error            ///< another rank failed, is missing, or disagrees
};

/// what(): one sentence, "operation: argument must be ..., got ...".
class Error : public std::runtime_error {
 public:
  Error(Status status, const char* sentence) : std::runtime_error(sentence), status_(status) {}
  Error(Status status, const std::string& sentence) : std::runtime_error(sentence), status_(status) {}
  Status status() const noexcept { return status_; }

 private:
  Status status_;
};

namespace border {
inline void check(topkey_status status) {
  if (status != TOPKEY_OK) throw Error(static_cast<Status>(status), topkey_last_error());
}
}  // namespace border
}  // namespace topkey
