// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A kernel that holds SMs, for tests that calls finish beside it.
#pragma once
#include <cuda_runtime_api.h>

namespace topkey::testing {

/// Starts `blocks` thread blocks, each as large as an SM holds, which spin until *release (host memory that the device
/// sees) is not 0, or `seconds` are over.
cudaError_t hold_sms(int blocks, const volatile int* release, double seconds, cudaStream_t stream);

}  // namespace topkey::testing
