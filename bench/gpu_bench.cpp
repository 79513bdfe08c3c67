// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Times whole calls on a GPU: device events around graph replays, L2 flushed before each, median; cold calls, not a warm
// loop. Usage: topkey_gpu_bench [--quick] [--backend NAME] [--json FILE] [--commit C]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "bench/gpu_cases.h"

namespace topkey::bench {
namespace {

using Json = nlohmann::ordered_json;

// What an H200 was measured to reach: bytes a second of a copy, flop a second of bf16 and of fp8 products.
constexpr double kBandwidth = 4.3e12, kFp8 = 1.45e15, kBf16 = 7.9e14;

void must(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

struct Options {
  bool quick = false;
  std::string backend = "cuda.portable", json, commit;
};

class Timer {
 public:
  Timer() {
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    must(cudaEventCreate(&begin_)), must(cudaEventCreate(&end_));
    must(cudaMalloc(&flush_, kFlush));
  }
  cudaStream_t stream() const { return stream_; }

  /// Microseconds of each replay, ascending.
  std::vector<float> replays(cudaGraphExec_t graph, int count) {
    std::vector<float> times;
    for (int i = 0; i < count + 2; ++i) {
      must(cudaMemsetAsync(flush_, i, kFlush, stream_));
      must(cudaEventRecord(begin_, stream_));
      must(cudaGraphLaunch(graph, stream_));
      must(cudaEventRecord(end_, stream_));
      must(cudaEventSynchronize(end_));
      float ms = 0;
      must(cudaEventElapsedTime(&ms, begin_, end_));
      if (i >= 2) times.push_back(ms * 1000);
    }
    std::sort(times.begin(), times.end());
    return times;
  }

 private:
  static constexpr size_t kFlush = size_t{256} << 20;
  cudaStream_t stream_{};
  cudaEvent_t begin_{}, end_{};
  void* flush_{};
};

Json run_case(const GpuCase& c, const Options& options, Timer& timer) {
  const GpuData data(c);
  Exec exec{};
  exec.device = Device::cuda, exec.backend = options.backend.c_str(), exec.stream = timer.stream();
  exec.workspace_bytes = data.workspace_bytes(exec);
  must(cudaMalloc(&exec.workspace, exec.workspace_bytes + 256));
  cudaGraph_t graph{};
  cudaGraphExec_t runnable{};
  must(cudaStreamBeginCapture(timer.stream(), cudaStreamCaptureModeThreadLocal));
  data.call(exec);
  must(cudaStreamEndCapture(timer.stream(), &graph));
  must(cudaGraphInstantiate(&runnable, graph, 0));
  const std::vector<float> times = timer.replays(runnable, data.flop() > 1e13 ? 8 : 20);
  cudaGraphExecDestroy(runnable), cudaGraphDestroy(graph), cudaFree(exec.workspace);
  const double median = times[times.size() / 2];
  const double floor = std::max(data.bytes() / kBandwidth, data.flop() / kFp8) * 1e6;
  std::printf("%-15s H %2d  %5ld x %7ld  next_n %d  %9.1f us  floor %8.1f  must %7.1f  bf16 %4.0f %%\n", c.op.c_str(),
              c.heads, static_cast<long>(c.rows), static_cast<long>(c.keys), c.next_n, median, floor, c.must_us,
              100 * data.flop() / kBf16 / (median * 1e-6));
  std::fflush(stdout);
  const auto or_null = [](double x) { return x > 0 ? Json(x) : Json(nullptr); };
  const bool scored = c.heads > 0 && c.op != "empty";
  return {{"op", c.op},
          {"backend", options.backend},
          {"arithmetic", scored ? Json(arithmetic(exec.backend, KeyFormat::fp8, DType::f8_e4m3fn)) : Json(nullptr)},
          {"numerics", scored ? Json(numerics_version(exec.backend, KeyFormat::fp8)) : Json(nullptr)},
          {"format", "fp8"},
          {"heads", c.heads},
          {"head_dim", 128},
          {"rows", c.rows},
          {"keys", c.keys},
          {"next_n", c.next_n},
          {"topk", c.topk},
          {"pattern", "normal"},
          {"threads", nullptr},
          {"heat", "cold"},
          {"graph", true},
          {"median_us", median},
          {"min_us", times.front()},
          {"floor_us", or_null(floor)},
          {"fraction", or_null(floor / median)},
          {"peer", nullptr},
          {"peer_us", nullptr},
          {"must_us", or_null(c.must_us)},
          {"target_us", or_null(c.target_us)},
          {"workspace_bytes", exec.workspace_bytes},
          {"rescans", nullptr},
          {"util", nullptr}};
}

void run(const Options& options) {
  prepare(Device::cuda);
  cudaDeviceProp device{};
  must(cudaGetDeviceProperties(&device, 0));
  char date[32] = {};
  const std::time_t seconds = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&seconds));
  Json all = {{"device", device.name}, {"commit", options.commit}, {"date", date}};
  all["ceilings"] = {{"copy_tbytes", kBandwidth / 1e12}, {"fp8_tflops", kFp8 / 1e12}, {"bf16_tflops", kBf16 / 1e12}};
  Timer timer;
  for (const GpuCase& c : gpu_cases(options.quick)) all["rows"].push_back(run_case(c, options, timer));
  if (!options.json.empty()) std::ofstream(options.json) << all.dump(1) << "\n";
}

}  // namespace
}  // namespace topkey::bench

int main(int argc, char** argv) {
  topkey::bench::Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--quick") options.quick = true;
    if (word == "--backend" && i + 1 < argc) options.backend = argv[++i];
    if (word == "--json" && i + 1 < argc) options.json = argv[++i];
    if (word == "--commit" && i + 1 < argc) options.commit = argv[++i];
  }
  try {
    topkey::bench::run(options);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "topkey_gpu_bench: %s\n", e.what());
    return 1;
  }
  return 0;
}
