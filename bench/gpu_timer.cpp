// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See gpu_timer.h.
#include "bench/gpu_timer.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace topkey::bench {

Graph::Graph(cudaStream_t stream, const std::function<void()>& call) : stream_(stream) {
  must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  try {
    call();
  } catch (...) {
    cudaStreamEndCapture(stream, &graph_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
    throw;
  }
  must(cudaStreamEndCapture(stream, &graph_));
  must(cudaGraphInstantiate(&runnable_, graph_, 0));
}

Graph::~Graph() { cudaGraphExecDestroy(runnable_), cudaGraphDestroy(graph_); }

Timer::Timer() {
  must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  must(cudaEventCreate(&begin_)), must(cudaEventCreate(&end_));
  must(cudaMalloc(&flush_, kFlush));
}

Timer::~Timer() { cudaFree(flush_), cudaEventDestroy(begin_), cudaEventDestroy(end_), cudaStreamDestroy(stream_); }

double Timer::one(const std::function<void()>& launch, bool flush) {
  // The flush also gives the host a head start: what it takes to launch is not timed unless it takes longer.
  if (flush) must(cudaMemsetAsync(flush_, 0, kFlush, stream_));
  return timed(launch);
}

double Timer::once_behind(const std::function<void()>& before, const std::function<void()>& launch) {
  must(cudaMemsetAsync(flush_, 0, kFlush, stream_));
  before();
  return timed(launch);
}

double Timer::timed(const std::function<void()>& launch) {
  must(cudaEventRecord(begin_, stream_));
  launch();
  must(cudaEventRecord(end_, stream_));
  must(cudaEventSynchronize(end_));
  float ms = 0;
  must(cudaEventElapsedTime(&ms, begin_, end_));
  return 1000.0 * ms;
}

Times Timer::times(const std::function<void()>& launch, int most) {
  constexpr double kMicroseconds = 20000;
  const double first = std::max(1.0, one(launch, true));
  const int count = std::clamp(static_cast<int>(kMicroseconds / first), 3, most);
  std::vector<double> all;
  for (int i = 0; i < count; ++i) all.push_back(one(launch, true));
  std::sort(all.begin(), all.end());
  return {all[all.size() / 2], all.front()};
}

void Timer::load(const std::function<void()>& launch, double seconds) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  const int batch = std::clamp(static_cast<int>(5000 / std::max(1.0, one(launch, false))), 1, 500);
  while (std::chrono::steady_clock::now() < until) {
    for (int i = 0; i < batch; ++i) launch();
    must(cudaStreamSynchronize(stream_));
  }
}

void Timer::idle(double seconds) {
  must(cudaDeviceSynchronize());
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

}  // namespace topkey::bench
