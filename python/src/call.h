// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A call of any operation from a dict of its fields (fields.h) and an Exec: run it, ask for its workspace, ask why it
// cannot run, make a trace of it.
#pragma once
#include <nanobind/nanobind.h>

#include <string>

#include "support/trace.h"
#include "topkey/error.h"

namespace topkey::python {

namespace nb = nanobind;

/// Wrong arguments: ValueError with the library's sentence, nothing written. No backend can run it, or one failed:
/// RuntimeError. The GIL is released while the operation runs.
void run(nb::handle op, const nb::dict& fields, nb::handle exec);
size_t workspace_bytes(nb::handle op, const nb::dict& fields, nb::handle exec);
/// None, or the reason.
nb::object unsupported(nb::handle op, const nb::dict& fields, nb::handle exec);
support::Trace trace_of(nb::handle op, const nb::dict& fields);
/// Seconds of `repeats` calls of the C symbol alone, arguments ready: what bench/python_overhead.py compares with.
double time_calls(nb::handle op, const nb::dict& fields, nb::handle exec, int repeats);

/// Runs `body`, turning the library's errors into Python's.
template <class Body>
auto guarded(Body&& body) {
  try {
    return body();
  } catch (const Error& e) {
    if (e.status() == Status::invalid_argument || e.status() == Status::workspace_too_small)
      throw nb::value_error(e.what());
    throw;  // a std::runtime_error: RuntimeError
  } catch (const support::TraceError& e) {
    throw nb::value_error(e.what());
  }
}

}  // namespace topkey::python
