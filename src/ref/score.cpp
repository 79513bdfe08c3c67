// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `score`: S_ref and the two logits operations.
#include "ref/score.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "ref/admit.h"

namespace topkey::ref {

QueryRow::QueryRow(const Query& q, int64_t row, KeyFormat format, int64_t head_dim) {
  const int64_t heads = q.values.shape[1];
  const bool coded = is_fp8(format) || format == KeyFormat::mxfp4;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t d = 0; d < head_dim; ++d) {
      values.push_back(coded ? code_value(format, element<uint8_t>(q.values, row, h), scale_at(q.scales, row, h),
                                          static_cast<size_t>(d))
                             : static_cast<double>(real(q.values, row, h, d)));
    }
    weights.push_back(static_cast<double>(real(q.weights, row, h)));
  }
}

float canonical(float score) { return std::isnan(score) ? canonical_nan() : score == 0.0f ? 0.0f : score; }

float score_of(const QueryRow& q, const std::vector<double>& key, double kscale) {
  const size_t dim = key.size();
  double sum = 0.0;
  for (size_t h = 0; h < q.weights.size(); ++h) {
    double dot = 0.0;
    for (size_t d = 0; d < dim; ++d) dot = dot + q.values[h * dim + d] * key[d];
    const double positive = dot <= 0.0 ? 0.0 : dot;
    const double term = q.weights[h] * positive;
    sum = sum + term;
  }
  return canonical(static_cast<float>(sum * kscale));
}

namespace {

/// Writes one row of logits: -inf in all `width` columns if clean, then each reachable visible key's score (-inf if
/// it is not live).
void write_row(const Tensor& logits, int64_t row, int64_t width, bool clean, const std::vector<Run>& visible,
               const std::vector<std::pair<int64_t, float>>& scores) {
  const float hidden = -std::numeric_limits<float>::infinity();
  for (int64_t n = 0; clean && n < width; ++n) put_real(logits, hidden, row, n);
  for (const Run& run : visible) {
    for (int64_t n = std::max<int64_t>(run.first, 0); n < std::min(run.last, width); ++n)
      put_real(logits, hidden, row, n);
  }
  for (const auto& [column, score] : scores) put_real(logits, score, row, column);
}

struct LogitsJob {
  const char* op;
  const Query& q;
  const Keys& keys;
  const Rows& rows;
  const Tensor& mask;
  bool clean;
  int64_t width;  ///< columns that exist
  const Tensor& logits;
};

void logits_of(const LogitsJob& job, const Exec& exec) {
  const auto& [op, q, keys, rows, mask, clean, width, logits] = job;
  Counts counts;
  // Under strict a first pass only counts, so that the raise comes before any write.
  for (int pass = exec.strict ? 0 : 1; pass < 2; ++pass) {
    if (pass == 1) counts.raise_if_strict(op, exec);
    for (int64_t r = 0; r < rows.count; ++r) {
      const Window w = window_of(rows, r, keys.count());
      const int64_t table_row = keys.table_row(r, w.request, counts);
      const std::vector<Run> visible = table_row < 0 ? std::vector<Run>{} : admitted_runs(w, Admit{}, r);
      std::vector<std::pair<int64_t, float>> scores;
      Scorer score(q, keys, r);
      for (const Run& run : reachable_runs(visible, w, std::min(keys.count(), width), rows.max_len, r, counts)) {
        for (int64_t n = run.first; n < run.last; ++n) {
          float addend = 0.0f;
          if (masked(mask, r, n, &addend)) continue;
          const KeyBytes bytes = keys.find(table_row, n);
          if (bytes.values == nullptr) counts.wild(kSkippedPages, 1, "page id", r, keys.page_of(table_row, n));
          if (bytes.values == nullptr || pass == 0) continue;
          const float s = mask.data != nullptr ? canonical(score(bytes) + addend) : score(bytes);
          scores.emplace_back(n, s);
          counts.add(kScoredKeys);
          counts.add(kNanScores, std::isnan(s));
        }
      }
      if (pass == 1) write_row(logits, r, width, clean, visible, scores);
    }
  }
  counts.add(kRows, rows.count);
  counts.publish(exec);
}

}  // namespace

void mqa_logits(const MqaLogits& a, const Exec& exec) {
  const Keys keys(a.keys);
  logits_of({"mqa_logits", a.q, keys, a.rows, a.mask, a.clean, keys.count(), a.logits}, exec);
}

void paged_mqa_logits(const PagedMqaLogits& a, const Exec& exec) {
  const Keys keys(a.keys);
  const bool bounded = a.rows.max_len > 0 && a.rows.start.data == nullptr;
  const int64_t width = std::min(a.logits.shape[1], bounded ? std::min(a.rows.max_len, keys.count()) : keys.count());
  const Tensor no_mask{};
  logits_of({"paged_mqa_logits", a.q, keys, a.rows, no_mask, a.clean, width, a.logits}, exec);
}

}  // namespace topkey::ref
