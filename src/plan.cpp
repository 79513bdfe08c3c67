// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Pure functions on upper bounds of lengths; no backend, no device.
#include "plan.h"

#include <algorithm>
#include <deque>
#include <numeric>

#include "check.h"

namespace topkey::plan {
namespace {

void check(const Check& c, const PlanStep& step) {
  c.number("num_requests", step.num_requests, 0, kMaxKeys);
  TOPKEY_REQUIRE(c, step.num_requests == 0 || step.query_lens != nullptr, "query_lens", "given", "null");
  TOPKEY_REQUIRE(c, step.num_requests == 0 || step.seq_lens != nullptr, "seq_lens", "given", "null");
  for (int64_t b = 0; b < step.num_requests; ++b) {
    c.number("query_lens", step.query_lens[b], 0, kMaxKeys);
    c.number("seq_lens", step.seq_lens[b], 0, kMaxKeys);
  }
  c.number("decode_threshold", step.decode_threshold, 0, kMaxKeys);
  c.number("ratio", step.ratio, 0, kMaxKeys);
  c.number("gather_rows", step.gather_rows, 0, INT64_MAX);
  c.number("logits_bytes", step.logits_bytes, 0, INT64_MAX);
  c.number("row_shards", step.row_shards, 0, 1 << 20);
  c.number("min_shard_rows", step.min_shard_rows, 0, kMaxKeys);
}

int64_t ratio_of(const PlanStep& step) { return std::max(step.ratio, 1); }
int64_t key_rows(const PlanStep& step, int64_t b) { return step.seq_lens[b] / ratio_of(step); }

/// a * b <= limit, without overflow.
bool product_fits(int64_t a, int64_t b, int64_t limit) { return a == 0 || b <= limit / a; }

/// The largest cost of a shard, from running sums.
int64_t dearest(const std::vector<int64_t>& sizes, const std::vector<int64_t>& sums) {
  int64_t most = 0, row = 0, before = 0;
  for (const int64_t size : sizes) {
    row += size;
    most = std::max(most, sums[static_cast<size_t>(row - 1)] - before);
    before = sums[static_cast<size_t>(row - 1)];
  }
  return most;
}

/// Running cost: key rows that prefill rows 0..j see.
std::vector<int64_t> running_costs(const PlanStep& step, int64_t first_prefill) {
  std::vector<int64_t> sums;
  int64_t total = 0;
  for (int64_t b = first_prefill; b < step.num_requests; ++b) {
    for (int64_t j = 0; j < step.query_lens[b]; ++j) {
      total += std::max<int64_t>(0, step.seq_lens[b] - step.query_lens[b] + 1 + j) / ratio_of(step);
      sums.push_back(total);
    }
  }
  return sums;
}

/// What shards take on devices that answer `most` rows side by side, then the next ones: the sum, over rounds of so many
/// rows, of what the dearest row of a round costs.
class Rounds {
 public:
  Rounds(const std::vector<int64_t>& sums, int64_t most) : most_(most), costs_(sums.size()), dearest_(sums.size()) {
    for (size_t i = 0; i < sums.size(); ++i) costs_[i] = sums[i] - (i > 0 ? sums[i - 1] : 0);
    std::deque<int64_t> window;  // rows of the round that begins at `row`, each dearer than those before it
    for (int64_t row = rows() - 1; row >= 0; --row) {
      while (!window.empty() && cost(window.front()) <= cost(row)) window.pop_front();
      window.push_front(row);
      if (window.back() >= row + most_) window.pop_back();
      dearest_[static_cast<size_t>(row)] = cost(window.back());
    }
  }

  int64_t longest(const std::vector<int64_t>& sizes) const {
    int64_t most = 0, row = 0;
    for (const int64_t size : sizes) {
      int64_t time = 0;
      const int64_t end = row + size;
      for (; row + most_ <= end; row += most_) time += dearest_[static_cast<size_t>(row)];
      if (row < end) time += *std::max_element(costs_.begin() + row, costs_.begin() + end);
      row = end, most = std::max(most, time);
    }
    return most;
  }

