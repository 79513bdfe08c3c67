// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Trace files: what is written is read again, bit for bit and in one order; what is hostile, truncated or merely wrong
// is refused with a sentence that says where.
#include "support/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

namespace topkey::support {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

std::string file_of(const std::string& header, const std::string& data, uint64_t length) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[static_cast<size_t>(i)] = static_cast<char>(length >> (8 * i));
  return bytes + header + data;
}
std::string file_of(const std::string& header, const std::string& data) { return file_of(header, data, header.size()); }

/// The sentence with which `bytes` are refused; "" if they are not.
std::string refusal(const std::string& bytes) {
  try {
    parse_trace(bytes, "file");
    return "";
  } catch (const TraceError& error) {
    return error.what();
  }
}

Trace small_trace() {
  Trace trace;
  trace.metadata = {{"op", "topk"}, {"text", "[\"\xC3\xA9\",\"\\n\"]"}, {"mine", "kept"}};
  trace.tensors["b"] = make_tensor("U8", {3});
  trace.tensors["a"] = make_tensor("F32", {2, 2});
  trace.tensors["z"] = make_tensor("I64", {1});
  trace.tensors["empty"] = make_tensor("BF16", {0, 7});
  for (auto& [name, tensor] : trace.tensors) {
    for (size_t i = 0; i < tensor.bytes.size(); ++i) tensor.bytes[i] = static_cast<std::byte>(i + name.size());
  }
  return trace;
}

std::string bytes_of(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

class TraceFile : public ::testing::Test {
 protected:
  TraceFile() { fs::create_directories(folder_); }
  ~TraceFile() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  size_t files() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }

 private:
  fs::path folder_ =
      fs::path(::testing::TempDir()) /
      ("trace_test_" +
       std::to_string(std::hash<std::string>()(::testing::UnitTest::GetInstance()->current_test_info()->name())));
};

TEST_F(TraceFile, WhatIsWrittenIsReadAgain) {
  const Trace trace = small_trace();
  write_trace(path("a"), trace);
  const Trace again = read_trace(path("a"));
  EXPECT_EQ(again.metadata, trace.metadata);
  ASSERT_EQ(again.tensors.size(), trace.tensors.size());
  for (const auto& [name, tensor] : trace.tensors) {
    ASSERT_NE(again.find(name), nullptr) << name;
    EXPECT_EQ(again.find(name)->dtype, tensor.dtype);
    EXPECT_EQ(again.find(name)->shape, tensor.shape);
    EXPECT_EQ(again.find(name)->bytes, tensor.bytes);
  }
}

TEST_F(TraceFile, TheSameTraceGivesTheSameBytesAndAlignedData) {
  write_trace(path("a"), small_trace());
  write_trace(path("b"), read_trace(path("a")));
  const std::string bytes = bytes_of(path("a"));
  EXPECT_EQ(bytes, bytes_of(path("b")));
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), sizeof header);
  EXPECT_EQ(header % 8, 0U);
  EXPECT_LT(bytes.find("\"z\""), bytes.size());
}

TEST_F(TraceFile, AFailedWriteLeavesTheOldFileAndNoOther) {
  write_trace(path("a"), small_trace());
  const std::string before = bytes_of(path("a"));
  Trace bad = small_trace();
  bad.metadata["text"] = "\xFF not UTF-8";
  EXPECT_THROW(write_trace(path("a"), bad), TraceError);
  EXPECT_EQ(bytes_of(path("a")), before);
  EXPECT_EQ(files(), 1U);
  EXPECT_THROW(write_trace(path("no/such/folder"), small_trace()), TraceError);
  EXPECT_THROW(write_trace("/dev/null", small_trace()), TraceError) << "a device must not be replaced by a file";
}

TEST_F(TraceFile, AMissingFileAndAFolderAreNamed) {
  EXPECT_THROW(read_trace(path("none")), TraceError);
  EXPECT_THROW(read_trace(path("")), TraceError);
}

TEST_F(TraceFile, EveryTruncationIsRefused) {
  write_trace(path("a"), small_trace());
  const std::string bytes = bytes_of(path("a"));
  for (size_t size = 0; size < bytes.size(); ++size) EXPECT_NE(refusal(bytes.substr(0, size)), "") << size << " bytes";
  EXPECT_EQ(refusal(bytes), "");
  EXPECT_THAT(refusal(bytes + "x"), HasSubstr("belong to no tensor"));
}

