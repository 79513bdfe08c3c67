// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See gpu_data.h: what a timed call wrote. The tests say whether it is right; this says that it was done.
#include <algorithm>
#include <cstdint>
#include <functional>

#include "bench/gpu_data.h"
#include "bench/gpu_must.h"

namespace topkey::bench {
namespace {

constexpr int32_t kPoison = static_cast<int32_t>(0xA5A5A5A5);

std::vector<int32_t> row_of(const Tensor& t, int64_t row) {
  std::vector<int32_t> values(static_cast<size_t>(t.shape[1]));
  must(cudaMemcpy(values.data(), static_cast<int32_t*>(t.data) + row * t.stride[0], values.size() * 4,
                  cudaMemcpyDeviceToHost));
  return values;
}

/// So many first entries ascend inside [0, end), and the others are -1.
std::string ascending(const std::vector<int32_t>& row, size_t count, int32_t end) {
  for (size_t i = 0; i < row.size(); ++i) {
    const int32_t x = row[i];
    if (i >= count ? x == -1 : x >= 0 && x < end && (i == 0 || x > row[i - 1])) continue;
    return "entry " + std::to_string(i) + " of " + std::to_string(count) + " is " +
           (x == kPoison ? "not written" : std::to_string(x));
  }
  return {};
}

}  // namespace

void GpuData::poison() {
  for (const Written& w : written_) {
    size_t bytes = support::dtype_bytes(w.tensor.dtype);
    for (int32_t d = 0; d < w.tensor.ndim; ++d) bytes *= static_cast<size_t>(w.tensor.shape[d]);
    must(cudaMemset(w.tensor.data, 0xA5, bytes));
  }
  must(cudaDeviceSynchronize());
}

std::string GpuData::wrong_rows(const Tensor& t, bool blocks) const {
  constexpr int64_t kLook = 24;
  for (int64_t i = 0; i < std::min<int64_t>(kLook, case_.rows); ++i) {
    const int64_t r = case_.rows <= kLook ? i : i * (case_.rows - 1) / (kLook - 1);
    const int32_t end = ends_[static_cast<size_t>(r)], last = blocks ? (end + 7) / 8 : end;
    const int64_t live = case_.admitted > 0 ? case_.admitted * 8 : last;
    const std::vector<int32_t> row = row_of(t, r);
    std::string fault = ascending(row, static_cast<size_t>(std::min(live, t.shape[1])), last);
    if (fault.empty() && blocks && std::find(row.begin(), row.end(), last - 1) == row.end())
      fault = "the newest block is not there";
    if (!fault.empty()) return "row " + std::to_string(r) + ": " + fault;
  }
  return {};
}

/// Given scores: no score that was left out of the first row is better than one that is in it.
std::string GpuData::wrong_choice() const {
  const Tensor& t = select_.scores;
  std::vector<float> scores(static_cast<size_t>(t.shape[1]));
  must(cudaMemcpy(scores.data(), t.data, scores.size() * 4, cudaMemcpyDeviceToHost));
  float least = scores[0];
  const std::vector<int32_t> row = row_of(select_.out.indices, 0);
  for (size_t i = 0; i < row.size(); ++i) {
    const float x = scores[static_cast<size_t>(row[i])];
    least = i == 0 ? x : std::min(least, x);
  }
  const auto better = std::count_if(scores.begin(), scores.end(), [&](float x) { return x > least; });
  return better < static_cast<int64_t>(row.size()) ? "" : "row 0: " + std::to_string(better) + " better than the worst";
}

std::string GpuData::wrong_bytes(const Tensor& t) const {
  std::vector<uint8_t> bytes(support::dtype_bytes(t.dtype));
  for (int32_t d = 0; d < t.ndim; ++d) bytes.resize(bytes.size() * static_cast<size_t>(t.shape[d]));
  must(cudaMemcpy(bytes.data(), t.data, bytes.size(), cudaMemcpyDeviceToHost));
  const auto poison = std::count(bytes.begin(), bytes.end(), uint8_t{0xA5});
  return poison * 4 < static_cast<int64_t>(bytes.size()) ? "" : std::to_string(poison) + " bytes were not written";
}

std::string GpuData::wrong() const {
  must(cudaDeviceSynchronize());
  for (const Written& w : written_) {
    const std::string name = w.name;
    const bool blocks = name == "blocks";
    std::string fault = blocks || name == "indices" ? wrong_rows(w.tensor, blocks) : wrong_bytes(w.tensor);
    if (fault.empty() && case_.op == "topk") fault = wrong_choice();
    if (!fault.empty()) return name + ": " + fault;
  }
  return {};
}

}  // namespace topkey::bench
