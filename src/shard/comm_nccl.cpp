// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// NCCL, on the caller's communicator and the stream of the call: nothing blocks and it may be captured. What is in host
// memory (the first exchange, in which the ranks compare what they must agree on; collectives on the CPU) goes through a
// buffer on the device and is waited for, with the time limit. Whether memory is the host's must be the same on all
// ranks, as it is: it follows from the call. A blocking communicator that NCCL has not connected yet waits for its peers
// inside NCCL, without a limit; a non-blocking one (ncclConfig_t) does not.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "shard/comm.h"

namespace topkey::shard {
namespace {

void require(ncclResult_t code, const char* what) {
  if (code != ncclSuccess) throw Error(Status::peer_error, std::string(what) + ": " + ncclGetErrorString(code));
}
void require(cudaError_t code, const char* what) {
  if (code != cudaSuccess) throw Error(Status::device_error, std::string(what) + ": " + cudaGetErrorString(code));
}

/// Absent memory (nothing is received) counts as the device's: no host byte is touched then.
bool on_host(const void* data) {
  cudaPointerAttributes facts{};
  if (data == nullptr) return false;
  if (cudaPointerGetAttributes(&facts, data) != cudaSuccess) {
    cudaGetLastError();  // else the next launch would report it
    return true;
  }
  return facts.type != cudaMemoryTypeDevice && facts.type != cudaMemoryTypeManaged;
}

/// The communicator's device is current for a while, whatever was before.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    require(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) require(cudaSetDevice(device), "cudaSetDevice");
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

/// Device memory for a while. Freeing waits for the device: no kernel may be left that waits for a peer.
struct Staging {
  explicit Staging(size_t bytes) { require(cudaMalloc(&data, bytes > 0 ? bytes : 1), "cudaMalloc"); }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging() { cudaFree(data); }
  void* data = nullptr;
};

struct Peer : Failing {
  ncclComm_t comm = nullptr;
  int rank = 0, size = 1, device = 0;
  double seconds = 0;
  std::string broken;

  void all_gather(const void* send, void* receive, size_t bytes, void* stream) {
    const OnDevice current(device);
    check();
    const auto on = static_cast<cudaStream_t>(stream);
    if (on_host(receive)) {
      const std::vector<size_t> each(static_cast<size_t>(size), bytes);
      through_device(send, receive, each.data(), on);
    } else {
      settle(ncclAllGather(send, receive, bytes, ncclUint8, comm, on), "ncclAllGather");
    }
    check();
  }

  void all_gatherv(const void* send, void* receive, const size_t* bytes, void* stream) {
    const OnDevice current(device);
    check();
    const auto on = static_cast<cudaStream_t>(stream);
    if (on_host(receive)) {
      through_device(send, receive, bytes, on);
    } else {
      broadcasts(send, static_cast<char*>(receive), bytes, on);
    }
    check();
  }

  /// NCCL has no word for it: peers learn by their own watchdog, or by the time limit of a first exchange.
  void fail(const char* why) {
    if (broken.empty()) broken = "rank " + std::to_string(rank) + " failed: " + why;
  }

 private:
  void check() const {
    if (!broken.empty()) throw Error(Status::peer_error, broken);
    ncclResult_t state = ncclSuccess;
    require(ncclCommGetAsyncError(comm, &state), "ncclCommGetAsyncError");
    if (state != ncclInProgress) require(state, "NCCL");
  }

  /// Each rank's part from it to all, in one group: sizes differ, which an all-gather does not know.
  void broadcasts(const void* send, char* to, const size_t* bytes, cudaStream_t stream) {
    require(ncclGroupStart(), "ncclGroupStart");
    for (int r = 0; r < size; to += bytes[r++]) {
      if (bytes[r] == 0) continue;
      const ncclResult_t code = ncclBroadcast(r == rank ? send : to, to, bytes[r], ncclUint8, r, comm, stream);
      if (code != ncclSuccess && code != ncclInProgress) {
        ncclGroupEnd();
        require(code, "ncclBroadcast");
      }
    }
    settle(ncclGroupEnd(), "ncclGroupEnd");
  }

  /// A non-blocking communicator connects to its peers behind our back: nothing is on the stream before that is done.
  void settle(ncclResult_t code, const char* what) {
    if (code != ncclInProgress) return require(code, what);
    const auto until = deadline();
    for (ncclResult_t state = code; state == ncclInProgress;) {
      require(ncclCommGetAsyncError(comm, &state), "ncclCommGetAsyncError");
      if (state != ncclInProgress) require(state, what);
      if (std::chrono::steady_clock::now() > until) give_up(silence());
      std::this_thread::yield();
    }
  }

  void through_device(const void* send, void* receive, const size_t* bytes, cudaStream_t stream) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    require(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
    if (capture != cudaStreamCaptureStatusNone) {
      throw Error(
          Status::not_prepared,
          "an exchange in host memory, such as the first of a communicator, must not be captured, got a capture");
    }
    size_t before = 0, total = 0;
    for (int r = 0; r < size; total += bytes[r++]) {
      if (r < rank) before += bytes[r];
    }
    const Staging all(total);
    char* own = static_cast<char*>(all.data) + before;
    require(cudaMemcpyAsync(own, send, bytes[rank], cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
    try {
      broadcasts(own, static_cast<char*>(all.data), bytes, stream);
      wait(stream);
    } catch (const Error& e) {
      give_up(e.what());  // ends the kernel that waits, so that the memory can be freed
    }
    require(cudaMemcpyAsync(receive, all.data, total, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
    require(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }

  void wait(cudaStream_t stream) const {
    const auto until = deadline();
    for (cudaError_t state; (state = cudaStreamQuery(stream)) != cudaSuccess;) {
      if (state != cudaErrorNotReady) require(state, "cudaStreamQuery");
      check();
      if (std::chrono::steady_clock::now() > until) throw Error(Status::peer_error, silence());
      std::this_thread::yield();
    }
  }

  std::chrono::steady_clock::time_point deadline() const {
    return std::chrono::steady_clock::now() +
           std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
  }
  std::string silence() const { return "a peer did not answer within " + std::to_string(seconds) + " s"; }

  /// The caller's handle is of no more use, and gone: it must not be destroyed.
  [[noreturn]] void give_up(const std::string& why) {
    if (broken.empty()) {
      broken = why;
      ncclCommAbort(comm);
    }
    throw Error(Status::peer_error, broken);
  }
};

}  // namespace

const char* nccl_unusable() noexcept { return nullptr; }

void make_nccl(void* nccl_comm, double seconds, topkey_communicator& comm) {
  auto peer = std::make_unique<Peer>();
  peer->comm = static_cast<ncclComm_t>(nccl_comm);
  peer->seconds = seconds;
  require(ncclCommUserRank(peer->comm, &peer->rank), "ncclCommUserRank");
  require(ncclCommCount(peer->comm, &peer->size), "ncclCommCount");
  require(ncclCommCuDevice(peer->comm, &peer->device), "ncclCommCuDevice");
  const int rank = peer->rank, size = peer->size;
  comm = filled(peer.release(), rank, size, 0);
}

}  // namespace topkey::shard
