// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The layout of the C border, mostly at compile time: every C struct and its C++ twin have the same fields at the same
// offsets, and the lists here forget none, since each list must tile its struct and the header's structs are counted.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <regex>
#include <set>
#include <string>
#include <type_traits>

#include "topkey/topkey.h"

namespace {

/// C structs that this file has looked at.
std::set<std::string>& looked_at() {
  static std::set<std::string> names;
  return names;
}

struct Field {
  size_t offset, size, align;
  constexpr bool operator==(const Field& o) const { return offset == o.offset && size == o.size && align == o.align; }
};

/// Fields in order, each at the first address that its alignment allows, the last one at the end: then none is missing.
template <size_t N>
constexpr bool tiles(const std::array<Field, N>& fields, size_t size, size_t align) {
  const auto up = [](size_t x, size_t to) { return (x + to - 1) / to * to; };
  size_t next = 0;
  for (const Field& f : fields) {
    if (f.offset != up(next, f.align)) return false;
    next = f.offset + f.size;
  }
  return size == up(next, align);
}

#define FIELD_OF(S, name) Field{offsetof(S, name), sizeof(S::name), alignof(decltype(S::name))},
#define C_FIELD(name) FIELD_OF(C, name)
#define CPP_FIELD(name) FIELD_OF(Cpp, name)
#define CHECK_TWIN(CStruct, CppStruct, FIELDS)                                                               \
  namespace twin_##CStruct {                                                                                 \
    using C = ::CStruct;                                                                                     \
    using Cpp = topkey::CppStruct;                                                                           \
    constexpr std::array c_fields{FIELDS(C_FIELD)};                                                          \
    constexpr std::array cpp_fields{FIELDS(CPP_FIELD)};                                                      \
    static_assert(c_fields == cpp_fields, #CStruct ": same fields, same offsets");                           \
    static_assert(sizeof(C) == sizeof(Cpp) && alignof(C) == alignof(Cpp), #CStruct ": same size");           \
    static_assert(tiles(c_fields, sizeof(C), alignof(C)), #CStruct ": the list names every field in order"); \
    static_assert(std::is_standard_layout_v<Cpp> && std::is_trivial_v<Cpp> && std::is_aggregate_v<Cpp>,      \
                  "crosses a border");                                                                       \
    [[maybe_unused]] const bool listed = looked_at().insert(#CStruct).second;                                \
  }

// The tool sees casts in these lists.
// clang-format off
#define TENSOR(F) F(data) F(shape) F(stride) F(ndim) F(dtype)
#define TEAM(F) F(rank) F(size) F(barrier) F(ctx)
#define DENSE_KEYS(F) F(values) F(scales) F(format)
#define KEY_CACHE(F) F(pages) F(format) F(layout) F(page_size) F(head_dim)
#define SHARD(F) F(rank) F(world_size) F(interleave)
#define PAGED_KEYS(F) F(cache) F(shard) F(block_table) F(table_per_row)
#define QUERY(F) F(values) F(scales) F(weights)
#define ROWS(F) F(count) F(end) F(length) F(start) F(request) F(q_indptr) F(next_n) F(max_len)
#define ADMIT(F) F(candidates) F(candidate_block_size) F(mask) F(force_first) F(force_last)
#define SLOT_MAP(F) F(block_table) F(table_per_row) F(page_size)
#define SELECTION(F) \
  F(indices) F(slots) F(scores) F(counts) F(blocks) F(block_size) F(index_base) F(slot_map) F(order) F(fill) \
  F(fill_value)
#define NORM(F) F(kind) F(weight) F(bias) F(eps)
#define ROPE(F) F(positions) F(cos_sin) F(dim) F(interleaved) F(trailing)
#define EXEC(F) \
  F(struct_size) F(device) F(device_id) F(stream) F(workspace) F(workspace_bytes) F(backend) F(max_sms) F(threads) \
  F(team) F(stats) F(flags) F(arithmetic) F(strategy) F(strict)
#define EXPAND_ROWS(F) \
  F(struct_size) F(query_start) F(seq_lens) F(ratio) F(shard) F(block_table) F(page_size) F(capacity) \
  F(row_request) F(lens) F(positions) F(slots)
#define TO_SLOTS(F) \
  F(struct_size) F(indices) F(row_request) F(block_table) F(page_size) F(shard) F(compact) F(slots) F(counts)
#define QUANTIZE_Q(F) \
  F(struct_size) F(q) F(weights) F(softmax_scale) F(head_scale) F(rule) F(rope) F(hadamard) F(format) \
  F(q_out) F(q_scales_out) F(weights_out)
#define QUANTIZE_K(F) F(struct_size) F(k) F(norm) F(rope) F(hadamard) F(scale) F(rule) F(out)
#define STORE_K(F) \
  F(struct_size) F(k) F(k_scales) F(norm) F(rope) F(hadamard) F(scale) F(rule) F(slot_mapping) F(cache)
#define GATHER_K(F) F(struct_size) F(keys) F(indptr) F(total) F(out)
#define MQA_LOGITS(F) F(struct_size) F(q) F(keys) F(rows) F(mask) F(clean) F(logits)
#define PAGED_MQA_LOGITS(F) F(struct_size) F(q) F(keys) F(rows) F(clean) F(logits)
#define TOPK(F) F(struct_size) F(scores) F(row_topk) F(rows) F(admit) F(topk) F(out)
#define SELECT_BLOCKS(F) F(struct_size) F(scores) F(rows) F(block_size) F(blocks)
#define MQA_TOPK(F) F(struct_size) F(q) F(keys) F(rows) F(admit) F(topk) F(out)
#define PAGED_MQA_TOPK(F) MQA_TOPK(F) F(whole_start) F(whole_end) F(block_scores)
#define MERGE_TOPK(F) \
  F(struct_size) F(scores) F(indices) F(topk) F(rows) F(out) F(force_first) F(force_last) F(block_scores) F(block_ids)
#define POOL_K(F) \
  F(struct_size) F(k) F(gate) F(ape) F(positions) F(q_indptr) F(slot_mapping) F(tail) F(tail_slots) F(pool_size) \
  F(scale) F(cache) F(request) F(next_n)
#define COMPRESS_K(F) \
  F(struct_size) F(kv) F(score) F(ape) F(positions) F(state) F(state_slots) F(query_start) F(rms_weight) F(eps) \
  F(cos_sin) F(slot_mapping) F(cache) F(rule) F(state_table)
#define EXPAND_POOLS(F) F(struct_size) F(pools) F(rows) F(pool_size) F(out) F(positions)
#define RANGE(F) F(first) F(last)
#define PREFILL_CHUNK(F) F(first_request) F(last_request) F(first_row) F(last_row) F(total_keys) F(skip_gather)
#define PLAN_STEP(F) \
  F(struct_size) F(num_requests) F(query_lens) F(seq_lens) F(prefilling) F(decode_threshold) F(require_uniform) \
  F(extends_prefill) F(ratio) F(gather_rows) F(logits_bytes) F(row_shards) F(min_shard_rows)
#define INDEXER_CONFIG(F) \
  F(struct_size) F(heads) F(head_dim) F(topk) F(ratio) F(pool_size) F(format) F(scale) F(role) F(candidate_block_size) \
  F(candidate_topk_blocks) F(force_first) F(force_last) F(candidate_ratio)
#define INDEXER_LIMITS(F) F(struct_size) F(max_rows) F(max_requests) F(max_len) F(max_next_n)
#define INDEXER_STEP(F) \
  F(struct_size) F(k) F(k_scales) F(gate) F(ape) F(positions) F(slot_mapping) F(tail) F(tail_slots) F(norm) F(rope) \
  F(hadamard) F(q) F(keys) F(rows) F(num_decode_rows) F(candidates) F(out) F(cleared) F(skip_step)
#define SHARD_SPEC(F) \
  F(struct_size) F(context) F(row_rank) F(row_shards) F(prefill_rank) F(prefill_size) F(shard_decode) F(exchange_limit)
#define SHARD_STEP(F) \
  F(struct_size) F(comm) F(prefill_comm) F(row_shard_sizes) F(whole_start) F(whole_end) F(gathered) F(key_indptr) \
  F(total_keys) F(gathered_start) F(token_order) F(token_positions) F(token_request)
#define EXCHANGE_ROWS(F) F(struct_size) F(buffer) F(width) F(first_row) F(row_shard_sizes)
// clang-format on

CHECK_TWIN(topkey_tensor, Tensor, TENSOR)
CHECK_TWIN(topkey_team, Team, TEAM)
CHECK_TWIN(topkey_dense_keys, DenseKeys, DENSE_KEYS)
CHECK_TWIN(topkey_key_cache, KeyCache, KEY_CACHE)
CHECK_TWIN(topkey_shard, Shard, SHARD)
CHECK_TWIN(topkey_paged_keys, PagedKeys, PAGED_KEYS)
CHECK_TWIN(topkey_query, Query, QUERY)
CHECK_TWIN(topkey_rows, Rows, ROWS)
CHECK_TWIN(topkey_admit, Admit, ADMIT)
CHECK_TWIN(topkey_slot_map, SlotMap, SLOT_MAP)
CHECK_TWIN(topkey_selection, Selection, SELECTION)
CHECK_TWIN(topkey_norm, Norm, NORM)
CHECK_TWIN(topkey_rope, Rope, ROPE)
CHECK_TWIN(topkey_exec, Exec, EXEC)
CHECK_TWIN(topkey_expand_rows_args, ExpandRows, EXPAND_ROWS)
CHECK_TWIN(topkey_to_slots_args, ToSlots, TO_SLOTS)
CHECK_TWIN(topkey_quantize_q_args, QuantizeQ, QUANTIZE_Q)
CHECK_TWIN(topkey_quantize_k_args, QuantizeK, QUANTIZE_K)
CHECK_TWIN(topkey_store_k_args, StoreK, STORE_K)
CHECK_TWIN(topkey_gather_k_args, GatherK, GATHER_K)
CHECK_TWIN(topkey_mqa_logits_args, MqaLogits, MQA_LOGITS)
CHECK_TWIN(topkey_paged_mqa_logits_args, PagedMqaLogits, PAGED_MQA_LOGITS)
CHECK_TWIN(topkey_topk_args, Topk, TOPK)
CHECK_TWIN(topkey_select_blocks_args, SelectBlocks, SELECT_BLOCKS)
CHECK_TWIN(topkey_mqa_topk_args, MqaTopk, MQA_TOPK)
CHECK_TWIN(topkey_paged_mqa_topk_args, PagedMqaTopk, PAGED_MQA_TOPK)
CHECK_TWIN(topkey_merge_topk_args, MergeTopk, MERGE_TOPK)
CHECK_TWIN(topkey_pool_k_args, PoolK, POOL_K)
CHECK_TWIN(topkey_compress_k_args, CompressK, COMPRESS_K)
CHECK_TWIN(topkey_expand_pools_args, ExpandPools, EXPAND_POOLS)
CHECK_TWIN(topkey_range, Range, RANGE)
CHECK_TWIN(topkey_prefill_chunk, PrefillChunk, PREFILL_CHUNK)
CHECK_TWIN(topkey_plan_step_args, PlanStep, PLAN_STEP)
CHECK_TWIN(topkey_indexer_config, IndexerConfig, INDEXER_CONFIG)
CHECK_TWIN(topkey_indexer_limits, IndexerLimits, INDEXER_LIMITS)
CHECK_TWIN(topkey_indexer_step, IndexerStep, INDEXER_STEP)
CHECK_TWIN(topkey_shard_spec, ShardSpec, SHARD_SPEC)
CHECK_TWIN(topkey_shard_step, ShardStep, SHARD_STEP)
CHECK_TWIN(topkey_exchange_rows_args, ExchangeRows, EXCHANGE_ROWS)

/// A C name for each C++ value, in the order of the C++ enumeration from 0: so each value is checked, and none has been
/// inserted.
template <class E>
constexpr bool same_values(std::initializer_list<int> c, std::initializer_list<E> cpp) {
  if (c.size() != cpp.size() || sizeof(E) != 4) return false;
  for (size_t i = 0; i < c.size(); ++i) {
    if (c.begin()[i] != static_cast<int>(i) || static_cast<int>(cpp.begin()[i]) != static_cast<int>(i)) return false;
  }
  return true;
}
using topkey::Device, topkey::DType, topkey::Fill, topkey::KeyFormat, topkey::Layout, topkey::NormKind, topkey::Order;
using topkey::QuantRule, topkey::ScaleRule, topkey::Stat, topkey::Status;
static_assert(same_values({TOPKEY_OK, TOPKEY_INVALID_ARGUMENT, TOPKEY_UNSUPPORTED, TOPKEY_WORKSPACE_TOO_SMALL,
                           TOPKEY_NOT_PREPARED, TOPKEY_DEVICE_ERROR, TOPKEY_PEER_ERROR},
                          {Status::ok, Status::invalid_argument, Status::unsupported, Status::workspace_too_small,
                           Status::not_prepared, Status::device_error, Status::peer_error}));
static_assert(same_values({TOPKEY_DTYPE_NONE, TOPKEY_DTYPE_F32, TOPKEY_DTYPE_F16, TOPKEY_DTYPE_BF16,
                           TOPKEY_DTYPE_F8_E4M3FN, TOPKEY_DTYPE_E8M0, TOPKEY_DTYPE_U8, TOPKEY_DTYPE_B8,
                           TOPKEY_DTYPE_I32, TOPKEY_DTYPE_I64},
                          {DType::none, DType::f32, DType::f16, DType::bf16, DType::f8_e4m3fn, DType::e8m0, DType::u8,
                           DType::b8, DType::i32, DType::i64}));
static_assert(same_values({TOPKEY_DEVICE_CPU, TOPKEY_DEVICE_CUDA}, {Device::cpu, Device::cuda}));
static_assert(same_values({TOPKEY_FORMAT_FP8, TOPKEY_FORMAT_MXFP4, TOPKEY_FORMAT_BF16, TOPKEY_FORMAT_F16,
                           TOPKEY_FORMAT_F32, TOPKEY_FORMAT_Q8_0, TOPKEY_FORMAT_FP8_FNUZ},
                          {KeyFormat::fp8, KeyFormat::mxfp4, KeyFormat::bf16, KeyFormat::f16, KeyFormat::f32,
                           KeyFormat::q8_0, KeyFormat::fp8_fnuz}));
static_assert(same_values({TOPKEY_LAYOUT_PLANAR, TOPKEY_LAYOUT_INTERLEAVED, TOPKEY_LAYOUT_TILED16,
                           TOPKEY_LAYOUT_TILED32, TOPKEY_LAYOUT_TILED64},
                          {Layout::planar, Layout::interleaved, Layout::tiled16, Layout::tiled32, Layout::tiled64}));
static_assert(same_values({TOPKEY_ORDER_POSITION, TOPKEY_ORDER_SCORE, TOPKEY_ORDER_ANY},
                          {Order::position, Order::score, Order::any}));
static_assert(same_values({TOPKEY_FILL_MINUS_ONE, TOPKEY_FILL_REPEAT, TOPKEY_FILL_VALUE},
                          {Fill::minus_one, Fill::repeat, Fill::value}));
static_assert(same_values({TOPKEY_NORM_NONE, TOPKEY_NORM_LAYER, TOPKEY_NORM_RMS},
                          {NormKind::none, NormKind::layer, NormKind::rms}));
static_assert(same_values({TOPKEY_SCALE_UE8M0, TOPKEY_SCALE_F32}, {ScaleRule::ue8m0, ScaleRule::f32}));
static_assert(same_values({TOPKEY_RULE_AUTOMATIC, TOPKEY_RULE_V32_KEY, TOPKEY_RULE_V32_QUERY, TOPKEY_RULE_V4_QUERY,
                           TOPKEY_RULE_V4_KEY, TOPKEY_RULE_KPOOL_QUERY, TOPKEY_RULE_KPOOL_KEY, TOPKEY_RULE_CPU_QUERY,
                           TOPKEY_RULE_MXFP4, TOPKEY_RULE_Q8_0},
                          {QuantRule::automatic, QuantRule::v32_key, QuantRule::v32_query, QuantRule::v4_query,
                           QuantRule::v4_key, QuantRule::kpool_query, QuantRule::kpool_key, QuantRule::cpu_query,
                           QuantRule::mxfp4, QuantRule::q8_0}));
static_assert(same_values({TOPKEY_STAT_ROWS, TOPKEY_STAT_SCORED_KEYS, TOPKEY_STAT_RESCANS, TOPKEY_STAT_SKIPPED_PAGES,
                           TOPKEY_STAT_SKIPPED_SLOTS, TOPKEY_STAT_NAN_SCORES, TOPKEY_STAT_TIED_CUTS,
                           TOPKEY_STAT_RESERVED, TOPKEY_NUM_STATS},
                          {topkey::kRows, topkey::kScoredKeys, topkey::kRescans, topkey::kSkippedPages,
                           topkey::kSkippedSlots, topkey::kNanScores, topkey::kTiedCuts, topkey::kReserved,
                           topkey::kNumStats}));
static_assert(same_values({TOPKEY_ROLE_NONE, TOPKEY_ROLE_SOURCE, TOPKEY_ROLE_CONSUMER},
                          {topkey::CandidateRole::none, topkey::CandidateRole::source,
                           topkey::CandidateRole::consumer}));
static_assert(static_cast<int>(TOPKEY_FLAG_OVERLAP_PREVIOUS) == static_cast<int>(topkey::kOverlapPrevious));

/// A twin as C++ has it would hold vectors: only the C side is looked at.
static_assert(sizeof(topkey_step_plan) == 72 && offsetof(topkey_step_plan, rows_sharded) == 64);

TEST(AbiLayout, NoStructOfTheHeaderIsForgotten) {
  std::string text;
  for (const char* name : {"topkey_c.h", "topkey_shard_c.h"}) {
    std::ifstream file(std::string(TOPKEY_SOURCE_DIR "/include/topkey/") + name);
    text.append(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  const std::regex struct_name("typedef struct (topkey_[a-z0-9_]+) \\{");
  std::set<std::string> names;
  for (std::sregex_iterator match(text.begin(), text.end(), struct_name), none; match != none; ++match) {
    names.insert((*match)[1]);
  }
  EXPECT_GT(names.size(), 25u);
  names.erase("topkey_step_plan");
  names.erase("topkey_communicator");  // its twin is a class
  EXPECT_EQ(looked_at(), names);
}

}  // namespace
