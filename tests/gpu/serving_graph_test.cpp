// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The serving test as an engine with CUDA graphs runs it: the layers' step is captured once, in the first step of the day,
// for as many rows, keys and requests as any step may have, and replayed for every step of it. Only contents of device
// memory change: lengths, requests, slots, tables, queries, keys.
#include <memory>

#include "tests/gpu/on_gpu.h"
#include "tests/serving_day.h"

namespace topkey::testing {
namespace {

struct Range {
  Tensor* tensor;
  bool output;
  uint8_t* first;
  size_t bytes;
};

/// Every tensor of a step that is there.
std::vector<Range> tensors_of(IndexerStep& step) {
  std::vector<Range> list;
  bool output = false;
  const auto add = [&](Tensor& t) {
    if (t.data == nullptr) return;
    int64_t reach = 1;
    for (int32_t d = 0; d < t.ndim; ++d) {
      if (t.shape[d] == 0) return;
      reach += (t.shape[d] - 1) * t.stride[d];
    }
    list.push_back({&t, output, static_cast<uint8_t*>(t.data), static_cast<size_t>(reach) * dtype_bytes(t.dtype)});
  };
  EachTensor each{add};
  for (Tensor* t : {&step.k, &step.k_scales, &step.slot_mapping}) add(*t);
  fields(each, step.norm), fields(each, step.rope), fields(each, step.q), fields(each, step.rows);
  add(step.keys.block_table), add(step.out.index_base), add(step.out.slot_map.block_table);
  output = true;
  add(step.keys.cache.pages), add(step.candidates);
  output_fields(each, step.out);
  return list;
}

/// Device memory of a day's steps, and the graph over it.
class Replays {
 public:
  void forward(const std::vector<LayerCall>& calls, const Exec& exec) {
    std::vector<LayerCall> own = calls;
    std::vector<Range> ranges;
    for (LayerCall& call : own) {
      for (const Range& r : tensors_of(call.step)) ranges.push_back(r);
    }
    if (graph_ == nullptr) capture(own, ranges, exec);
    ASSERT_EQ(ranges.size(), place_.size());
    for (size_t i = 0; i < ranges.size(); ++i) {
      ASSERT_EQ(ranges[i].bytes, pieces_[place_[i]]->size()) << "a step of another shape cannot be replayed";
      pieces_[place_[i]]->put(ranges[i].first, ranges[i].bytes);
    }
    stats_->put(exec.stats, stats_->size());
    graph_->replay();
    for (size_t i = 0; i < ranges.size(); ++i) {
      const std::vector<uint8_t> bytes = pieces_[place_[i]]->get<uint8_t>(ranges[i].bytes);
      if (outputs_[place_[i]]) {
        std::memcpy(ranges[i].first, bytes.data(), bytes.size());
      } else {
        ASSERT_EQ(std::memcmp(ranges[i].first, bytes.data(), bytes.size()), 0) << "the step wrote to an input";
      }
    }
    const std::vector<uint64_t> counts = stats_->get<uint64_t>(kNumStats);
    std::copy(counts.begin(), counts.end(), exec.stats);
    ++replays;
  }
  int replays = 0;

 private:
  void capture(std::vector<LayerCall>& calls, const std::vector<Range>& ranges, Exec exec) {
    std::vector<uint8_t*> known;
    for (const Range& r : ranges) {
      const auto at = static_cast<size_t>(std::find(known.begin(), known.end(), r.first) - known.begin());
      if (at == known.size()) {
        known.push_back(r.first), outputs_.push_back(false);
        pieces_.push_back(std::make_unique<GpuBytes>(r.bytes));
      }
      outputs_[at] = outputs_[at] || r.output;
      place_.push_back(at);
      r.tensor->data = pieces_[at]->data();
    }
    stats_ = std::make_unique<GpuBytes>(kNumStats * sizeof(uint64_t));
    workspace_ = std::make_unique<GpuBytes>(exec.workspace_bytes);
    exec.stats = reinterpret_cast<uint64_t*>(stats_->data());
    exec.workspace = workspace_->data(), exec.stream = stream_.stream;
    prepare(Device::cuda);
    graph_ = std::make_unique<GraphOf>(stream_, [&] {
      for (const LayerCall& call : calls) call.indexer->forward(call.step, exec);
    });
  }

  Stream stream_;
  std::vector<std::unique_ptr<GpuBytes>> pieces_;
  std::vector<bool> outputs_;
  std::vector<size_t> place_;  ///< piece of each tensor: some share one
  std::unique_ptr<GpuBytes> stats_, workspace_;
  std::unique_ptr<GraphOf> graph_;
};

class ServingGraph : public ::testing::TestWithParam<std::string> {};

TEST_P(ServingGraph, OneGraphServesEveryStepOfADay) {
  int lived = 0;
  for (const Geometry& geometry : geometries()) {
    Replays replays;
    const bool takes = live_through(
        geometry, GetParam(),
        [&](const std::vector<LayerCall>& calls, const Exec& exec) { replays.forward(calls, exec); }, true);
    if (HasFailure()) return;
    lived += takes;
    EXPECT_EQ(replays.replays, takes ? 200 : 0);
  }
  EXPECT_GE(lived, 1);
}

INSTANTIATE_TEST_SUITE_P(Backends, ServingGraph, ::testing::ValuesIn(gpu_backends()), backend_label);

}  // namespace
}  // namespace topkey::testing
