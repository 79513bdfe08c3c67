// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See arrays.h. Each framework has one function that reads an array of it.
#include "python/src/arrays.h"

#include <nanobind/stl/string.h>

#include <cstring>
#include <unordered_map>

#include "python/src/dtypes.h"

namespace topkey::python {
namespace {

enum class Framework { numpy, torch, buffer, dlpack, shape, none };

Framework framework_of_type(PyTypeObject* type, nb::handle array) {
  const nb::object classes = nb::getattr(nb::handle(reinterpret_cast<PyObject*>(type)), "__mro__");
  for (nb::handle one : classes) {
    const std::string module = nb::str(nb::getattr(one, "__module__", nb::str(""))).c_str();
    const std::string name = nb::str(nb::getattr(one, "__name__", nb::str(""))).c_str();
    if (module == "numpy" && name == "ndarray") return Framework::numpy;
    if (module.rfind("torch", 0) == 0 && name == "Tensor") return Framework::torch;
  }
  if (PyObject_CheckBuffer(array.ptr())) return Framework::buffer;
  if (nb::hasattr(array, "__dlpack__")) return Framework::dlpack;
  return nb::hasattr(array, "shape") && nb::hasattr(array, "dtype") ? Framework::shape : Framework::none;
}

Framework framework_of(nb::handle array) {
  // Types are kept alive, so that an address stays what it was.
  static std::unordered_map<PyTypeObject*, Framework> known;
  PyTypeObject* type = Py_TYPE(array.ptr());
  const auto place = known.find(type);
  if (place != known.end()) return place->second;
  const Framework found = framework_of_type(type, array);
  if (known.size() < 256) {
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    known.emplace(type, found);
  }
  return found;
}

/// Attribute names as interned strings, made once.
struct Names {
  nb::object dtype = interned("dtype"), view = interned("view"), shape = interned("shape"), stride = interned("stride"),
             data_ptr = interned("data_ptr"), is_cpu = interned("is_cpu"), device = interned("device");

