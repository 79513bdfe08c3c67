// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What each operation of the stages rows, quantize and cache wants, and what every call wants of Exec.
#include "validate.h"

#include "validate_parts.h"

namespace topkey {
namespace {

/// Scales are f32 numbers a caller may leave 0 (= 1).
void check_scale(const Check& c, const char* name, float scale) {
  TOPKEY_REQUIRE(c, scale >= -1e30f && scale <= 1e30f, name, "finite", std::to_string(scale));
}

Shape producer_shape(KeyFormat format, int64_t rows, int64_t head_dim) {
  Shape s{};
  s.format = format;
  s.rows = rows;
  s.head_dim = head_dim;
  return s;
}

bool has_own_scales(KeyFormat format) { return is_fp8(format) || format == KeyFormat::mxfp4; }

}  // namespace

void validate_exec(const char* op, const Exec& exec) {
  const Check c(op, Mode::call);
  const int device = static_cast<int>(exec.device);
  TOPKEY_REQUIRE(c, device == 0 || device == 1, "exec.device", "cpu (0) or cuda (1)", std::to_string(device));
  c.number("exec.device_id", exec.device_id, 0, 4095);
  c.number("exec.max_sms", exec.max_sms, 0, kMaxKeys);
  c.number("exec.threads", exec.threads, 0, kMaxKeys);
  TOPKEY_REQUIRE(c, reinterpret_cast<uintptr_t>(exec.workspace) % 256 == 0, "exec.workspace", "256-byte aligned",
                 "a misaligned address");
  TOPKEY_REQUIRE(c, reinterpret_cast<uintptr_t>(exec.stats) % 8 == 0, "exec.stats", "8-byte aligned",
                 "a misaligned address");
  TOPKEY_REQUIRE(c, (exec.flags & ~uint32_t{kOverlapPrevious}) == 0, "exec.flags", "of known bits",
                 std::to_string(exec.flags));
  if (exec.team != nullptr) {
    const Team& team = *exec.team;
    TOPKEY_REQUIRE(c, exec.device == Device::cpu, "exec.team", "null on a GPU", "a team");
    c.number("exec.team->size", team.size, 1, 4096);
    c.number("exec.team->rank", team.rank, 0, team.size - 1);
    TOPKEY_REQUIRE(c, team.size == 1 || team.barrier != nullptr, "exec.team->barrier", "a function", "null");
  }
}

Shape validate(const ExpandRows& a, Mode mode) {
  const Check c("expand_rows", mode);
  c.tensor("query_start", a.query_start, kI32, {at_least(1)}, 0);
  const int64_t requests = a.query_start.shape[0] - 1;
  c.tensor("seq_lens", a.seq_lens, kI32, {at_least(requests)}, 0);
  c.number("ratio", a.ratio, 0, kMaxKeys);
  check_shard(c, a.shard);
  c.number("capacity", a.capacity, 0, kMaxKeys);
  const Extent rows = at_least(a.capacity);
  c.tensor("row_request", a.row_request, kI32, {rows}, kOptional | kOutput);
  c.tensor("lens", a.lens, kI32, {rows}, kOptional | kOutput);
  c.tensor("positions", a.positions, kInts, {rows}, kOptional | kOutput);
  if (c.tensor("slots", a.slots, kInts, {rows}, kOptional | kOutput)) {
    check_block_table(c, "block_table", a.block_table, requests);
    c.number("page_size", a.page_size, 1, kMaxKeys);
  } else {
    c.absent("block_table", a.block_table, "without slots");
  }
  c.apart(a.capacity,
          {{"row_request", &a.row_request}, {"lens", &a.lens}, {"positions", &a.positions}, {"slots", &a.slots}});
  return producer_shape(KeyFormat::fp8, a.capacity, 0);
}

Shape validate(const ToSlots& a, Mode mode) {
  const Check c("to_slots", mode);
  c.tensor("indices", a.indices, kI32, {any(), any()}, kUnit);
  const int64_t rows = a.indices.shape[0];
  const bool by_request = c.tensor("row_request", a.row_request, kI32, {at_least(rows)}, kOptional);
  check_block_table(c, "block_table", a.block_table, by_request ? 0 : rows);
  c.number("page_size", a.page_size, 1, kMaxKeys);
  check_shard(c, a.shard);
  c.tensor("slots", a.slots, kI32, {at_least(rows), at_least(a.indices.shape[1])}, kUnit | kOutput);
  c.tensor("counts", a.counts, kI32, {at_least(rows)}, kOptional | kOutput);
  c.apart(rows, {{"slots", &a.slots}, {"counts", &a.counts}});
  return producer_shape(KeyFormat::fp8, rows, 0);
}

Shape validate(const QuantizeQ& a, Mode mode) {
  const Check c("quantize_q", mode);
  check_format(c, "format", a.format);
  c.tensor("q", a.q, kFloats, {any(), at_least(1), at_least(1)}, kUnit);
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], dim = a.q.shape[2];
  // q8_0 keys are met by plain queries: only mxfp4 asks for a multiple here.
  check_dim(c, "q head_dim", a.format == KeyFormat::mxfp4 ? a.format : KeyFormat::fp8, dim);
  c.number("q heads", heads, 1, kMaxDim);
  c.tensor("weights", a.weights, kWeights, {at_least(rows), exactly(heads)}, kUnit);
  check_scale(c, "softmax_scale", a.softmax_scale);
  check_scale(c, "head_scale", a.head_scale);
  check_rule(c, a.rule, ScaleRule::ue8m0, a.format, true);
  check_rope(c, a.rope, rows, dim);
  check_hadamard(c, a.hadamard, dim);
  const int64_t width = a.format == KeyFormat::mxfp4 ? dim / 2 : dim;
  c.tensor("q_out", a.q_out, query_dtypes(a.format), {at_least(rows), exactly(heads), exactly(width)}, kUnit | kOutput);
  check_query_scales(c, "q_scales_out", a.q_scales_out, a.format, {at_least(rows), heads, dim}, kOutput);
  c.tensor("weights_out", a.weights_out, kF32, {at_least(rows), exactly(heads)}, kUnit | kOutput);
  c.apart(rows, {{"q_out", &a.q_out}, {"q_scales_out", &a.q_scales_out}, {"weights_out", &a.weights_out}});
  Shape s = producer_shape(a.format, rows, dim);
  s.heads = heads;
  return s;
}

