# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# Cross build for 64-bit Arm with Debian's compiler; tests run under qemu-user. Packages of that architecture are unpacked
# into TOPKEY_ARM_ROOT (scripts/run_neon).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64;-L;/usr/aarch64-linux-gnu)

set(TOPKEY_ARM_ROOT "" CACHE PATH "Where the packages are unpacked")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES TOPKEY_ARM_ROOT)
set(CMAKE_FIND_ROOT_PATH ${TOPKEY_ARM_ROOT})
set(CMAKE_PREFIX_PATH /usr)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
# Highway's package names its library without a folder.
foreach(kind EXE SHARED)
  set(CMAKE_${kind}_LINKER_FLAGS_INIT "-L${TOPKEY_ARM_ROOT}/usr/lib/aarch64-linux-gnu")
endforeach()
