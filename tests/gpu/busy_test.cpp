// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Calls on a GPU that others use: half the SMs are held by a kernel in another stream, and two calls run at once. No
// call may wait for blocks of its own that cannot start.
#include <memory>

#include "tests/gpu/hold.h"
#include "tests/gpu/on_gpu.h"

namespace topkey::testing {
namespace {

constexpr double kHeldSeconds = 3;

/// Host memory that a kernel reads while it runs.
struct Flag {
  Flag() {
    must(cudaHostAlloc(&memory, sizeof(int), cudaHostAllocMapped));
    value = static_cast<int*>(memory);
    *value = 0;
  }
  ~Flag() { cudaFreeHost(memory); }
  Flag(const Flag&) = delete;
  Flag& operator=(const Flag&) = delete;
  void* memory = nullptr;
  volatile int* value = nullptr;
};

class Busy : public ::testing::TestWithParam<std::string> {};

TEST_P(Busy, TwoCallsFinishBesideAKernelThatHoldsHalfOfTheSms) {
  prepare(Device::cuda);
  int sms = 0;
  must(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  const struct { int64_t rows, requests, keys; } shapes[] = {{1, 1, 200000}, {64, 64, 8000}, {300, 1, 20000}};
  for (const auto& a : shapes) {
    for (const auto& b : shapes) {
      ProblemSpec first = decode_spec(), second = decode_spec();
      first.rows = a.rows, first.requests = static_cast<int32_t>(a.requests), first.keys = a.keys;
      second.rows = b.rows, second.requests = static_cast<int32_t>(b.requests), second.keys = b.keys, second.seed = 2;
      GpuSearch one(first, 300), two(second, 300);
      GpuSearch* both[] = {&one, &two};
      const Stream held, streams[2];
      Exec execs[2] = {on(GetParam()), on(GetParam())};
      std::vector<std::unique_ptr<GpuRoom>> rooms;
      std::vector<int32_t> alone[2];
      for (int i = 0; i < 2; ++i) {
        execs[i].stream = streams[i].stream;
        // The SMs that are left: blocks of one kernel may wait for each other, so all of them must find a place.
        execs[i].max_sms = sms - sms / 2;
        rooms.push_back(std::make_unique<GpuRoom>(both[i]->args, execs[i]));
        paged_mqa_topk(both[i]->args, execs[i]);
        streams[i].wait();
        alone[i] = both[i]->indices.ints();
        both[i]->indices.poison();
      }
      must(cudaDeviceSynchronize());
      const Flag release;
      must(hold_sms(sms / 2, release.value, kHeldSeconds, held.stream));
      for (int i = 0; i < 2; ++i) paged_mqa_topk(both[i]->args, execs[i]);
      for (int i = 0; i < 2; ++i) streams[i].wait();
      // Had they waited for the held SMs, that kernel would have come to its end first.
      EXPECT_EQ(cudaStreamQuery(held.stream), cudaErrorNotReady) << a.keys << " and " << b.keys;
      *release.value = 1;
      held.wait();
      for (int i = 0; i < 2; ++i) EXPECT_EQ(alone[i], both[i]->indices.ints()) << a.keys << " and " << b.keys;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Busy, ::testing::ValuesIn(gpu_backends()), backend_label);

}  // namespace
}  // namespace topkey::testing
