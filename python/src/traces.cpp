// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Trace files through support/trace.h, the reader and writer of the command line, so that the bytes are its bytes.
// A tensor crosses as (safetensors dtype, shape, bytes); topkey/traces.py makes arrays of it.
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "python/src/arrays.h"
#include "python/src/call.h"
#include "python/src/parts.h"
#include "support/trace.h"

namespace topkey::python {
namespace {

nb::tuple to_python(const support::Trace& trace) {
  nb::dict tensors;
  for (const auto& [name, tensor] : trace.tensors) {
    const nb::bytearray bytes(tensor.bytes.data(), tensor.bytes.size());
    tensors[nb::str(name.c_str())] = nb::make_tuple(tensor.dtype, nb::tuple(nb::cast(tensor.shape)), bytes);
  }
  return nb::make_tuple(tensors, trace.metadata);
}

support::TraceTensor to_tensor(const nb::tuple& parts, const std::string& name) {
  support::TraceTensor tensor =
      support::make_tensor(nb::cast<std::string>(parts[0]), nb::cast<std::vector<int64_t>>(parts[1]));
  const nb::bytes bytes = nb::cast<nb::bytes>(parts[2]);
  if (bytes.size() != tensor.bytes.size())
    throw nb::value_error(("save_trace: tensor '" + name + "' must be " + std::to_string(tensor.bytes.size()) +
                           " bytes, got " + std::to_string(bytes.size()))
                              .c_str());
  if (bytes.size() != 0) std::memcpy(tensor.bytes.data(), bytes.c_str(), bytes.size());
  return tensor;
}

}  // namespace

void bind_traces(nb::module_& m) {
  m.def("read_trace",
        [](const std::string& path) { return guarded([&] { return to_python(support::read_trace(path)); }); });
  m.def("write_trace",
        [](const std::string& path, const nb::dict& tensors, std::map<std::string, std::string> metadata) {
          guarded([&] {
            support::Trace trace;
            trace.metadata = std::move(metadata);
            for (const auto& [name, parts] : tensors) {
              const auto key = nb::cast<std::string>(name);
              trace.tensors.emplace(key, to_tensor(nb::cast<nb::tuple>(parts), key));
            }
            support::write_trace(path, trace);
          });
        });
  m.def("trace_of", [](nb::handle op, const nb::dict& fields) { return to_python(trace_of(op, fields)); });
}

}  // namespace topkey::python
