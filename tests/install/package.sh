#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# Installs this build, builds a consumer that finds the package, runs it. Usage: package.sh SOURCE BUILD WORK
set -eu
source=$1 build=$2 work=$3
rm -rf "$work"

cmake --install "$build" --prefix "$work/prefix" >/dev/null
cmake -S "$source/tests/install/consumer" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" >/dev/null
cmake --build "$work/build"
"$work/build/consumer"
