// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Twin of openmp.cpp for builds without OpenMP: teams of one. The caller's own threads (Exec.team) work all the same.
#include "cpu/team.h"

namespace topkey::cpu {

int32_t openmp_threads() { return 1; }

void run_openmp(int32_t, TeamFunction function, void* arg) { function(Member(0, 1, nullptr, nullptr), arg); }

}  // namespace topkey::cpu
