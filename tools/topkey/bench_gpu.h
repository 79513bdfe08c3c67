// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The parts of `topkey bench` that need a GPU.
#pragma once
#include <string>

#include "bench/gpu_suite.h"
#include "command.h"

namespace topkey::cli {

bool is_gpu_suite(const std::string& suite);
Exit bench_gpu(const bench::GpuOptions& options);
/// Does not return where it succeeds in starting Python, whose exit code is then the command's.
Exit bench_against(const std::string& peers, const bench::GpuOptions& options);

}  // namespace topkey::cli
