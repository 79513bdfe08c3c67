// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Any call as a trace: the input chooses an operation and gives it tensors and numbers of every kind, most of them
// wrong. Each usable host backend must answer with a result or a worded error. Where trace_fuzz attacks the file
// format, this one goes past it.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "support/call.h"
#include "support/trace.h"

namespace {

using namespace topkey;
constexpr uint64_t kMaxOutput = uint64_t{1} << 20;
constexpr int64_t kMaxElements = 4096;

const char* const kTensors[] = {"q",
                                "q_scale",
                                "weights",
                                "keys",
                                "key_scale",
                                "cache",
                                "block_table",
                                "row_request",
                                "lens",
                                "ends",
                                "starts",
                                "q_indptr",
                                "candidates",
                                "mask",
                                "index_base",
                                "slot_map.block_table",
                                "scores",
                                "indices",
                                "row_topk",
                                "query_start",
                                "seq_lens",
                                "k",
                                "k_scales",
                                "positions",
                                "rope.cos_sin",
                                "norm.weight",
                                "norm.bias",
                                "slot_mapping",
                                "indptr"};
const char* const kNumbers[] = {"topk",
                                "page_size",
                                "head_dim",
                                "next_n",
                                "max_len",
                                "count",
                                "candidate_block",
                                "force_first",
                                "force_last",
                                "block_size",
                                "num_blocks",
                                "slot_map.page_size",
                                "slot_map.table_per_row",
                                "table_per_row",
                                "shard.rank",
                                "shard.world_size",
                                "shard.interleave",
                                "ratio",
                                "capacity",
                                "compact",
                                "total",
                                "clean",
                                "rope.dim",
                                "rope.interleaved",
                                "rope.trailing",
                                "hadamard",
                                "pages",
                                "page_stride",
                                "fill_value",
                                "softmax_scale",
                                "norm.eps"};
struct Word {
  const char* key;
  std::vector<const char*> values;
};
const std::vector<Word>& words() {
  static const std::vector<Word> kWords = {
      {"format", {"fp8", "mxfp4", "bf16", "f16", "f32", "q8_0"}},
      {"layout", {"planar", "interleaved"}},
      {"order", {"position", "score", "any"}},
      {"fill", {"minus_one", "repeat", "value"}},
      {"norm.kind", {"none", "layer", "rms"}},
      {"scale", {"ue8m0", "f32"}},
      {"rule",
       {"automatic", "v32_key", "v32_query", "v4_query", "v4_key", "kpool_query", "kpool_key", "cpu_query", "q8_0"}},
      {"out", {"indices", "indices,slots,scores,counts,blocks", "slots", "scores", "indices,blocks"}},
      {"logits_dtype", {"F32", "BF16"}}};
  return kWords;
}

support::TraceTensor any_tensor(FuzzedDataProvider& data) {
  static const char* const kDTypes[] = {"F32", "F32",  "BF16", "F16", "F8_E4M3", "U8",
                                        "U8",  "BOOL", "I32",  "I32", "I64"};
  const char* dtype = data.PickValueInArray(kDTypes);
  std::vector<int64_t> shape;
  int64_t elements = 1;
  for (int dims = data.ConsumeIntegralInRange(0, 4); dims > 0; --dims) {
    shape.push_back(data.ConsumeIntegralInRange<int64_t>(0, 8) * (data.ConsumeBool() ? 1 : 16));
    elements *= std::max<int64_t>(1, shape.back());
  }
  if (elements > kMaxElements) shape = {4};
  support::TraceTensor tensor = support::make_tensor(dtype, shape);
  const std::vector<uint8_t> bytes =
      data.ConsumeBytes<uint8_t>(std::min<size_t>(tensor.bytes.size(), data.ConsumeIntegralInRange<size_t>(0, 64)));
  for (size_t i = 0; i < tensor.bytes.size() && !bytes.empty(); ++i)
    tensor.bytes[i] = static_cast<std::byte>(bytes[i % bytes.size()]);
  return tensor;
}

support::Trace any_trace(FuzzedDataProvider& data) {
  support::Trace trace;
  static const std::vector<std::string> kOps = support::operation_names();
  trace.metadata["op"] = kOps[data.ConsumeIntegralInRange<size_t>(0, kOps.size() - 1)];
  while (data.remaining_bytes() > 0) {
    switch (data.ConsumeIntegralInRange(0, 3)) {
      case 0: {
        const Word& word = words()[data.ConsumeIntegralInRange<size_t>(0, words().size() - 1)];
        trace.metadata[word.key] = word.values[data.ConsumeIntegralInRange<size_t>(0, word.values.size() - 1)];
        break;
      }
      case 1: {
        const bool small = data.ConsumeIntegralInRange(0, 7) > 0;
        const int64_t value = small ? data.ConsumeIntegralInRange<int64_t>(0, 40) : data.ConsumeIntegral<int64_t>();
        trace.metadata[data.PickValueInArray(kNumbers)] = std::to_string(value);
        break;
      }
      default: trace.tensors.insert_or_assign(data.PickValueInArray(kTensors), any_tensor(data));
    }
  }
  return trace;
}

void run_everywhere(const support::Call& call) {
  for (const BackendInfo& backend : backends()) {
    if (backend.device != Device::cpu || !backend.unusable.empty()) continue;
    Exec exec{};
    exec.backend = backend.name.c_str();
    exec.threads = 1;
    try {
      call.run(exec);
    } catch (const Error&) {
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  FuzzedDataProvider data(bytes, size);
  try {
    auto trace = std::make_shared<const support::Trace>(any_trace(data));
    support::CallOptions options;
    options.max_output_bytes = kMaxOutput;
    const support::Call call(std::move(trace), options);
    run_everywhere(call);
    support::trace_of(call.args());
  } catch (const support::TraceError&) {
  }
  return 0;
}
