// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See setting.h.
#include "python/src/setting.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

namespace topkey::python {
namespace {

/// Memory that the CPU calls of a thread share, as no two of them overlap. It only grows, to 64 MiB at most for topk up
/// to 8192, and lasts as long as the thread.
class HostWorkspace {
 public:
  ~HostWorkspace() { std::free(memory_); }
  void* at_least(size_t bytes) {
    if (bytes > size_) {
      std::free(memory_);
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_ = std::aligned_alloc(256, size_);
      if (memory_ == nullptr) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return memory_;
  }
  static HostWorkspace& of_this_thread() {
    static thread_local HostWorkspace own;
    return own;
  }

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

nb::object frameworks() { return nb::module_::import_("topkey.frameworks"); }

}  // namespace

Setting::Setting(const char* op, nb::handle tuple, Borrowed& arrays) : op_(op), tuple_(tuple) {
  if (!PyTuple_Check(tuple.ptr()) || PyTuple_Size(tuple.ptr()) != kNumFields) refuse("exec", "a topkey.Exec", tuple);
  exec.backend = text(kBackend, "exec.backend");
  exec.arithmetic = text(kArithmetic, "exec.arithmetic");
  exec.strategy = text(kStrategy, "exec.strategy");
  exec.max_sms = number(kMaxSms, "exec.max_sms");
  exec.threads = number(kThreads, "exec.threads");
  exec.strict = PyObject_IsTrue(at(kStrict).ptr()) == 1;
  if (PyObject_IsTrue(at(kOverlap).ptr()) == 1) exec.flags = kOverlapPrevious;
  if (!at(kStats).is_none()) exec.stats = arrays.take_stats(at(kStats));
  if (!at(kWorkspace).is_none()) take_workspace(arrays);
  exec.device = arrays.place().device;
  exec.device_id = arrays.place().device_id;
  if (arrays.first().ptr() == nullptr) place_by_backend();
  if (exec.device == Device::cuda) take_stream(arrays.first());
}

void Setting::add_workspace(size_t bytes, nb::handle like) {
  if (!at(kWorkspace).is_none()) return;
  exec.workspace_bytes = bytes;
  if (bytes == 0) return;
  if (exec.device == Device::cpu) {
    exec.workspace = HostWorkspace::of_this_thread().at_least(bytes);
    return;
  }
  kept_ = frameworks().attr("workspace")(like, bytes + 255, at(kStream));
  const auto address = nb::cast<uintptr_t>(kept_.attr("data_ptr")());
  exec.workspace = reinterpret_cast<void*>((address + 255) / 256 * 256);
}

void Setting::refuse(const char* name, const char* must, nb::handle got) const {
  throw nb::value_error(
      (std::string(op_) + ": " + name + " must be " + must + ", got " + nb::repr(got).c_str()).c_str());
}

const char* Setting::text(Field field, const char* name) const {
  const nb::handle value = at(field);
  if (value.is_none()) return nullptr;
  const char* letters = PyUnicode_Check(value.ptr()) ? PyUnicode_AsUTF8AndSize(value.ptr(), nullptr) : nullptr;
  if (letters == nullptr) {  // lone surrogates too
    PyErr_Clear();
    refuse(name, "a string or None", value);
  }
  return letters;
}

int32_t Setting::number(Field field, const char* name) const {
  const long n = PyLong_AsLong(at(field).ptr());
  if (n == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    refuse(name, "a whole number", at(field));
  }
  return static_cast<int32_t>(std::clamp<long>(n, -1, INT32_MAX));
}

/// Aligned here, so that any array will do.
void Setting::take_workspace(Borrowed& arrays) {
  const Tensor t = arrays.take(at(kWorkspace), "exec.workspace", true);
  if (t.dtype != DType::u8 || t.ndim != 1 || (t.shape[0] > 1 && t.stride[0] != 1))
    throw nb::value_error((std::string(op_) + ": exec.workspace must be uint8 [bytes], contiguous").c_str());
  const auto address = reinterpret_cast<uintptr_t>(t.data);
  const int64_t skipped = static_cast<int64_t>((address + 255) / 256 * 256 - address);
  exec.workspace = static_cast<char*>(t.data) + skipped;
  exec.workspace_bytes = static_cast<size_t>(std::max<int64_t>(t.shape[0] - skipped, 0));
}

/// Without an array that has memory (meta tensors): the device of the backend that is asked for.
void Setting::place_by_backend() {
  for (int32_t i = 0; const char* name = topkey_backend_name(i); ++i) {
    if (exec.backend != nullptr && std::strcmp(name, exec.backend) == 0)
      exec.device = static_cast<Device>(topkey_backend_device(i));
  }
}

void Setting::take_stream(nb::handle like) {
  nb::object stream = nb::borrow<nb::object>(at(kStream));
  if (stream.is_none() && like.ptr() != nullptr) stream = frameworks().attr("current_stream")(like, exec.device_id);
  if (!stream.is_none()) exec.stream = reinterpret_cast<void*>(nb::cast<uintptr_t>(stream));
}

}  // namespace topkey::python
