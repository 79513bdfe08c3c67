// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What Call's parts share: Settings, the metadata of a call; OutputMaker, which allocates the outputs that a trace asks
// for.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "support/call.h"

namespace topkey::support {

/// Metadata of the trace, replaced by the options where they have the key.
class Settings {
 public:
  Settings(const Trace& trace, const CallOptions& options) : trace_(trace), options_(options) {}
  bool has(const std::string& key) const;
  std::string text(const std::string& key, const std::string& fallback) const;
  int64_t number(const std::string& key, int64_t fallback) const;

 private:
  const Trace& trace_;
  const CallOptions& options_;
};

/// Rows.count where the trace does not give it; and the tensor that says so.
int64_t row_count(const CallArgs& args);

/// outputs(args) sets every output of `args`. Which of a selection's: metadata `out`, a list with commas ("indices" by
/// default; for expand_rows and to_slots all). `num_blocks` is the width of `blocks`; `logits_dtype` F32 or BF16;
/// `pages` the size of a cache that store_k, pool_k or compress_k is to make.
class OutputMaker {
 public:
  OutputMaker(const Settings& settings, uint64_t limit, std::map<std::string, TraceTensor>& outputs)
      : settings_(settings), room_(limit), outputs_(outputs) {}

  void outputs(ExpandRows& a);
  void outputs(ToSlots& a);
  void outputs(QuantizeQ& a);
  void outputs(QuantizeK& a);
  void outputs(StoreK& a);
  void outputs(GatherK& a);
  void outputs(MqaLogits& a);
  void outputs(PagedMqaLogits& a);
  void outputs(Topk& a);
  void outputs(SelectBlocks& a);
  void outputs(MqaTopk& a);
  void outputs(PagedMqaTopk& a);
  void outputs(MergeTopk& a);
  void outputs(PoolK& a);
  void outputs(CompressK& a);
  void outputs(ExpandPools& a);

 private:
  bool wants(const std::string& output, const char* otherwise = "indices") const;
  Tensor make(const std::string& name, DType dtype, std::vector<int64_t> shape);
  void selection(Selection& out, int64_t rows, int64_t topk, const std::string& taken);
  DenseKeys dense(KeyFormat format, int64_t rows, int64_t head_dim);
  DType logits_dtype() const;
  void cache(KeyCache& cache, const Tensor& slot_mapping);
  /// A copy of what is there, to be written over.
  Tensor state(const char* name, const Tensor& given);

  const Settings& settings_;
  uint64_t room_;
  std::map<std::string, TraceTensor>& outputs_;
};

}  // namespace topkey::support
