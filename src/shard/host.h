// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What the collectives do on the host: share out a workspace and look at a part of a tensor's rows. Rows that are
// contiguous travel in place and need no copy.
#pragma once
#include <algorithm>
#include <string>

#include "check.h"
#include "memory.h"
#include "topkey/topkey.h"

namespace topkey::shard {

constexpr size_t kLine = 256;
constexpr size_t padded(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

/// Cuts a workspace from the front; throws where it is too small.
class Workspace {
 public:
  Workspace(const char* op, const Exec& exec)
      : op_(op), at_(static_cast<char*>(exec.workspace)), left_(exec.workspace == nullptr ? 0 : exec.workspace_bytes) {}
  char* take(size_t bytes) {
    const size_t size = padded(bytes);
    if (size > left_) {
      throw Error(Status::workspace_too_small, std::string(op_) + ": exec.workspace_bytes must be at least " +
                                                   std::to_string(taken_ + size) + ", got " +
                                                   std::to_string(taken_ + left_));
    }
    char* start = at_;
    at_ += size;
    left_ -= size;
    taken_ += size;
    return start;
  }
  /// What is left, for an operation.
  Exec rest(const Exec& exec) const {
    Exec e = exec;
    e.workspace = left_ > 0 ? at_ : nullptr;
    e.workspace_bytes = left_;
    return e;
  }

 private:
  const char* op_;
  char* at_;
  size_t left_, taken_ = 0;
};

inline bool there(const Tensor& t) { return present(t); }

/// Rows [first, first + count) of a tensor; absent stays absent.
inline Tensor rows_of(const Tensor& t, int64_t first, int64_t count) {
  if (!there(t)) return t;
  Tensor part = t;
  if (t.data != nullptr) part.data = static_cast<char*>(t.data) + first * t.stride[0] * dtype_bytes(t.dtype);
  part.shape[0] = count;
  return part;
}

/// Bytes of the first `width` elements of a row; `t` is [rows, ...] with contiguous rows.
inline int64_t row_size(const Tensor& t, int64_t width) { return width * dtype_bytes(t.dtype); }
inline int64_t row_elements(const Tensor& t) {
  int64_t n = 1;
  for (int32_t d = 1; d < t.ndim; ++d) n *= t.shape[d];
  return n;
}
inline bool contiguous(const Tensor& t, int64_t width) { return t.shape[0] <= 1 || t.stride[0] == width; }

/// Rows of `width` elements from a tensor to packed memory, and back.
inline RowCopy packing(const Tensor& t, int64_t width, void* packed) {
  const int64_t bytes = row_size(t, width);
  return {packed, bytes, t.data, t.stride[0] * dtype_bytes(t.dtype), bytes, t.shape[0]};
}
inline RowCopy unpacking(const void* packed, int64_t width, const Tensor& t) {
  const int64_t bytes = row_size(t, width);
  return {t.data, t.stride[0] * dtype_bytes(t.dtype), packed, bytes, bytes, t.shape[0]};
}

}  // namespace topkey::shard
