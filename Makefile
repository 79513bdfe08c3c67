# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# Thin front of CMake: each target sets up what it needs, configures a preset and builds. `make help` lists them.
PRESET ?= release
JOBS ?= $(shell nproc)
CTEST_ARGS ?=
BENCH_ARGS ?=
FUZZ_SECONDS ?= 30

# The folder of a preset, as in CMakePresets.json.
build_folder = $(if $(filter release,$(1)),build,build-$(1))
folder := $(call build_folder,$(PRESET))

.PHONY: help setup build run test python sanitize tsan fuzz neon nightly bench lint tidy format clean
.DEFAULT_GOAL := build

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup:  ## install what all other targets need (Debian; as root, else prints the command)
	@scripts/setup build test lint fuzz

build:  ## the library and the command line, build/topkey
	@scripts/setup build
	@cmake --preset $(PRESET) >/dev/null
	@cmake --build $(folder) --target topkey_cli -j $(JOBS)

run: build  ## the pipeline on a real model's keys
	@trace=$$(ls data/smollm2_*.safetensors 2>/dev/null | head -n 1); \
	if [ -z "$$trace" ]; then echo "make run: no file data/smollm2_*.safetensors; examples/real_trace makes it" >&2; exit 1; fi; \
	$(folder)/topkey run "$$trace"

test:  ## build and run all tests, lint and install tests included
	@scripts/setup test
	@scripts/run_tests $(PRESET) $(folder) $(JOBS) $(CTEST_ARGS)

python:  ## the Python package, built and installed into .venv
	@scripts/setup test
	@cmake --preset $(PRESET) >/dev/null
	@scripts/python_package $(folder)

sanitize:  ## the tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(MAKE) --no-print-directory test PRESET=asan

tsan:  ## ThreadSanitizer over the tests with threads
	@scripts/setup test tsan
	@scripts/run_tsan $(JOBS)

fuzz:  ## each fuzz target for FUZZ_SECONDS
	@scripts/setup fuzz
	@scripts/run_fuzz $(FUZZ_SECONDS) $(JOBS)

neon:  ## the tests on 64-bit Arm under qemu-user (tens of minutes)
	@scripts/setup test neon
	@scripts/run_neon $(JOBS) $(CTEST_ARGS)

nightly: neon tidy  ## what takes too long for every change

bench: build  ## whole calls beside the machine's ceilings (BENCH_ARGS="--json FILE --device NAME")
	@scripts/setup bench
	@$(folder)/topkey bench $(BENCH_ARGS)

lint:  ## format check, include and file lint
	@scripts/setup lint
	@scripts/lint

tidy:  ## clang-tidy over library, support and tools (minutes)
	@scripts/setup lint
	@scripts/lint --tidy $(JOBS)

format:  ## rewrite all C++ files in the house style
	@scripts/setup lint
	@scripts/lint --list | xargs clang-format-14 -i

clean:  ## remove all build folders
	rm -rf build build-*
