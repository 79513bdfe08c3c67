// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See dtypes.h.
#include "python/src/dtypes.h"

#include <cstring>
#include <iterator>
#include <string>

namespace topkey::python {
namespace {

struct Name {
  const char* name;
  DType dtype;
};
// Some engines declare bytes of codes as int8; torch's packed fp4 are bytes of two codes.
constexpr Name kNames[] = {{"float32", DType::f32},
                           {"int32", DType::i32},
                           {"float8_e4m3fn", DType::f8_e4m3fn},
                           {"bfloat16", DType::bf16},
                           {"uint8", DType::u8},
                           {"float16", DType::f16},
                           {"int64", DType::i64},
                           {"bool", DType::b8},
                           {"int8", DType::u8},
                           {"float8_e8m0fnu", DType::e8m0},
                           {"float4_e2m1fn_x2", DType::u8},
                           {"uint64", kCounter}};
constexpr const char* kShort[] = {"", "f32", "f16", "bf16", "f8_e4m3fn", "e8m0", "u8", "b8", "i32", "i64"};

/// Dtype objects seen so far. They are few, and kept alive, so that an address stays what it was.
struct Seen {
  PyObject* object;
  DType dtype;
};
constexpr size_t kMostSeen = 32;
Seen seen[kMostSeen];
size_t num_seen = 0;

}  // namespace

DType dtype_by_name(const char* name) {
  for (const Name& row : kNames) {
    if (std::strcmp(row.name, name) == 0) return row.dtype;
  }
  return DType::none;
}

DType dtype_by_letter(const char* format) {
  if (format == nullptr) return DType::u8;
  if (*format == '@' || *format == '=' || *format == '<') ++format;
  if (*format == '\0' || format[1] != '\0') return DType::none;
  switch (*format) {
    case 'f': return DType::f32;
    case 'e': return DType::f16;
    case 'B':
    case 'b':
    case 'c': return DType::u8;
    case '?': return DType::b8;
    case 'i': return DType::i32;
    case 'l': return sizeof(long) == 8 ? DType::i64 : DType::i32;
    case 'q': return DType::i64;
    case 'L': return sizeof(long) == 8 ? kCounter : DType::none;
    case 'Q': return kCounter;
    default: return DType::none;
  }
}

DType dtype_by_code(int code, int bits) {
  enum { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6, kE4m3fn = 10, kE8m0 = 14 };
  switch (code * 1000 + bits) {
    case kFloat * 1000 + 32: return DType::f32;
    case kFloat * 1000 + 16: return DType::f16;
    case kBfloat * 1000 + 16: return DType::bf16;
    case kE4m3fn * 1000 + 8: return DType::f8_e4m3fn;
    case kE8m0 * 1000 + 8: return DType::e8m0;
    case kInt * 1000 + 8:
    case kUInt * 1000 + 8: return DType::u8;
    case kBool * 1000 + 8: return DType::b8;
    case kInt * 1000 + 32: return DType::i32;
    case kInt * 1000 + 64: return DType::i64;
    case kUInt * 1000 + 64: return kCounter;
    default: return DType::none;
  }
}

const char* short_name(DType dtype) {
  const auto i = static_cast<size_t>(dtype);
  return i < std::size(kShort) ? kShort[i] : "";
}

std::string name_of_object(nb::handle dtype) {
  nb::object name = nb::getattr(dtype, "name", nb::none());
  std::string text = nb::str(nb::isinstance<nb::str>(name) ? nb::handle(name) : dtype).c_str();
  if (text.rfind("torch.", 0) == 0) text = text.substr(6);
  // '>f4' is called float32 as well.
  if (nb::object native = nb::getattr(dtype, "isnative", nb::none()); native.is(nb::handle(Py_False)))
    text = "byte-swapped " + text;
  return text;
}

DType dtype_of_object(nb::handle dtype) {
  for (size_t i = 0; i < num_seen; ++i) {
    if (seen[i].object == dtype.ptr()) return seen[i].dtype;
  }
  const DType found = dtype_by_name(name_of_object(dtype).c_str());
  if (found != DType::none && num_seen < kMostSeen) {
    Py_INCREF(dtype.ptr());
    seen[num_seen++] = {dtype.ptr(), found};
  }
  return found;
}

}  // namespace topkey::python
