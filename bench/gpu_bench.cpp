// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The GPU's benchmark alone, for machines without what the command line needs. Usage: topkey_gpu_bench [--suite S]
// [--rows REGEX] [--backend NAME] [--quick] [--list] [--idle S] [--load S] [--json FILE] [--commit C]
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>

#include "bench/gpu_suite.h"

int main(int argc, char** argv) {
  topkey::bench::GpuOptions options;
  const std::map<std::string, std::string*> words = {{"--suite", &options.suite},
                                                     {"--rows", &options.rows},
                                                     {"--backend", &options.backend},
                                                     {"--json", &options.json},
                                                     {"--commit", &options.commit}};
  const std::map<std::string, double*> numbers = {{"--idle", &options.idle}, {"--load", &options.load}};
  try {
    for (int i = 1; i < argc; ++i) {
      const std::string name = argv[i];
      const auto word = words.find(name);
      const auto number = numbers.find(name);
      const bool takes = (word != words.end() || number != numbers.end()) && i + 1 < argc;
      if (name == "--quick") {
        options.quick = true;
      } else if (name == "--list") {
        options.list = true;
      } else if (takes && word != words.end()) {
        *word->second = argv[++i];
      } else if (takes) {
        *number->second = std::strtod(argv[++i], nullptr);
      } else {
        std::fprintf(stderr, "topkey_gpu_bench: %s is no option, or lacks its value\n", name.c_str());
        return 2;
      }
    }
    return topkey::bench::run_gpu_suite(options) ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "topkey_gpu_bench: %s\n", e.what());
    return 1;
  }
}
