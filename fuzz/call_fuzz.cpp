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
#include "support/problem.h"
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
                                "indptr",
                                "gate",
                                "ape",
                                "tail",
                                "tail_slots",
                                "kv",
                                "score",
                                "state",
                                "state_slots",
                                "state_table",
                                "rms_weight",
                                "cos_sin",
                                "pools"};
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
                                "norm.eps",
                                "pool_size"};
struct Word {
  const char* key;
  std::vector<const char*> values;
};
const std::vector<Word>& words() {
  static const std::vector<Word> kWords = {
      {"format", {"fp8", "mxfp4", "bf16", "f16", "f32", "q8_0", "fp8_fnuz"}},
      {"layout", {"planar", "interleaved", "tiled16", "tiled32", "tiled64"}},
      {"order", {"position", "score", "any"}},
      {"fill", {"minus_one", "repeat", "value"}},
      {"norm.kind", {"none", "layer", "rms"}},
      {"scale", {"ue8m0", "f32"}},
      {"rule",
       {"automatic", "v32_key", "v32_query", "v4_query", "v4_key", "kpool_query", "kpool_key", "cpu_query", "mxfp4",
        "q8_0"}},
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

/// Tensors that some operation around the score takes as they are; the scoring operations come from a Problem.
support::Trace base_of_stage(const std::string& op, KeyFormat format) {
  support::Trace trace;
  const auto put = [&](const char* name, const char* dtype, std::vector<int64_t> shape) {
    support::TraceTensor& tensor = trace.tensors[name] = support::make_tensor(dtype, std::move(shape));
    for (size_t i = 0; i < tensor.bytes.size(); ++i)
      tensor.bytes[i] = static_cast<std::byte>(i % 4 == 0 ? i / 4 % 3 : 0);
  };
  const bool merges = op == "merge_topk";
  put("scores", "F32", merges ? std::vector<int64_t>{2, 3, 4} : std::vector<int64_t>{3, 8});
  put("indices", "I32", merges ? std::vector<int64_t>{2, 3, 4} : std::vector<int64_t>{3, 4});
  put("query_start", "I32", {3}), put("seq_lens", "I32", {2}), put("block_table", "I32", {3, 3});
  put("q", "F32", {2, 2, 32}), put("weights", "F32", {2, 2}), put("k", "F32", {5, 32}), put("slot_mapping", "I32", {5});
  trace.metadata = {{"topk", "3"},      {"block_size", "2"}, {"num_blocks", "2"},
                    {"page_size", "4"}, {"head_dim", "32"},  {"capacity", "4"}};
  trace.metadata["format"] = format_name(format);
  put("positions", "I32", {5}), put("ape", "F32", {2, op == "compress_k" ? 64 : 32});
  if (op == "pool_k") {
    put("k", "BF16", {5, 32}), put("gate", "BF16", {5, 32}), put("q_indptr", "I32", {3});
    put("tail", "BF16", {2, 2, 4, 32}), put("tail_slots", "I32", {5});
    trace.metadata["pool_size"] = "2";
  } else if (op == "compress_k") {
    put("kv", "F32", {5, 64}), put("score", "F32", {5, 64}), put("state", "F32", {2, 4, 128});
    put("state_slots", "I32", {5}), put("rms_weight", "F32", {32}), put("cos_sin", "F32", {4, 8});
  } else if (op == "expand_pools") {
    put("pools", "I32", {5, 2});
    trace.metadata["pool_size"] = "3";
  }
  return trace;
}

support::Trace base_of(const std::string& op, KeyFormat format) {
  if (op.find("mqa") == std::string::npos && op != "gather_k") return base_of_stage(op, format);
  support::ProblemSpec spec;
  spec.format = format;
  spec.heads = 2, spec.rows = 4, spec.keys = 20, spec.requests = 2, spec.page_size = 4, spec.exact = true;
  spec.paged = op.rfind("mqa", 0) != 0;
  const support::Problem p = support::make_problem(spec);
  const int32_t indptr[] = {0, 2, 5};
  GatherK gather{};
  if (op == "mqa_logits") return support::trace_of(p.dense_logits({}));
  if (op == "mqa_topk") return support::trace_of(p.dense_search(5, {}));
  gather.keys = p.paged_keys();
  gather.indptr = tensor(indptr, DType::i32, {3});
  if (op == "gather_k") return support::trace_of(gather);
  return op == "paged_mqa_logits" ? support::trace_of(p.paged_logits({})) : support::trace_of(p.paged_search(5, {}));
}

void change(support::Trace& trace, FuzzedDataProvider& data) {
  switch (data.ConsumeIntegralInRange(0, 5)) {
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
    case 2: trace.tensors.insert_or_assign(data.PickValueInArray(kTensors), any_tensor(data)); break;
    case 3: trace.tensors.erase(data.PickValueInArray(kTensors)); break;
    default: {  // other contents, or another shape of as many elements
      const auto place = trace.tensors.find(data.PickValueInArray(kTensors));
      if (place == trace.tensors.end() || place->second.bytes.empty()) break;
      support::TraceTensor& tensor = place->second;
      if (data.ConsumeIntegralInRange(0, 7) == 0 && tensor.shape.size() > 1)
        std::swap(tensor.shape[0], tensor.shape[1]);
      const auto at = data.ConsumeIntegralInRange<size_t>(0, tensor.bytes.size() - 1);
      const std::vector<uint8_t> bytes = data.ConsumeBytes<uint8_t>(data.ConsumeIntegralInRange<size_t>(0, 16));
      for (size_t i = 0; i < bytes.size(); ++i)
        tensor.bytes[(at + i) % tensor.bytes.size()] = static_cast<std::byte>(bytes[i]);
    }
  }
}

support::Trace any_trace(FuzzedDataProvider& data) {
  static const std::vector<std::string> kOps = support::operation_names();
  static constexpr KeyFormat kFormats[] = {KeyFormat::fp8, KeyFormat::mxfp4, KeyFormat::bf16,    KeyFormat::f16,
                                           KeyFormat::f32, KeyFormat::q8_0,  KeyFormat::fp8_fnuz};
  const std::string op = kOps[data.ConsumeIntegralInRange<size_t>(0, kOps.size() - 1)];
  support::Trace trace = base_of(op, data.PickValueInArray(kFormats));
  trace.metadata["op"] = op;
  trace.metadata["out"] = "indices,scores,counts";
  while (data.remaining_bytes() > 0) change(trace, data);
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