  static nb::object interned(const char* text) { return nb::steal<nb::object>(PyUnicode_InternFromString(text)); }
};
const Names& names() {
  static const Names* const made = new Names;  // never destroyed: the interpreter may be gone by then
  return *made;
}

nb::object attribute(nb::handle object, const nb::object& name) {
  PyObject* found = PyObject_GetAttr(object.ptr(), name.ptr());
  if (found == nullptr) throw nb::python_error();
  return nb::steal<nb::object>(found);
}
nb::object call(nb::handle object, const nb::object& method) {
  PyObject* found = PyObject_CallMethodObjArgs(object.ptr(), method.ptr(), nullptr);
  if (found == nullptr) throw nb::python_error();
  return nb::steal<nb::object>(found);
}

/// Reads a tuple of integers; returns how many, or -1 if there are more than 4.
int32_t integers(nb::handle sequence, int64_t* out) {
  const nb::tuple all = nb::borrow<nb::tuple>(PyTuple_Check(sequence.ptr()) ? sequence : nb::tuple(sequence));
  if (all.size() > 4) return -1;
  for (size_t i = 0; i < all.size(); ++i) out[i] = nb::cast<int64_t>(all[i]);
  return static_cast<int32_t>(all.size());
}

std::string class_name(nb::handle object) { return nb::str(nb::handle(object).type().attr("__name__")).c_str(); }

/// What an exception says, without its traceback.
std::string reason(const nb::python_error& error) { return std::string(" (") + nb::str(error.value()).c_str() + ")"; }

std::string words(const int64_t* numbers, int32_t n) {
  std::string text = "(";
  for (int32_t i = 0; i < n; ++i) text += (i ? ", " : "") + std::to_string(numbers[i]);
  return text + ")";
}

const char* const kKnown =
    "of a dtype that TopKey has (float32, float16, bfloat16, float8_e4m3fn, float8_e8m0fnu, uint8, int8, bool, int32, "
    "int64)";

void set_row_major(Tensor* t) {
  int64_t step = 1;
  for (int32_t d = t->ndim - 1; d >= 0; --d) {
    t->stride[d] = step;
    if (t->shape[d] > 1) step *= t->shape[d];
  }
}

}  // namespace

Borrowed::~Borrowed() {
  for (Py_buffer& buffer : buffers_) PyBuffer_Release(&buffer);
}

void Borrowed::refuse(const char* name, const std::string& must, const std::string& got) const {
  throw nb::value_error((std::string(op_) + ": " + name + " must be " + must + ", got " + got).c_str());
}

Tensor Borrowed::from_buffer(nb::handle array, const char* name, bool written, DType known) {
  const int flags = PyBUF_STRIDES | (known == DType::none ? PyBUF_FORMAT : 0) | (written ? PyBUF_WRITABLE : 0);
  buffers_.reserve(32);
  Py_buffer& buffer = buffers_.emplace_back();
  if (PyObject_GetBuffer(array.ptr(), &buffer, flags) != 0) {
    buffers_.pop_back();
    const nb::python_error error;  // takes the pending one
    refuse(name, written ? "an array that can be written" : "an array with strides", class_name(array) + reason(error));
  }
  Tensor t{};
  t.dtype = known != DType::none ? known : dtype_by_letter(buffer.format);
  if (t.dtype == DType::none) refuse(name, kKnown, "buffer format '" + std::string(buffer.format) + "'");
  if (buffer.ndim > 4) refuse(name, "of at most 4 dimensions", std::to_string(buffer.ndim));
  t.data = buffer.buf;
  t.ndim = buffer.ndim;
  for (int d = 0; d < buffer.ndim; ++d) {
    t.shape[d] = buffer.shape[d];
    t.stride[d] = buffer.strides[d] / buffer.itemsize;
    if (buffer.strides[d] % buffer.itemsize != 0 && buffer.shape[d] > 1)
      refuse(name, "an array with strides in whole elements",
             "a stride of " + std::to_string(buffer.strides[d]) + " bytes");
  }
  return t;
}

/// ml_dtypes do not export a buffer: seen as unsigned integers of the same width they do, whatever their strides.
Tensor Borrowed::from_numpy(nb::handle array, const char* name, bool written) {
  const nb::object dtype = attribute(array, names().dtype);
  const DType known = dtype_of_object(dtype);
  if (known == DType::none) refuse(name, kKnown, name_of_object(dtype));
  if (known != DType::bf16 && known != DType::f8_e4m3fn && known != DType::e8m0)
    return from_buffer(array, name, written, known);
  static PyObject* const kWide = PyUnicode_InternFromString("uint16");
  static PyObject* const kNarrow = PyUnicode_InternFromString("uint8");
  PyObject* as = known == DType::bf16 ? kWide : kNarrow;
  PyObject* seen = PyObject_CallMethodObjArgs(array.ptr(), names().view.ptr(), as, nullptr);
  if (seen == nullptr) throw nb::python_error();
  kept_.push_back(nb::steal<nb::object>(seen));
  return from_buffer(seen, name, written, known);
}

Tensor Borrowed::from_torch(nb::handle array, const char* name, Place* place) try {
  Tensor t{};
  const nb::object dtype = attribute(array, names().dtype);
  t.dtype = dtype_of_object(dtype);
  if (t.dtype == DType::none) refuse(name, kKnown, name_of_object(dtype));
  if (!attribute(array, names().is_cpu).is(nb::handle(Py_True))) {
    const nb::object device = attribute(array, names().device);
    const std::string type = nb::cast<std::string>(device.attr("type"));
    place->meta = type == "meta";
    if (type == "cuda") {
      place->device = Device::cuda;
      place->device_id = nb::cast<int32_t>(device.attr("index"));
    } else if (!place->meta || !query_) {
      refuse(name, "on cpu or cuda", "a tensor on " + type);
    }
  }
  t.ndim = integers(attribute(array, names().shape), t.shape);
  if (t.ndim < 0) refuse(name, "of at most 4 dimensions", "more");
  integers(call(array, names().stride), t.stride);
  if (!place->meta) t.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(call(array, names().data_ptr)));
  return t;
} catch (const nb::python_error& error) {  // sparse, quantised, traced tensors
  refuse(name, "a tensor with memory and strides", class_name(array) + reason(error));
}

nb::ndarray<nb::ro> Borrowed::exported(nb::handle array, const char* name, bool written, bool cuda) {
  try {
    // No synchronisation is asked for (stream -1): the call goes to the framework's own stream.
    const nb::object capsule = cuda ? array.attr("__dlpack__")(nb::arg("stream") = -1) : array.attr("__dlpack__")();
    kept_.push_back(capsule);
    if (written) return nb::ndarray<nb::ro>(nb::cast<nb::ndarray<>>(capsule));
    return nb::cast<nb::ndarray<nb::ro>>(capsule);
  } catch (const nb::python_error& error) {
    refuse(name, "an array that DLPack exports", class_name(array) + reason(error));
  } catch (const nb::cast_error&) {
    refuse(name, written ? "an array that DLPack exports for writing" : "an array that DLPack exports",
           class_name(array));
  }
}

