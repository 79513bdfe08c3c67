// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What this machine can do, measured in the same run as the operations: the fused multiply-adds of a loop that does
// nothing else, the bandwidth of a copy, and a matrix product by OpenBLAS where it is installed. A bench figure
// without its ceiling says little.
#pragma once
#include <string>
#include <vector>

namespace topkey::cli {

/// FLOP/s of fused multiply-adds in registers, all threads at once, with the vectors of `isa` (Highway's name;
/// others: scalar).
double fma_peak(const std::string& isa, int threads, int rounds = 5);

/// memcpy of all threads at once, each between two buffers of its own that are filled once.
class CopyLoop {
 public:
  CopyLoop(int threads, size_t bytes);
  /// Bytes/s of one round, bytes read plus bytes written.
  double rate();

 private:
  std::vector<std::vector<char>> from_, to_;
};

struct Sgemm {
  bool found = false;
  std::string core;  ///< the kernel that OpenBLAS chose for this processor: a wrong one makes the comparison worthless
  double flops = 0;  ///< per second
};
/// f32 C[m,n] = A[m,k] * B[n,k]^T, best of several. In a process of its own: OpenBLAS's workers spin after a call.
Sgemm sgemm_rate(int m, int n, int k, int threads);
/// What that process runs: prints "core flops", or nothing where there is no OpenBLAS.
int print_sgemm(int m, int n, int k, int threads);

}  // namespace topkey::cli
