// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Python arrays as borrowed tensors, without a copy: numpy (also the ml_dtypes that refuse the buffer protocol) and
// whatever has a buffer, torch by its attributes, all others by DLPack. Neither numpy nor torch is imported here: an
// array can only be of a framework that its owner has imported.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <vector>

#include "topkey/topkey.h"

namespace topkey::python {

namespace nb = nanobind;

/// Where an array lives. `meta`: it has a shape and no memory (torch's meta device, any object with shape and dtype).
struct Place {
  Device device = Device::cpu;
  int32_t device_id = 0;
  bool meta = false;
};

/// What a call borrows, until it is destroyed. All arrays of a call must be on one device; the first one says which.
class Borrowed {
 public:
  /// query: arrays may be without memory.
  Borrowed(const char* op, bool query) : op_(op), query_(query) {}
  ~Borrowed();
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  /// ValueError: no array at all, dtype unknown, over 4 dimensions, negative strides or none in whole elements, read-only
  /// where it is written, a device unlike the others'.
  Tensor take(nb::handle array, const char* name, bool written);
  /// A cache as engines allocate it, [P, page_size, row_bytes] and the like, seen as [P, bytes].
  Tensor take_pages(nb::handle array, const char* name, bool written);
  /// Eight counters: the address of an array of 64-bit integers.
  uint64_t* take_stats(nb::handle array);

  const Place& place() const { return place_; }
  /// The first array on the call's device: its framework is the caller's.
  nb::handle first() const { return first_; }

 private:
  [[noreturn]] void refuse(const char* name, const std::string& must, const std::string& got) const;
  Tensor read(nb::handle array, const char* name, bool written, Place* place);
  Tensor from_buffer(nb::handle array, const char* name, bool written, DType known);
  Tensor from_numpy(nb::handle array, const char* name, bool written);
  Tensor from_torch(nb::handle array, const char* name, Place* place);
  nb::ndarray<nb::ro> exported(nb::handle array, const char* name, bool written, bool cuda);
  Tensor from_dlpack(nb::handle array, const char* name, bool written, Place* place);
  Tensor from_shape(nb::handle array, const char* name, Place* place);
  void join(const Place& place, nb::handle array, const char* name);

  const char* op_;
  bool query_, has_device_ = false;
  Place place_;
  nb::handle first_;
  std::vector<Py_buffer> buffers_;
  std::vector<nb::object> kept_;
};

/// The dtype of an array by TopKey's name ("f32", "f8_e4m3fn"); "" for one that no operation takes.
const char* dtype_of(nb::handle array);

}  // namespace topkey::python