  /// The cut whose longest shard is shortest: each takes as many rows as fit the time.
  std::vector<int64_t> cut(int64_t shards) const {
    int64_t low = 0, high = std::accumulate(costs_.begin(), costs_.end(), int64_t{0});
    while (low < high) {
      const int64_t time = low + (high - low) / 2;
      if (fits(shards, time)) {
        high = time;
      } else {
        low = time + 1;
      }
    }
    return filled(shards, low);
  }

 private:
  int64_t rows() const { return static_cast<int64_t>(costs_.size()); }
  int64_t cost(int64_t row) const { return costs_[static_cast<size_t>(row)]; }
  /// The first row behind those that fit `time` from `row` on.
  int64_t end_of(int64_t row, int64_t time) const {
    for (; row < rows() && dearest_[static_cast<size_t>(row)] <= time; row += most_) {
      time -= dearest_[static_cast<size_t>(row)];
    }
    if (row >= rows()) return rows();
    const int64_t last = std::min(rows(), row + most_);
    while (row < last && cost(row) <= time) ++row;
    return row;
  }
  bool fits(int64_t shards, int64_t time) const {
    int64_t row = 0;
    for (int64_t s = 0; s < shards && row < rows(); ++s) row = end_of(row, time);
    return row == rows();
  }
  /// Each at least one row.
  std::vector<int64_t> filled(int64_t shards, int64_t time) const {
    std::vector<int64_t> sizes;
    int64_t row = 0;
    for (int64_t s = 1; s <= shards; ++s) {
      const int64_t end = s == shards ? rows() : std::clamp(end_of(row, time), row + 1, rows() - (shards - s));
      sizes.push_back(end - row);
      row = end;
    }
    return sizes;
  }

