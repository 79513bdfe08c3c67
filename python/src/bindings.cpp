// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The extension module topkey._native: operations by name (call.h), plans, traces, and what the library says of itself.
// The Python files beside it give these their public form.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/src/arrays.h"
#include "python/src/call.h"
#include "python/src/fields.h"
#include "python/src/parts.h"
#include "topkey/topkey.h"

namespace topkey::python {
namespace {

nb::list backend_list() {
  nb::list all;
  for (const BackendInfo& b : backends()) {
    const char* device = b.device == Device::cpu ? "cpu" : "cuda";
    all.append(nb::make_tuple(b.name, device, b.unusable, b.detail));
  }
  return all;
}

nb::list field_list(nb::handle op) {
  nb::list all;
  for (const Field& field : operation(op).fields) all.append(nb::make_tuple(field.name, field.written));
  return all;
}

void bind_operations(nb::module_& m) {
  m.def("run", &run);
  m.def("workspace_bytes", &workspace_bytes);
  m.def("unsupported", &unsupported);
  m.def("time_calls", &time_calls);
  m.def("operations", [] {
    nb::list names;
    for (const char* name : operation_names()) names.append(name);
    return names;
  });
  m.def("fields", &field_list);
  m.def("dtype_of", [](nb::handle array) { return dtype_of(array); });
}

void bind_library(nb::module_& m) {
  m.def("version", &topkey_version);
  m.def("abi_version", &topkey_abi_version);
  m.attr("ABI_VERSION") = TOPKEY_ABI_VERSION;
  m.def("backends", &backend_list);
  m.def("numerics_version", [](const std::string& backend, const std::string& format) -> std::optional<std::string> {
    return guarded([&]() -> std::optional<std::string> {
      const char* version = numerics_version(backend.c_str(), support::format_by_name(format));
      return version == nullptr ? std::nullopt : std::optional<std::string>(version);
    });
  });
  m.def("prepare", [](const std::string& device, int32_t device_id) {
    guarded([&] { prepare(device == "cuda" ? Device::cuda : Device::cpu, device_id); });
  });
}

}  // namespace
}  // namespace topkey::python

NB_MODULE(_native, m) {
  topkey::python::bind_operations(m);
  topkey::python::bind_library(m);
  topkey::python::bind_plan(m);
  topkey::python::bind_ranks(m);
  topkey::python::bind_traces(m);
}
