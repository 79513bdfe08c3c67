// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The C border. Layout: every C struct and its C++ twin have the same fields at the same offsets, and the lists here
// forget none, since each list must tile its struct. Behaviour: enumerations, struct_size, null pointers, last_error
// per thread, versions.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "topkey/topkey.h"

extern "C" const char* topkey_abi_c_check(void);

namespace {

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
#define MERGE_TOPK(F) F(struct_size) F(scores) F(indices) F(topk) F(rows) F(out)
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
CHECK_TWIN(topkey_paged_mqa_topk_args, PagedMqaTopk, MQA_TOPK)
CHECK_TWIN(topkey_merge_topk_args, MergeTopk, MERGE_TOPK)

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
                           TOPKEY_FORMAT_F32, TOPKEY_FORMAT_Q8_0},
                          {KeyFormat::fp8, KeyFormat::mxfp4, KeyFormat::bf16, KeyFormat::f16, KeyFormat::f32,
                           KeyFormat::q8_0}));
static_assert(same_values({TOPKEY_LAYOUT_PLANAR, TOPKEY_LAYOUT_INTERLEAVED}, {Layout::planar, Layout::interleaved}));
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
static_assert(static_cast<int>(TOPKEY_FLAG_OVERLAP_PREVIOUS) == static_cast<int>(topkey::kOverlapPrevious));

topkey_tensor vector_i32(std::vector<int32_t>& v) {
  topkey_tensor t{};
  t.data = v.data();
  t.shape[0] = static_cast<int64_t>(v.size());
  t.stride[0] = 1;
  t.ndim = 1;
  t.dtype = TOPKEY_DTYPE_I32;
  return t;
}

/// A valid C call, expand_rows over one request, in structs that may be longer than the library's.
struct Call {
  struct {
    topkey_expand_rows_args args;
    unsigned char tail[64];
  } grown{};
  struct {
    topkey_exec exec;
    unsigned char tail[64];
  } grown_exec{};
  std::vector<int32_t> query_start{0, 2}, seq_lens{5}, lens{77, 77, 77};

  Call() {
    topkey_expand_rows_args& a = grown.args;
    a.struct_size = sizeof a;
    a.query_start = vector_i32(query_start);
    a.seq_lens = vector_i32(seq_lens);
    a.capacity = 3;
    a.lens = vector_i32(lens);
    grown_exec.exec.struct_size = sizeof(topkey_exec);
  }
  topkey_status run() { return topkey_expand_rows(&grown.args, &grown_exec.exec); }
  bool answered() const { return lens == std::vector<int32_t>{4, 5, 0}; }
  bool untouched() const { return lens == std::vector<int32_t>{77, 77, 77}; }
};

/// A refusal: the status, a sentence that names the operation and the struct, nothing written.
void expect_refused(Call& call, const std::string& name) {
  EXPECT_EQ(call.run(), TOPKEY_INVALID_ARGUMENT);
  const std::string sentence = topkey_last_error();
  EXPECT_EQ(sentence.rfind("expand_rows: " + name + " must ", 0), 0u) << sentence;
  EXPECT_NE(sentence.find("got "), std::string::npos) << sentence;
  EXPECT_TRUE(call.untouched());
}

TEST(Abi, StructSizeZeroIsTheFirstVersions) {
  Call call;
  call.grown.args.struct_size = 0;
  call.grown_exec.exec.struct_size = 0;
  ASSERT_EQ(call.run(), TOPKEY_OK) << topkey_last_error();
  EXPECT_TRUE(call.answered());
}

TEST(Abi, LargerStructWithZeroTailIsAccepted) {
  for (uint32_t more : {1u, 8u, 64u}) {
    Call call;
    call.grown.args.struct_size += more;
    call.grown_exec.exec.struct_size += more;
    ASSERT_EQ(call.run(), TOPKEY_OK) << topkey_last_error();
    EXPECT_TRUE(call.answered());
  }
}

TEST(Abi, LargerStructThatAsksForMoreIsRefused) {
  for (size_t at : {size_t{0}, size_t{63}}) {
    Call call;
    call.grown.args.struct_size += 64;
    call.grown.tail[at] = 1;
    expect_refused(call, "args");
    Call other;
    other.grown_exec.exec.struct_size += 64;
    other.grown_exec.tail[at] = 1;
    expect_refused(other, "exec");
  }
}

TEST(Abi, BytesPastStructSizeAreNotLookedAt) {
  Call call;
  std::memset(call.grown.tail, 0xFF, sizeof call.grown.tail);
  std::memset(call.grown_exec.tail, 0xFF, sizeof call.grown_exec.tail);
  ASSERT_EQ(call.run(), TOPKEY_OK) << topkey_last_error();
  EXPECT_TRUE(call.answered());
}

TEST(Abi, SmallerStructLacksItsLastFields) {
  Call call;  // what lies behind is not the struct's: it may be anything
  const size_t known = offsetof(topkey_expand_rows_args, positions), exec_known = offsetof(topkey_exec, backend);
  call.grown.args.struct_size = known;
  call.grown_exec.exec.struct_size = exec_known;
  std::memset(reinterpret_cast<unsigned char*>(&call.grown.args) + known, 0xFF,
              sizeof(topkey_expand_rows_args) - known);
  std::memset(reinterpret_cast<unsigned char*>(&call.grown_exec.exec) + exec_known, 0xFF,
              sizeof(topkey_exec) - exec_known);
  ASSERT_EQ(call.run(), TOPKEY_OK) << topkey_last_error();
  EXPECT_TRUE(call.answered());
}

TEST(Abi, NoStructIsSmallerThanItsSize) {
  for (uint32_t size : {1u, 3u}) {
    Call call;
    call.grown.args.struct_size = size;
    expect_refused(call, "args");
    Call other;
    other.grown_exec.exec.struct_size = size;
    expect_refused(other, "exec");
  }
}

