// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Problems made from problems: the same question asked another way (dense for paged, one shard of it, a few of its
// rows, more heads of weight 0), whose answers must agree.
#include <algorithm>
#include <cstring>

#include "support/coded_rows.h"
#include "support/oracle.h"

namespace topkey::support {
namespace {

/// Rows `rows` of a [R, ...] array.
Array take(const Array& from, const std::vector<int64_t>& rows) {
  if (!from) return {};
  const Tensor& t = from.view();
  const auto count = static_cast<int64_t>(rows.size());
  const Array to = t.ndim == 1   ? Array(t.dtype, {count})
                   : t.ndim == 2 ? Array(t.dtype, {count, t.shape[1]})
                                 : Array(t.dtype, {count, t.shape[1], t.shape[2]});
  const size_t bytes = count > 0 ? to.bytes() / static_cast<size_t>(count) : 0;
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(element(to.view(), i), element(t, rows[static_cast<size_t>(i)]), bytes);
  return to;
}

void copy_key(const Problem& from, int64_t b, int64_t position, const Problem& to, int64_t to_b, int64_t to_position) {
  const ProblemSpec& spec = from.spec;
  std::vector<uint8_t> values(static_cast<size_t>(value_bytes(spec.format, spec.head_dim)));
  std::vector<uint8_t> scales(static_cast<size_t>(scale_bytes(spec.format, spec.head_dim)));
  from.read_key(b, position, values.data(), scales.data());
  to.write_key(to_b, to_position, values.data(), scales.data());
}

}  // namespace

Problem rows_of(const Problem& whole, const std::vector<int64_t>& rows) {
  Problem p = whole;
  const int64_t default_end = whole.spec.paged ? 0 : whole.spec.keys;
  p.q = take(whole.q, rows);
  p.q_scales = take(whole.q_scales, rows);
  p.weights = take(whole.weights, rows);
  p.q_truth = take(whole.q_truth, rows);
  p.weights_truth = take(whole.weights_truth, rows);
  p.start = take(whole.start, rows);
  p.length = take(whole.length, rows);
  p.row_request.clear();
  std::vector<int32_t> ends, requests;
  for (int64_t r : rows) {
    const RowRange range = row_range(whole.rows(), r, default_end, -1);
    ends.push_back(static_cast<int32_t>(range.end));
    requests.push_back(static_cast<int32_t>(range.request));
    p.row_request.push_back(whole.row_request[static_cast<size_t>(r)]);
  }
  if (!whole.length) p.end = Array::of(ends);
  p.q_indptr = {};
  p.request = whole.spec.paged ? Array::of(requests) : Array{};
  p.spec.addressing = Addressing::request;
  p.spec.rows = static_cast<int64_t>(rows.size());
  if (p.spec.table_per_row) fill_table(p);
  return p;
}

Problem dense_of(const Problem& paged, int32_t b, std::vector<int64_t>* rows) {
  rows->clear();
  for (int64_t r = 0; r < paged.count(); ++r) {
    if (paged.row_request[static_cast<size_t>(r)] == b) rows->push_back(r);
  }
  Problem p = rows_of(paged, *rows);
  const int64_t count = paged.lens[static_cast<size_t>(b)];
  p.spec.paged = false;
  p.spec.table_per_row = false;
  p.spec.keys = count;
  p.lens = {count};
  p.request = {}, p.pages = {}, p.block_table = {};
  p.page_ids.clear();
  p.row_request.assign(rows->size(), 0);
  allocate_dense(p, count);
  for (int64_t t = 0; t < count; ++t) copy_key(paged, b, t, p, 0, t);
  return p;
}

Problem shard_of(const Problem& whole, Shard shard) {
  std::vector<int64_t> all(static_cast<size_t>(whole.count()));
  for (size_t r = 0; r < all.size(); ++r) all[r] = static_cast<int64_t>(r);
  Problem p = rows_of(whole, all);
  p.shard = shard;
  p.keys_truth = {};
  std::vector<int32_t> starts, ends, whole_starts, whole_ends;
  const auto owned_before = [&](int64_t at) { return static_cast<int32_t>(at <= 0 ? at : shard.local_length(at)); };
  for (int64_t r : all) {
    const RowRange range = row_range(whole.rows(), r, 0, -1);
    starts.push_back(owned_before(range.start)), ends.push_back(owned_before(range.end));
    whole_starts.push_back(static_cast<int32_t>(range.start)), whole_ends.push_back(static_cast<int32_t>(range.end));
  }
  p.length = {};
  p.end = Array::of(ends);
  if (whole.start) p.start = Array::of(starts);
  p.whole_start = Array::of(whole_starts), p.whole_end = Array::of(whole_ends);
  const auto owned = [&](int64_t g) {
    return g / std::max(1, shard.interleave) % std::max(1, shard.world_size) == shard.rank;
  };
  for (size_t b = 0; b < whole.lens.size(); ++b) {
    p.lens[b] = 0;
    for (int64_t g = 0; g < whole.lens[b]; ++g) p.lens[b] += owned(g) ? 1 : 0;
  }
  Random random(whole.spec.seed * 131 + static_cast<uint64_t>(shard.rank));
  allocate_pages(p, random);
  fill_table(p);
  for (size_t b = 0; b < whole.lens.size(); ++b) {
    int64_t local = 0;
    for (int64_t g = 0; g < whole.lens[b]; ++g) {
      if (owned(g)) copy_key(whole, static_cast<int64_t>(b), g, p, static_cast<int64_t>(b), local++);
    }
  }
  return p;
}

Problem with_zero_heads(const Problem& whole, int32_t extra) {
  Problem p = whole;
  const int64_t rows = whole.count(), h = whole.spec.heads, more = h + extra;
  const Tensor& q = whole.q.view();
  Random random(whole.spec.seed * 17 + 3);
  p.spec.heads = static_cast<int32_t>(more);
  p.q = Array(q.dtype, {rows, more, q.shape[2]});
  p.weights = Array(whole.spec.weights_dtype, {rows, more});
  if (whole.q_scales) p.q_scales = Array(DType::u8, {rows, more, whole.q_scales.view().shape[2]});
  const auto vector_bytes = static_cast<size_t>(q.shape[2]) * dtype_bytes(q.dtype);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < more; ++i) {
      // Extra heads repeat a real head's codes: they could change the score if their weight were looked at wrongly.
      const int64_t from = i < h ? i : static_cast<int64_t>(random.below(static_cast<uint64_t>(h)));
      std::memcpy(element(p.q.view(), r, i), element(q, r, from), vector_bytes);
      if (whole.q_scales) {
        std::memcpy(element(p.q_scales.view(), r, i), element(whole.q_scales.view(), r, from),
                    static_cast<size_t>(p.spec.head_dim / 32));
      }
      const size_t size = dtype_bytes(whole.spec.weights_dtype);
      if (i < h) std::memcpy(element(p.weights.view(), r, i), element(whole.weights.view(), r, i), size);
    }
  }
  p.q_truth = {}, p.keys_truth = {}, p.weights_truth = {};
  return p;
}

}  // namespace topkey::support
