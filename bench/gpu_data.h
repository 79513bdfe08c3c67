// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Device memory of one benchmark case, its call, and a look at what the call wrote.
#pragma once
#include <string>
#include <vector>

#include "bench/gpu_cases.h"
#include "support/array.h"
#include "topkey/topkey.h"

namespace topkey::bench {

class GpuData {
 public:
  explicit GpuData(const GpuCase& c);
  ~GpuData();
  GpuData(const GpuData&) = delete;
  GpuData& operator=(const GpuData&) = delete;

  /// One call, asynchronous.
  void call(const Exec& exec) const;
  size_t workspace_bytes(const Exec& exec) const;
  /// Why the backend cannot; null: it can.
  const char* unsupported(const Exec& exec) const;
  /// Empty, or what is wrong with what the last call wrote: a call that does nothing must not look fast.
  std::string wrong() const;
  /// All outputs hold poison again.
  void poison();

  /// The arguments of a search, by its operation.
  const PagedMqaTopk& paged() const { return paged_; }
  const MqaTopk& dense() const { return dense_; }
  double bytes() const { return bytes_; }  ///< least that must be read and written
  double flop() const { return flop_; }
  double pairs() const { return pairs_; }  ///< (row, key) pairs to be scored

 private:
  struct Written {
    Tensor tensor;
    const char* name;
  };
  void* take(size_t bytes, int fill);
  Tensor make(DType dtype, std::initializer_list<int64_t> shape, int fill);
  Tensor output(DType dtype, std::initializer_list<int64_t> shape, const char* name);
  Tensor upload(const std::vector<int32_t>& values);
  Tensor upload(const std::vector<float>& values);
  KeyCache pages(int64_t count, bool filled);
  std::vector<int32_t> request_lengths() const;
  std::vector<float> key_scales(int64_t keys) const;
  void make_decode(), make_prefill(), make_select(), make_producer(), make_search_parts(Admit&admit, Selection&out);
  Query query();
  std::string wrong_rows(const Tensor& t, bool blocks) const;
  std::string wrong_bytes(const Tensor& t) const;
  std::string wrong_choice() const;

  const GpuCase case_;
  std::vector<void*> memory_;
  std::vector<Written> written_;
  std::vector<int32_t> ends_;   ///< of each row
  std::vector<int32_t> order_;  ///< pages, as the requests use them
  PagedMqaTopk paged_{};
  MqaTopk dense_{};
  Topk select_{};
  SelectBlocks blocks_{};
  StoreK store_{};
  QuantizeQ quantize_{};
  GatherK gather_{};
  PoolK pool_{};
  double bytes_ = 0, flop_ = 0, pairs_ = 0;
};

}  // namespace topkey::bench
