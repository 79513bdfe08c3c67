// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// One line, redrawn in place ten times a second at most.
#include "progress.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>

#include "command.h"

namespace topkey::cli {
namespace {
constexpr double kSilent = 0.5, kBetween = 0.1;  // seconds
constexpr int kWidth = 40;
}  // namespace

bool stderr_is_terminal() { return isatty(STDERR_FILENO) == 1; }
bool stdout_is_terminal() { return isatty(STDOUT_FILENO) == 1; }

Progress::Progress(std::string what, int64_t total)
    : what_(std::move(what)), total_(std::max<int64_t>(total, 1)), visible_(stderr_is_terminal()), begin_(now()) {}

Progress::~Progress() {
  if (drawn_) std::fputs("\r\033[K", stderr);
}

void Progress::at(int64_t done) {
  const double time = now(), spent = time - begin_;
  if (!visible_ || done <= 0 || spent < kSilent || time - last_ < kBetween) return;
  last_ = time;
  drawn_ = true;
  const double part = std::min(1.0, static_cast<double>(done) / static_cast<double>(total_));
  const int full = static_cast<int>(part * kWidth);
  fmt::print(stderr, "\r{} [{:#<{}}{:.<{}}] {:3.0f} %, {:.0f} s left \033[K", what_, "", full, "", kWidth - full,
             part * 100, spent / part - spent);
  std::fflush(stderr);
}

}  // namespace topkey::cli
