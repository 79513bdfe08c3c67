// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The parts of the extension that are no operations: each adds its functions to the module.
#pragma once
#include <nanobind/nanobind.h>

namespace topkey::python {

void bind_plan(nanobind::module_& m);
void bind_ranks(nanobind::module_& m);
void bind_traces(nanobind::module_& m);

}  // namespace topkey::python
