// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Reads a finished call's arguments, outputs and statistics.
#include "summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "command.h"
#include "study.h"

namespace topkey::cli {
namespace {

template <class Args>
KeyFormat format_of(const Args& a) {
  if constexpr (requires { a.keys.cache; }) {
    return a.keys.cache.format;
  } else {
    return a.keys.format;
  }
}

/// "208 query rows, 7985 to 8192 keys each, fp8, 3 heads x 64, topk 256".
template <class Args>
std::string describe(const Args& a, const std::vector<Window>& windows) {
  std::string text = fmt::format("{} query rows", a.rows.count);
  if (!windows.empty()) {
    const auto [low, high] = std::minmax_element(windows.begin(), windows.end(),
                                                 [](const Window& x, const Window& y) { return x.size() < y.size(); });
    text += low->size() == high->size() ? fmt::format(", {} keys each", low->size())
                                        : fmt::format(", {} to {} keys each", low->size(), high->size());
  }
  if constexpr (requires { a.q; }) {
    text += fmt::format(", {} keys, {} heads x {}", format_name(format_of(a)), a.q.values.shape[1],
                        a.q.values.shape[2] * (format_of(a) == KeyFormat::mxfp4 ? 2 : 1));
  }
  if constexpr (requires { a.topk; }) text += fmt::format(", topk {}", a.topk);
  return text;
}

/// What the rows of a selection got.
void add_selection(const support::Call& call, const std::vector<Window>& windows, const uint64_t* stats,
                   Summary& summary) {
  const support::TraceTensor* counts = call.output("counts");
  const int64_t rows = counts->count();
  int64_t least = INT64_MAX, most = 0, chosen = 0, keys = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t n = counts->as<int32_t>()[r];
    least = std::min(least, n), most = std::max(most, n), chosen += n;
  }
  for (const Window& window : windows) keys += window.size();
  std::string line = fmt::format("selected {} of {} (row, key) pairs", chosen, keys);
  if (keys > 0) line += fmt::format(" = {:.2f} %", 100.0 * static_cast<double>(chosen) / static_cast<double>(keys));
  if (windows.empty()) line = fmt::format("selected {} positions", chosen);
  summary.lines.push_back(line + (least == most ? fmt::format("; {} a row", most)
                                                : fmt::format("; {} to {} a row", rows == 0 ? 0 : least, most)));
  std::string odd = fmt::format("{} rows whose cut falls in a tie", stats[kTiedCuts]);
  if (stats[kNanScores] != 0) odd += fmt::format(", {} NaN scores", stats[kNanScores]);
  if (stats[kSkippedPages] != 0) odd += fmt::format(", {} (row, key) pairs not readable", stats[kSkippedPages]);
  if (stats[kRescans] != 0) odd += fmt::format(", {} rows rescanned", stats[kRescans]);
  summary.lines.push_back(odd);
  summary.numbers["selected"] = static_cast<double>(chosen);
  summary.numbers["visible"] = static_cast<double>(keys);
  summary.numbers["count_min"] = static_cast<double>(rows == 0 ? 0 : least);
  summary.numbers["count_max"] = static_cast<double>(most);
}

/// Largest |a - b| as a part of the largest |b|: what another arithmetic may cost. Infinite where only one of a pair is
/// finite.
double largest_difference(const support::TraceTensor& a, const support::TraceTensor& b) {
  double largest = 0, size = 0;
  for (int64_t i = 0; i < b.count(); ++i) {
    const double x = a.as<float>()[i], y = b.as<float>()[i];
    if (std::isfinite(x) != std::isfinite(y)) return INFINITY;
    if (!std::isfinite(x)) continue;
    largest = std::max(largest, std::abs(x - y));
    size = std::max(size, std::abs(y));
  }
  return size == 0 ? largest : largest / size;
}

/// How the results lie to the trace's own expectation, where it has one for this topk. Expected scores are those of
/// `ref`.
void add_expected(const support::Call& call, Summary& summary) {
  for (const char* name : {"indices", "scores"}) {
    const support::TraceTensor *got = call.output(name), *want = call.trace().find(std::string("expected_") + name);
    if (got == nullptr || want == nullptr || got->shape != want->shape || got->dtype != want->dtype) continue;
    const bool same = got->bytes == want->bytes;
    summary.numbers[std::string(name) + "_as_expected"] = same ? 1 : 0;
    if (same) {
      summary.lines.push_back(fmt::format("{} equal, bit for bit, the trace's expected_{}", name, name));
    } else if (got->dtype == "F32") {
      summary.lines.push_back(
          fmt::format("{} are within {:.2g} of the trace's expected_{} (those of ref), relative to the largest", name,
                      largest_difference(*got, *want), name));
    } else {
      int64_t differ = 0;
      for (int64_t i = 0; i < want->count(); ++i) differ += got->as<int32_t>()[i] != want->as<int32_t>()[i];
      summary.lines.push_back(
          fmt::format("{} of {} {} differ from the trace's expected_{}", differ, want->count(), name, name));
    }
  }
}

void add_stats(const uint64_t* stats, double seconds, Summary& summary) {
  static constexpr const char* kWords[kNumStats] = {"rows",          "scored",     "rescans",   "skipped_pages",
                                                    "skipped_slots", "nan_scores", "tied_cuts", "reserved"};
  for (int i = 0; i < kReserved; ++i) summary.numbers[kWords[i]] = static_cast<double>(stats[i]);
  const double scored = static_cast<double>(stats[kScoredKeys]);
  if (scored == 0 || seconds <= 0) return;
  summary.numbers["keys_per_second"] = scored / seconds;
  summary.speed =
      fmt::format("{} keys scored over all rows, {} keys/s", short_count(scored), short_count(scored / seconds));
}

}  // namespace

Summary summarise(const support::Call& call, const uint64_t* stats, double seconds) {
  Summary summary;
  const std::vector<Window> windows = windows_of(call.args());
  summary.search = !windows.empty();
  std::visit(
      [&](const auto& a) {
        if constexpr (requires { a.rows.count; }) summary.what = describe(a, windows);
      },
      call.args());
  add_stats(stats, seconds, summary);
  if (call.output("counts") != nullptr && call.output("indices") != nullptr)
    add_selection(call, windows, stats, summary);
  if (!summary.search) {
    for (const auto& [name, tensor] : call.outputs()) {
      summary.lines.push_back(fmt::format("{} {} [{}]", name, tensor.dtype, fmt::join(tensor.shape, ", ")));
    }
  }
  add_expected(call, summary);
  return summary;
}

void name_numerics(const support::CallArgs& args, const std::string& backend, Summary& summary) {
  std::visit(
      [&](const auto& a) {
        if constexpr (requires { a.q.values; }) {
          const char* words = arithmetic(backend.c_str(), format_of(a), a.q.values.dtype);
          const char* number = numerics_version(backend.c_str(), format_of(a));
          summary.arithmetic = words == nullptr ? "" : words;
          summary.numerics = number == nullptr ? "" : number;
        }
      },
      args);
}

}  // namespace topkey::cli
