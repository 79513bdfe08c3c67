// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Where a call runs: its device made current for as long as it lives, its stream, how many SMs it may take; and whether
// the device's kernels are loaded.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "topkey/types.h"

namespace topkey::cuda {

/// A kernel that prepare() must load, and the dynamic shared memory that it may ask for.
struct KernelEntry {
  const void* kernel;
  int shared_bytes;
  bool wide_clusters = false;  ///< of Hopper: more than 8 thread blocks may form a cluster
};
/// Each stage's kernels; `count` entries are written to where `entries` points.
struct KernelList {
  const KernelEntry* entries;
  int count;
};

/// Why no device of this machine can run the backend; null = one can.
const char* machine_problem();
/// The same for Hopper's backend; null: all usable GPUs have compute capability 9.0 and this build has their code.
const char* hopper_problem();
/// Name of the first usable GPU.
const char* machine_detail();
/// Loads every kernel of the device. Throws device_error, or unsupported for a GPU that is too old.
void prepare(int32_t device_id);

/// Restores the caller's current device at its end. Throws not_prepared for a first call under stream capture.
class Launch {
 public:
  Launch(const char* op, const Exec& exec);
  ~Launch();
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  cudaStream_t stream() const { return stream_; }
  /// Thread blocks for `work` pieces of which `per_sm` fit an SM: never more than the call's SM budget allows.
  uint32_t blocks(int64_t work, int per_sm) const;
  int sms() const { return sms_; }
  /// Whether the device has Hopper's kernels.
  bool hopper() const;
  /// Throws unless it has.
  void require_hopper(const char* op) const;
  /// Shared memory of a thread block at most.
  int shared_bytes() const { return shared_bytes_; }

 private:
  cudaStream_t stream_;
  int caller_device_ = 0, device_, sms_, shared_bytes_;
  bool bounded_;
};

}  // namespace topkey::cuda