  const int64_t most_;
  std::vector<int64_t> costs_, dearest_;  ///< of a row; of the dearest of a round that begins with it
};

std::vector<int64_t> sizes_by_cost(const std::vector<int64_t>& sums, int64_t shards) {
  const int64_t rows = static_cast<int64_t>(sums.size());
  const double total = static_cast<double>(sums.back());
  std::vector<int64_t> by_cost, by_rows;
  int64_t begin = 0;
  for (int64_t s = 1; s <= shards; ++s) {
    const double share = total * static_cast<double>(s) / static_cast<double>(shards);
    const auto above = [](double x, int64_t y) { return x < static_cast<double>(y); };
    const int64_t cut = std::upper_bound(sums.begin(), sums.end(), share, above) - sums.begin();
    const int64_t end = s == shards ? rows : std::clamp(cut, begin + 1, rows - (shards - s));
    by_cost.push_back(end - begin);
    by_rows.push_back(rows / shards + (s <= rows % shards ? 1 : 0));
    begin = end;
  }
  // On short batches a cut by cost can be coarser than equal rows.
  return dearest(by_cost, sums) <= dearest(by_rows, sums) ? by_cost : by_rows;
}

}  // namespace

int64_t decode_requests(const PlanStep& step) {
  const int64_t threshold = std::max<int64_t>(step.decode_threshold, 1);
  const int64_t* lens = step.query_lens;
  int64_t split = step.num_requests;
  if (split == 0 || lens[0] > threshold) return 0;
  const bool alike = std::all_of(lens, lens + split, [&](int64_t n) { return n == lens[0] || n == 0; });
  for (int64_t b = 0; b < split; ++b) {
    const bool odd = step.require_uniform && threshold > 1 && !alike && lens[b] != lens[0];
    const bool extend = step.extends_prefill && step.prefilling != nullptr && step.prefilling[b] != 0;
    if (odd || extend || lens[b] > threshold) split = b;
  }
  return split;
}

std::vector<PrefillChunk> prefill_chunks(const PlanStep& step) {
  const Check c("prefill_chunks", Mode::call);
  check(c, step);
  const int64_t most_keys = step.gather_rows > 0 ? step.gather_rows : INT64_MAX;
  const int64_t most_logits = step.logits_bytes > 0 ? step.logits_bytes / 4 : INT64_MAX;
  const int64_t first = decode_requests(step);
  int64_t row = 0;
  for (int64_t b = 0; b < first; ++b) row += step.query_lens[b];
  std::vector<PrefillChunk> chunks;
  for (int64_t b = first; b < step.num_requests;) {
    int64_t rows = step.query_lens[b], keys = key_rows(step, b), end = b + 1;
    TOPKEY_REQUIRE(c, keys <= most_keys, "gather_rows", "enough for the longest request, " + std::to_string(keys),
                   std::to_string(most_keys));
    for (; end < step.num_requests; ++end) {
      const int64_t more_rows = rows + step.query_lens[end], more_keys = keys + key_rows(step, end);
      if (more_keys > most_keys || !product_fits(more_rows, more_keys, most_logits)) break;
      rows = more_rows;
      keys = more_keys;
    }
    // Only a request that does not fit alone is split: joined ones fit by construction.
    const int64_t slice =
        keys == 0 || product_fits(rows, keys, most_logits) ? rows : std::max<int64_t>(1, most_logits / keys);
    for (int64_t at = 0; keys > 0 && at < rows; at += slice) {
      chunks.push_back({b, end, row + at, row + std::min(at + slice, rows), keys, at > 0});
    }
    row += rows;
    b = end;
  }
  return chunks;
}

std::vector<Range> decode_chunks(int64_t rows, int64_t width, int64_t budget) {
  const Check c("decode_chunks", Mode::call);
  c.number("rows", rows, 0, kMaxKeys);
  c.number("width", width, 0, kMaxKeys);
  TOPKEY_REQUIRE(c, budget >= 0, "budget", "nonnegative", std::to_string(budget));
  if (rows == 0 || budget == 0 || product_fits(rows, 2 * width, budget)) return {};
  constexpr int64_t kUnit = 16;
  const int64_t most_units = budget / (2 * width) / kUnit;
  TOPKEY_REQUIRE(c, most_units >= 1, "budget", "enough for 16 bf16 rows", std::to_string(budget));
  const int64_t units = (rows + kUnit - 1) / kUnit, slices = (units + most_units - 1) / most_units;
  std::vector<Range> ranges;
  int64_t first = 0;
  for (int64_t s = 0; s < slices; ++s) {
    const int64_t last = std::min(rows, first + (units / slices + (s < units % slices ? 1 : 0)) * kUnit);
    ranges.push_back({first, last});
    first = last;
  }
  return ranges;
}

std::vector<int64_t> shard_sizes(const PlanStep& step, int64_t first_prefill, int64_t rows_at_once) {
  const int64_t shards = step.row_shards;
  const std::vector<int64_t> sums = running_costs(step, first_prefill);
  if (shards <= 1 || static_cast<int64_t>(sums.size()) < shards * std::max<int64_t>(step.min_shard_rows, 1)) return {};
  std::vector<int64_t> sizes = sizes_by_cost(sums, shards);
  if (rows_at_once <= 0) return sizes;
  const Rounds rounds(sums, rows_at_once);
  std::vector<int64_t> cut = rounds.cut(shards);
  return rounds.longest(cut) < rounds.longest(sizes) ? cut : sizes;
}

StepPlan summary(const PlanStep& step) {
  check(Check("plan_step", Mode::call), step);
  StepPlan plan{};
  plan.num_decode_requests = decode_requests(step);
  plan.decode_uniform = true;
  for (int64_t b = 0; b < step.num_requests; ++b) {
    const bool decodes = b < plan.num_decode_requests;
    const int64_t rows = step.query_lens[b];
    (decodes ? plan.num_decode_rows : plan.num_prefill_rows) += rows;
    int64_t& longest = decodes ? plan.max_decode_len : plan.max_prefill_len;
    longest = std::max(longest, key_rows(step, b));
    if (decodes) plan.max_next_n = std::max(plan.max_next_n, rows);
  }
  for (int64_t b = 0; b < plan.num_decode_requests; ++b) {
    plan.decode_uniform = plan.decode_uniform && (step.query_lens[b] == 0 || step.query_lens[b] == plan.max_next_n);
  }
  return plan;
}

}  // namespace topkey::plan