Shape validate(const QuantizeK& a, Mode mode) {
  const Check c("quantize_k", mode);
  check_format(c, "out.format", a.out.format);
  c.tensor("k", a.k, kFloats, {any(), at_least(1)}, kUnit);
  const int64_t rows = a.k.shape[0], dim = a.k.shape[1];
  check_dim(c, "k head_dim", a.out.format, dim);
  check_norm(c, a.norm, dim);
  check_rope(c, a.rope, rows, dim);
  check_hadamard(c, a.hadamard, dim);
  check_rule(c, a.rule, a.scale, a.out.format, false);
  check_dense(c, {"out.values", "out.scales"}, a.out, at_least(rows), dim, kOutput);
  c.apart(rows, {{"out.values", &a.out.values}, {"out.scales", &a.out.scales}});
  return producer_shape(a.out.format, rows, dim);
}

Shape validate(const StoreK& a, Mode mode) {
  const Check c("store_k", mode);
  check_cache(c, a.cache);
  const KeyFormat format = a.cache.format;
  const int64_t dim = a.cache.head_dim;
  c.tensor("slot_mapping", a.slot_mapping, kInts, {any()}, 0);
  const int64_t rows = a.slot_mapping.shape[0];
  const bool ready = c.has(a.k_scales) || (format == KeyFormat::q8_0 && a.k.dtype == DType::u8);
  if (ready) {
    TOPKEY_REQUIRE(c, has_own_scales(format) || !c.has(a.k_scales), "k_scales",
                   "absent for keys without scales of their own", describe(a.k_scales));
    check_dense(c, {"k", "k_scales"}, DenseKeys{a.k, a.k_scales, format}, at_least(rows), dim, 0);
    TOPKEY_REQUIRE(c, a.norm.kind == NormKind::none && a.rope.dim == 0 && !a.hadamard, "norm, rope and hadamard",
                   "absent for ready codes", "one of them");
  } else {
    c.tensor("k", a.k, kFloats, {at_least(rows), exactly(dim)}, kUnit);
  }
  check_norm(c, a.norm, dim);
  check_rope(c, a.rope, rows, dim);
  check_hadamard(c, a.hadamard, dim);
  check_rule(c, a.rule, a.scale, format, false);
  return cache_shape(a.cache, rows);
}

Shape validate(const GatherK& a, Mode mode) {
  const Check c("gather_k", mode);
  check_cache(c, a.keys.cache);
  check_shard(c, a.keys.shard);
  TOPKEY_REQUIRE(c, !a.keys.table_per_row, "keys.table_per_row", "false", "true");
  c.tensor("indptr", a.indptr, kI32, {at_least(1)}, 0);
  check_block_table(c, "keys.block_table", a.keys.block_table, a.indptr.shape[0] - 1);
  c.number("total", a.total, 0, kMaxKeys);
  TOPKEY_REQUIRE(c, a.out.format == a.keys.cache.format, "out.format",
                 std::string("that of the cache, ") + format_name(a.keys.cache.format),
                 std::to_string(static_cast<int>(a.out.format)));
  check_dense(c, {"out.values", "out.scales"}, a.out, at_least(a.total), a.keys.cache.head_dim, kOutput);
  c.apart(a.total, {{"out.values", &a.out.values}, {"out.scales", &a.out.scales}});
  return cache_shape(a.keys.cache, a.total);
}

}  // namespace topkey
