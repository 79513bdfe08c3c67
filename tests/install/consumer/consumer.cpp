// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Ten lines of a user: the umbrella header, the version of the library that was linked.
#include <cstdio>
#include <cstring>

#include "topkey/topkey.h"

int main() {
  std::printf("topkey %s, ABI %u\n", topkey::version(), static_cast<unsigned>(topkey::abi_version()));
  return std::strcmp(topkey::version(), TOPKEY_VERSION) == 0 && topkey::abi_version() == TOPKEY_ABI_VERSION ? 0 : 1;
}
