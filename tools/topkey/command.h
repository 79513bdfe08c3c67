// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What the subcommands share: exit codes, how each one joins the command line, and the choice of a backend. A
// subcommand is one file; it prints its result on stdout, progress and complaints on stderr, and returns an exit code.
#pragma once
#include <cstdint>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/call.h"

namespace CLI {
class App;
}

namespace topkey::cli {

/// Exit codes of every subcommand.
enum Exit : int { kDone = 0, kDiffers = 1, kBadInput = 2, kUnusable = 3 };

/// A number too large is read as the largest of its type, which must then be out of range.
inline constexpr int64_t kMostSeed = INT64_MAX - 1;

/// A fault of the user's or of a file, told in one sentence; exit code kBadInput unless another is given.
class Failure : public std::runtime_error {
 public:
  explicit Failure(const std::string& sentence, Exit exit = kBadInput) : std::runtime_error(sentence), code(exit) {}
  Exit code;
};

/// Each adds its subcommand; `action` is set to what runs it when it is the one that was asked for.
using Action = std::function<Exit()>;
void add_info(CLI::App& app, Action& action);
void add_run(CLI::App& app, Action& action);
void add_check(CLI::App& app, Action& action);
void add_make_trace(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_scale(CLI::App& app, Action& action);

/// The backend that will run `args`: `forced` (or TOPKEY_BACKEND) if it can, else a Failure with its reason; "" = the
/// first that can.
std::string choose_backend(const support::CallArgs& args, const std::string& forced);
/// An Exec for the backend of that name, on its device; `name` must outlive it.
Exec exec_on(const std::string& name);
/// Why exec.backend cannot run `args` though they are right; empty = it can. Wrong arguments throw.
std::string why_not(const support::CallArgs& args, const Exec& exec);
/// The backends that can be used here, or only `forced`; a Failure when that leaves none.
std::vector<std::string> usable_backends(const std::string& forced);

/// `sentence` without a leading "op: ", where a table says the operation already.
std::string without_op(const std::string& op, const std::string& sentence);
/// "12.3 ms": seconds as a person reads them. "3.1 M": a count likewise.
std::string duration(double seconds);
std::string short_count(double count);
/// Seconds since some moment.
double now();

}  // namespace topkey::cli
