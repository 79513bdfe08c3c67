// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// One version for the library, the headers and the Python package. CMake reads it from here.
#pragma once
#include <cstdint>

#include "topkey/topkey_c.h"

#define TOPKEY_VERSION_MAJOR 0
#define TOPKEY_VERSION_MINOR 1
#define TOPKEY_VERSION_PATCH 0
#define TOPKEY_VERSION "0.1.0"

namespace topkey {

/// Version of the library that is linked or loaded, "major.minor.patch".
inline const char* version() { return topkey_version(); }
/// ABI that the loaded library speaks; a binding compares it with TOPKEY_ABI_VERSION of its headers.
inline uint32_t abi_version() { return topkey_abi_version(); }

}  // namespace topkey
