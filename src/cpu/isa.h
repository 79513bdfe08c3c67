// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Which ISA Highway dispatches to: the best of the machine, or the one that TOPKEY_CPU_ISA names (by Highway's names:
// SCALAR, AVX2, AVX3, NEON, ...), so that a test can run the same case on each.
#pragma once

namespace topkey::cpu {

/// Applies TOPKEY_CPU_ISA, once, before the first dispatch. A name that this machine lacks leaves the best one in
/// place; isa_problem() then says so.
void choose_isa();
/// Why the backend must refuse to run (a forced ISA that cannot), or null.
const char* isa_problem();

}  // namespace topkey::cpu
