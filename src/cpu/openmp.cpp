// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Teams made by OpenMP. The barrier is OpenMP's own, reached through an orphaned directive.
#include <omp.h>

#include "cpu/team.h"

namespace topkey::cpu {
namespace {

void barrier(void*) {
#pragma omp barrier
}

}  // namespace

int32_t openmp_threads() { return omp_in_parallel() ? 1 : omp_get_max_threads(); }

void run_openmp(int32_t size, TeamFunction function, void* arg) {
#pragma omp parallel num_threads(size)
  function(Member(omp_get_thread_num(), omp_get_num_threads(), barrier, nullptr), arg);
}

}  // namespace topkey::cpu
