/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * The same in C11. */
#include <stdio.h>
#include <topkey/topkey_c.h>

int main(void) {
  printf("topkey %s, ABI %u\n", topkey_version(), (unsigned)topkey_abi_version());
  return topkey_abi_version() == TOPKEY_ABI_VERSION ? 0 : 1;
}
