// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// topkey check TRACE... | --random: holds every usable backend against the oracle, itself and the reference. Exit code
// 1 when anything differs; the first difference of each comparison is shown, and a random case that differs can be kept
// as a trace.
#include <CLI/CLI.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "check_call.h"
#include "check_pools.h"
#include "command.h"
#include "progress.h"
#include "sample.h"

namespace topkey::cli {
namespace {

using Json = nlohmann::ordered_json;
using support::Report;

struct CheckOptions {
  std::vector<std::string> traces;
  std::string op, backend, save;
  uint64_t seed = 1;
  int64_t cases = 0, rows = 0;
  bool random = false, json = false;
};

constexpr int64_t kCases = 400;

/// Where a difference is, in full.
std::string difference(const Report& report) {
  std::string text = report.first;
  if (report.row >= 0) text += fmt::format(", row {}", report.row);
  if (report.position >= 0) text += fmt::format(", position {}", report.position);
  if (report.bound > 0 || report.got != report.want) {
    text += fmt::format(" (got {:.9g}, reference {:.9g}, bound {:.9g})", report.got, report.want, report.bound);
  }
  return text;
}

std::string figures(const Report& report) {
  std::string text = fmt::format("{} compared", report.compared);
  if (report.differing > 0) text += fmt::format(", {} {}", report.differing, report.ok ? "within the band" : "differ");
  if (report.worst > 0)
    text += fmt::format(", worst {:.3g}{}", report.worst, report.name == "sets" ? " a row" : " of its bound");
  if (report.calc_diff != 0) text += fmt::format(", calc_diff {:.3g}", report.calc_diff);
  return text;
}

Json as_json(const Finding& finding) {
  if (!finding.skipped.empty()) return {{"backend", finding.backend}, {"skipped", finding.skipped}};
  const Report& r = finding.report;
  Json json = {
      {"backend", finding.backend}, {"check", r.name},          {"ok", r.ok},       {"rows", r.rows},
      {"compared", r.compared},     {"differing", r.differing}, {"worst", r.worst}, {"calc_diff", r.calc_diff}};
  if (!r.ok) json["first"] = difference(r);
  return json;
}

/// Prints the findings of one trace; true = none differs.
bool print_findings(const std::vector<Finding>& findings) {
  bool good = true;
  for (const Finding& finding : findings) {
    if (!finding.skipped.empty()) {
      fmt::print("  {:<12} skipped: {}\n", finding.backend, finding.skipped);
      continue;
    }
    const Report& report = finding.report;
    fmt::print("  {:<12} {:<20} {:<8} {}\n", finding.backend, report.name, report.ok ? "ok" : "DIFFERS",
               figures(report));
    if (!report.ok) fmt::print("  {:<12} {:<20} first: {}\n", "", "", difference(report));
    good = good && report.ok;
  }
  return good;
}

bool all_ok(const std::vector<Finding>& findings) {
  return std::all_of(findings.begin(), findings.end(),
                     [](const Finding& f) { return !f.skipped.empty() || f.report.ok; });
}

Exit check_files(const CheckOptions& options) {
  const std::vector<std::string> backends = usable_backends(options.backend);
  bool good = true, ran = false;
  Json json = Json::array();
  for (const std::string& path : options.traces) {
    const auto trace = std::make_shared<support::Trace>(support::read_trace(path));
    const std::vector<Finding> findings = check_trace(trace, backends, options.rows);
    good = good && all_ok(findings);
    ran = ran || std::any_of(findings.begin(), findings.end(), [](const Finding& f) { return f.skipped.empty(); });
    if (options.json) {
      Json row = {{"trace", path}, {"op", trace->text("op", "")}, {"ok", all_ok(findings)}, {"checks", Json::array()}};
      for (const Finding& finding : findings) row["checks"].push_back(as_json(finding));
      json.push_back(std::move(row));
    } else {
      fmt::print("{}: {}\n", path, trace->text("op", ""));
      print_findings(findings);
    }
  }
  if (options.json) fmt::print("{}\n", json.dump(1, ' ', false, Json::error_handler_t::replace));
  if (!options.json) fmt::print("{}\n", !ran ? "nothing was checked" : good ? "equal" : "DIFFERS");
  return !ran ? kUnusable : good ? kDone : kDiffers;
}

/// What random cases of one operation on one backend showed.
struct Tally {
  int64_t cases = 0, skipped = 0, differ = 0, compared = 0;
  double worst = 0;  ///< score error as a part of its bound
  std::map<std::string, int64_t> reasons;
};

class RandomCheck {
 public:
  explicit RandomCheck(const CheckOptions& options) : options_(options), backends_(usable_backends(options.backend)) {
    std::vector<std::string> all = support::operation_names();
    all.emplace_back(kPools);
    ops_ = options.op.empty() ? all : std::vector<std::string>{options.op};
    if (std::find(all.begin(), all.end(), ops_[0]) == all.end()) {
      throw Failure(fmt::format("check: op must be one of {}; got {}", fmt::join(all, ", "), support::shown(ops_[0])));
    }
  }

