// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Comparisons of scores and of sets (1, 2 and 4 of compare.h); selection given scores is in compare_selection.cpp.
#include "support/compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>

namespace topkey::support {
namespace {

std::string number(double x) {
  char text[40];
  std::snprintf(text, sizeof text, "%.9g", x);
  return text;
}

/// A cell of the logits as f32, and the rounding it went through on top of the score's own.
struct Cell {
  float got, want;
  double bound;
};

/// S_ref with mask, as the logits' dtype would hold it.
float want_of(const Tensor& mask, DType dtype, int64_t row, int64_t column, float ref, bool* hidden) {
  float want = ref;
  if (mask.data != nullptr && mask.dtype == DType::b8) {
    *hidden = int_at(mask, row, column) == 0;
  } else if (mask.data != nullptr) {
    const float add = float_at(mask, row, column);
    *hidden = std::isinf(add) && add < 0;
    want += add;
  }
  return dtype == DType::bf16 ? round_to_bf16(want) : want;
}

/// Both sides were rounded once more, to f32 (a mask was added) or bf16: for arithmetics that are not S_ref itself.
double rounding_of(float value, bool masked, DType dtype) {
  const double size = std::abs(static_cast<double>(value));
  return (masked ? size * 0x1p-23 : 0) + (dtype == DType::bf16 ? size * 0x1p-7 + 0x1p-133 : 0);
}

void judge_cell(Report& report, const Cell& cell, int64_t row, int64_t column, double a) {
  ++report.compared;
  bool good;
  double error = 0;
  if (!std::isfinite(cell.want) || !std::isfinite(cell.got)) {
    // An infinite bound: the key's scale is infinite and the sum before it has no certain sign.
    good = (std::isnan(cell.want) ? std::isnan(cell.got) : cell.want == cell.got) ||
           (std::isinf(cell.bound) && !std::isfinite(cell.got));
  } else {
    error = std::abs(static_cast<double>(cell.got) - static_cast<double>(cell.want));
    good = error <= cell.bound;
    const double unit = cell.bound > 0 ? cell.bound : a;
    if (error > 0 && unit > 0) report.worst = std::max(report.worst, error / unit);
  }
  if (good) return;
  ++report.differing;
  if (!report.first.empty()) return;
  report.got = static_cast<double>(cell.got);
  report.want = static_cast<double>(cell.want);
  report.bound = cell.bound;
  report.fail("score " + number(report.got) + ", reference " + number(report.want) + ", bound " + number(cell.bound),
              row, column);
}

struct LogitsView {
  const Tensor &logits, &mask;
  bool clean;
};

/// Cells without a score: -inf where visible, and outside the window under `clean`.
void judge_empty(Report& report, const LogitsView& view, const RowRange& range, int64_t row, int64_t column) {
  const bool visible = range.visible() > 0 && column >= range.start && column < range.end;
  if (!visible && !view.clean) return;
  const float got = float_at(view.logits, row, column);
  if (std::isinf(got) && got < 0) return;
  ++report.differing;
  report.fail("score " + number(static_cast<double>(got)) + " where -inf belongs (" +
                  (visible ? "visible, not live" : "outside the window, clean") + ")",
              row, column);
}

using RangeOf = std::function<RowRange(int64_t)>;

Report scores_report(const LogitsView& view, const Truth& truth, std::string_view arithmetic, double calc_limit,
                     const RangeOf& range_of) {
  Report report;
  report.name = "scores";
  report.rows = truth.rows;
  CalcDiff diff;
  const DType dtype = view.logits.dtype;
  for (int64_t r = 0; r < truth.rows; ++r) {
    const RowRange range = range_of(r);
    for (int64_t n = 0; n < truth.width; ++n) {
      const size_t cell = static_cast<size_t>(r * truth.width + n);
      bool hidden = !truth.live(r, n);
      const float want = hidden ? 0.F : want_of(view.mask, dtype, r, n, truth.ref.as<float>()[cell], &hidden);
      if (hidden) {
        judge_empty(report, view, range, r, n);
        continue;
      }
      const float got = float_at(view.logits, r, n);
      double bound = score_bound(arithmetic, truth.heads, truth.head_dim, truth.a[cell], truth.tiny[cell]);
      if (bound > 0) bound += rounding_of(want, view.mask.data != nullptr, dtype);
      judge_cell(report, {got, want, bound}, r, n, truth.a[cell]);
      if (std::isfinite(got) && std::isfinite(want)) diff.add(static_cast<double>(got), static_cast<double>(want));
    }
  }
  report.calc_diff = diff.value();
  // The e4m3 tensor core keeps about 13 bits of a dot: of a few scores that is no mean yet.
  const bool judged = arithmetic != "fp8mma" || report.compared >= kJudgedScores;
  if (judged && calc_limit > 0 && dtype == DType::f32 && report.calc_diff >= calc_limit) {
    report.fail("calc_diff " + number(report.calc_diff) + ", limit " + number(calc_limit));
  }
  return report;
}

/// One row of comparison 2: which keys were chosen against which S_ref would choose.
struct SetRow {
  const RowQuestion& question;        // live keys with S_ref
  const std::vector<double>& bounds;  // of each live key
  const std::vector<int64_t>& got;    // chosen relative positions, ascending
};

/// Fails the report for a key that differs and lies too far from the cut; returns how many keys of the row differ.
int64_t judge_set(Report& report, const SetRow& set, int64_t row) {
  const RowAnswer want = answer(set.question);
  std::vector<int64_t> wanted;
  for (const Key& key : want.chosen) wanted.push_back(key.position);
  std::sort(wanted.begin(), wanted.end());
  std::vector<int64_t> only, missing;
  std::set_difference(set.got.begin(), set.got.end(), wanted.begin(), wanted.end(), std::back_inserter(only));
  std::set_difference(wanted.begin(), wanted.end(), set.got.begin(), set.got.end(), std::back_inserter(missing));
  if (std::adjacent_find(set.got.begin(), set.got.end()) != set.got.end()) report.fail("a key was chosen twice", row);
  if (only.size() != missing.size()) {
    report.fail(std::to_string(set.got.size()) + " keys chosen, " + std::to_string(wanted.size()) + " expected", row);
  }
  if (only.empty() && missing.empty()) return 0;
  std::vector<int64_t> odd = only;
  odd.insert(odd.end(), missing.begin(), missing.end());
  const auto index_of = [&](int64_t position) {
    const auto at = std::lower_bound(set.question.live.begin(), set.question.live.end(), position,
                                     [](const Key& key, int64_t p) { return key.position < p; });
    return at != set.question.live.end() && at->position == position ? at - set.question.live.begin() : -1;
  };
  // Two keys change places when their errors add up, so the band is twice the largest bound among those that did.
  double band = 0;
  for (int64_t position : odd) {
    if (const int64_t i = index_of(position); i >= 0) band = std::max(band, 2 * set.bounds[static_cast<size_t>(i)]);
  }
  const float cut = want.chosen.empty() ? 0.F : want.chosen.back().score;
  for (int64_t position : odd) {
    const int64_t i = index_of(position);
    if (i < 0) {
      report.fail("a key was chosen that is not live", row, position);
      continue;
    }
    const float score = set.question.live[static_cast<size_t>(i)].score;
    const double away = std::abs(static_cast<double>(score) - static_cast<double>(cut));
    const bool alike = std::isnan(score) ? std::isnan(cut) : score == cut || away <= band;
    if (!alike) {
      report.bound = band, report.got = static_cast<double>(score), report.want = static_cast<double>(cut);
      report.fail("a key differs whose reference score " + number(report.got) + " is not within " + number(band) +
                      " of the cut " + number(report.want),
                  row, position);
    }
  }
  return static_cast<int64_t>(std::max(only.size(), missing.size()));
}

template <class Args>
Report sets_report(const Args& args, const Truth& truth, std::string_view arithmetic, bool judge_count) {
  Report report;
  report.name = "sets";
  report.rows = args.rows.count;
  if (args.out.indices.data == nullptr) {
    report.fail("no indices to compare");
    return report;
  }
  for (int64_t r = 0; r < args.rows.count; ++r) {
    const RowQuestion q = question(args, truth.ref.view(), r);
    std::vector<double> bounds;
    for (const Key& key : q.live) {
      const auto cell = static_cast<size_t>(r * truth.width + q.range.start + key.position);
      bounds.push_back(
          score_bound(arithmetic, truth.heads, truth.head_dim, std::max(0.0, truth.a[cell]), truth.tiny[cell]));
    }
    const int64_t base = args.out.index_base.data != nullptr ? int_at(args.out.index_base, r) : 0;
    const auto expected = std::min<int64_t>(q.topk, static_cast<int64_t>(q.live.size()));
    std::vector<int64_t> got;
    for (int64_t i = 0; i < expected; ++i) got.push_back(int_at(args.out.indices, r, i) - base);
    std::sort(got.begin(), got.end());
    report.compared += expected;
    const int64_t odd = judge_set(report, {q, bounds, got}, r);
    report.differing += odd;
    report.worst = std::max(report.worst, static_cast<double>(odd));
    if (judge_count && static_cast<double>(odd) > 1 + 0.005 * static_cast<double>(q.topk)) {
      report.fail(std::to_string(odd) + " keys of the row differ, more than 1 + 0.5 % of topk", r);
    }
  }
  return report;
}

}  // namespace

void Report::fail(std::string sentence, int64_t at_row, int64_t at_position) {
  ok = false;
  if (!first.empty()) return;
  first = std::move(sentence);
  row = at_row;
  position = at_position;
}

std::string Report::text() const {
  std::string line = name + ": " + (ok ? "ok" : "DIFFERS") + ", " + std::to_string(rows) + " rows, " +
                     std::to_string(compared) + " compared, " + std::to_string(differing) + " differing";
  if (worst > 0) line += ", worst " + number(worst);
  if (calc_diff != 0) line += ", calc_diff " + number(calc_diff);
  if (first.empty()) return line;
  line += "; first: " + first;
  if (row >= 0) line += ", row " + std::to_string(row);
  if (position >= 0) line += ", position " + std::to_string(position);
  return line;
}

double score_bound(std::string_view arithmetic, int64_t heads, int64_t head_dim, double a, double tiny) {
  const auto terms = static_cast<double>(heads + head_dim + 4);
  const double floor = tiny * 0x1p-150;
  if (arithmetic == "ref") return 0;
  if (arithmetic == "f32") return terms * 0x1p-24 * a + floor;
  if (arithmetic == "bf16mma" || arithmetic == "f16mma" || arithmetic == "bf16dp") return terms * 0x1p-23 * a + floor;
  if (arithmetic == "fp8mma") return 0x1p-7 * a + floor;
  throw std::invalid_argument("support: no bound is known for arithmetic '" + std::string(arithmetic) + "'");
}

Report compare_scores(const MqaLogits& args, const Truth& truth, std::string_view arithmetic, double calc_limit) {
  return scores_report({args.logits, args.mask, args.clean}, truth, arithmetic, calc_limit,
                       [&](int64_t r) { return row_range(args.rows, r, truth.width, -1); });
}

Report compare_scores(const PagedMqaLogits& args, const Truth& truth, std::string_view arithmetic, double calc_limit) {
  const int64_t tables = args.keys.table_per_row ? -1 : args.keys.block_table.shape[0];
  return scores_report({args.logits, Tensor{}, args.clean}, truth, arithmetic, calc_limit,
                       [&](int64_t r) { return row_range(args.rows, r, 0, tables); });
}

Report compare_sets(const MqaTopk& args, const Truth& truth, std::string_view arithmetic, bool judge_count) {
  return sets_report(args, truth, arithmetic, judge_count);
}

Report compare_sets(const PagedMqaTopk& args, const Truth& truth, std::string_view arithmetic, bool judge_count) {
  return sets_report(args, truth, arithmetic, judge_count);
}

Report compare_unquantised(const Truth& truth, const Unquantised& exact, const Rows& rows, KeyFormat format,
                           bool judge) {
  Report report;
  report.name = "unquantised";
  report.rows = truth.rows;
  const bool by_request = exact.keys.ndim == 3;
  CalcDiff diff;
  int64_t scored_rows = 0, scored_keys = 0;
  for (int64_t r = 0; r < truth.rows; ++r) {
    int64_t own = 0;
    const int64_t request = by_request && exact.keys.shape[0] > 1 ? row_range(rows, r, truth.width, -1).request : 0;
    for (int64_t n = 0; n < truth.width; ++n) {
      if (!truth.live(r, n) || n >= exact.keys.shape[by_request ? 1 : 0]) continue;
      const float coded = truth.ref.as<float>()[static_cast<size_t>(r * truth.width + n)];
      double sum = 0;
      for (int64_t h = 0; h < truth.heads; ++h) {
        double dot = 0;
        for (int64_t d = 0; d < truth.head_dim; ++d) {
          const float k = by_request ? float_at(exact.keys, request, n, d) : float_at(exact.keys, n, d);
          dot += static_cast<double>(float_at(exact.q, r, h, d)) * static_cast<double>(k);
        }
        sum += static_cast<double>(float_at(exact.weights, r, h)) * std::max(0.0, dot);
      }
      if (!std::isfinite(coded) || !std::isfinite(sum)) continue;
      ++report.compared;
      ++own;
      diff.add(static_cast<double>(coded), sum);
    }
    scored_rows += own > 0;
    scored_keys = std::max(scored_keys, own);
  }
  report.calc_diff = diff.value();
  // The limit is one on a mean over independent roundings: of each vector's numbers, and of the scores made from them.
  const bool enough = report.compared >= kJudgedScores &&
                      scored_rows * truth.heads * truth.head_dim >= kJudgedNumbers &&
                      scored_keys * truth.head_dim >= kJudgedNumbers;
  const double limit = is_fp8(format) ? 1e-3 : format == KeyFormat::mxfp4 ? 0.02 : 0;
  if (judge && enough && limit > 0 && report.calc_diff >= limit) {
    report.fail("calc_diff " + number(report.calc_diff) + " against unquantised scores, limit " + number(limit));
  }
  return report;
}

}  // namespace topkey::support
