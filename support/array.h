// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Memory for tests and tools: Array owns a tensor's bytes (copies share them), Guarded owns an output surrounded by
// poison and can tell whether a call wrote outside its part. Host memory; a device version replaces only what
// `view()` points to.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "topkey/types.h"

namespace topkey::support {

size_t dtype_bytes(DType dtype);
const char* dtype_name(DType dtype);

/// `size` zeroed bytes whose first one lies `offset` bytes past a 256-byte boundary.
std::shared_ptr<uint8_t> aligned_bytes(size_t size, size_t offset = 0);

/// The workspace of one call: `bytes` from a 256-byte boundary on, filled with rubbish, and behind them canaries, which
/// AddressSanitizer guards too. The thread keeps the memory for its next call: fresh pages were most of a small call's
/// time. Of a GPU's call only the addresses matter (on_device.h), so that nothing is filled.
class Workspace {
 public:
  Workspace(size_t bytes, bool filled);
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace();
  uint8_t* data() const { return memory_.get(); }
  size_t bytes() const { return bytes_; }
  bool kept_inside() const;  ///< whether the canaries live

 private:
  std::shared_ptr<uint8_t> memory_;
  size_t bytes_, room_ = 0;
};

/// An owned dense row-major tensor, zeroed. Default-constructed: absent.
class Array {
 public:
  Array() = default;
  Array(DType dtype, std::initializer_list<int64_t> shape, size_t offset = 0);
  /// A 1-D i32 array of these values.
  static Array of(const std::vector<int32_t>& values);
  /// The same bytes seen as another tensor (a slice, other strides, another dtype).
  Array seen_as(const Tensor& view) const;
  Array clone() const;  ///< dense row-major arrays only

  const Tensor& view() const { return view_; }
  explicit operator bool() const { return view_.data != nullptr; }
  int64_t size() const;  ///< elements
  size_t bytes() const { return bytes_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(view_.data);
  }

 private:
  std::shared_ptr<uint8_t> store_;
  size_t bytes_ = 0;
  Tensor view_{};
};

/// Pointer to element (i, j, ...) of a host tensor.
inline uint8_t* element(const Tensor& t, int64_t i, int64_t j = 0, int64_t l = 0) {
  const int64_t index = i * t.stride[0] + (t.ndim > 1 ? j * t.stride[1] : 0) + (t.ndim > 2 ? l * t.stride[2] : 0);
  return static_cast<uint8_t*>(t.data) + index * static_cast<int64_t>(dtype_bytes(t.dtype));
}
/// One element widened: f32, bf16, f16 (exactly) or an integer.
float float_at(const Tensor& t, int64_t i, int64_t j = 0, int64_t l = 0);
int64_t int_at(const Tensor& t, int64_t i, int64_t j = 0);

/// An output [rows, cols] (cols < 0: [rows]) inside poisoned memory: `pad` spare elements after each row and 256
/// bytes at both ends.
class Guarded {
 public:
  Guarded() = default;
  Guarded(DType dtype, int64_t rows, int64_t cols, int64_t pad = 3, int64_t spare_rows = 1);
  /// The tensor to hand to a call. `wide`: its shape includes the spare columns, which the call must still not touch.
  Tensor view(bool wide = false) const;
  explicit operator bool() const { return store_ != nullptr; }
  /// Poison everywhere again.
  void reset();
  /// Empty, or a sentence on the first byte outside rows [0, rows) and columns [0, cols) that is no longer poison.
  std::string touched_outside() const { return touched_outside(rows_, cols_); }
  std::string touched_outside(int64_t rows, int64_t cols) const;
  /// True if that element still is poison.
  bool poisoned(int64_t row, int64_t col) const;
  /// True if every byte is still poison.
  bool untouched() const { return touched_outside(0, 0).empty(); }

 private:
  std::shared_ptr<uint8_t> store_;
  size_t bytes_ = 0, lead_ = 0;
  DType dtype_ = DType::none;
  int64_t rows_ = 0, cols_ = 0, step_ = 0;
  bool vector_ = false;
};

}  // namespace topkey::support
