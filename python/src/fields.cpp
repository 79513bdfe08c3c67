// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See fields.h.
#include "python/src/fields.h"

#include <cstring>
#include <type_traits>

#include "python/src/ranks.h"
#include "support/call_fields.h"
#include "support/output_fields.h"

namespace topkey::python {
namespace {

/// Notes where each field lies. A field that is walked twice is an input and an output: a cache that is written.
class Record {
 public:
  Record(std::vector<Field>& list, const void* base) : list_(list), base_(static_cast<const char*>(base)) {}

  void operator()(const char* name, const Tensor& field) {
    using Kind = Field::Kind;
    add(name, std::strcmp(name, "cache") == 0 ? Kind::pages : Kind::tensor, &field);
  }
  void operator()(const char* name, const int64_t& field) { add(name, Field::Kind::i64, &field); }
  void operator()(const char* name, const int32_t& field) { add(name, Field::Kind::i32, &field); }
  void operator()(const char* name, const float& field) { add(name, Field::Kind::f32, &field); }
  void operator()(const char* name, const bool& field) { add(name, Field::Kind::boolean, &field); }
  template <class Enum>
  void operator()(const char* name, const Enum& field, support::Names words) {
    static_assert(sizeof(Enum) == sizeof(int32_t) && std::is_enum_v<Enum>);
    add(name, Field::Kind::word, &field);
    list_.back().words.assign(words.begin(), words.end());
  }
  void writes() { writes_ = true; }

 private:
  void add(const char* name, Field::Kind kind, const void* field) {
    const auto offset = static_cast<size_t>(static_cast<const char*>(field) - base_);
    for (Field& known : list_) {
      if (known.offset == offset) return void(known.written = writes_);
    }
    list_.push_back({name, kind, offset, writes_, {}});
  }

  std::vector<Field>& list_;
  const char* base_;
  bool writes_ = false;
};

void number_fields(FieldTable& table) {
  table.numbers = PyDict_New();
  for (size_t i = 0; i < table.fields.size(); ++i) {
    PyObject* name = PyUnicode_InternFromString(table.fields[i].name.c_str());
    PyObject* number = PyLong_FromSize_t(i);
    PyDict_SetItem(table.numbers, name, number);
    Py_DECREF(name);
    Py_DECREF(number);
  }
}

template <class Args>
Operation describe(const Args& blank) {
  Operation op{{support::args_op(blank), {}, nullptr}, blank};
  Args args = blank;
  Record record(op.fields, &args);
  support::fields(record, args);
  record.writes();
  support::output_fields(record, args);
  number_fields(op);
  return op;
}

template <size_t... I>
std::vector<Operation> describe_all(std::index_sequence<I...>) {
  return {describe(std::variant_alternative_t<I, support::CallArgs>{})...};
}

/// Made at the first call and never destroyed: it holds Python objects, and the interpreter may end first.
const std::vector<Operation>& operations() {
  static const auto* const all =
      new std::vector<Operation>(describe_all(std::make_index_sequence<std::variant_size_v<support::CallArgs>>()));
  return *all;
}

/// Traces' names of windows, where Python's keywords are other words: an error names what the caller has written.
/// expand_rows' own lens and row_request are called so, and to_slots' row_request too.
const char* keyword_of(const char* op, const std::string& name) {
  if (std::strcmp(op, "expand_rows") == 0 || std::strcmp(op, "to_slots") == 0) return name.c_str();
  static constexpr const char* kKeywords[][2] = {
      {"starts", "start"}, {"ends", "end"}, {"lens", "length"}, {"row_request", "request"}};
  for (const auto& [field, keyword] : kKeywords) {
    if (name == field) return keyword;
  }
  return name.c_str();
}

/// One field of one call.
struct Setter {
  const char* op;
  const Field& field;

