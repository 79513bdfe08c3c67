// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Times launches by device events: L2 flushed before each, cold after a pause, warm after a load of the same call.
#pragma once
#include <functional>
#include <vector>

#include "bench/gpu_must.h"

namespace topkey::bench {

/// A call captured once.
class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& call);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch() const { must(cudaGraphLaunch(runnable_, stream_)); }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_{};
  cudaGraphExec_t runnable_{};
};

struct Times {
  double median_us = 0, min_us = 0;
};

class Timer {
 public:
  Timer();
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  cudaStream_t stream() const { return stream_; }
  /// One launch is not counted; then as many as take 20 ms, 3 to `most`.
  Times times(const std::function<void()>& launch, int most);
  /// One launch, L2 flushed before it, in microseconds.
  double once(const std::function<void()>& launch) { return one(launch, true); }
  /// The same with something on the stream before, which is not timed.
  double once_behind(const std::function<void()>& before, const std::function<void()>& launch);
  /// Launches one after another for so long.
  void load(const std::function<void()>& launch, double seconds);
  /// Nothing for so long.
  void idle(double seconds);

 private:
  double one(const std::function<void()>& launch, bool flush);
  double timed(const std::function<void()>& launch);
  static constexpr size_t kFlush = size_t{256} << 20;
  cudaStream_t stream_{};
  cudaEvent_t begin_{}, end_{};
  void* flush_{};
};

}  // namespace topkey::bench
