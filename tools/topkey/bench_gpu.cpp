// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// topkey bench on a GPU: the performance suite, and the comparison with other people's kernels, which Python runs.
#include <fmt/core.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "bench_gpu.h"
#include "command.h"

namespace topkey::cli {

bool is_gpu_suite(const std::string& suite) {
  for (const char* name : {"performance", "decode", "prefill", "select", "producers", "worst"}) {
    if (suite == name) return true;
  }
  return false;
}

Exit bench_gpu(const bench::GpuOptions& options) {
  try {
    return bench::run_gpu_suite(options) ? kDone : kDiffers;
  } catch (const Error&) {
    throw;
  } catch (const std::runtime_error& e) {  // no CUDA, no GPU, or one that failed
    throw Failure(e.what(), kUnusable);
  }
}

Exit bench_against(const std::string& peers, const bench::GpuOptions& options) {
  const char* elsewhere = std::getenv("TOPKEY_AGAINST");
  const std::string script = elsewhere != nullptr ? elsewhere : TOPKEY_AGAINST;
  if (!std::filesystem::exists(script)) {
    throw Failure(fmt::format(
        "bench: --against needs bench/against.py of the sources (TOPKEY_AGAINST names it), got {}", script));
  }
  std::vector<std::string> words = {"python3", script, "--against", peers};
  if (options.quick) words.emplace_back("--quick");
  if (!options.backend.empty()) words.insert(words.end(), {"--backend", options.backend});
  if (!options.json.empty()) words.insert(words.end(), {"--json", options.json});
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  std::fflush(nullptr);
  execvp(arguments[0], arguments.data());  // returns only where it fails
  throw Failure(fmt::format("bench: python3 cannot be run: {}", std::strerror(errno)), kUnusable);
}

}  // namespace topkey::cli