TEST(Trace, HostileHeadersAreRefused) {
  const std::string ok = R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})";
  ASSERT_EQ(refusal(file_of(ok, "xy")), "");
  const auto tensor = [](const std::string& fields) { return file_of("{\"a\":{" + fields + "}}", "xy"); };
  const std::vector<std::pair<std::string, std::string>> cases = {
      {file_of(ok, "xy", UINT64_MAX), "its header would be"},
      {file_of(ok, "xy", ok.size() + 3), "its header would be"},
      {file_of("", ""), "no valid JSON"},
      {file_of("[]", ""), "must be a JSON object"},
      {file_of("7", ""), "must be a JSON object"},
      {file_of("{} {}", ""), "no valid JSON"},
      {file_of("{\"a\":", ""), "no valid JSON"},
      {file_of("{\"\xFF\":{}}", ""), "no valid JSON"},
      {file_of("{\"a\":7}", ""), "must be an object"},
      {file_of(std::string(1000000, '['), ""), "must be a JSON object"},
      {file_of("{\"a\":" + std::string(1000000, '{'), ""), "no valid JSON"},
      {file_of("{\"a\":" + std::string(1000000, '['), ""), "must be an object"},
      {file_of("{\"__metadata__\":{\"a\":7}}", ""), "metadata values must be strings"},
      {file_of("{\"__metadata__\":{\"a\":{}}}", ""), "metadata values must be strings"},
      {file_of("{\"__metadata__\":{\"a\":\"\",\"a\":\"\"}}", ""), "occurs twice"},
      {file_of("{\"__metadata__\":{},\"__metadata__\":{}}", ""), "occurs twice"},
      {file_of("{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}," + ok.substr(1), "xy"),
       "'a' occurs twice"},
      {tensor(R"("dtype":"U8","shape":[2])"), "must have dtype, shape and data_offsets"},
      {tensor(R"("dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2])"), "twice"},
      {tensor(R"("dtype":"U8","shape":[2],"data_offsets":[0,2],"x":1)"), "unknown field"},
      {tensor(R"("dtype":8,"shape":[2],"data_offsets":[0,2])"), "whole numbers"},
      {tensor(R"("dtype":"Q8","shape":[2],"data_offsets":[0,2])"), "unknown dtype"},
      {tensor(R"("dtype":"U8","shape":[-2],"data_offsets":[0,2])"), "negative"},
      {tensor(R"("dtype":"U8","shape":[2.0],"data_offsets":[0,2])"), "not whole"},
      {tensor(R"("dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,2])"), "beyond 2^63"},
      {tensor(R"("dtype":"U8","shape":[[2]],"data_offsets":[0,2])"), "a list"},
      {tensor(R"("dtype":"U8","shape":2,"data_offsets":[0,2])"), "a number"},
      {tensor(R"("dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,2])"), "shape and dtype"},
      {tensor(R"("dtype":"U8","shape":[3],"data_offsets":[0,2])"), "shape and dtype"},
      {tensor(R"("dtype":"F4","shape":[3],"data_offsets":[0,2])"), "shape and dtype"},
      {tensor(R"("dtype":"U8","shape":[2],"data_offsets":[0])"), "two data_offsets"},
      {tensor(R"("dtype":"U8","shape":[2],"data_offsets":[0,2,4])"), "a number"},
      {tensor(R"("dtype":"U8","shape":[2],"data_offsets":[2,0])"), "ends before it begins"},
      {tensor(R"("dtype":"U8","shape":[2],"data_offsets":[0,18446744073709551615])"), "beyond the end"},
      {tensor(R"("dtype":"U8","shape":[1],"data_offsets":[1,2])"), "gap"},
      {file_of(
           R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
           "xy"),
       "overlaps"},
      {tensor("\"dtype\":\"U8\",\"shape\":[1" +
              [] {
                std::string ones;
                for (int i = 0; i < 40; ++i) ones += ",1";
                return ones;
              }() +
              "],\"data_offsets\":[0,1]"),
       "32 dimensions"},
  };
  for (const auto& [bytes, words] : cases) {
    const std::string sentence = refusal(bytes);
    EXPECT_THAT(sentence, HasSubstr(words)) << bytes.substr(0, 200);
    EXPECT_THAT(sentence, HasSubstr("file")) << "the file must be named";
    EXPECT_EQ(sentence.find('\n'), std::string::npos);
  }
}

TEST(Trace, NamesInSentencesArePrintable) {
  const std::string header = "{\"" + std::string(500, 'n') + "\\u001b[31m\":7}";
  const std::string sentence = refusal(file_of(header, ""));
  EXPECT_LT(sentence.size(), 200U);
  EXPECT_EQ(shown("a\033b\xC3\xA9"), "'a?b\?\?'");
}

TEST(Trace, NumbersInMetadataAreWholeOrRefused) {
  Trace trace;
  trace.metadata = {{"a", "12"}, {"b", "-3"}, {"c", "1.5"}, {"d", ""}, {"e", "99999999999999999999"}, {"f", " 1"}};
  EXPECT_EQ(trace.number("a", 0), 12);
  EXPECT_EQ(trace.number("b", 0), -3);
  EXPECT_EQ(trace.number("none", 5), 5);
  for (const char* key : {"c", "d", "e", "f"}) EXPECT_THROW(trace.number(key, 0), TraceError) << key;
}

TEST(Trace, TensorsOfWildSizeAreRefused) {
  EXPECT_THROW(make_tensor("F32", {int64_t{1} << 62, 8}), TraceError);
  EXPECT_THROW(make_tensor("F32", {-1}), TraceError);
  EXPECT_THROW(make_tensor("F99", {1}), TraceError);
  EXPECT_THROW(make_tensor("U8", {1000}, 999), TraceError);
  EXPECT_EQ(make_tensor("F32", {0, int64_t{1} << 62}).bytes.size(), 0U);
}

}  // namespace
}  // namespace topkey::support
