// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See bench_producers.h.
#include "bench_producers.h"

#include <fmt/format.h>

#include <algorithm>

#include "support/run.h"

namespace topkey::cli {
namespace {

constexpr int32_t kDim = 128, kRope = 64, kPositions = 4096;

/// 64 heads of 128; pages of 64; bf16 in.
ProducerCase producer(const std::string& op, int64_t units, KeyFormat format) {
  ProducerCase c;
  c.name = fmt::format("{} {}, {}", op, units, format_name(format));
  c.sample.op = op;
  support::ProblemSpec& spec = c.sample.spec;
  spec.heads = op == "quantize_q" ? 64 : 1, spec.head_dim = kDim, spec.page_size = 64, spec.format = format;
  spec.rows = op == "quantize_q" || op == "expand_pools" ? units : 1;
  spec.keys = units;
  return c;
}

ProducerCase with_steps(ProducerCase c) {
  c.name += c.sample.op == "quantize_q" ? ", rope, Hadamard" : ", norm, rope, Hadamard";
  c.steps = true;
  return c;
}

void add_steps(const std::string& op, int64_t units, support::Trace& trace) {
  support::TraceTensor table = support::make_tensor("F32", {kPositions, kRope}),
                       positions = support::make_tensor("I32", {units});
  support::Random random(11);
  for (int64_t i = 0; i < table.count(); ++i) table.as<float>()[i] = random.normal();
  for (int64_t i = 0; i < units; ++i) positions.as<int32_t>()[i] = static_cast<int32_t>(i % kPositions);
  trace.tensors["rope.cos_sin"] = table, trace.tensors["positions"] = positions;
  trace.metadata["rope.dim"] = std::to_string(kRope);
  trace.metadata["hadamard"] = "1";
  if (op == "quantize_q") return;
  support::TraceTensor weight = support::make_tensor("F32", {kDim});
  std::fill_n(weight.as<float>(), kDim, 1.0F);
  trace.tensors["norm.weight"] = weight;
  trace.metadata["norm.kind"] = "layer", trace.metadata["norm.eps"] = "1e-06";
}

/// Inputs but for tables of cos and sin, of which few rows stay in a cache, and outputs.
double bytes_moved(const support::Call& call) {
  double bytes = 0;
  for (const auto& [name, tensor] : call.trace().tensors) {
    if (name.find("cos_sin") == std::string::npos) bytes += static_cast<double>(tensor.bytes.size());
  }
  for (const auto& [name, tensor] : call.outputs()) bytes += static_cast<double>(tensor.bytes.size());
  return bytes;
}

}  // namespace

std::vector<ProducerCase> producer_cases(bool quick) {
  const int64_t scale = quick ? 64 : 1;
  std::vector<ProducerCase> cases;
  for (const KeyFormat format : {KeyFormat::fp8, KeyFormat::mxfp4}) {
    const ProducerCase queries = producer("quantize_q", 4096 / scale, format),
                       store = producer("store_k", 262144 / scale, format);
    cases.push_back(queries), cases.push_back(with_steps(queries));
    cases.push_back(producer("quantize_k", 262144 / scale, format));
    cases.push_back(store), cases.push_back(with_steps(store));
    cases.push_back(producer("gather_k", 262144 / scale, format));
    cases.push_back(producer("pool_k", 131072 / scale, format));
    cases.push_back(producer("compress_k", 65536 / scale, format));
    cases.push_back(with_steps(producer("store_k", 64, format)));  // a step of decode
  }
  ProducerCase expand = producer("expand_pools", 4096 / scale, KeyFormat::fp8);
  expand.name = fmt::format("expand_pools {}", 4096 / scale);
  expand.sample.topk = 512, expand.sample.spec.keys = 1 << 18;
  cases.push_back(expand);
  return cases;
}

std::shared_ptr<ProducerCall> prepare_producer(const ProducerCase& c, const std::string& backend, int threads) {
  const auto trace = std::make_shared<support::Trace>(make_sample(c.sample));
  const bool queries = c.sample.op == "quantize_q" || c.sample.op == "expand_pools";
  const int64_t units = queries ? c.sample.spec.rows : c.sample.spec.keys;
  if (c.steps) add_steps(c.sample.op, units, *trace);
  auto p = std::make_shared<ProducerCall>(ProducerCall{c, support::Call(trace), 0, units, backend});
  p->bytes = bytes_moved(p->call);
  p->exec.backend = p->backend.c_str();
  p->exec.threads = threads;
  p->exec.workspace_bytes =
      std::visit([&](const auto& a) { return support::workspace_bytes(a, p->exec); }, p->call.args());
  p->workspace = support::aligned_bytes(p->exec.workspace_bytes);
  p->exec.workspace = p->workspace.get();
  return p;
}

void ProducerCall::run() const {
  std::visit([this](const auto& a) { support::call_op(a, exec); }, call.args());
}

}  // namespace topkey::cli
