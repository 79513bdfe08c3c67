// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See launch.h. Nothing here runs before the first question about the backend: loading the library calls no driver.
#include "cuda/launch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <string>

#include "cuda/check.h"
#include "cuda/stages.h"

namespace topkey::cuda {
namespace {

constexpr int kMaxDevices = 64;

struct DeviceFacts {
  std::atomic<bool> prepared{false};
  int sms = 0, shared_bytes = 0;
  bool hopper = false;  ///< the kernels of cuda.sm90 that were loaded are those for sm_90a
};
std::array<DeviceFacts, kMaxDevices> devices;
std::mutex prepare_mutex;

/// What of sm_90a nvcc was asked for (cmake/cuda.cmake).
constexpr bool kBuiltForHopper = TOPKEY_CUDA_SM90;

struct Machine {
  std::string problem, hopper_problem, detail;
};
void add_device(Machine& m, const cudaDeviceProp& p) {
  const std::string has = std::string(p.name) + " has " + std::to_string(p.major) + "." + std::to_string(p.minor);
  if (p.major < 8) {
    m.problem = "it needs compute capability 8.0, " + has + ": use backend cpu";
    return;
  }
  if (m.detail.empty()) m.detail = p.name;
  // One backend answers for all of a machine's GPUs: a call names its device later than it is chosen.
  if (p.major != 9) m.hopper_problem = "all GPUs must have compute capability 9.0, " + has + ": use cuda.portable";
}
const Machine& machine() {
  static const Machine found = [] {
    Machine m;
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
      cudaGetLastError();
      m.problem = std::string("no usable CUDA driver or GPU: ") + cudaGetErrorString(error);
      return m;
    }
    for (int i = 0; i < count; ++i) {
      cudaDeviceProp p{};
      if (cudaGetDeviceProperties(&p, i) == cudaSuccess) add_device(m, p);
    }
    if (!m.detail.empty()) m.problem.clear();
    if (!kBuiltForHopper) m.hopper_problem = "this build has no code for sm_90a (CMake option TOPKEY_CUDA_TARGETS)";
    if (m.detail.empty() && m.problem.empty()) m.problem = "no GPU in this machine";
    return m;
  }();
  return found;
}

/// shared: what a thread block of this GPU may have at most. A kernel that asks for more is not launched here. clusters:
/// whether it is a GPU whose kernels may come in clusters.
void load_kernels(int shared, bool clusters) {
  for (const KernelList& list : kernel_lists()) {
    for (int i = 0; i < list.count; ++i) {
      const KernelEntry& entry = list.entries[i];
      cudaFuncAttributes attributes{};
      TOPKEY_CUDA_CHECK(cudaFuncGetAttributes(&attributes, entry.kernel));
      const int bytes = std::min(entry.shared_bytes, shared - static_cast<int>(attributes.sharedSizeBytes));
      if (bytes > 48 * 1024) {
        TOPKEY_CUDA_CHECK(cudaFuncSetAttribute(entry.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        // Else the driver may leave so much to L1 that one block fills an SM.
        TOPKEY_CUDA_CHECK(cudaFuncSetAttribute(entry.kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                               cudaSharedmemCarveoutMaxShared));
      }
      if (clusters && entry.wide_clusters && attributes.ptxVersion >= 90)
        TOPKEY_CUDA_CHECK(cudaFuncSetAttribute(entry.kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    }
  }
}

/// With the device current.
void prepare_current(int device) {
  const std::lock_guard<std::mutex> lock(prepare_mutex);
  DeviceFacts& facts = devices[static_cast<size_t>(device)];
  if (facts.prepared.load(std::memory_order_acquire)) return;
  cudaDeviceProp p{};
  TOPKEY_CUDA_CHECK(cudaGetDeviceProperties(&p, device));
  if (p.major < 8) {
    throw Error(Status::unsupported,
                "cuda.portable: device must have compute capability 8.0 or more (use backend cpu), got " +
                    std::string(p.name) + " with " + std::to_string(p.major) + "." + std::to_string(p.minor));
  }
  load_kernels(static_cast<int>(p.sharedMemPerBlockOptin), p.major == 9);
  // The driver may have been told to compile the PTX for other GPUs instead (CUDA_FORCE_PTX_JIT): there they are empty.
  cudaFuncAttributes loaded{};
  TOPKEY_CUDA_CHECK(cudaFuncGetAttributes(&loaded, score_sm90_kernels().entries[0].kernel));
  facts.hopper = p.major == 9 && loaded.ptxVersion >= 90;
  facts.sms = p.multiProcessorCount;
  facts.shared_bytes = static_cast<int>(p.sharedMemPerBlockOptin);
  facts.prepared.store(true, std::memory_order_release);
}

/// Makes `device` current; true if another one was. Nothing is switched where it already is.
bool enter_device(const char* op, int device, int* before) {
  int count = 0;
  TOPKEY_CUDA_CHECK(cudaGetDeviceCount(&count));
  if (device >= std::min(count, kMaxDevices)) {
    throw Error(Status::invalid_argument, std::string(op) + ": exec.device_id must be under " +
                                              std::to_string(std::min(count, kMaxDevices)) + ", got " +
                                              std::to_string(device));
  }
  TOPKEY_CUDA_CHECK(cudaGetDevice(before));
  if (*before == device) return false;
  TOPKEY_CUDA_CHECK(cudaSetDevice(device));
  return true;
}

}  // namespace

const char* machine_problem() { return machine().problem.empty() ? nullptr : machine().problem.c_str(); }
const char* hopper_problem() {
  if (machine_problem() != nullptr) return machine_problem();
  return machine().hopper_problem.empty() ? nullptr : machine().hopper_problem.c_str();
}
const char* machine_detail() { return machine().detail.c_str(); }

void prepare(int32_t device_id) {
  int before = 0;
  const bool switched = enter_device("prepare", device_id, &before);
  try {
    prepare_current(device_id);
  } catch (...) {
    if (switched) cudaSetDevice(before);
    throw;
  }
  if (switched) cudaSetDevice(before);
}

Launch::Launch(const char* op, const Exec& exec)
    : stream_(static_cast<cudaStream_t>(exec.stream)),
      device_(exec.device_id),
      sms_(0),
      shared_bytes_(0),
      bounded_(exec.max_sms > 0) {
  enter_device(op, device_, &caller_device_);
  try {
    if (!devices[static_cast<size_t>(device_)].prepared.load(std::memory_order_acquire)) {
      cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
      // The legacy stream answers with an error while another one captures: then nothing may be loaded either.
      const cudaError_t error = cudaStreamIsCapturing(stream_, &capture);
      if (error != cudaSuccess) cudaGetLastError();
      if (error != cudaSuccess || capture != cudaStreamCaptureStatusNone) {
        throw Error(Status::not_prepared, std::string(op) +
                                              ": device must be prepared before a first call is captured, got device " +
                                              std::to_string(device_) + " without prepare()");
      }
      prepare_current(device_);
    }
  } catch (...) {
    if (caller_device_ != device_) cudaSetDevice(caller_device_);
    throw;
  }
  sms_ = devices[static_cast<size_t>(device_)].sms;
  shared_bytes_ = devices[static_cast<size_t>(device_)].shared_bytes;
  if (bounded_) sms_ = std::min(sms_, exec.max_sms);
}

bool Launch::hopper() const { return devices[static_cast<size_t>(device_)].hopper; }

void Launch::require_hopper(const char* op) const {
  if (hopper()) return;
  throw Error(Status::unsupported, std::string(op) +
                                       ": device must run code for sm_90a (use backend cuda.portable), got device " +
                                       std::to_string(device_) + ", on which there is none");
}

Launch::~Launch() {
  if (caller_device_ != device_) cudaSetDevice(caller_device_);
}

uint32_t Launch::blocks(int64_t work, int per_sm) const {
  // Under a budget one block an SM: how the hardware spreads them is not ours to say.
  const int64_t most = bounded_ ? sms_ : int64_t{sms_} * per_sm;
  return static_cast<uint32_t>(std::clamp<int64_t>(work, 1, most));
}

}  // namespace topkey::cuda
