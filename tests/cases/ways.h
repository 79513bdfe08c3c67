// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// One question, given as scores, asked of all three selections: topk gets the scores, the two searches get fp8 keys
// whose dot with the query is 1 and whose scale is the wanted score, which is exact in every arithmetic. So a case
// about selection on given scores is at the same time a case of the fused operations on exact inputs.
#pragma once
#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "tests/cases/case.h"

namespace topkey::cases {

/// Scores given by row, to be selected from by every operation that selects.
struct Asked {
  std::vector<Floats> scores;
  int32_t topk = 1;
  Order order = Order::position;
  Ints start{}, end{};  ///< empty: whole rows
};

namespace way {

inline constexpr int64_t kHeads = 4, kDim = 32, kPage = 16;
inline constexpr uint8_t kOne = 0x38;  // e4m3

struct Keys {
  int64_t rows, width;
  Array q, weights, values, scales, pages, table, start, end;
};

inline Query query(const Keys& k) { return {k.q.view(), {}, k.weights.view()}; }

inline void fill_pages(Keys& k) {
  const PageLayout at = page_layout(KeyFormat::fp8, Layout::planar, kPage, kDim);
  const int64_t columns = (k.width + kPage - 1) / kPage;
  Ints ids = progression(0, static_cast<int32_t>(k.rows * columns));
  Random(5).shuffle(ids);
  k.pages = Array(DType::u8, {k.rows * columns, at.page_bytes});
  std::memset(k.pages.as<uint8_t>(), 0x7F, k.pages.bytes());  // NaN codes where no key is
  k.table = Array(DType::i32, {k.rows, columns});
  std::copy(ids.begin(), ids.end(), k.table.as<int32_t>());
  for (int64_t r = 0; r < k.rows; ++r) {
    for (int64_t n = 0; n < k.width; ++n) {
      uint8_t* page = support::element(k.pages.view(), ids[static_cast<size_t>(r * columns + n / kPage)]);
      std::memcpy(page + at.value_offset(n % kPage), support::element(k.values.view(), r * k.width + n), kDim);
      std::memcpy(page + at.scale_offset(n % kPage), support::element(k.scales.view(), r * k.width + n), 4);
    }
  }
}

inline Keys keys_of(const Asked& asked) {
  Keys k{};
  k.rows = static_cast<int64_t>(asked.scores.size());
  k.width = static_cast<int64_t>(asked.scores.at(0).size());
  k.q = Array(DType::f8_e4m3fn, {k.rows, kHeads, kDim});
  k.weights = Array(DType::f32, {k.rows, kHeads});
  k.values = Array(DType::f8_e4m3fn, {k.rows * k.width, kDim});
  k.scales = Array(DType::f32, {k.rows * k.width});
  for (int64_t i = 0; i < k.rows * kHeads; ++i) k.q.as<uint8_t>()[i * kDim] = kOne, k.weights.as<float>()[i] = 0.25F;
  for (int64_t i = 0; i < k.rows * k.width; ++i) k.values.as<uint8_t>()[i * kDim] = kOne;
  float* to = k.scales.as<float>();
  for (const Floats& row : asked.scores) to = std::copy(row.begin(), row.end(), to);
  fill_pages(k);
  return k;
}

/// Windows as given; `step`: where each row's own columns begin, if the rows lie side by side.
inline void set_windows(const Asked& asked, Keys& k, int64_t step) {
  k.start = Array(DType::i32, {k.rows});
  k.end = Array(DType::i32, {k.rows});
  for (int64_t r = 0; r < k.rows; ++r) {
    const auto i = static_cast<size_t>(r);
    k.start.as<int32_t>()[r] = static_cast<int32_t>(r * step + (asked.start.empty() ? 0 : asked.start[i]));
    k.end.as<int32_t>()[r] = static_cast<int32_t>(r * step + (asked.end.empty() ? k.width : asked.end[i]));
  }
}

template <class Args>
Args common(const Asked& asked, const Keys& k) {
  Args a{};
  a.rows.count = k.rows;
  a.rows.start = k.start.view();
  a.rows.end = k.end.view();
  a.topk = asked.topk;
  a.out.order = asked.order;
  return a;
}

inline void expect_same(const Picked& a, const Picked& b, const char* what) {
  EXPECT_EQ(a.indices, b.indices) << what;
  EXPECT_EQ(a.counts, b.counts) << what;
  for (size_t r = 0; r < a.scores.size(); ++r) {
    const size_t bytes = a.scores[r].size() * sizeof(float);
    EXPECT_EQ(std::memcmp(a.scores[r].data(), b.scores[r].data(), bytes), 0) << what << ", scores of row " << r;
  }
}

}  // namespace way

/// Asks topk, mqa_topk and paged_mqa_topk the same question and demands the same bits of all; topk is compared with a
/// full sort.
inline void each_way(const Asked& asked, const Exec& exec, const std::function<void(const Picked&)>& judge) {
  way::Keys k = way::keys_of(asked);
  const Array scores = floats(asked.scores);
  way::set_windows(asked, k, 0);
  Topk given = way::common<Topk>(asked, k);
  given.scores = scores.view();
  const Picked first = pick_exactly(given, exec);
  judge(first);
  PagedMqaTopk paged = way::common<PagedMqaTopk>(asked, k);
  paged.q = way::query(k);
  paged.keys.cache = {k.pages.view(), KeyFormat::fp8, Layout::planar, way::kPage, way::kDim};
  paged.keys.block_table = k.table.view();
  way::expect_same(first, pick(paged, exec), "paged_mqa_topk and topk differ");
  way::set_windows(asked, k, k.width);
  MqaTopk dense = way::common<MqaTopk>(asked, k);
  dense.q = way::query(k);
  dense.keys = {k.values.view(), k.scales.view(), KeyFormat::fp8};
  way::expect_same(first, pick(dense, exec), "mqa_topk and topk differ");
}

}  // namespace topkey::cases
