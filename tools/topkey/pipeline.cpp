// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The producers of a trace's codes, run into memory of their own and held against the trace.
#include "pipeline.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "command.h"
#include "producers.h"
#include "study.h"
#include "support/array.h"

namespace topkey::cli {
namespace {

using support::Array;

/// Memory of the same dtype and shape as `t`; absent for an absent tensor.
Array like(const Tensor& t) {
  if (t.data == nullptr) return {};
  if (t.ndim == 1) return Array(t.dtype, {t.shape[0]});
  return t.ndim == 2 ? Array(t.dtype, {t.shape[0], t.shape[1]}) : Array(t.dtype, {t.shape[0], t.shape[1], t.shape[2]});
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  return (a.data == nullptr && b.data == nullptr) || support::copy_of(a).bytes == support::copy_of(b).bytes;
}

const char* verdict(bool same) {
  return same ? "bytes as in the trace" : "other bytes than in the trace (made by another rule)";
}

double timed(const support::CallArgs& args, const Exec& exec) {
  const double begin = now();
  support::run_args(args, exec);
  return now() - begin;
}

Stage quantize_queries(const Query& q, KeyFormat format, const Vectors& vectors, const Exec& exec) {
  const int64_t rows = vectors.q.shape[0], heads = vectors.q.shape[1];
  const Array values = like(q.values), scales = like(q.scales), weights = like(q.weights),
              ones(DType::f32, {rows, heads});
  std::fill_n(ones.as<float>(), ones.size(), 1.0F);
  const double spent =
      timed(query_producer(vectors, format, {values.view(), scales.view(), weights.view()}, ones.view()), exec);
  const bool same = same_bytes(values.view(), q.values) && same_bytes(scales.view(), q.scales) &&
                    same_bytes(weights.view(), q.weights);
  return {"quantize_q", spent, fmt::format("{} query vectors, {}", rows * heads, verdict(same))};
}

/// Slot of each of the vectors' keys, -1 for those that no row can see or that have no page.
std::vector<int64_t> slots_of(const PagedKeys& keys, const Tensor& vectors, const std::vector<Window>& windows) {
  const int64_t requests = vectors.ndim == 3 ? vectors.shape[0] : 1, width = vectors.shape[vectors.ndim - 2];
  const int64_t page_size = keys.cache.page_size;
  std::vector<int64_t> slots(static_cast<size_t>(requests * width), -1), seen(static_cast<size_t>(requests), 0);
  for (const Window& window : windows) {
    if (window.size() == 0) continue;  // its request may be none
    int64_t& done = seen[static_cast<size_t>(window.request)];
    for (; done < window.end; ++done) {
      const int64_t page = support::int_at(keys.block_table, window.request, done / page_size);
      if (page < 0 || page >= keys.cache.pages.shape[0]) continue;
      slots[static_cast<size_t>(window.request * width + done)] = page * page_size + done % page_size;
    }
  }
  return slots;
}

/// Whether the keys at `slots` have the same bytes in both caches; pages may hold more than them.
bool same_keys(const KeyCache& a, const KeyCache& b, const std::vector<int64_t>& slots) {
  const PageLayout layout = page_layout(a.format, a.layout, a.page_size, a.head_dim);
  const auto key = [&](const KeyCache& cache, int64_t slot) {
    std::vector<uint8_t> bytes(static_cast<size_t>(layout.value + layout.scale));
    read_row(layout, support::element(cache.pages, slot / a.page_size), slot % a.page_size, bytes.data(),
             bytes.data() + layout.value);
    return bytes;
  };
  return std::all_of(slots.begin(), slots.end(),
                     [&](int64_t slot) { return slot < 0 || key(a, slot) == key(b, slot); });
}

Stage store_keys(const PagedKeys& keys, const Vectors& vectors, const std::vector<Window>& windows, ScaleRule scale,
                 const Exec& exec) {
  const std::vector<int64_t> slots = slots_of(keys, vectors.keys, windows);
  const Array memory = like(keys.cache.pages);
  KeyCache to = keys.cache;
  to.pages = memory.view();
  const double spent = timed(page_producer(vectors, scale, slots, to), exec);
  const auto stored = slots.size() - static_cast<size_t>(std::count(slots.begin(), slots.end(), -1));
  return {
      "store_k", spent,
      fmt::format("{} keys into {} pages, {}", stored, to.pages.shape[0], verdict(same_keys(to, keys.cache, slots)))};
}

Stage quantize_keys(const DenseKeys& keys, const Vectors& vectors, ScaleRule scale, const Exec& exec) {
  const Array values = like(keys.values), scales = like(keys.scales);
  const double spent = timed(dense_producer(vectors, scale, {values.view(), scales.view(), keys.format}), exec);
  const bool same = same_bytes(values.view(), keys.values) && same_bytes(scales.view(), keys.scales);
  return {"quantize_k", spent, fmt::format("{} keys, {}", vectors.keys.shape[0], verdict(same))};
}

}  // namespace

std::vector<Stage> run_producers(const support::Call& call, const Exec& exec) {
  const support::Trace& trace = call.trace();
  const std::vector<Window> windows = windows_of(call.args());
  if (!study_obstacle(call, windows).empty()) return {};
  Vectors vectors{
      support::view(*trace.find("q_bf16"), "q_bf16"), support::view(*trace.find("keys_bf16"), "keys_bf16"), {}};
  if (const support::TraceTensor* raw = trace.find("weights_raw")) vectors.weights = support::view(*raw, "weights_raw");
  const ScaleRule scale = trace.text("scale", "ue8m0") == "f32" ? ScaleRule::f32 : ScaleRule::ue8m0;
  if (const auto* paged = std::get_if<PagedMqaTopk>(&call.args()); paged != nullptr && !paged->keys.table_per_row) {
    return {quantize_queries(paged->q, paged->keys.cache.format, vectors, exec),
            store_keys(paged->keys, vectors, windows, scale, exec)};
  }
  if (const auto* dense = std::get_if<MqaTopk>(&call.args()); dense != nullptr && vectors.keys.ndim == 2) {
    return {quantize_queries(dense->q, dense->keys.format, vectors, exec),
            quantize_keys(dense->keys, vectors, scale, exec)};
  }
  return {};
}

}  // namespace topkey::cli
