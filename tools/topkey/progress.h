// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A progress bar on stderr: appears once work has taken half a second, only on a terminal, and leaves no trace when it
// is done.
#pragma once
#include <cstdint>
#include <string>

namespace topkey::cli {

bool stderr_is_terminal();
bool stdout_is_terminal();

class Progress {
 public:
  Progress(std::string what, int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  /// False where nothing would be seen: then there is no reason to cut work into pieces.
  bool visible() const { return visible_; }
  void at(int64_t done);

 private:
  std::string what_;
  int64_t total_;
  bool visible_, drawn_ = false;
  double begin_, last_ = 0;
};

}  // namespace topkey::cli
