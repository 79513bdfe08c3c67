// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Which TopKey dtype an element type of a framework is: by its name in numpy, ml_dtypes and torch, by its letter in the
// buffer protocol, by its code in DLPack.
#pragma once
#include <nanobind/nanobind.h>

#include "topkey/topkey.h"

namespace topkey::python {

namespace nb = nanobind;

/// Counters of exec.stats; no tensor of an operation has it.
constexpr DType kCounter = static_cast<DType>(100);

/// none: no operation takes it.
DType dtype_by_name(const char* name);
DType dtype_by_letter(const char* format);
DType dtype_by_code(int code, int bits);
const char* short_name(DType dtype);

/// Of a dtype object of numpy or torch. Known ones are kept by their address, so the second look costs no call.
DType dtype_of_object(nb::handle dtype);
/// Its name as the framework has it, for sentences.
std::string name_of_object(nb::handle dtype);

}  // namespace topkey::python
