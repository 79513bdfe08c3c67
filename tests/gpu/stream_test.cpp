// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What only a GPU has: captured calls and their replays, a budget of SMs, errors that leave a capture valid. Device
// memory is the test's own here; all else runs in the stage tests, on copies.
#include <cuda_runtime_api.h>

#include <cstring>

#include "tests/backend_test.h"

namespace topkey::testing {
namespace {

void must(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

/// Host data on the device, for as long as it lives.
class OnGpu {
 public:
  explicit OnGpu(const Array& host) : host_(host), view_(host.view()) {
    must(cudaMalloc(&view_.data, host.bytes() + 1));
    upload();
  }
  ~OnGpu() { cudaFree(view_.data); }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;
  const Tensor& view() const { return view_; }
  void upload() const { must(cudaMemcpy(view_.data, host_.view().data, host_.bytes(), cudaMemcpyHostToDevice)); }
  std::vector<int32_t> ints() const {
    std::vector<int32_t> values(static_cast<size_t>(host_.size()));
    must(cudaMemcpy(values.data(), view_.data, values.size() * 4, cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  const Array host_;
  Tensor view_;
};

struct Stream {
  Stream() { must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream); }
  cudaStream_t stream{};
};

/// A paged search with everything on the device.
struct Search {
  explicit Search(const ProblemSpec& spec, int32_t topk)
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
    args.keys.cache.pages.data = static_cast<uint8_t*>(pages.view().data);
    args.keys.block_table.data = table.view().data;
    args.rows.end.data = end.view().data, args.rows.request.data = request.view().data;
    args.out.indices = indices.view();
  }
  Problem problem;
  OnGpu q, weights, pages, table, end, request, indices;
  PagedMqaTopk args;
};

ProblemSpec decode_spec() {
  ProblemSpec spec;
  spec.paged = true, spec.rows = 6, spec.requests = 6, spec.keys = 3000, spec.pattern = Pattern::few_mantissa_bits;
  return spec;
}

struct Room {
  Room(const PagedMqaTopk& args, Exec& exec) {
    exec.workspace_bytes = paged_mqa_topk_workspace_bytes(args, exec);
    must(cudaMalloc(&data, exec.workspace_bytes + 1));
    exec.workspace = data;
  }
  ~Room() { cudaFree(data); }
  void* data{};
};

class OnStream : public ::testing::TestWithParam<std::string> {};

TEST_P(OnStream, AReplayFollowsTheLengthsThatItFinds) {
  prepare(Device::cuda);
  Search s(decode_spec(), 64);
  Stream stream;
  Exec exec = on(GetParam());
  exec.stream = stream.stream;
  const Room room(s.args, exec);
  cudaGraph_t graph{};
  cudaGraphExec_t runnable{};
  must(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeThreadLocal));
  paged_mqa_topk(s.args, exec);
  must(cudaStreamEndCapture(stream.stream, &graph));
  must(cudaGraphInstantiate(&runnable, graph, 0));
  for (const int32_t shorter : {0, 1, 700, 2990, 100000}) {
    for (int64_t r = 0; r < s.problem.count(); ++r) {
      int32_t& end = s.problem.end.as<int32_t>()[r];
      end = std::max(0, end - (r % 2 == 0 ? shorter : 0));
    }
    s.end.upload();
    must(cudaGraphLaunch(runnable, stream.stream));
    must(cudaStreamSynchronize(stream.stream));
    const std::vector<int32_t> replayed = s.indices.ints();
    must(cudaMemset(s.indices.view().data, 0xA5, replayed.size() * 4));
    paged_mqa_topk(s.args, exec);
    must(cudaStreamSynchronize(stream.stream));
    EXPECT_EQ(replayed, s.indices.ints()) << shorter;
  }
  cudaGraphExecDestroy(runnable), cudaGraphDestroy(graph);
}

TEST_P(OnStream, AnArgumentErrorLeavesACaptureOpen) {
  prepare(Device::cuda);
  Search s(decode_spec(), 64);
  Stream stream;
  Exec exec = on(GetParam());
  exec.stream = stream.stream;
  const Room room(s.args, exec);
  must(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeThreadLocal));
  PagedMqaTopk wrong = s.args;
  wrong.topk = -1;
  EXPECT_EQ(thrown_by([&] { paged_mqa_topk(wrong, exec); }).status, Status::invalid_argument);
  paged_mqa_topk(s.args, exec);
  cudaGraph_t graph{};
  must(cudaStreamEndCapture(stream.stream, &graph));
  size_t nodes = 0;
  must(cudaGraphGetNodes(graph, nullptr, &nodes));
  EXPECT_GT(nodes, 0u);
  cudaGraphDestroy(graph);
}

TEST_P(OnStream, ABudgetOfSmsChangesNoBit) {
  for (const bool prefill : {false, true}) {
    ProblemSpec spec = decode_spec();
    if (prefill) spec.rows = 200, spec.requests = 2, spec.windows = Windows::causal;
    Search s(spec, 100);
    Exec exec = on(GetParam());
    const Room room(s.args, exec);
    std::vector<int32_t> first;
    for (const int32_t sms : {0, 1, 17, 78}) {
      exec.max_sms = sms;
      must(cudaMemset(s.indices.view().data, 0xA5, static_cast<size_t>(s.problem.count()) * 400));
      paged_mqa_topk(s.args, exec);
      must(cudaDeviceSynchronize());
      if (sms == 0) first = s.indices.ints();
      EXPECT_EQ(first, s.indices.ints()) << sms;
    }
  }
}

TEST_P(OnStream, AThousandRunsGiveTheSameBits) {
  for (const Pattern pattern : {Pattern::all_equal, Pattern::nans, Pattern::relu_plateau, Pattern::few_mantissa_bits}) {
    ProblemSpec spec = decode_spec();
    spec.pattern = pattern;
    Search s(spec, 200);
    Exec exec = on(GetParam());
    const Room room(s.args, exec);
    std::vector<int32_t> first;
    for (int i = 0; i < 1000; ++i) {
      paged_mqa_topk(s.args, exec);
      if (i % 100 != 0) continue;
      must(cudaDeviceSynchronize());
      if (i == 0) first = s.indices.ints();
      ASSERT_EQ(first, s.indices.ints()) << pattern_name(pattern) << " " << i;
    }
  }
}

TEST_P(OnStream, StrictAndUnknownDevicesAreRefused) {
  Search s(decode_spec(), 64);
  Exec exec = on(GetParam());
  exec.strict = true;
  EXPECT_EQ(thrown_by([&] { paged_mqa_topk(s.args, exec); }).status, Status::unsupported);
  exec.strict = false;
  const Room room(s.args, exec);
  exec.device_id = 4000;
  EXPECT_EQ(thrown_by([&] { paged_mqa_topk(s.args, exec); }).status, Status::invalid_argument);
}

INSTANTIATE_TEST_SUITE_P(Backends, OnStream, ::testing::ValuesIn(gpu_backends()), backend_label);

}  // namespace
}  // namespace topkey::testing
