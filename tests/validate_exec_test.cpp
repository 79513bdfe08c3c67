// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Wrong Exec: backends that do not exist or cannot run, another arithmetic, devices, workspaces, teams, and the
// default backend of the environment (read in a child process, since a process reads it once). Whatever is refused
// leaves the outputs alone.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "support/array.h"
#include "support/run.h"
#include "tests/backend_test.h"
#include "topkey/topkey.h"

namespace topkey::testing {
namespace {

/// A valid scored call and a valid unscored one, with their memory.
struct Calls {
  Array q{DType::u8, {2, 2, 32}}, weights{DType::f32, {2, 2}}, keys{DType::u8, {5, 32}}, scales{DType::f32, {5}},
      scores{DType::f32, {2, 5}};
  Guarded indices{DType::i32, 2, 3};
  MqaTopk search{};
  Topk select{};

  Calls() {
    for (int i = 0; i < 128; ++i) q.as<uint8_t>()[i] = 0x38;
    for (int i = 0; i < 160; ++i) keys.as<uint8_t>()[i] = 0x38;
    for (int i = 0; i < 4; ++i) weights.as<float>()[i] = 1;
    for (int i = 0; i < 5; ++i) scales.as<float>()[i] = static_cast<float>(i + 1);
    for (int i = 0; i < 10; ++i) scores.as<float>()[i] = static_cast<float>(i % 5);
    search.q = {q.view(), {}, weights.view()};
    search.keys = {keys.view(), scales.view(), KeyFormat::fp8};
    search.rows.count = select.rows.count = 2;
    search.topk = select.topk = 3;
    search.out.indices = select.out.indices = indices.view();
    select.scores = scores.view();
  }
  bool answered() const {
    for (int64_t r = 0; r < 2; ++r) {
      for (int64_t i = 0; i < 3; ++i) {
        if (int_at(indices.view(), r, i) != 2 + i) return false;
      }
    }
    return indices.touched_outside().empty();
  }
};

/// Both calls refuse `exec` with this status; the sentence begins with the operation and has these words.
void expect_refused(const Exec& exec, Status status, const std::vector<std::string>& words) {
  Calls calls;
  const auto check = [&](const auto& args) {
    const Thrown thrown = thrown_by([&] { launch(args, exec); });
    EXPECT_EQ(static_cast<int>(thrown.status), static_cast<int>(status)) << thrown.sentence;
    EXPECT_EQ(thrown.sentence.rfind(std::string(op_name(args)) + ": ", 0), 0u) << thrown.sentence;
    for (const std::string& word : words)
      EXPECT_NE(thrown.sentence.find(word), std::string::npos) << thrown.sentence << " lacks " << word;
    EXPECT_TRUE(calls.indices.untouched());
  };
  check(calls.search);
  check(calls.select);
}

TEST(ValidateExec, UnknownBackend) {
  Exec exec{};
  exec.backend = "no such backend";
  expect_refused(exec, Status::unsupported, {"no such backend"});
  exec.backend = "";
  expect_refused(exec, Status::unsupported, {});
  exec.backend = "REF";
  expect_refused(exec, Status::unsupported, {"REF"});
}

TEST(ValidateExec, BackendsThatCannotRunHereSayWhy) {
  for (const BackendInfo& info : backends()) {
    if (info.unusable.empty()) continue;
    Exec exec{};
    exec.backend = info.name.c_str();
    exec.device = info.device;
    expect_refused(exec, Status::unsupported, {info.name, info.unusable});
  }
}

TEST(ValidateExec, DeviceWithoutABackend) {
  for (const BackendInfo& info : backends()) {
    if (info.device == Device::cuda && info.unusable.empty()) GTEST_SKIP() << "this machine has a usable CUDA backend";
  }
  Exec exec{};
  exec.device = Device::cuda;
  expect_refused(exec, Status::unsupported, {});
  exec.backend = "ref";
  expect_refused(exec, Status::unsupported, {"ref"});
  EXPECT_EQ(static_cast<int>(thrown_by([] { prepare(Device::cuda); }).status), static_cast<int>(Status::unsupported));
}

TEST(ValidateExec, NumbersAndPointers) {
  const auto refuse = [](const std::string& field, void (*change)(Exec&)) {
    Exec exec{};
    change(exec);
    expect_refused(exec, Status::invalid_argument, {field + " must ", ", got "});
  };
  alignas(256) static uint8_t memory[512];
  static Team no_members{0, 0, nullptr, nullptr}, past_end{2, 2, [](void*) {}, nullptr},
      below{-1, 2, [](void*) {}, nullptr}, silent{0, 2, nullptr, nullptr};
  refuse("exec.device", [](Exec& e) { e.device = static_cast<Device>(2); });
  refuse("exec.device", [](Exec& e) { e.device = static_cast<Device>(-1); });
  refuse("exec.device_id", [](Exec& e) { e.device_id = -1; });
  refuse("exec.max_sms", [](Exec& e) { e.max_sms = -1; });
  refuse("exec.threads", [](Exec& e) { e.threads = -1; });
  refuse("exec.flags", [](Exec& e) { e.flags = 2; });
  refuse("exec.flags", [](Exec& e) { e.flags = 0x80000001u; });
  refuse("exec.workspace", [](Exec& e) { e.workspace = memory + 16, e.workspace_bytes = 256; });
  refuse("exec.workspace", [](Exec& e) { e.workspace = memory + 255, e.workspace_bytes = 1; });
  refuse("exec.stats", [](Exec& e) { e.stats = reinterpret_cast<uint64_t*>(memory + 4); });
  refuse("exec.team->size", [](Exec& e) { e.team = &no_members; });
  refuse("exec.team->rank", [](Exec& e) { e.team = &past_end; });
  refuse("exec.team->rank", [](Exec& e) { e.team = &below; });
  refuse("exec.team->barrier", [](Exec& e) { e.team = &silent; });
  refuse("exec.team", [](Exec& e) { e.team = &below, e.device = Device::cuda; });
}

TEST(ValidateExec, WhatNoBackendHasIsRefusedWithTheReason) {
  // By every question, in the same words.
  Calls calls;
  Exec exec{};
  exec.arithmetic = "abacus";
  const char* reason = mqa_topk_unsupported(calls.search, exec);
  ASSERT_NE(reason, nullptr);
  const std::string words = reason;
  for (const char* part : {"abacus", "ref", "cpu"}) EXPECT_NE(words.find(part), std::string::npos) << words;
  const Thrown thrown = thrown_by([&] { launch(calls.search, exec); });
  EXPECT_EQ(static_cast<int>(thrown.status), static_cast<int>(Status::unsupported));
  EXPECT_EQ(thrown.sentence, words);
  EXPECT_TRUE(calls.indices.untouched());
}

TEST(ValidateExec, WorkspaceBytesKeepsTheStatus) {
  Calls calls;
  Exec exec{};
  exec.backend = "no such backend";
  const Thrown thrown = thrown_by([&] { workspace_bytes(calls.search, exec); });
  EXPECT_EQ(static_cast<int>(thrown.status), static_cast<int>(Status::unsupported))
      << "right in itself, but no backend: " << thrown.sentence;
}

// ---- on each backend ----
class ValidateOnBackend : public BackendTest {};

TEST_P(ValidateOnBackend, ItsOwnArithmeticAndNoOther) {
  Calls calls;
  Exec exec = this->exec();
  exec.arithmetic = arithmetic(GetParam().c_str(), KeyFormat::fp8, DType::f8_e4m3fn);
  ASSERT_NE(exec.arithmetic, nullptr);
  run(calls.search, exec);
  EXPECT_TRUE(calls.answered());
  for (const char* other : {"ref", "f32", "bf16mma", "fp8mma", "no such arithmetic", ""}) {
    if (std::string(other) == arithmetic(GetParam().c_str(), KeyFormat::fp8, DType::f8_e4m3fn)) continue;
    Calls fresh;
    exec.arithmetic = other;
    const Thrown thrown = thrown_by([&] { launch(fresh.search, exec); });
    EXPECT_EQ(static_cast<int>(thrown.status), static_cast<int>(Status::unsupported)) << other;
    EXPECT_EQ(thrown.sentence.rfind("mqa_topk: ", 0), 0u) << thrown.sentence;
    EXPECT_NE(mqa_topk_unsupported(fresh.search, exec), nullptr) << other;
    EXPECT_TRUE(fresh.indices.untouched());
  }
}

TEST_P(ValidateOnBackend, UnknownStrategy) {
  Calls calls;
  Exec exec = this->exec();
  exec.strategy = "no such strategy";
  for (const bool search : {true, false}) {
    const Thrown thrown = thrown_by([&] { search ? launch(calls.search, exec) : launch(calls.select, exec); });
    EXPECT_EQ(static_cast<int>(thrown.status), static_cast<int>(Status::unsupported)) << thrown.sentence;
    EXPECT_NE(thrown.sentence.find("no such strategy"), std::string::npos) << thrown.sentence;
  }
  EXPECT_NE(topk_unsupported(calls.select, exec), nullptr);
  EXPECT_TRUE(calls.indices.untouched());
}

TEST_P(ValidateOnBackend, WorkspaceTooSmall) {
  Calls calls;
  const size_t bytes = workspace_bytes(calls.search, exec());
  if (bytes == 0) GTEST_SKIP() << GetParam() << " needs no workspace";
  const std::shared_ptr<uint8_t> memory = aligned_bytes(bytes);
  Exec exec = this->exec();
  const auto refused = [&](void* workspace, size_t size) {
    exec.workspace = workspace;
    exec.workspace_bytes = size;
    const Thrown thrown = thrown_by([&] { launch(calls.search, exec); });
    EXPECT_EQ(static_cast<int>(thrown.status), static_cast<int>(Status::workspace_too_small)) << thrown.sentence;
    EXPECT_EQ(thrown.sentence.rfind("mqa_topk: exec.workspace", 0), 0u) << thrown.sentence;
    EXPECT_NE(thrown.sentence.find(std::to_string(bytes)), std::string::npos)
        << "the size it wants: " << thrown.sentence;
    EXPECT_TRUE(calls.indices.untouched());
  };
  refused(memory.get(), bytes - 1);
  refused(memory.get(), 0);
  refused(nullptr, 0);
  refused(nullptr, bytes);
}

TEST_P(ValidateOnBackend, TeamOfTheCallersThreads) {
  constexpr int32_t kSize = 3;
  Calls calls;
  std::barrier<> barrier(kSize);
  Exec exec = this->exec();
  const std::shared_ptr<uint8_t> memory = aligned_bytes(workspace_bytes(calls.search, exec));
  exec.workspace = memory.get();
  exec.workspace_bytes = workspace_bytes(calls.search, exec);
  std::vector<std::thread> threads;
  std::vector<Thrown> results(kSize);
  for (int32_t rank = 0; rank < kSize; ++rank) {
    threads.emplace_back([&, rank] {
      const Team team{rank, kSize, [](void* b) { static_cast<std::barrier<>*>(b)->arrive_and_wait(); }, &barrier};
      Exec mine = exec;
      mine.team = &team;
      results[static_cast<size_t>(rank)] = thrown_by([&] { launch(calls.search, mine); });
    });
  }
  for (std::thread& t : threads) t.join();
  for (const Thrown& result : results)
    EXPECT_EQ(static_cast<int>(result.status), static_cast<int>(Status::ok)) << result.sentence;
  EXPECT_TRUE(calls.answered());
}

TOPKEY_ON_EVERY_BACKEND(ValidateOnBackend);

// ---- TOPKEY_BACKEND ----
/// Exit status of this program's test ValidateChild.Runs under TOPKEY_BACKEND=value; its output in *text.
int child(const std::string& value, std::string* text) {
  char self[4096] = {};
  if (::readlink("/proc/self/exe", self, sizeof self - 1) <= 0) return -1;
  const std::string command =
      "TOPKEY_CHILD=1 TOPKEY_BACKEND='" + value + "' '" + self + "' --gtest_filter=ValidateChild.Runs 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return -1;
  char buffer[4096];
  for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) text->append(buffer, n);
  const int status = pclose(pipe);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(ValidateChild, Runs) {
  if (std::getenv("TOPKEY_CHILD") == nullptr) GTEST_SKIP() << "run by the tests below, in a process of its own";
  Calls calls;
  try {
    run(calls.search, Exec{});
    std::printf("answered %d\n", calls.answered() ? 1 : 0);
  } catch (const Error& e) {
    std::printf("status %d: %s\n", static_cast<int>(e.status()), e.what());
  }
  const Thrown thrown = thrown_by([&] { launch(calls.select, on("ref")); });
  std::printf("an argument overrides it: %d\n", static_cast<int>(thrown.status));
}

TEST(ValidateExec, BackendOfTheEnvironment) {
  for (const std::string& name : host_backends()) {
    std::string text;
    ASSERT_EQ(child(name, &text), 0) << text;
    EXPECT_NE(text.find("answered 1"), std::string::npos) << text;
  }
  std::string text;
  ASSERT_EQ(child("no such backend", &text), 0) << text;
  EXPECT_NE(text.find("mqa_topk: "), std::string::npos) << text;
  EXPECT_NE(text.find("no such backend"), std::string::npos) << text;
  EXPECT_EQ(text.find("answered"), std::string::npos) << "an unknown default must fail loudly: " << text;
  EXPECT_NE(text.find("an argument overrides it: 0"), std::string::npos) << text;
  text.clear();
  ASSERT_EQ(child("", &text), 0) << text;
  EXPECT_NE(text.find("answered 1"), std::string::npos) << "an empty variable is none: " << text;
}

}  // namespace
}  // namespace topkey::testing
