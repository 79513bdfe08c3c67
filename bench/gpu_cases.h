// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The calls that a GPU's benchmark times: rows of decode and prefill as data, and what each must reach.
#pragma once
#include <string>
#include <vector>

#include "topkey/topkey.h"

namespace topkey::bench {

struct GpuCase {
  std::string op;  ///< paged_mqa_topk, mqa_topk (causal: the last rows of the keys), topk, store_k, empty
  int32_t heads = 64;
  int64_t rows = 1, keys = 8192;
  int32_t next_n = 1, topk = 2048;
  double must_us = 0, target_us = 0;  ///< 0 = none set
};
std::vector<GpuCase> gpu_cases(bool quick);

/// Device memory of one case: random normal fp8 data, D = 128, pages of 64 keys in shuffled order.
class GpuData {
 public:
  explicit GpuData(const GpuCase& c);
  ~GpuData();
  GpuData(const GpuData&) = delete;
  GpuData& operator=(const GpuData&) = delete;

  /// One call, asynchronous.
  void call(const Exec& exec) const;
  size_t workspace_bytes(const Exec& exec) const;
  double bytes() const { return bytes_; }  ///< least that must be read
  double flop() const { return flop_; }

 private:
  void* take(size_t bytes, int fill);
  Tensor make(DType dtype, std::initializer_list<int64_t> shape, int fill);

  const GpuCase& case_;
  std::vector<void*> memory_;
  PagedMqaTopk paged_{};
  MqaTopk dense_{};
  Topk select_{};
  StoreK store_{};
  double bytes_ = 0, flop_ = 0;
};

}  // namespace topkey::bench
