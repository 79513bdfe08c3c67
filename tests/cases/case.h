// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What the tests of public faults share: the suite, its judgements (VALID, INDEX-EXACT, GUARD, RIGHT-OR-REFUSE, a
// deadline), whole problems judged, and large addresses in little memory. README.md lists which case is tested where.
#pragma once
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "support/array.h"
#include "support/compare.h"
#include "support/patterns.h"
#include "support/problem.h"
#include "support/run.h"
#include "tests/backend_test.h"
#include "topkey/topkey.h"

namespace topkey::cases {

using support::Array;
using support::Guarded;
using support::Problem;
using support::ProblemSpec;
using support::Random;
using Ints = std::vector<int32_t>;
using Floats = std::vector<float>;

/// Every case runs on every backend that takes host memory.
class Cases : public topkey::testing::BackendTest {
 protected:
  /// TOPKEY_FULL=1 asks for the full sizes; `ref` always runs the CI form.
  bool full() const {
    const char* asked = std::getenv("TOPKEY_FULL");
    return asked != nullptr && *asked == '1' && GetParam() != "ref";
  }
};
#define TOPKEY_CASES()                                                                     \
  INSTANTIATE_TEST_SUITE_P(, Cases, ::testing::ValuesIn(topkey::testing::every_backend()), \
                           topkey::testing::backend_label)

/// For files with cases of the layer on small shapes.
#define TOPKEY_CASES_OF_GENERAL_BACKENDS()                                                    \
  INSTANTIATE_TEST_SUITE_P(, Cases, ::testing::ValuesIn(topkey::testing::general_backends()), \
                           topkey::testing::backend_label)

// ---- judgements
// --------------------------------------------------------------------------------------------------------------

/// VALID: the first `count` entries are distinct positions in [low, high), all later ones -1. Empty, or what is wrong.
inline std::string invalid(const Ints& row, int64_t count, int64_t low, int64_t high) {
  std::set<int32_t> seen;
  for (size_t i = 0; i < row.size(); ++i) {
    const std::string at = "entry " + std::to_string(i) + " is " + std::to_string(row[i]);
    if (static_cast<int64_t>(i) >= count) {
      if (row[i] != -1) return at + ", not -1";
    } else if (row[i] < low || row[i] >= high) {
      return at + ", outside the window";
    } else if (!seen.insert(row[i]).second) {
      return at + " for the second time";
    }
  }
  return {};
}

/// RIGHT-OR-REFUSE: true where `call` ran, whose result must then be right; false where it raised with a sentence.
template <class Call>
bool ran(const Call& call) {
  try {
    call();
    return true;
  } catch (const Error& e) {
    EXPECT_TRUE(e.status() == Status::invalid_argument || e.status() == Status::unsupported) << e.what();
    EXPECT_NE(std::string(e.what()).find(": "), std::string::npos) << e.what();
    return false;
  }
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr double kPatience = 20;
#else
inline constexpr double kPatience = 1;
#endif

/// Fails when its scope lasted longer than a case allows. (A call that never returns is ended by ctest's timeout.)
class Deadline {
 public:
  explicit Deadline(double seconds) : seconds_(seconds * kPatience), start_(std::chrono::steady_clock::now()) {}
  ~Deadline() {
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start_;
    EXPECT_LT(taken.count(), seconds_) << "the call took too long";
  }

 private:
  double seconds_;
  std::chrono::steady_clock::time_point start_;
};

/// first, first + step, ...: `count` of them.
inline Ints progression(int32_t first, int32_t count, int32_t step = 1) {
  Ints values;
  for (int32_t i = 0; i < count; ++i) values.push_back(first + i * step);
  return values;
}

/// A list of rows as a dense matrix, and back.
template <class T>
Array matrix(DType dtype, const std::vector<std::vector<T>>& rows) {
  const auto count = static_cast<int64_t>(rows.size());
  const Array out(dtype, {count, count > 0 ? static_cast<int64_t>(rows[0].size()) : 0});
  T* to = out.as<T>();
  for (const auto& row : rows) to = std::copy(row.begin(), row.end(), to);
  return out;
}
template <class T>
std::vector<T> row_of(const Tensor& t, int64_t row) {
  std::vector<T> values(static_cast<size_t>(t.shape[1]));
  for (size_t i = 0; i < values.size(); ++i)
    std::memcpy(&values[i], support::element(t, row, static_cast<int64_t>(i)), sizeof(T));
  return values;
}
inline Array floats(const std::vector<Floats>& rows) { return matrix(DType::f32, rows); }
inline Array ints(const std::vector<Ints>& rows) { return matrix(DType::i32, rows); }

// ---- selections
// ------------------------------------------------------------------------------------------------------------

/// What a selection wrote, by row, and what it counted.
struct Picked {
  std::vector<Ints> indices, slots;
  std::vector<Floats> scores;
  Ints counts;
  std::vector<uint64_t> stats = std::vector<uint64_t>(kNumStats, 0);
};

/// Runs a selection into guarded outputs: indices, counts, scores if wanted, slots if the arguments bring a slot map.
/// `judge` may look at the arguments with their outputs while these exist.
template <class Args>
Picked pick(Args args, Exec exec, bool scores = true, const std::function<void(const Args&)>& judge = {}) {
  topkey::testing::Want want;
  want.scores = scores, want.counts = true;
  want.slots = args.out.slot_map.block_table.data != nullptr;
  want.order = args.out.order, want.index_base = args.out.index_base, want.slot_map = args.out.slot_map;
  want.wide = true;
  const topkey::testing::Outputs out(args.rows.count, args.topk, want);
  args.out = out.selection();
  Picked p;
  exec.stats = p.stats.data();
  support::run(args, exec);
  EXPECT_TRUE(topkey::testing::inside(out));
  for (int64_t r = 0; r < args.rows.count; ++r) {
    p.indices.push_back(row_of<int32_t>(out.indices.view(), r));
    if (want.scores) p.scores.push_back(row_of<float>(out.scores.view(), r));
    if (want.slots) p.slots.push_back(row_of<int32_t>(out.slots.view(), r));
    p.counts.push_back(static_cast<int32_t>(support::int_at(out.counts.view(), r)));
  }
  if (judge) judge(args);
  return p;
}

/// INDEX-EXACT of a selection on given scores: equal to a full sort in set, order, scores and counts.
inline Picked pick_exactly(const Topk& args, const Exec& exec, bool scores = true) {
  return pick<Topk>(args, exec, scores, [](const Topk& written) {
    EXPECT_TRUE(topkey::testing::good(support::compare_selection(written)));
  });
}

// ---- whole problems
// ----------------------------------------------------------------------------------------------------------

/// Logits of a problem, clean, [count, width].
inline Array logits_of(const Problem& p, const Exec& exec) {
  const Array out(DType::f32, {p.count(), p.width()});
  if (p.spec.paged) {
    support::run(p.paged_logits(out.view()), exec);
  } else {
    support::run(p.dense_logits(out.view()), exec);
  }
  return out;
}

/// Scores within the backend's bound (on exact inputs: bit for bit), the search equal to a full sort of them. Returns
/// the search.
inline Picked expect_right(const Problem& p, int32_t topk, const Exec& exec) {
  const Array logits = logits_of(p, exec);
  const Exec runner = p.spec.paged ? support::runner_of(p.paged_logits(logits.view()), exec)
                                   : support::runner_of(p.dense_logits(logits.view()), exec);
  const char* own = arithmetic(runner.backend, p.spec.format, support::query_dtype(p.spec));
  const char* bound = p.spec.exact ? "ref" : own;
  support::Report scores, selection;
  Picked picked;
  if (p.spec.paged) {
    const auto truth = support::truth_of(p.query(), p.paged_keys(), p.rows());
    scores = support::compare_scores(p.paged_logits(logits.view()), truth, bound);
    picked = pick<PagedMqaTopk>(p.paged_search(topk, {}), exec, true, [&](const PagedMqaTopk& written) {
      selection = support::compare_selection(written, logits.view());
    });
  } else {
    const auto truth = support::truth_of(p.query(), p.dense_keys(), p.rows());
    scores = support::compare_scores(p.dense_logits(logits.view()), truth, bound);
    picked = pick<MqaTopk>(p.dense_search(topk, {}), exec, true, [&](const MqaTopk& written) {
      selection = support::compare_selection(written, logits.view());
    });
  }
  EXPECT_TRUE(topkey::testing::good(scores)) << p.text();
  EXPECT_TRUE(topkey::testing::good(selection)) << p.text();
  return picked;
}

// ---- memory
// ------------------------------------------------------------------------------------------------------------------

/// Zero bytes that cost memory only where they are touched, for addresses past 2^31 and 2^32.
class Sparse {
 public:
  explicit Sparse(size_t bytes) : bytes_(bytes) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (at != MAP_FAILED) data_ = static_cast<uint8_t*>(at);
  }
  ~Sparse() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  explicit operator bool() const { return data_ != nullptr; }
  uint8_t* data() const { return data_; }
  template <class T>
  T* as(int64_t index = 0) const {
    return reinterpret_cast<T*>(data_) + index;
  }

 private:
  size_t bytes_;
  uint8_t* data_ = nullptr;
};
#define TOPKEY_NEEDS(sparse) \
  if (!(sparse)) GTEST_SKIP() << "this machine gives no sparse mapping of the size that the case needs"

/// Bytes between two walls of 4 KiB that a call must leave alone.
class Walled {
 public:
  explicit Walled(size_t bytes, uint8_t fill = 0) : bytes_(bytes), store_(support::aligned_bytes(bytes + 2 * kWall)) {
    std::memset(store_.get(), 0xA5, bytes_ + 2 * kWall);
    std::memset(data(), fill, bytes_);
  }
  uint8_t* data() const { return store_.get() + kWall; }
  bool intact() const {
    const auto is_wall = [](uint8_t byte) { return byte == 0xA5; };
    return std::all_of(store_.get(), data(), is_wall) && std::all_of(data() + bytes_, data() + bytes_ + kWall, is_wall);
  }

 private:
  static constexpr size_t kWall = 4096;
  size_t bytes_;
  std::shared_ptr<uint8_t> store_;
};

}  // namespace topkey::cases
