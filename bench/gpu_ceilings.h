// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What this GPU can do, measured in the same run as the calls.
#pragma once
#include "bench/gpu_timer.h"

namespace topkey::bench {

/// Bytes a second of a copy of 1 GiB on the device, read plus written.
double copy_rate(Timer& timer);
/// FLOP a second of a plain product of 8192 x 8192 matrices by cuBLASLt, after so many seconds of it: bf16, or fp8
/// (e4m3). 0 where the library is not installed (nobody links it: it is looked for when asked) or was not known when
/// this was built.
double gemm_rate(Timer& timer, bool fp8, double load_seconds);

}  // namespace topkey::bench
