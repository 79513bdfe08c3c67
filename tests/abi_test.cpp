// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The C border at work: struct_size, null pointers, last_error and last_status per thread, versions, backends, and a
// C11 translation unit (abi_c.c). Its layout is held by abi_layout_test.cpp.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "topkey/topkey.h"

extern "C" const char* topkey_abi_c_check(void);
extern "C" const char* topkey_abi_c_ranks_check(void);

namespace {

using topkey::Device, topkey::DType, topkey::KeyFormat;

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
  CHECK_NAME(pool_k)
  CHECK_NAME(compress_k)
  CHECK_NAME(expand_pools)
#undef CHECK_NAME
  std::ifstream file(TOPKEY_SOURCE_DIR "/include/topkey/topkey_c.h");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const std::regex declaration("\nTOPKEY_DECLARE\\(");
  EXPECT_EQ(std::distance(std::sregex_iterator(text.begin(), text.end(), declaration), std::sregex_iterator()), 16)
      << "operations of the header; the list above must name each";
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
    EXPECT_EQ(topkey_last_status(), TOPKEY_INVALID_ARGUMENT);
  }
}

TEST(Abi, FromC11) {
  const char* fault = topkey_abi_c_check();
  EXPECT_EQ(fault, nullptr) << fault;
}

TEST(Abi, ACommunicatorOfACProgram) {
  const char* fault = topkey_abi_c_ranks_check();
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
  EXPECT_STREQ(topkey_backend_detail(-1), "");
  EXPECT_EQ(topkey::numerics_version("no such backend", KeyFormat::fp8), nullptr);
  EXPECT_EQ(topkey::numerics_version(nullptr, KeyFormat::fp8), nullptr);
  EXPECT_EQ(topkey::arithmetic(nullptr, KeyFormat::fp8, DType::f8_e4m3fn), nullptr);
  EXPECT_EQ(topkey::arithmetic("ref", static_cast<KeyFormat>(99), DType::f8_e4m3fn), nullptr);
  EXPECT_STREQ(topkey::arithmetic("ref", KeyFormat::fp8, DType::f8_e4m3fn), "ref");
  EXPECT_STREQ(topkey::numerics_version("ref", KeyFormat::fp8), "fp8/ref/1");
  EXPECT_NO_THROW(topkey::prepare(Device::cpu));
}

}  // namespace
