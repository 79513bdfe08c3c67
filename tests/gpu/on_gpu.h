// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Device memory that a test holds itself, for calls that on_device.h cannot make: captured ones, several at once, memory
// larger than the host should hold. Walls of poison stand around each piece and are looked at when it goes.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "tests/backend_test.h"

namespace topkey::testing {

inline void must(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

/// So many bytes of poison between two walls.
class GpuBytes {
 public:
  explicit GpuBytes(size_t bytes) : bytes_(bytes) {
    ++gpu_pieces();
    must(cudaMalloc(reinterpret_cast<void**>(&whole_), bytes + 2 * kWall));
    must(cudaMemset(whole_, kPoison, bytes + 2 * kWall));
    must(cudaDeviceSynchronize());  // the tests' own streams do not wait for this one
  }
  ~GpuBytes() {
    cudaDeviceSynchronize();
    for (const size_t at : {size_t{0}, kWall + bytes_}) {
      std::vector<uint8_t> wall(kWall);
      EXPECT_EQ(cudaMemcpy(wall.data(), whole_ + at, kWall, cudaMemcpyDeviceToHost), cudaSuccess);
      EXPECT_EQ(std::count(wall.begin(), wall.end(), kPoison), static_cast<int64_t>(kWall))
          << "a call wrote " << (at == 0 ? "before" : "behind") << " a buffer of " << bytes_ << " bytes";
    }
    cudaFree(whole_);
  }
  GpuBytes(const GpuBytes&) = delete;
  GpuBytes& operator=(const GpuBytes&) = delete;

  uint8_t* data() const { return whole_ + kWall; }
  size_t size() const { return bytes_; }
  void poison() const {
    must(cudaMemset(data(), kPoison, bytes_));
    must(cudaDeviceSynchronize());
  }
  void put(const void* host, size_t bytes, size_t at = 0) const {
    must(cudaMemcpy(data() + at, host, bytes, cudaMemcpyHostToDevice));
    must(cudaDeviceSynchronize());
  }
  template <class T>
  std::vector<T> get(size_t count, size_t at = 0) const {
    std::vector<T> values(count);
    must(cudaMemcpy(values.data(), data() + at, count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  static constexpr size_t kWall = 4096;
  static constexpr uint8_t kPoison = 0xA5;
  size_t bytes_;
  uint8_t* whole_ = nullptr;
};

/// Host data on the device, for as long as it lives.
class OnGpu {
 public:
  explicit OnGpu(const Array& host) : host_(host), memory_(host.bytes()), view_(host.view()) {
    view_.data = memory_.data();
    upload();
  }
  const Tensor& view() const { return view_; }
  void upload() const { memory_.put(host_.view().data, host_.bytes()); }
  void poison() const { memory_.poison(); }
  std::vector<int32_t> ints() const { return memory_.get<int32_t>(static_cast<size_t>(host_.size())); }

 private:
  const Array host_;
  GpuBytes memory_;
  Tensor view_;
};

struct Stream {
  Stream() { must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  void wait() const { must(cudaStreamSynchronize(stream)); }
  cudaStream_t stream{};
};

/// Calls captured once.
class GraphOf {
 public:
  GraphOf(const Stream& on, const std::function<void()>& calls) : stream_(on.stream) {
    must(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    try {
      calls();
    } catch (...) {  // an open capture would forbid this thread to allocate
      cudaStreamEndCapture(stream_, &graph_);
      if (graph_ != nullptr) cudaGraphDestroy(graph_);
      throw;
    }
    must(cudaStreamEndCapture(stream_, &graph_));
    must(cudaGraphInstantiate(&runnable_, graph_, 0));
  }
  ~GraphOf() { cudaGraphExecDestroy(runnable_), cudaGraphDestroy(graph_); }
  GraphOf(const GraphOf&) = delete;
  GraphOf& operator=(const GraphOf&) = delete;
  void replay() const {
    must(cudaGraphLaunch(runnable_, stream_));
    must(cudaStreamSynchronize(stream_));
  }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_{};
  cudaGraphExec_t runnable_{};
};

/// A workspace of exactly what the call asks for, given to exec.
class GpuRoom {
 public:
  template <class Args>
  GpuRoom(const Args& args, Exec& exec) : memory_(workspace_bytes(args, exec)) {
    exec.workspace = memory_.data(), exec.workspace_bytes = memory_.size();
  }

 private:
  GpuBytes memory_;
};

/// A paged search with everything on the device.
struct GpuSearch {
  GpuSearch(const ProblemSpec& spec, int32_t topk)
      : problem(make_problem(spec)),
        q(problem.q),
        weights(problem.weights),
        pages(problem.pages),
        table(problem.block_table),
        end(problem.end),
        request(problem.request),
        indices(Array(DType::i32, {problem.count(), topk})) {
    args = problem.paged_search(topk, {});
    args.q.values.data = q.view().data, args.q.weights.data = weights.view().data;
    // The first page may lie behind the array's start.
    args.keys.cache.pages.data =
        static_cast<uint8_t*>(pages.view().data) +
        (static_cast<uint8_t*>(problem.paged_keys().cache.pages.data) - problem.pages.as<uint8_t>());
    args.keys.block_table.data = table.view().data;
    args.rows.end.data = end.view().data, args.rows.request.data = request.view().data;
    args.out.indices = indices.view();
  }
  Problem problem;
  OnGpu q, weights, pages, table, end, request, indices;
  PagedMqaTopk args;
};

/// Shapes that every CUDA backend takes: fp8, heads and dims as in production.
inline ProblemSpec decode_spec() {
  ProblemSpec spec;
  spec.paged = true, spec.rows = 6, spec.requests = 6, spec.keys = 3000, spec.pattern = Pattern::few_mantissa_bits;
  spec.heads = 8, spec.head_dim = 128;
  return spec;
}

}  // namespace topkey::testing