TEST(Abi, NullPointersAreRefused) {
  Call call;
  EXPECT_EQ(topkey_expand_rows(nullptr, &call.grown_exec.exec), TOPKEY_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(topkey_last_error()).rfind("expand_rows: ", 0), 0u) << topkey_last_error();
  EXPECT_EQ(topkey_expand_rows(&call.grown.args, nullptr), TOPKEY_INVALID_ARGUMENT);
  EXPECT_EQ(topkey_expand_rows_workspace_bytes(nullptr, nullptr), SIZE_MAX);
  EXPECT_NE(topkey_expand_rows_unsupported(nullptr, nullptr), nullptr);
  EXPECT_TRUE(call.untouched());
}

TEST(Abi, EveryOperationKnowsItsOwnName) {
#define CHECK_NAME(name)                                               \
  EXPECT_EQ(topkey_##name(nullptr, nullptr), TOPKEY_INVALID_ARGUMENT); \
  EXPECT_EQ(std::string(topkey_last_error()).rfind(#name ": ", 0), 0u) << topkey_last_error();
  CHECK_NAME(expand_rows)
  CHECK_NAME(to_slots)
  CHECK_NAME(quantize_q)
  CHECK_NAME(quantize_k)
  CHECK_NAME(store_k)
  CHECK_NAME(gather_k)
  CHECK_NAME(mqa_logits)
  CHECK_NAME(paged_mqa_logits)
  CHECK_NAME(topk)
  CHECK_NAME(select_blocks)
  CHECK_NAME(mqa_topk)
  CHECK_NAME(paged_mqa_topk)
  CHECK_NAME(merge_topk)
#undef CHECK_NAME
}

TEST(Abi, LastErrorBelongsToItsThread) {
  Call call;
  call.grown.args.capacity = -1;
  ASSERT_EQ(call.run(), TOPKEY_INVALID_ARGUMENT);
  const std::string mine = topkey_last_error();
  ASSERT_NE(mine, "");
  std::string before, after;
  std::thread([&] {
    before = topkey_last_error();
    Call other;
    other.grown.args.ratio = -3;
    other.run();
    after = topkey_last_error();
  }).join();
  EXPECT_EQ(before, "");
  EXPECT_NE(after, "");
  EXPECT_NE(after, mine);
  EXPECT_EQ(topkey_last_error(), mine);
}

TEST(Abi, CallsFromManyThreadsAtOnce) {
  std::array<int, 8> failures{};
  std::vector<std::thread> threads;
  for (int& failed : failures) {
    threads.emplace_back([&failed] {
      for (int i = 0; i < 200; ++i) {
        Call good, bad;
        bad.grown.args.capacity = -1 - i;
        if (good.run() != TOPKEY_OK || !good.answered()) ++failed;
        if (bad.run() != TOPKEY_INVALID_ARGUMENT) ++failed;
        if (std::string(topkey_last_error()).find("got " + std::to_string(-1 - i)) == std::string::npos) ++failed;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(failures, (std::array<int, 8>{}));
}

TEST(Abi, CppCarriesStatusAndSentence) {
  topkey::ExpandRows args{};
  args.capacity = -1;
  try {
    topkey::expand_rows(args, topkey::Exec{});
    FAIL() << "not refused";
  } catch (const topkey::Error& e) {
    EXPECT_EQ(e.status(), topkey::Status::invalid_argument);
    EXPECT_STREQ(e.what(), topkey_last_error());
  }
}

TEST(Abi, FromC11) {
  const char* fault = topkey_abi_c_check();
  EXPECT_EQ(fault, nullptr) << fault;
}

TEST(Abi, Versions) {
  EXPECT_STREQ(topkey::version(), TOPKEY_VERSION);
  const std::string joined = std::to_string(TOPKEY_VERSION_MAJOR) + "." + std::to_string(TOPKEY_VERSION_MINOR) + "." +
                             std::to_string(TOPKEY_VERSION_PATCH);
  EXPECT_EQ(joined, TOPKEY_VERSION);
  EXPECT_EQ(topkey::abi_version(), static_cast<uint32_t>(TOPKEY_ABI_VERSION));
}

TEST(Abi, BackendsHaveNamesAndReasons) {
  const auto list = topkey::backends();
  ASSERT_FALSE(list.empty());
  bool ref = false;
  for (const auto& b : list) {
    EXPECT_NE(b.name, "");
    ref = ref || (b.name == "ref" && b.unusable.empty());
  }
  EXPECT_TRUE(ref) << "the reference runs everywhere";
  EXPECT_EQ(topkey_backend_name(static_cast<int32_t>(list.size())), nullptr);
  EXPECT_EQ(topkey_backend_name(-1), nullptr);
  EXPECT_NE(topkey_backend_unusable(-1), nullptr);
  EXPECT_EQ(topkey::numerics_version("no such backend", KeyFormat::fp8), nullptr);
  EXPECT_EQ(topkey::numerics_version(nullptr, KeyFormat::fp8), nullptr);
  EXPECT_EQ(topkey::arithmetic(nullptr, KeyFormat::fp8, DType::f8_e4m3fn), nullptr);
  EXPECT_EQ(topkey::arithmetic("ref", static_cast<KeyFormat>(99), DType::f8_e4m3fn), nullptr);
  EXPECT_STREQ(topkey::arithmetic("ref", KeyFormat::fp8, DType::f8_e4m3fn), "ref");
  EXPECT_STREQ(topkey::numerics_version("ref", KeyFormat::fp8), "fp8/ref/1");
  EXPECT_NO_THROW(topkey::prepare(Device::cpu));
}

}  // namespace
