// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A call cut by query rows: rows [first, first + count) of its inputs and outputs as a call of their own. Rows do not
// influence each other, so the pieces together write what the whole writes, bit for bit; a progress bar and a study of
// a few rows live on that.
#pragma once
#include <cstdint>

#include "progress.h"
#include "support/call.h"

namespace topkey::cli {

/// Rows of the call; 0 where it has none that could be cut (producers, rows found through q_indptr).
int64_t rows_to_cut(const support::CallArgs& args);
/// `first` and `count` must be multiples of row_step.
support::CallArgs cut_rows(const support::CallArgs& args, int64_t first, int64_t count);
int64_t row_step(const support::CallArgs& args);
/// Rows [first, first + count) along the first dimension of `t`, if it is present.
void cut_tensor(Tensor& t, int64_t first, int64_t count);
/// In one call; or, if the bar is visible, in pieces.
void run_with_progress(const support::CallArgs& args, const Exec& exec, const char* what);

}  // namespace topkey::cli
