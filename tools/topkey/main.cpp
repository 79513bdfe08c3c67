// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// topkey info | run | check | make-trace | bench | scale. Exit codes: 0 equal or done, 1 differs, 2 bad input, 3 backend
// unusable.
#include <CLI/CLI.hpp>

#include <fmt/core.h>

#include <cstdlib>
#include <new>

#include "command.h"

namespace topkey::cli {
namespace {

Exit parse_and_run(int argc, char** argv) {
  CLI::App app("TopKey: scores all keys of a request for every query and selects the k best, exactly.", "topkey");
  app.set_version_flag("--version", std::string("topkey ") + version());
  app.require_subcommand(1);
  app.footer("Exit codes: 0 equal or done, 1 differs, 2 bad input, 3 backend unusable.");
  Action action;
  add_info(app, action);
  add_run(app, action);
  add_check(app, action);
  add_make_trace(app, action);
  add_bench(app, action);
  add_scale(app, action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kDone : kBadInput;  // --help and --version come here too
  }
  return action();
}

/// The sentence and the exit code of whatever went wrong.
Exit guarded(int argc, char** argv) {
  try {
    return parse_and_run(argc, argv);
  } catch (const Failure& failure) {
    fmt::print(stderr, "topkey: {}\n", failure.what());
    return failure.code;
  } catch (const Error& error) {
    fmt::print(stderr, "topkey: {}\n", error.what());
    return error.status() == Status::invalid_argument ? kBadInput : kUnusable;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "topkey: out of memory\n");
    return kBadInput;
  } catch (const std::exception& error) {
    fmt::print(stderr, "topkey: {}\n", error.what());
    return kBadInput;
  }
}

}  // namespace
}  // namespace topkey::cli

int main(int argc, char** argv) {
  try {
    return topkey::cli::guarded(argc, argv);
  } catch (...) {  // stderr itself failed
    return topkey::cli::kBadInput;
  }
}
