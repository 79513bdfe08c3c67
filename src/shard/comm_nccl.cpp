// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// NCCL, on the caller's communicator and the stream of the call: nothing blocks and it may be captured. What is in host
// memory (the first exchange, in which the ranks compare what they must agree on) goes through a buffer on the device
// and is waited for, with the time limit.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "shard/comm.h"

namespace topkey::shard {
namespace {

void require(ncclResult_t code, const char* what) {
  if (code != ncclSuccess) throw Error(Status::peer_error, std::string(what) + ": " + ncclGetErrorString(code));
}
void require(cudaError_t code, const char* what) {
  if (code != cudaSuccess) throw Error(Status::device_error, std::string(what) + ": " + cudaGetErrorString(code));
}

bool on_device(const void* data) {
  cudaPointerAttributes facts{};
  if (data == nullptr || cudaPointerGetAttributes(&facts, data) != cudaSuccess) return false;
  return facts.type == cudaMemoryTypeDevice || facts.type == cudaMemoryTypeManaged;
}

/// Device memory for a while.
struct Staging {
  explicit Staging(size_t bytes) { require(cudaMalloc(&data, bytes > 0 ? bytes : 1), "cudaMalloc"); }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging() { cudaFree(data); }
  void* data = nullptr;
};

struct Peer : Failing {
  ncclComm_t comm = nullptr;
  int rank = 0, size = 1;
  double seconds = 0;
  std::string broken;

  void all_gather(const void* send, void* receive, size_t bytes, void* stream) {
    check();
    const auto on = static_cast<cudaStream_t>(stream);
    if (on_device(receive)) {
      require(ncclAllGather(send, receive, bytes, ncclUint8, comm, on), "ncclAllGather");
    } else {
      through_device(send, receive, bytes, on);
    }
    check();
  }

  void all_gatherv(const void* send, void* receive, const size_t* bytes, void* stream) {
    check();
    require(ncclGroupStart(), "ncclGroupStart");
    char* to = static_cast<char*>(receive);
    for (int r = 0; r < size; to += bytes[r++]) {
      if (bytes[r] == 0) continue;
      const ncclResult_t code =
          ncclBroadcast(r == rank ? send : to, to, bytes[r], ncclUint8, r, comm, static_cast<cudaStream_t>(stream));
      if (code != ncclSuccess) {
        ncclGroupEnd();
        require(code, "ncclBroadcast");
      }
    }
    require(ncclGroupEnd(), "ncclGroupEnd");
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

  void through_device(const void* send, void* receive, size_t bytes, cudaStream_t stream) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    require(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
    if (capture != cudaStreamCaptureStatusNone) {
      throw Error(Status::not_prepared, "the first exchange of a communicator must not be captured, got a capture");
    }
    const Staging all(bytes * static_cast<size_t>(size));
    char* own = static_cast<char*>(all.data) + bytes * static_cast<size_t>(rank);
    require(cudaMemcpyAsync(own, send, bytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
    require(ncclAllGather(own, all.data, bytes, ncclUint8, comm, stream), "ncclAllGather");
    wait(stream);
    require(cudaMemcpy(receive, all.data, bytes * static_cast<size_t>(size), cudaMemcpyDeviceToHost), "cudaMemcpy");
  }

  void wait(cudaStream_t stream) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (cudaError_t state; (state = cudaStreamQuery(stream)) != cudaSuccess;) {
      if (state != cudaErrorNotReady) require(state, "cudaStreamQuery");
      check();
      if (std::chrono::steady_clock::now() > until) {
        broken = "a peer did not answer within " + std::to_string(seconds) + " s";
        ncclCommAbort(comm);  // ends the kernel that waits; the caller's handle is of no more use
        throw Error(Status::peer_error, broken);
      }
      std::this_thread::yield();
    }
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
  const int rank = peer->rank, size = peer->size;
  comm = filled(peer.release(), rank, size, 0);
}

}  // namespace topkey::shard