Tensor Borrowed::from_dlpack(nb::handle array, const char* name, bool written, Place* place) {
  enum { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };
  const int type = nb::cast<int>(array.attr("__dlpack_device__")()[0]);
  const bool cuda = type == kCuda || type == kCudaManaged;
  if (!cuda && type != kCpu && type != kCudaHost)
    refuse(name, "on cpu or cuda", "DLPack device " + std::to_string(type));
  const auto seen = exported(array, name, written, cuda);
  kept_.push_back(nb::borrow<nb::object>(array));
  Tensor t{};
  t.dtype = seen.dtype().lanes == 1 ? dtype_by_code(seen.dtype().code, seen.dtype().bits) : DType::none;
  if (t.dtype == DType::none) refuse(name, kKnown, "DLPack code " + std::to_string(seen.dtype().code));
  if (seen.ndim() > 4) refuse(name, "of at most 4 dimensions", std::to_string(seen.ndim()));
  t.data = const_cast<void*>(static_cast<const void*>(seen.data()));
  t.ndim = static_cast<int32_t>(seen.ndim());
  for (size_t d = 0; d < seen.ndim(); ++d) {
    t.shape[d] = static_cast<int64_t>(seen.shape(d));
    t.stride[d] = seen.stride(d);
  }
  *place = {cuda ? Device::cuda : Device::cpu, cuda ? seen.device_id() : 0, false};
  return t;
}

Tensor Borrowed::from_shape(nb::handle array, const char* name, Place* place) {
  if (!query_) refuse(name, "an array", class_name(array));
  place->meta = true;
  Tensor t{};
  nb::object dtype = array.attr("dtype");
  t.dtype = nb::isinstance<nb::str>(dtype) ? dtype_by_name(nb::str(dtype).c_str()) : dtype_of_object(dtype);
  if (t.dtype == DType::none) refuse(name, kKnown, name_of_object(dtype));
  t.ndim = integers(array.attr("shape"), t.shape);
  if (t.ndim < 0) refuse(name, "of at most 4 dimensions", "more");
  set_row_major(&t);
  return t;
}

Tensor Borrowed::read(nb::handle array, const char* name, bool written, Place* place) {
  switch (framework_of(array)) {
    case Framework::numpy: return from_numpy(array, name, written);
    case Framework::torch: return from_torch(array, name, place);
    case Framework::buffer: return from_buffer(array, name, written, DType::none);
    case Framework::dlpack: return from_dlpack(array, name, written, place);
    case Framework::shape: return from_shape(array, name, place);
    case Framework::none: break;
  }
  refuse(name, "an array", class_name(array));
}

void Borrowed::join(const Place& place, nb::handle array, const char* name) {
  const auto where = [](const Place& p) {
    return p.device == Device::cpu ? std::string("cpu") : "cuda:" + std::to_string(p.device_id);
  };
  if (place.meta) return;
  if (!has_device_) {
    has_device_ = true;
    place_ = place;
    first_ = array;
  } else if (place.device != place_.device || place.device_id != place_.device_id) {
    refuse(name, "on the device of the other arrays, " + where(place_), where(place));
  }
}

Tensor Borrowed::take(nb::handle array, const char* name, bool written) {
  Place place;
  const Tensor t = read(array, name, written, &place);
  if (t.dtype == kCounter) refuse(name, kKnown, "uint64");
  for (int32_t d = 0; d < t.ndim; ++d) {
    if (t.stride[d] < 0 && t.shape[d] > 1)
      refuse(name, "an array without negative strides", "strides of " + words(t.stride, t.ndim) + " elements");
  }
  join(place, array, name);
  return t;
}

Tensor Borrowed::take_pages(nb::handle array, const char* name, bool written) {
  Tensor t = take(array, name, written);
  while (t.ndim > 2) {
    int64_t *shape = t.shape + t.ndim - 2, *stride = t.stride + t.ndim - 2;  // of the last two dimensions
    if (shape[0] > 1 && shape[1] > 1 && stride[0] != shape[1] * stride[1])
      refuse(name, "[P, bytes], or contiguous inside a page", "strides of " + words(t.stride, t.ndim) + " bytes");
    if (shape[1] > 1) stride[0] = stride[1];
    shape[0] *= shape[1];
    --t.ndim;
  }
  return t;
}

uint64_t* Borrowed::take_stats(nb::handle array) {
  Place place;
  const Tensor t = read(array, "exec.stats", true, &place);
  if (t.dtype != kCounter || t.ndim != 1 || t.shape[0] < kNumStats || t.stride[0] != 1)
    refuse("exec.stats", "uint64 [8], contiguous", class_name(array) + " of shape " + words(t.shape, t.ndim));
  join(place, array, "exec.stats");
  return static_cast<uint64_t*>(t.data);
}

const char* dtype_of(nb::handle array) {
  switch (framework_of(array)) {
    case Framework::numpy:
    case Framework::torch:
    case Framework::shape: return short_name(dtype_of_object(attribute(array, names().dtype)));
    case Framework::none: return "";
    default: return short_name(Borrowed("dtype_of", true).take(array, "array", false).dtype);
  }
}

}  // namespace topkey::python
