// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See call.h.
#include "python/src/call.h"

#include <chrono>

#include "python/src/arrays.h"
#include "python/src/fields.h"
#include "python/src/setting.h"
#include "support/run.h"

namespace topkey::python {
namespace {

size_t bytes_of(const support::CallArgs& args, const Exec& exec) {
  return std::visit([&](const auto& a) { return support::workspace_bytes(a, exec); }, args);
}
void launch(const support::CallArgs& args, const Exec& exec) {
  std::visit([&](const auto& a) { support::launch(a, exec); }, args);
}

}  // namespace

void run(nb::handle name, const nb::dict& fields, nb::handle tuple) {
  guarded([&] {
    const Operation& op = operation(name);
    Borrowed arrays(op.name, false);
    const support::CallArgs args = read_fields(op, fields, arrays);
    Setting setting(op.name, tuple, arrays);
    setting.add_workspace(bytes_of(args, setting.exec), arrays.first());
    const nb::gil_scoped_release released;
    launch(args, setting.exec);
  });
}

size_t workspace_bytes(nb::handle name, const nb::dict& fields, nb::handle tuple) {
  return guarded([&] {
    const Operation& op = operation(name);
    Borrowed arrays(op.name, true);
    const support::CallArgs args = read_fields(op, fields, arrays);
    return bytes_of(args, Setting(op.name, tuple, arrays).exec);
  });
}

nb::object unsupported(nb::handle name, const nb::dict& fields, nb::handle tuple) {
  return guarded([&]() -> nb::object {
    const Operation& op = operation(name);
    Borrowed arrays(op.name, true);
    const support::CallArgs args = read_fields(op, fields, arrays);
    const char* reason = support::args_unsupported(args, Setting(op.name, tuple, arrays).exec);
    return reason == nullptr ? nb::none() : nb::object(nb::str(reason));
  });
}

support::Trace trace_of(nb::handle name, const nb::dict& fields) {
  return guarded([&] {
    const Operation& op = operation(name);
    Borrowed arrays(op.name, false);
    const support::CallArgs args = read_fields(op, fields, arrays);
    if (arrays.place().device != Device::cpu) throw nb::value_error("trace_of: arrays must be on the cpu");
    return support::trace_of(args);
  });
}

double time_calls(nb::handle name, const nb::dict& fields, nb::handle tuple, int repeats) {
  return guarded([&] {
    const Operation& op = operation(name);
    Borrowed arrays(op.name, false);
    const support::CallArgs args = read_fields(op, fields, arrays);
    Setting setting(op.name, tuple, arrays);
    setting.add_workspace(bytes_of(args, setting.exec), arrays.first());
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < repeats; ++i) launch(args, setting.exec);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  });
}

}  // namespace topkey::python