  [[noreturn]] void refuse(const std::string& must, nb::handle got) const {
    throw nb::value_error(
        (std::string(op) + ": " + keyword_of(op, field.name) + " must be " + must + ", got " + nb::repr(got).c_str())
            .c_str());
  }
  int64_t integer(nb::handle value, int64_t low, int64_t high) const {
    const long long n = PyLong_AsLongLong(value.ptr());
    const bool failed = n == -1 && PyErr_Occurred() != nullptr;
    if (failed) PyErr_Clear();
    if (failed || n < low || n > high)
      refuse("a whole number of " + std::string(high > INT32_MAX ? "64" : "32") + " bits", value);
    return n;
  }
  int32_t word(nb::handle value) const {
    const char* text = PyUnicode_Check(value.ptr()) ? PyUnicode_AsUTF8AndSize(value.ptr(), nullptr) : nullptr;
    std::string all;
    for (size_t i = 0; i < field.words.size(); ++i) {
      if (text != nullptr && std::strcmp(text, field.words[i]) == 0) return static_cast<int32_t>(i);
      all += std::string(i ? ", " : "one of ") + field.words[i];
    }
    refuse(all, value);
  }
  void operator()(nb::handle value, char* to, Borrowed& arrays) const {
    switch (field.kind) {
      case Field::Kind::tensor: put(to, arrays.take(value, keyword_of(op, field.name), field.written)); break;
      case Field::Kind::pages: put(to, arrays.take_pages(value, field.name.c_str(), field.written)); break;
      case Field::Kind::i64: put(to, integer(value, INT64_MIN, INT64_MAX)); break;
      case Field::Kind::i32: put(to, static_cast<int32_t>(integer(value, INT32_MIN, INT32_MAX))); break;
      case Field::Kind::word: put(to, word(value)); break;
      case Field::Kind::boolean: {
        const int truth = PyObject_IsTrue(value.ptr());
        if (truth < 0) throw nb::python_error();
        put(to, truth == 1);
        break;
      }
      case Field::Kind::f32: {
        const double number = PyFloat_AsDouble(value.ptr());
        if (number == -1.0 && PyErr_Occurred() != nullptr) {
          PyErr_Clear();
          refuse("a number", value);
        }
        put(to, static_cast<float>(number));
      }
    }
  }
  template <class T>
  static void put(char* to, const T& value) {
    std::memcpy(to, &value, sizeof value);
  }
};

}  // namespace

const Operation& operation(nb::handle name) {
  const char* wanted = PyUnicode_Check(name.ptr()) ? PyUnicode_AsUTF8AndSize(name.ptr(), nullptr) : nullptr;
  for (const Operation& op : operations()) {
    if (wanted != nullptr && std::strcmp(op.name, wanted) == 0) return op;
  }
  throw nb::value_error(("there is no operation " + std::string(nb::repr(name).c_str())).c_str());
}

std::vector<const char*> operation_names() {
  std::vector<const char*> names;
  for (const Operation& op : operations()) names.push_back(op.name);
  return names;
}

support::CallArgs read_fields(const Operation& op, const nb::dict& values, Borrowed& arrays) {
  support::CallArgs args = op.blank;
  char* base = std::visit([](auto& a) { return reinterpret_cast<char*>(&a); }, args);
  read_fields(op, op.name, values, base, arrays);
  return args;
}

void read_fields(const FieldTable& table, const char* op, const nb::dict& values, char* base, Borrowed& arrays) {
  PyObject *name = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(values.ptr(), &at, &name, &value);) {
    if (value == Py_None) continue;
    PyObject* number = PyDict_GetItemWithError(table.numbers, name);
    if (number == nullptr) throw nb::type_error((std::string(op) + " has no field " + nb::repr(name).c_str()).c_str());
    const Field& field = table.fields[PyLong_AsSize_t(number)];
    Setter{op, field}(value, base + field.offset, arrays);
  }
}

const FieldTable& rank_table() {
  static const auto* const table = [] {
    auto* made = new FieldTable{"forward_sharded", {}, nullptr};
    RankArgs args{};
    Record record(made->fields, &args);
    rank_fields(record, args);
    record.writes();
    rank_output_fields(record, args);
    number_fields(*made);
    return made;
  }();
  return *table;
}

}  // namespace topkey::python
