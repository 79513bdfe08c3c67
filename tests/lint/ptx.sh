#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# The Hopper sources must be harmless in code for other GPUs: one instruction that these do not know, and their driver
# refuses the whole library's PTX. Compiling that PTX for compute capability 8.0 shows it. Usage: ptx.sh NVCC
set -eu
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
count=0
for source in src/cuda/*_sm90.cu; do
  "$1" -std=c++17 -gencode=arch=compute_80,code=sm_80 -fmad=false -Isrc -Iinclude -cubin "$source" -o "$scratch/out" 2>"$scratch/log" ||
    { cat "$scratch/log"; echo "ptx lint: $source does not compile for compute capability 8.0"; exit 1; }
  count=$((count + 1))
done
echo "ptx lint: $count files"
[ $count -gt 0 ]
