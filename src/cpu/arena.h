// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Cuts the caller's workspace into arrays. The same code run over a null base gives the size that a size query answers.
#pragma once
#include <cstddef>
#include <cstdint>

namespace topkey::cpu {

class Arena {
 public:
  Arena(void* base, size_t bytes) : base_(static_cast<char*>(base)), bytes_(bytes) {}

  /// n elements on a cache line of their own. Null where there is no base.
  template <class T>
  T* take(int64_t n) {
    const size_t at = used_;
    used_ += (static_cast<size_t>(n) * sizeof(T) + kLine - 1) / kLine * kLine;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  size_t used() const { return used_; }
  size_t left() const { return bytes_ > used_ ? bytes_ - used_ : 0; }

 private:
  static constexpr size_t kLine = 64;
  char* base_;
  size_t bytes_, used_ = 0;
};

}  // namespace topkey::cpu
