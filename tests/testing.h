// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What all stage tests share: the backends to run, a tally of what ran (a test that ran nothing fails), guarded
// outputs, RapidCheck properties with a fixed seed, GoogleTest assertions over support's reports.
#pragma once
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/array.h"
#include "support/compare.h"
#include "support/problem.h"
#include "support/run.h"
#include "topkey/topkey.h"

namespace topkey::testing {

using namespace topkey::support;

/// Names of the usable backends that take host memory.
std::vector<std::string> host_backends();
/// Those, and the usable ones of a GPU, which run() and launch() give copies of host memory. TOPKEY_TEST_DEVICE=cuda or
/// cpu names one kind of them, TOPKEY_TEST_BACKEND one of them.
std::vector<std::string> every_backend();
/// Of those, the ones that take any head_dim: tests of the layer on small shapes. serving_day.h has a shape for all.
std::vector<std::string> general_backends();
/// Only those of a GPU.
std::vector<std::string> gpu_backends();
/// An Exec for `backend`; stats may be null. TOPKEY_TEST_MAX_SMS is the budget of SMs on a GPU.
Exec on(const std::string& backend, uint64_t* stats = nullptr);

/// Pieces of GPU memory that tests have held themselves so far: a test with such counts as one of a GPU.
int64_t& gpu_pieces();

/// Counts what ran and what a backend refuses (`*_unsupported`), prints both at its end, and fails the test if
/// nothing ran.
class Tally {
 public:
  explicit Tally(std::string what) : what_(std::move(what)) {}
  Tally(const Tally&) = delete;
  Tally& operator=(const Tally&) = delete;
  ~Tally();
  /// True where `args` can run; counted under `label`, e.g. "ref/fp8".
  template <class Args>
  bool runs(const Args& args, const Exec& exec, const std::string& label) {
    const char* reason = unsupported(args, exec);
    if (reason == nullptr) {
      ++ran_[label];
      return true;
    }
    ++skipped_[label + ": " + reason];
    refused_strict_ += exec.strict && exec.device == Device::cuda;  // as it must
    return false;
  }
  void ran(const std::string& label) { ++ran_[label]; }
  int64_t total() const;

 private:
  std::string what_;
  std::map<std::string, int64_t> ran_, skipped_;
  int64_t refused_strict_ = 0;
};

/// "ref/fp8", with q's dtype where it is not the keys' own.
std::string label_of(const std::string& backend, const ProblemSpec& spec);

/// Which outputs a call shall write, and how.
struct Want {
  bool indices = true, slots = false, scores = false, counts = false;
  int64_t blocks = 0;  ///< columns of published blocks
  int32_t block_size = 0;
  Order order = Order::position;
  Fill fill = Fill::minus_one;
  int32_t fill_value = 0;
  Tensor index_base{};
  SlotMap slot_map{};
  bool wide = false;  ///< outputs have spare columns in their shape, not only in their stride
};

/// Guarded outputs of a selection of `rows` rows.
class Outputs {
 public:
  Outputs(int64_t rows, int64_t topk, const Want& want);
  Selection selection() const;
  void reset();
  /// Empty, or which output was written outside its part.
  std::string touched_outside() const;
  bool untouched() const;

  Guarded indices, slots, scores, counts, blocks;

 private:
  Want want_;
};

/// Same bits in the first `topk` columns of every output that both have.
::testing::AssertionResult same_outputs(const Selection& a, const Selection& b, int64_t rows, int64_t topk);
/// ok(), or the report's text as the failure.
::testing::AssertionResult good(const Report& report);
/// Empty guards.
::testing::AssertionResult inside(const Outputs& outputs);

/// A matrix of logits inside guards.
struct Logits {
  Guarded memory;
  Logits(DType dtype, int64_t rows, int64_t width) : memory(dtype, rows, width) {}
  Tensor view() const { return memory.view(); }
};

/// Runs a RapidCheck property `cases` times from a fixed seed, so that CI is repeatable; a counterexample fails the
/// test. RC_PARAMS (RapidCheck's own variable, e.g. "seed=7 max_success=5000") overrides both.
template <class Testable>
void property(const std::string& description, int cases, Testable&& testable) {
  rc::detail::TestMetadata metadata;
  metadata.id = metadata.description = description;
  rc::detail::TestParams params;
  params.maxSuccess = cases;
  params.seed = 14695981039346656037u;  // FNV-1a of the description, so that two properties do not draw the same cases
  for (const char letter : description) params.seed = (params.seed ^ static_cast<uint8_t>(letter)) * 1099511628211u;
  if (std::getenv("RC_PARAMS") != nullptr) params = rc::detail::configuration().testParams;
  const auto result = rc::detail::checkTestable(std::forward<Testable>(testable), metadata, params);
  if (result.template is<rc::detail::SuccessResult>()) return;
  std::ostringstream text;
  rc::detail::printResultMessage(result, text);
  ADD_FAILURE() << description << "\n" << text.str();
}

/// lo <= result <= hi, drawn inside a property; uniform at once (inRange alone grows with RapidCheck's size); shrinks
/// towards lo.
inline int64_t draw(int64_t lo, int64_t hi) {
  return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange<int64_t>(lo, hi + 1));
}
/// True once in `one_in` times; shrinks to false.
inline bool draw_flag(int64_t one_in = 2) { return draw(0, one_in - 1) == one_in - 1; }
template <class T>
T draw_of(std::initializer_list<T> values) {
  const std::vector<T> list(values);
  return list[static_cast<size_t>(draw(0, static_cast<int64_t>(list.size()) - 1))];
}
/// Fails the property with the report's text.
inline void require(const Report& report) {
  if (!report.ok) RC_FAIL(report.text());
}
inline void require_inside(const Outputs& outputs) {
  if (const std::string touched = outputs.touched_outside(); !touched.empty()) RC_FAIL(touched);
}

/// What a call throws: its status and sentence; Status::ok if it does not.
struct Thrown {
  Status status = Status::ok;
  std::string sentence;
};
Thrown thrown_by(const std::function<void()>& call);

}  // namespace topkey::testing
