#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# Each public header compiles alone: as C++17 with g++, and topkey_c.h as C11 too. Usage: headers.sh (in the root folder)
set -u
failed=0 count=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

compile() {  # compile COMPILER SUFFIX HEADER FLAGS...
  local compiler=$1 source=$work/alone.$2 header=$3
  shift 3
  printf '#include "%s"\n#include "%s"\n' "$header" "$header" >"$source"  # twice: the guard
  count=$((count + 1))
  if ! "$compiler" "$@" -Wall -Wextra -pedantic-errors -Werror -fsyntax-only -Iinclude "$source"; then
    echo "$header does not compile alone with: $compiler $*"
    failed=$((failed + 1))
  fi
}

for path in include/topkey/*.h; do
  compile g++ cpp "${path#include/}" -std=c++17
done
compile gcc c topkey/topkey_c.h -std=c11
compile gcc c topkey/topkey_shard_c.h -std=c11
echo "header lint: $count compilations, $failed failed"
[ "$failed" -eq 0 ] && [ "$count" -gt 2 ]