  Exit run() {
    const int64_t cases = options_.cases != 0 ? options_.cases : kCases;
    {
      Progress bar("random cases", cases);
      for (int64_t i = 0; i < cases; ++i) {
        one(ops_[static_cast<size_t>(i) % ops_.size()], options_.seed + static_cast<uint64_t>(i));
        bar.at(i + 1);
      }
    }
    options_.json ? print_json() : print_text(cases);
    return differ_ > 0 ? kDiffers : ran_ > 0 ? kDone : kUnusable;
  }

 private:
  void one(const std::string& op, uint64_t seed) {
    std::shared_ptr<const support::Trace> trace;
    std::vector<Finding> findings;
    if (op == kPools) {  // each backend has caches of its own
      for (const std::string& backend : backends_) {
        PoolFindings found = check_pools(seed, backend);
        if (trace == nullptr) trace = found.differing;
        for (Finding& finding : found.findings) findings.push_back(std::move(finding));
      }
    } else {
      trace = std::make_shared<support::Trace>(make_sample(random_sample(op, seed)));
      findings = check_trace(trace, backends_, 0);
    }
    for (const std::string& backend : backends_) ++tally_[{backend, op}].cases;
    for (const Finding& finding : findings) {
      Tally& tally = tally_[{finding.backend, op}];
      if (!finding.skipped.empty()) {
        ++tally.skipped, ++tally.reasons[without_op(op, finding.skipped)];
        continue;
      }
      ++ran_;
      tally.compared += finding.report.compared;
      if (finding.report.name == "scores") tally.worst = std::max(tally.worst, finding.report.worst);
      if (!finding.report.ok) ++tally.differ;
    }
    if (!all_ok(findings)) tell(op, seed, trace.get(), findings);
  }

  /// trace: null where the stages of a layer are right one by one.
  void tell(const std::string& op, uint64_t seed, const support::Trace* trace, const std::vector<Finding>& findings) {
    ++differ_;
    if (!saved_ && !options_.save.empty() && trace != nullptr) {
      support::write_trace(options_.save, *trace);
      saved_ = true;
    }
    std::FILE* out = options_.json ? stderr : stdout;
    for (const Finding& finding : findings) {
      if (finding.report.ok) continue;
      fmt::print(out, "{} on {}: {} differ: {}\n", op, finding.backend, finding.report.name,
                 difference(finding.report));
    }
    fmt::print(out, "  again: topkey check --random --op {} --seed {} --cases 1{}\n", op, seed,
               trace != nullptr ? " --save bug.safetensors" : "");
  }

