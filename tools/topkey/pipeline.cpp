// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// quantize_q and store_k (dense keys: quantize_k) over the truth of a trace, into memory of their own.
#include "pipeline.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "command.h"
#include "study.h"
#include "support/array.h"

namespace topkey::cli {
namespace {

using support::Array;

struct Truth {
  Tensor q, keys, weights;  ///< weights: absent = 1, and the scales of attention apply
};

bool same_bytes(const Tensor& a, const Tensor& b) {
  const support::TraceTensor x = support::copy_of(a), y = support::copy_of(b);
  return x.shape == y.shape && x.bytes == y.bytes;
}

const char* verdict(bool same) { return same ? "the trace's bytes" : "other bytes than the trace's (another rule made them)"; }

/// Queries and weights against those of the call.
Stage quantize_queries(const Query& q, KeyFormat format, const Truth& truth, const Exec& exec) {
  const int64_t rows = truth.q.shape[0], heads = truth.q.shape[1], head_dim = truth.q.shape[2];
  Array ones(DType::f32, {rows, heads}), weights_out(DType::f32, {rows, heads});
  std::fill_n(ones.as<float>(), ones.size(), 1.0F);
  Array codes(q.values.dtype, {q.values.shape[0], q.values.shape[1], q.values.shape[2]});
  Array scales = q.scales.data == nullptr ? Array() : Array(DType::u8, {rows, heads, head_dim / 32});
  QuantizeQ a{};
  a.q = truth.q;
  a.weights = truth.weights.data != nullptr ? truth.weights : ones.view();
  a.softmax_scale = truth.weights.data != nullptr ? 1.0F : static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim)));
  a.head_scale = truth.weights.data != nullptr ? 1.0F : static_cast<float>(1 / std::sqrt(static_cast<double>(heads)));
  a.format = format;
  a.q_out = codes.view();
  a.q_scales_out = scales.view();
  a.weights_out = weights_out.view();
  const double begin = now();
  support::run_args(a, exec);
  const double spent = now() - begin;
  const bool same = same_bytes(codes.view(), q.values) && same_bytes(weights_out.view(), q.weights);
  return {"quantize_q", spent, fmt::format("{} query vectors, {}", rows * heads, verdict(same))};
}

/// Bytes of the keys that rows of the call can see, [request][position], in the order of `slots`.
std::vector<std::string> key_bytes(const KeyCache& cache, const std::vector<int64_t>& slots) {
  const PageLayout layout = page_layout(cache.format, cache.layout, cache.page_size, cache.head_dim);
  std::vector<std::string> bytes;
  for (const int64_t slot : slots) {
    if (slot < 0) continue;
    const char* page = static_cast<const char*>(cache.pages.data) + slot / cache.page_size * cache.pages.stride[0];
    const int64_t row = slot % cache.page_size;
    bytes.emplace_back(page + layout.value_offset(row), layout.value);
    bytes.back().append(page + layout.scale_offset(row), static_cast<size_t>(layout.scale));
  }
  return bytes;
}

/// Slot of each of the truth's keys, -1 for those that no row can see or that have no page.
std::vector<int64_t> slots_of(const PagedMqaTopk& call, const Truth& truth, const std::vector<Window>& windows) {
  const int64_t requests = truth.keys.ndim == 3 ? truth.keys.shape[0] : 1, width = truth.keys.shape[truth.keys.ndim - 2];
  const Tensor& table = call.keys.block_table;
  const int64_t page_size = call.keys.cache.page_size;
  std::vector<int64_t> slots(static_cast<size_t>(requests * width), -1);
  for (const Window& window : windows) {
    for (int64_t p = 0; p < window.end; ++p) {
      const int64_t page = support::int_at(table, window.request, p / page_size);
      const bool inside = page >= 0 && page < call.keys.cache.pages.shape[0];
      slots[static_cast<size_t>(window.request * width + p)] = inside ? page * page_size + p % page_size : -1;
    }
  }
  return slots;
}

Stage store_keys(const PagedMqaTopk& call, const Truth& truth, const std::vector<Window>& windows, ScaleRule scale, const Exec& exec) {
  std::vector<int64_t> slots = slots_of(call, truth, windows);
  const Tensor& pages = call.keys.cache.pages;
  const Array memory(DType::u8, {pages.shape[0], pages.shape[1]});
  StoreK a{};
  a.k = tensor(truth.keys.data, truth.keys.dtype, {static_cast<int64_t>(slots.size()), truth.keys.shape[truth.keys.ndim - 1]});
  a.scale = scale;
  a.slot_mapping = tensor(slots.data(), DType::i64, {static_cast<int64_t>(slots.size())});
  a.cache = call.keys.cache;
  a.cache.pages = memory.view();
  const double begin = now();
  support::run_args(a, exec);
  const double spent = now() - begin;
  const std::vector<std::string> stored = key_bytes(a.cache, slots);
  const bool same = stored == key_bytes(call.keys.cache, slots);
  return {"store_k", spent, fmt::format("{} keys into {} pages, {}", stored.size(), pages.shape[0], verdict(same))};
}

Stage quantize_keys(const MqaTopk& call, const Truth& truth, ScaleRule scale, const Exec& exec) {
  const DenseKeys& keys = call.keys;
  const Array values(keys.values.dtype, {keys.values.shape[0], keys.values.shape[1]});
  const support::TraceTensor blank = keys.scales.data == nullptr ? support::TraceTensor{} : support::copy_of(keys.scales);
  QuantizeK a{};
  a.k = truth.keys;
  a.scale = scale;
  a.out = {values.view(), keys.scales.data == nullptr ? Tensor{} : support::view(blank, "key_scale"), keys.format};
  const double begin = now();
  support::run_args(a, exec);
  const double spent = now() - begin;
  const bool same = same_bytes(values.view(), keys.values) && (keys.scales.data == nullptr || same_bytes(a.out.scales, keys.scales));
  return {"quantize_k", spent, fmt::format("{} keys, {}", truth.keys.shape[0], verdict(same))};
}

}  // namespace

std::vector<Stage> run_producers(const support::Call& call, const Exec& exec) {
  const support::Trace& trace = call.trace();
  const std::vector<Window> windows = windows_of(call.args());
  if (!study_obstacle(call, windows).empty()) return {};
  Truth truth{support::view(*trace.find("q_bf16"), "q_bf16"), support::view(*trace.find("keys_bf16"), "keys_bf16"), {}};
  if (const support::TraceTensor* raw = trace.find("weights_raw")) truth.weights = support::view(*raw, "weights_raw");
  const ScaleRule scale = trace.text("scale", "ue8m0") == "f32" ? ScaleRule::f32 : ScaleRule::ue8m0;
  std::vector<Stage> stages;
  if (const auto* paged = std::get_if<PagedMqaTopk>(&call.args()); paged != nullptr && !paged->keys.table_per_row) {
    stages.push_back(quantize_queries(paged->q, paged->keys.cache.format, truth, exec));
    stages.push_back(store_keys(*paged, truth, windows, scale, exec));
  }
  if (const auto* dense = std::get_if<MqaTopk>(&call.args()); dense != nullptr && truth.keys.ndim == 2) {
    stages.push_back(quantize_queries(dense->q, dense->keys.format, truth, exec));
    stages.push_back(quantize_keys(*dense, truth, scale, exec));
  }
  return stages;
}

}  // namespace topkey::cli
