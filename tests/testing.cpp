// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See testing.h.
#include "tests/testing.h"

#include <cstring>
#include <iostream>
#include <map>
#include <mutex>

namespace topkey::testing {

std::vector<std::string> host_backends() {
  std::vector<std::string> names;
  for (const BackendInfo& info : backends()) {
    if (info.unusable.empty() && info.device == Device::cpu) names.push_back(info.name);
  }
  return names;
}

int64_t& gpu_pieces() {
  static int64_t pieces = 0;
  return pieces;
}

namespace {

/// Says at the end how many tests made calls on a GPU or held memory of it: scripts/gpu_check adds these up, and 0 fails it.
class GpuTests : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo&) override { before_ = calls_on_device(), pieces_ = gpu_pieces(); }
  void OnTestEnd(const ::testing::TestInfo&) override {
    tests_ += calls_on_device() > before_ || gpu_pieces() > pieces_;
  }
  void OnTestProgramEnd(const ::testing::UnitTest&) override {
    if (tests_ > 0) std::cout << "[ gpu tests] " << tests_ << "\n";
    if (stood_in > 0)
      std::cout << "[ stood in ] " << stood_in << " calls, by " << std::getenv("TOPKEY_TEST_STAND_IN") << "\n";
  }
  uint64_t before_ = 0;
  int64_t pieces_ = 0;
  int tests_ = 0;
};
[[maybe_unused]] const bool kListens = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new GpuTests);
  return true;
}();

}  // namespace

/// Usable, and what the environment asks for: TOPKEY_TEST_DEVICE, a kind of device, and TOPKEY_TEST_BACKEND, one by name.
static bool is_asked_for(const BackendInfo& info) {
  const char *device = std::getenv("TOPKEY_TEST_DEVICE"), *name = std::getenv("TOPKEY_TEST_BACKEND");
  return info.unusable.empty() && (name == nullptr || info.name == name) &&
         (device == nullptr || (std::string(device) == "cuda") == (info.device == Device::cuda));
}

std::vector<std::string> every_backend() {
  std::vector<std::string> names;
  for (const BackendInfo& info : backends()) {
    if (is_asked_for(info)) names.push_back(info.name);
  }
  return names;
}

std::vector<std::string> general_backends() {
  std::vector<std::string> names = every_backend();
  ProblemSpec small;
  small.paged = true;
  const Problem p = make_problem(small);
  const Array indices(DType::i32, {p.count(), 5});
  Selection out{};
  out.indices = indices.view();
  std::erase_if(names,
                [&](const std::string& name) { return unsupported(p.paged_search(5, out), on(name)) != nullptr; });
  return names;
}

std::vector<std::string> gpu_backends() {
  std::vector<std::string> names;
  for (const BackendInfo& info : backends()) {
    if (is_asked_for(info) && info.device == Device::cuda) names.push_back(info.name);
  }
  return names;
}

Exec on(const std::string& backend, uint64_t* stats) {
  static std::map<std::string, std::string> names;  // exec.backend must outlive the call
  static std::mutex mutex;                          // ranks are threads
  Exec exec{};
  {
    const std::lock_guard<std::mutex> lock(mutex);
    exec.backend = names.emplace(backend, backend).first->first.c_str();
  }
  exec.stats = stats;
  for (const BackendInfo& info : backends()) {
    if (info.name == backend) exec.device = info.device;
  }
  const char* sms = std::getenv("TOPKEY_TEST_MAX_SMS");
  if (sms != nullptr && exec.device == Device::cuda) exec.max_sms = std::atoi(sms);
  return exec;
}

int64_t Tally::total() const {
  int64_t total = 0;
  for (const auto& [label, count] : ran_) total += count;
  return total;
}

Tally::~Tally() {
  std::cout << "[ ran      ] " << what_ << ":";
  for (const auto& [label, count] : ran_) std::cout << " " << label << " x" << count;
  std::cout << "\n";
  for (const auto& [label, count] : skipped_)
    std::cout << "[ refused  ] " << what_ << ": " << label << " x" << count << "\n";
  EXPECT_GT(total() + refused_strict_, 0) << what_ << ": nothing ran";
}

std::string label_of(const std::string& backend, const ProblemSpec& spec) {
  std::string label = backend + "/" + format_name(spec.format);
  if (spec.q_dtype != DType::none) label += std::string("/q=") + dtype_name(spec.q_dtype);
  return label;
}

Outputs::Outputs(int64_t rows, int64_t topk, const Want& want) : want_(want) {
  if (want.indices) indices = Guarded(DType::i32, rows, topk);
  if (want.slots) slots = Guarded(DType::i32, rows, topk, 1);
  if (want.scores) scores = Guarded(DType::f32, rows, topk, 5);
  if (want.counts) counts = Guarded(DType::i32, rows, -1);
  if (want.blocks > 0) blocks = Guarded(DType::i32, rows, want.blocks);
}

Selection Outputs::selection() const {
  Selection s{};
  s.indices = indices.view(want_.wide);
  s.slots = slots.view(want_.wide);
  s.scores = scores.view(want_.wide);
  s.counts = counts.view();
  s.blocks = blocks.view();
  s.block_size = want_.block_size;
  s.index_base = want_.index_base;
  if (want_.slots) s.slot_map = want_.slot_map;
  s.order = want_.order;
  s.fill = want_.fill;
  s.fill_value = want_.fill_value;
  return s;
}

void Outputs::reset() {
  for (Guarded* g : {&indices, &slots, &scores, &counts, &blocks}) g->reset();
}

std::string Outputs::touched_outside() const {
  const std::pair<const char*, const Guarded*> all[] = {
      {"indices", &indices}, {"slots", &slots}, {"scores", &scores}, {"counts", &counts}, {"blocks", &blocks}};
  for (const auto& [name, memory] : all) {
    if (!*memory) continue;
    if (const std::string touched = memory->touched_outside(); !touched.empty())
      return std::string(name) + ": " + touched;
  }
  return {};
}

bool Outputs::untouched() const {
  for (const Guarded* g : {&indices, &slots, &scores, &counts, &blocks}) {
    if (*g && !g->untouched()) return false;
  }
  return true;
}

::testing::AssertionResult same_outputs(const Selection& a, const Selection& b, int64_t rows, int64_t topk) {
  struct Pair {
    const char* name;
    const Tensor &a, &b;
    int64_t cols;
  };
  const Pair pairs[] = {{"indices", a.indices, b.indices, topk},
                        {"slots", a.slots, b.slots, topk},
                        {"scores", a.scores, b.scores, topk},
                        {"counts", a.counts, b.counts, 1},
                        {"blocks", a.blocks, b.blocks, std::min(a.blocks.shape[1], b.blocks.shape[1])}};
  for (const Pair& p : pairs) {
    if (p.a.data == nullptr || p.b.data == nullptr) continue;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < p.cols; ++c) {
        uint32_t x, y;
        std::memcpy(&x, element(p.a, r, c), sizeof x);
        std::memcpy(&y, element(p.b, r, c), sizeof y);
        if (x == y) continue;
        return ::testing::AssertionFailure() << p.name << " differ at row " << r << ", column " << c << ": "
                                             << static_cast<int32_t>(x) << " and " << static_cast<int32_t>(y);
      }
    }
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult good(const Report& report) {
  if (report.ok) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << report.text();
}

::testing::AssertionResult inside(const Outputs& outputs) {
  const std::string touched = outputs.touched_outside();
  if (touched.empty()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << touched;
}

Thrown thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return {error.status(), error.what()};
  }
  return {};
}

}  // namespace topkey::testing
