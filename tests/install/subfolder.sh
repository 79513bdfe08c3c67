#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# Builds a consumer that adds TopKey as a subfolder, runs it, and checks that the library is all that came along: one
# archive, no other program, nothing installed, nothing fetched, no package looked for but the library's own (hwy).
# Usage: subfolder.sh SOURCE BUILD WORK
set -eu
source=$1 work=$3
rm -rf "$work"

cmake -S "$source/tests/install/consumer" -B "$work/build" -DTOPKEY_FOLDER="$source" -DCMAKE_CXX_FLAGS=-O0 >/dev/null
cmake --build "$work/build"
"$work/build/consumer"

cd "$work/build"
built=$(find . -name CMakeFiles -prune -o -type f \( -name '*.a' -o -name '*.so*' -o -executable \) -print | sort | xargs)
[ "$built" = "./consumer ./topkey/libtopkey.a" ] || { echo "built more than the library: $built"; exit 1; }
if grep -E '_DIR:PATH=|FETCHCONTENT' CMakeCache.txt | grep -v -E '^(CMAKE|consumer|topkey|hwy)_'; then
  echo "packages were looked for"
  exit 1
fi
cmake --install . --prefix "$work/prefix" >/dev/null
[ -z "$(find "$work/prefix" -type f 2>/dev/null)" ] || { echo "a subfolder must install nothing"; exit 1; }
