// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The arguments of every operation by name: a table of (name, kind, offset) made once by walking the lists that traces
// use (support/call_fields.h) and the outputs below. So a call from Python is a dict of fields, and one function fills
// the argument struct of any operation. A new operation needs its lines in support.
#pragma once
#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "python/src/arrays.h"
#include "support/call.h"

namespace topkey::python {

struct Field {
  enum class Kind { tensor, pages, i64, i32, f32, boolean, word };
  std::string name;
  Kind kind;
  size_t offset;
  bool written;
  std::vector<const char*> words;  ///< names of an enumeration's values, in order
};

struct FieldTable {
  const char* name;
  std::vector<Field> fields;
  PyObject* numbers;  ///< dict: name of a field -> its place in `fields`
};
struct Operation : FieldTable {
  support::CallArgs blank;  ///< all arguments at their defaults
};
/// Those of a step on one of several ranks (ranks.h).
const FieldTable& rank_table();

/// KeyError: there is none of this name.
const Operation& operation(nb::handle name);
std::vector<const char*> operation_names();

/// Arguments from a dict of fields; None is an absent one. ValueError: as Borrowed, or a number or word that does not
/// suit its field. TypeError: a field that there is not.
support::CallArgs read_fields(const Operation& op, const nb::dict& values, Borrowed& arrays);
/// The same into a struct at its defaults; `op` is named in errors.
void read_fields(const FieldTable& table, const char* op, const nb::dict& values, char* base, Borrowed& arrays);

}  // namespace topkey::python
