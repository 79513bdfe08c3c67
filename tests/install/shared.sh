#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# Builds and installs the shared library, checks its name and its symbols, links a C11 program to it with the compiler
# alone, runs it. The build is kept, so that a second run compiles only what changed. Usage: shared.sh SOURCE BUILD WORK
set -eu
source=$1 work=$3
rm -rf "$work/prefix"

cmake -S "$source" -B "$work/build" -DBUILD_SHARED_LIBS=ON -DTOPKEY_BUILD_TOOLS=OFF -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG" >/dev/null
cmake --build "$work/build"
cmake --install "$work/build" --prefix "$work/prefix" >/dev/null
library=$(find "$work/prefix" -name libtopkey.so)
[ -n "$library" ] || { echo "no libtopkey.so was installed"; exit 1; }

version=$(sed -n 's/^#define TOPKEY_VERSION "\([0-9]*\.[0-9]*\)\..*/\1/p' "$source/include/topkey/version.h")
readelf -d "$library" | grep -F "soname: [libtopkey.so.$version]" || { echo "SONAME must be libtopkey.so.$version"; exit 1; }
bash "$source/tests/lint/symbols.sh" "$library"

gcc -std=c11 -pedantic-errors -Wall -Werror -I"$work/prefix/include" "$source/tests/install/consumer/consumer.c" \
  -L"$(dirname "$library")" -ltopkey -Wl,-rpath,"$(dirname "$library")" -o "$work/consumer"
"$work/consumer"
