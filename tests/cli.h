// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The built command as a user or a script meets it, for the tests of it.
#pragma once
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/testing.h"

namespace topkey::testing {

namespace fs = std::filesystem;

struct Outcome {
  int code = -1;  ///< -1: ended by a signal
  std::string out, err;
};

inline std::string file_text(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

class CliTest : public ::testing::Test {
 protected:
  CliTest() { fs::create_directories(folder_); }
  ~CliTest() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  }
  Outcome run_command(const std::string& arguments, const std::string& environment = "") const {
    const std::string command =
        environment + " " TOPKEY_CLI " " + arguments + " >" + path("out") + " 2>" + path("err") + " </dev/null";
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, file_text(path("out")), file_text(path("err"))};
  }
  /// Exit code and one worded line on stderr.
  void expect_refused(const std::string& arguments, int code, const std::string& words = "",
                      const std::string& environment = "") const {
    expect_refusal(run_command(arguments, environment), arguments, code, words);
  }
  static void expect_refusal(const Outcome& outcome, const std::string& arguments, int code, const std::string& words) {
    EXPECT_EQ(outcome.code, code) << arguments << "\n" << outcome.err;
    EXPECT_THAT(outcome.err, ::testing::HasSubstr(words)) << arguments;
    EXPECT_EQ(outcome.err.rfind("topkey: ", 0), 0U) << outcome.err;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  }
  std::string small_trace(const std::string& options = "") const {
    const std::string file = path("small.safetensors");
    const Outcome outcome =
        run_command("make-trace -o " + file +
                    " --heads 2 --head-dim 32 --rows 4 --keys 90 --topk 5 --page-size 16 --expected " + options);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return file;
  }

 private:
  fs::path folder_ = fs::path(::testing::TempDir()) /
                     (std::string("cli_test_") + ::testing::UnitTest::GetInstance()->current_test_info()->name());
};

}  // namespace topkey::testing
