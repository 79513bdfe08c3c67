// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The exported symbols of plans and of the layers.
#include <algorithm>

#include "border.h"
#include "indexer.h"
#include "plan.h"

using namespace topkey;  // the symbols below are C; their bodies are not

namespace {

/// Copies what fits; returns how many there are.
template <class Twin, class T>
int64_t hand_out(const std::vector<T>& all, Twin* out, int64_t capacity) {
  static_assert(sizeof(Twin) == sizeof(T), "C and C++ twins must have one layout");
  const int64_t n = std::min(static_cast<int64_t>(all.size()), out == nullptr ? 0 : capacity);
  if (n > 0) std::memcpy(out, all.data(), static_cast<size_t>(n) * sizeof(T));
  return static_cast<int64_t>(all.size());
}

}  // namespace

extern "C" {

int64_t topkey_prefill_chunks(const topkey_plan_step_args* args, topkey_prefill_chunk* chunks, int64_t capacity) {
  int64_t n = -1;
  guard(
      [&] { n = hand_out(plan::prefill_chunks(from_c<PlanStep>("prefill_chunks", "args", args)), chunks, capacity); });
  return n;
}

int64_t topkey_decode_chunks(int64_t rows, int64_t width, int64_t budget, topkey_range* ranges, int64_t capacity) {
  int64_t n = -1;
  guard([&] { n = hand_out(plan::decode_chunks(rows, width, budget), ranges, capacity); });
  return n;
}

topkey_status topkey_plan_step(const topkey_plan_step_args* args, topkey_step_plan* out, int64_t* row_shard_sizes) {
  return guard([&] {
    const PlanStep step = from_c<PlanStep>("plan_step", "args", args);
    const StepPlan s = plan::summary(step);
    const std::vector<int64_t> sizes = plan::shard_sizes(step, s.num_decode_requests, 0);
    const Check c("plan_step", Mode::call);
    TOPKEY_REQUIRE(c, out != nullptr, "plan", "a struct", "null");
    TOPKEY_REQUIRE(c, sizes.empty() || row_shard_sizes != nullptr, "row_shard_sizes", "room for row_shards numbers",
                   "null");
    std::copy(sizes.begin(), sizes.end(), row_shard_sizes);
    *out = {sizeof *out,      s.num_decode_requests, s.num_decode_rows, s.num_prefill_rows, s.max_next_n,
            s.decode_uniform, s.max_decode_len,      s.max_prefill_len, !sizes.empty()};
  });
}

topkey_status topkey_indexer_check(const topkey_indexer_config* config) {
  return guard([&] { layer::check(from_c<IndexerConfig>("indexer", "config", config)); });
}

size_t topkey_indexer_workspace_bytes(const topkey_indexer_config* config, const topkey_indexer_limits* limits,
                                      const topkey_exec* exec) {
  size_t bytes = SIZE_MAX;
  guard([&] {
    const char* op = "indexer_workspace_bytes";
    bytes = layer::workspace_bytes(from_c<IndexerConfig>(op, "config", config),
                                   from_c<IndexerLimits>(op, "limits", limits), from_c<Exec>(op, "exec", exec));
  });
  return bytes;
}

topkey_status topkey_indexer_forward(const topkey_indexer_config* config, const topkey_indexer_step* step,
                                     const topkey_exec* exec) {
  return guard([&] {
    const char* op = "indexer_forward";
    layer::forward(from_c<IndexerConfig>(op, "config", config), from_c<IndexerStep>(op, "step", step),
                   from_c<Exec>(op, "exec", exec));
  });
}

topkey_status topkey_indexer_kpool_check(const topkey_indexer_config* config) {
  return guard([&] { layer::check_kpool(from_c<IndexerConfig>("indexer_kpool", "config", config)); });
}

size_t topkey_indexer_kpool_workspace_bytes(const topkey_indexer_config* config, const topkey_indexer_limits* limits,
                                            const topkey_exec* exec) {
  size_t bytes = SIZE_MAX;
  guard([&] {
    const char* op = "indexer_kpool_workspace_bytes";
    bytes = layer::kpool_workspace_bytes(from_c<IndexerConfig>(op, "config", config),
                                         from_c<IndexerLimits>(op, "limits", limits), from_c<Exec>(op, "exec", exec));
  });
  return bytes;
}

topkey_status topkey_indexer_kpool_forward(const topkey_indexer_config* config, const topkey_indexer_step* step,
                                           const topkey_exec* exec) {
  return guard([&] {
    const char* op = "indexer_kpool_forward";
    layer::forward_kpool(from_c<IndexerConfig>(op, "config", config), from_c<IndexerStep>(op, "step", step),
                         from_c<Exec>(op, "exec", exec));
  });
}

}  // extern "C"
