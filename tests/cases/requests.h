// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Paged problems whose requests have given lengths, where support::make_problem would draw them: what cases about
// padding, lengths and batches are made of. Each request has pages of its own; behind its last key lie NaN bytes,
// behind its table wild page ids.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "tests/cases/case.h"

namespace topkey::cases {

/// Row r belongs to request row_request[r] and sees that request's first ends[r] keys. Lengths below 0 count as 0.
inline Problem requests_of(ProblemSpec spec, const Ints& lens, const Ints& row_request, const Ints& ends) {
  const int64_t size = spec.page_size;
  const auto pages_of = [size](int32_t len) { return len > 0 ? (len + size - 1) / size : 0; };
  int64_t pages = 0, columns = 1;
  for (int32_t len : lens) pages += pages_of(len), columns = std::max(columns, pages_of(len) + 1);
  // One long request is drawn and cut at page borders.
  spec.paged = true, spec.requests = 1, spec.keys = std::max<int64_t>(1, pages) * size;
  spec.rows = static_cast<int64_t>(row_request.size());
  Problem p = support::make_problem(spec);
  const Ints ids = p.page_ids[0];
  p.page_ids.clear(), p.lens.clear();
  std::vector<Ints> table;
  auto next = ids.begin();
  for (int32_t len : lens) {
    p.page_ids.emplace_back(next, next + pages_of(len));
    p.lens.push_back(std::max(0, len));
    table.push_back(p.page_ids.back());
    table.back().resize(static_cast<size_t>(columns), 1000000000);
    next += pages_of(len);
    for (int64_t t = p.lens.back(); t < pages_of(len) * size; ++t) {
      const auto b = static_cast<int64_t>(p.lens.size()) - 1;
      std::memset(p.values_at(b, t), 0xFF, static_cast<size_t>(value_bytes(spec.format, spec.head_dim)));
      if (p.scales_at(b, t) != nullptr) {
        std::memset(p.scales_at(b, t), 0xFF, static_cast<size_t>(scale_bytes(spec.format, spec.head_dim)));
      }
    }
  }
  p.spec.requests = static_cast<int32_t>(lens.size());
  p.row_request = row_request;
  p.request = Array::of(row_request);
  p.end = Array::of(ends);
  p.block_table = ints(table);
  p.q_truth = {}, p.keys_truth = {}, p.weights_truth = {};
  return p;
}

/// next_n rows a request; row j of a request of length n ends at n - next_n + 1 + j, as the library derives it from
/// `end` [B].
inline Problem drafts_of(const ProblemSpec& spec, const Ints& lens, int32_t next_n) {
  Ints row_request, ends;
  for (size_t b = 0; b < lens.size(); ++b) {
    for (int32_t j = 0; j < next_n; ++j) {
      row_request.push_back(static_cast<int32_t>(b));
      ends.push_back(lens[b] - next_n + 1 + j);
    }
  }
  Problem p = requests_of(spec, lens, row_request, ends);
  p.request = {};
  p.end = Array::of(lens);
  p.spec.addressing = support::Addressing::next_n;
  p.spec.next_n = next_n;
  return p;
}

/// counts[b] rows of request b, its newest tokens, found by q_indptr.
inline Problem ragged_of(const ProblemSpec& spec, const Ints& lens, const Ints& counts) {
  Ints row_request, ends, indptr = {0};
  for (size_t b = 0; b < lens.size(); ++b) {
    for (int32_t j = 0; j < counts[b]; ++j) {
      row_request.push_back(static_cast<int32_t>(b));
      ends.push_back(lens[b] - counts[b] + 1 + j);
    }
    indptr.push_back(indptr.back() + counts[b]);
  }
  Problem p = requests_of(spec, lens, row_request, ends);
  p.request = {};
  p.q_indptr = Array::of(indptr);
  p.spec.addressing = support::Addressing::q_indptr;
  return p;
}

/// Key rows that expand_rows lets each row see.
inline Ints expanded_lens(const Ints& query_start, const Ints& seq_lens, int32_t ratio, const Exec& exec) {
  const int64_t rows = query_start.back();
  const Array starts = Array::of(query_start), seq = Array::of(seq_lens);
  const Guarded lens(DType::i32, rows, -1);
  ExpandRows a{};
  a.query_start = starts.view(), a.seq_lens = seq.view(), a.ratio = ratio, a.capacity = rows, a.lens = lens.view();
  support::run(a, exec);
  EXPECT_EQ(lens.touched_outside(), "");
  Ints values;
  for (int64_t r = 0; r < rows; ++r) values.push_back(static_cast<int32_t>(support::int_at(lens.view(), r)));
  return values;
}

}  // namespace topkey::cases
