// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Elements of borrowed tensors, read and written one at a time, whatever their dtype and strides. Plain and slow on
// purpose.
#pragma once
#include <cstdint>
#include <cstring>

#include "topkey/topkey.h"

namespace topkey::ref {

template <class T>
T* element(const Tensor& t, int64_t i, int64_t j = 0, int64_t k = 0) {
  return static_cast<T*>(t.data) + i * t.stride[0] + (t.ndim > 1 ? j * t.stride[1] : 0) +
         (t.ndim > 2 ? k * t.stride[2] : 0);
}

/// Bytes of one row's (or one query head's) scales: f32, u8 or e8m0, or four ue8m0 bytes as one i32. Null if absent.
inline uint8_t* scale_at(const Tensor& t, int64_t i, int64_t j = 0) {
  if (t.data == nullptr) return nullptr;
  return t.dtype == DType::f32 || t.dtype == DType::i32 ? reinterpret_cast<uint8_t*>(element<int32_t>(t, i, j))
                                                        : element<uint8_t>(t, i, j);
}

/// i32 or i64.
inline int64_t integer(const Tensor& t, int64_t i, int64_t j = 0, int64_t k = 0) {
  return t.dtype == DType::i64 ? *element<int64_t>(t, i, j, k) : *element<int32_t>(t, i, j, k);
}
inline void put_integer(const Tensor& t, int64_t i, int64_t value) {
  if (t.dtype == DType::i64) {
    *element<int64_t>(t, i) = value;
  } else {
    *element<int32_t>(t, i) = static_cast<int32_t>(value);
  }
}

/// f32, bf16 or f16, widened exactly.
inline float real(const Tensor& t, int64_t i, int64_t j = 0, int64_t k = 0) {
  switch (t.dtype) {
    case DType::f32: return *element<float>(t, i, j, k);
    case DType::bf16: return bf16_to_float(*element<uint16_t>(t, i, j, k));
    default: return f16_to_float(*element<uint16_t>(t, i, j, k));
  }
}
/// Rounded to nearest even.
inline void put_real(const Tensor& t, float value, int64_t i, int64_t j = 0, int64_t k = 0) {
  switch (t.dtype) {
    case DType::bf16: *element<uint16_t>(t, i, j, k) = float_to_bf16(value); break;
    case DType::f16: *element<uint16_t>(t, i, j, k) = float_to_f16(value); break;
    default: *element<float>(t, i, j, k) = value;
  }
}

/// From bytes at any address.
inline float load_f32(const uint8_t* bytes) {
  float x;
  std::memcpy(&x, bytes, sizeof x);
  return x;
}
inline uint16_t load_u16(const uint8_t* bytes) {
  uint16_t x;
  std::memcpy(&x, bytes, sizeof x);
  return x;
}

}  // namespace topkey::ref
