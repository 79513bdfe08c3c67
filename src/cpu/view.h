// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Elements and rows of borrowed tensors of more than one dtype, for the producers; and division by a page size.
#pragma once
#include <cstdint>

#include "topkey/topkey.h"

namespace topkey::cpu {

/// i32 or i64, one dimension.
inline int64_t integer_at(const Tensor& t, int64_t i) {
  const int64_t at = i * t.stride[0];
  return t.dtype == DType::i64 ? static_cast<const int64_t*>(t.data)[at] : static_cast<const int32_t*>(t.data)[at];
}
/// Absent tensors take nothing.
inline void put_integer(const Tensor& t, int64_t i, int64_t value) {
  if (t.data == nullptr) return;
  if (t.dtype == DType::i64) {
    static_cast<int64_t*>(t.data)[i * t.stride[0]] = value;
  } else {
    static_cast<int32_t*>(t.data)[i * t.stride[0]] = static_cast<int32_t>(value);
  }
}

/// Scales are f32 [N], bytes [N,D/32], or four such bytes as one i32 [N].
constexpr int64_t scale_element_bytes(const Tensor& scales) {
  return scales.dtype == DType::f32 || scales.dtype == DType::i32 ? 4 : 1;
}

/// Those of row i, or of head j of it; null where the tensor is absent.
inline uint8_t* scale_bytes_at(const Tensor& scales, int64_t i, int64_t j = 0) {
  if (scales.data == nullptr) return nullptr;
  const int64_t at = i * scales.stride[0] + j * scales.stride[1];
  return static_cast<uint8_t*>(scales.data) + at * scale_element_bytes(scales);
}

constexpr int64_t float_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

/// The bytes of row i of a tensor whose elements have `bytes` bytes.
inline uint8_t* row_at(const Tensor& t, int64_t i, int64_t bytes) {
  return static_cast<uint8_t*>(t.data) + i * t.stride[0] * bytes;
}

/// Quotients of numbers that are not negative. Page sizes are nearly always powers of two, and a 64-bit division
/// costs 20 to 40 cycles.
class Divider {
 public:
  explicit Divider(int64_t by) : by_(by) {
    if ((by & (by - 1)) != 0) return;
    for (shift_ = 0; (int64_t{1} << shift_) < by; ++shift_) {
    }
  }
  int64_t quotient(int64_t n) const {
    if (shift_ >= 0) return n >> shift_;
    if ((n | by_) <= UINT32_MAX) return static_cast<uint32_t>(n) / static_cast<uint32_t>(by_);
    return n / by_;
  }

 private:
  int64_t by_;
  int shift_ = -1;
};

}  // namespace topkey::cpu
