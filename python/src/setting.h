// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What a call needs beside its arguments: the library's Exec, from the tuple that Python has, and a workspace.
#pragma once
#include <nanobind/nanobind.h>

#include "python/src/arrays.h"
#include "topkey/topkey.h"

namespace topkey::python {

/// ValueError: an Exec that is none, or a field of it that is not what it should be. Strings point into the tuple. The
/// call's device is that of its arrays.
class Setting {
 public:
  Setting(const char* op, nb::handle tuple, Borrowed& arrays);
  /// Memory of the arrays' framework on a GPU, of this thread on a CPU, unless it was given.
  void add_workspace(size_t bytes, nb::handle like);

  Exec exec{};

 private:
  /// Fields of Exec of topkey/types.py in their order.
  enum Field {
    kBackend,
    kStream,
    kWorkspace,
    kMaxSms,
    kThreads,
    kStats,
    kArithmetic,
    kStrategy,
    kStrict,
    kOverlap,
    kNumFields
  };

  nb::handle at(Field field) const { return PyTuple_GetItem(tuple_.ptr(), field); }
  [[noreturn]] void refuse(const char* name, const char* must, nb::handle got) const;
  const char* text(Field field, const char* name) const;
  int32_t number(Field field, const char* name) const;
  void take_workspace(Borrowed& arrays);
  void place_by_backend();
  void take_stream(nb::handle like);

  const char* op_;
  nb::handle tuple_;
  nb::object kept_;
};

}  // namespace topkey::python