  void print_text(int64_t cases) const {
    fmt::print("  {:<12} {:<18} {:>6} {:>8} {:>8} {:>12}  {}\n", "backend", "operation", "cases", "skipped", "differ",
               "compared", "worst score error");
    for (const auto& [key, tally] : tally_) {
      fmt::print("  {:<12} {:<18} {:>6} {:>8} {:>8} {:>12}  {}\n", key.first, key.second, tally.cases, tally.skipped,
                 tally.differ, tally.compared,
                 tally.worst > 0 ? fmt::format("{:.3g} of its bound", tally.worst)
                 : tally.compared > 0 && key.second.find("mqa") != std::string::npos ? "none"
                                                                                     : "");
    }
    std::map<std::string, int64_t> reasons;
    for (const auto& [key, tally] : tally_) {
      for (const auto& [reason, count] : tally.reasons) reasons[reason] += count;
    }
    for (const auto& [reason, count] : reasons) fmt::print("  skipped {}: {}\n", count, reason);
    fmt::print("{} random cases from seed {}: {}\n", cases, options_.seed,
               differ_ > 0 ? "DIFFERS"
               : ran_ > 0  ? "equal"
                           : "nothing was checked");
  }

  void print_json() const {
    Json json = {{"seed", options_.seed}, {"ok", differ_ == 0}, {"rows", Json::array()}};
    for (const auto& [key, tally] : tally_) {
      json["rows"].push_back({{"backend", key.first},
                              {"op", key.second},
                              {"cases", tally.cases},
                              {"skipped", tally.skipped},
                              {"differ", tally.differ},
                              {"compared", tally.compared},
                              {"worst", tally.worst}});
    }
    fmt::print("{}\n", json.dump(1));
  }

  const CheckOptions& options_;
  std::vector<std::string> backends_, ops_;
  std::map<std::pair<std::string, std::string>, Tally> tally_;
  int64_t differ_ = 0, ran_ = 0;
  bool saved_ = false;
};

/// An option that would do nothing is a misunderstanding, and said to be one.
void refuse_unused(const CLI::App& sub, std::initializer_list<const char*> names, const char* when) {
  for (const char* name : names) {
    if (sub.count(name) > 0) throw Failure(fmt::format("check: {} must be absent {}, got one", name, when));
  }
}

Exit check(const CheckOptions& options, const CLI::App& sub) {
  if (options.random == !options.traces.empty()) throw Failure("check: name traces, or say --random");
  if (!options.random) refuse_unused(sub, {"--op", "--seed", "--cases", "--save"}, "with traces");
  if (options.random) refuse_unused(sub, {"--rows"}, "with --random");
  return options.random ? RandomCheck(options).run() : check_files(options);
}

}  // namespace

void add_check(CLI::App& app, Action& action) {
  auto options = std::make_shared<CheckOptions>();
  CLI::App* sub = app.add_subcommand("check", "Hold every backend against the oracle, itself and the reference");
  sub->add_option("traces", options->traces, "Traces to check");
  sub->add_flag("--random", options->random, "Random cases instead of traces");
  sub->add_option("--op", options->op,
                  "Random cases of this operation only; pools: pool_k, search, expand_pools and the layer over them");
  sub->add_option("--backend", options->backend, "This backend only (default: all that can be used)");
  sub->add_option("--seed", options->seed, "First seed of the random cases")
      ->check(CLI::Range(int64_t{0}, kMostSeed))
      ->capture_default_str();
  sub->add_option("--cases", options->cases, fmt::format("How many random cases (default {})", kCases))
      ->check(CLI::Range(int64_t{1}, int64_t{INT32_MAX}));
  sub->add_option("--rows", options->rows,
                  "Query rows of a trace to check, evenly spaced (default: what about a minute allows)")
      ->check(CLI::Range(int64_t{1}, int64_t{INT32_MAX}));
  sub->add_option("--save", options->save, "Keep the first random case that differs as a trace");
  sub->add_flag("--json", options->json, "Findings for a script");
  sub->callback([options, sub, &action] { action = [options, sub] { return check(*options, *sub); }; });
}

}  // namespace topkey::cli
