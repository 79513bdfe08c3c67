// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Every shape, stride, dtype and alignment check of the library: backends trust what passes here. Reads shapes,
// dtypes and host integers only. Throws Error(invalid_argument) with one sentence; returns what choosing a backend
// needs. Nothing has been written by then.
#pragma once
#include "backend_table.h"
#include "check.h"

namespace topkey {

#define X(name, Args) Shape validate(const Args& args, Mode mode);
TOPKEY_OPERATIONS(X)
#undef X

/// Device, team, budgets, workspace alignment.
void validate_exec(const char* op, const Exec& exec);

}  // namespace topkey
