// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Random choices of the RapidCheck properties that several stage tests share: problems, admission, outputs. Numbers
// that shrink are drawn by RapidCheck; bulk data comes from a seed that it draws.
#pragma once
#include "support/patterns.h"
#include "tests/testing.h"

namespace topkey::testing {

/// Formats with the dtypes of q that go with them: fp8, mxfp4, fp8_fnuz, and every pairing of bf16, f16, f32 q with bf16, f16,
/// f32, q8_0 keys.
struct Pairing {
  KeyFormat format;
  DType q;
};
std::vector<Pairing> all_pairings();

/// A problem of up to 7 rows and 90 keys in any format and layout; paged or dense.
ProblemSpec draw_spec(bool paged);

/// An int near [0, columns], sometimes negative, beyond, or at the ends of int32.
int32_t wild_int(Random& random, int64_t columns);
Array wild_ints(Random& random, int64_t count, int64_t columns);

/// What a drawn call borrows.
struct Borrowed {
  Array candidates, mask, base, table;
};
/// Candidates, masks (dense only), forced keys, each in a third of the cases.
Admit draw_admit(Borrowed& borrowed, Random& random, int64_t rows, int64_t columns, bool mask);
/// Outputs, order, fill, base, slot map for `requests` requests.
Want draw_want(Borrowed& borrowed, Random& random, int64_t rows, int64_t columns, int64_t requests);

}  // namespace topkey::testing
