// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// topkey run TRACE: runs the call of a trace and shows what a person wants to see of it: stages and their times, what
// was selected, how much of exact attention the selection holds, and, where the trace carries its text, the words
// behind the chosen positions.
#include <CLI/CLI.hpp>

#include <fmt/core.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "chunks.h"
#include "command.h"
#include "excerpt.h"
#include "pipeline.h"
#include "ranks.h"
#include "study.h"
#include "summary.h"

namespace topkey::cli {
namespace {

using Json = nlohmann::ordered_json;
constexpr int kPieces = 6;

struct RunOptions {
  std::string trace, backend, output;
  int64_t topk = 0;
  int threads = 0;
  bool json = false, on_ranks = false;
  RanksOptions ranks;
};

/// Everything that is printed, in the order of printing.
struct Result {
  std::string backend;
  std::vector<Stage> stages;
  Summary summary;
  Study study;
  std::vector<std::string> excerpt;
  int64_t excerpt_row = -1;
};

support::CallOptions call_options(const support::Trace& trace, const RunOptions& options) {
  support::CallOptions set;
  if (options.topk != 0) set.set["topk"] = std::to_string(options.topk);
  const std::string op = trace.text("op", "");
  if (op == "mqa_topk" || op == "paged_mqa_topk" || op == "topk" || op == "merge_topk") {
    set.set["out"] = trace.text("out", "indices") + ",indices,scores,counts";
  }
  return set;
}

/// The last row that chose something: the query closest to the end of the text.
void add_excerpt(const support::Call& call, bool colour, Result& result) {
  const std::vector<std::string> tokens = tokens_of(call.trace());
  const std::vector<Window> windows = windows_of(call.args());
  if (tokens.empty() || call.output("scores") == nullptr) return;
  for (auto row = static_cast<int64_t>(windows.size()) - 1; row >= 0; --row) {
    const Window& window = windows[static_cast<size_t>(row)];
    const std::vector<Chosen> chosen = chosen_by(call, row, window);
    if (chosen.empty()) continue;
    result.excerpt = excerpt(tokens, chosen, window, kPieces, colour);
    result.excerpt_row = row;
    return;
  }
}

Result run_call(const support::Call& call, const RunOptions& options, double loading) {
  Result result;
  result.backend = choose_backend(call.args(), options.backend);
  Exec exec = exec_on(result.backend);
  exec.threads = options.threads;
  result.stages.push_back({"load", loading, options.trace});
  for (Stage& stage : run_producers(call, exec)) result.stages.push_back(std::move(stage));
  uint64_t stats[kNumStats] = {};
  Exec counted = exec;
  counted.stats = stats;
  const double begin = now();
  run_with_progress(call.args(), counted, call.op().c_str());
  const double spent = now() - begin;
  result.summary = summarise(call, stats, spent);
  name_numerics(call.args(), result.backend, result.summary);
  result.stages.push_back({call.op(), spent, result.summary.speed});
  result.study = study(call, exec);
  add_excerpt(call, stdout_is_terminal() && !options.json, result);
  return result;
}

void print_table(const Study& study, const support::Trace& trace) {
  if (study.table.empty()) return fmt::print("\nno comparison with exact attention: {}\n", study.missing);
  fmt::print("\nagainst exact attention over the unquantised bf16 vectors (means over {} of {} rows)\n", study.rows,
             study.of_rows);
  if (trace.text("model", "") == "synthetic")
    fmt::print("SYNTHETIC: random vectors, which say nothing about a model\n");
  fmt::print("  {:>6}  {:>7}  {:>7}  {:>9}  {:>9}\n", "topk", "recall", "mass", "best mass", "last topk");
  for (const Quality& q : study.table) {
    fmt::print("  {:>6}  {:>6.1f}%  {:>6.1f}%  {:>8.1f}%  {:>8.1f}%\n", q.topk, 100 * q.recall, 100 * q.mass,
               100 * q.best, 100 * q.recent);
  }
  fmt::print(
      "  recall: exact attention's topk positions that are selected; mass: attention probability held by the "
      "selection,\n"
      "  by exact attention's own topk (best mass), by the topk latest positions (last topk)\n");
}

void print_text(const support::Call& call, const Result& result) {
  const support::Trace& trace = call.trace();
  fmt::print("{}{}\n", call.op(), result.summary.what.empty() ? "" : ": " + result.summary.what);
  const std::string model = trace.text("model", ""), layer = trace.text("layer", "");
  if (model == "synthetic") {
    fmt::print("synthetic data, pattern {}\n", trace.text("pattern", "unknown"));
  } else if (!model.empty()) {
    fmt::print("from {}{}\n", model, layer.empty() ? "" : ", layer " + layer);
  }
  fmt::print("backend {}{}\n\n", result.backend,
             result.summary.numerics.empty() ? "" : " (" + result.summary.numerics + ")");
  for (const Stage& stage : result.stages)
    fmt::print("  {:<16} {:>9}  {}\n", stage.name, duration(stage.seconds), stage.result);
  if (!result.summary.lines.empty()) fmt::print("\n");
  for (const std::string& line : result.summary.lines) fmt::print("  {}\n", line);
  if (!result.summary.search) return;
  print_table(result.study, trace);
  if (result.excerpt.empty()) return;
  fmt::print("\nwhat query row {} looks at\n", result.excerpt_row);
  for (const std::string& line : result.excerpt) fmt::print("{}\n", line);
}

void print_json(const support::Call& call, const Result& result) {
  Json json = {{"op", call.op()}, {"backend", result.backend}, {"numerics", result.summary.numerics}};
  for (const Stage& stage : result.stages) {
    json["stages"].push_back({{"name", stage.name}, {"seconds", stage.seconds}, {"result", stage.result}});
  }
  for (const auto& [name, value] : result.summary.numbers) json[name] = value;
  for (const Quality& q : result.study.table) {
    json["attention"].push_back(
        {{"topk", q.topk}, {"recall", q.recall}, {"mass", q.mass}, {"best", q.best}, {"recent", q.recent}});
  }
  if (!result.study.table.empty()) {
    json["attention_rows"] = result.study.rows;
    json["synthetic"] = call.trace().text("model", "") == "synthetic";
  }
  fmt::print("{}\n", json.dump(1, ' ', false, Json::error_handler_t::replace));
}

Exit run(const RunOptions& options) {
  if (options.on_ranks && !options.output.empty())
    throw Failure("run: --output must be absent with --ranks, which compares and keeps nothing; got one");
  const double begin = now();
  auto trace = std::make_shared<support::Trace>(support::read_trace(options.trace));
  const double loading = now() - begin;
  const support::Call call(trace, call_options(*trace, options));
  if (options.on_ranks) {
    Exec exec{};
    const std::string backend = choose_backend(call.args(), options.backend);
    exec.backend = backend.c_str();
    exec.threads = options.threads;
    call.run(exec);
    RanksOptions ranks = options.ranks;
    ranks.json = options.json;
    return run_on_ranks(call, backend, ranks);
  }
  const Result result = run_call(call, options, loading);
  if (!options.output.empty()) {
    support::Trace written = *trace;
    call.write_back(written);
    if (options.topk != 0) written.metadata["topk"] = std::to_string(options.topk);
    written.metadata["backend"] = result.backend;
    if (!result.summary.numerics.empty()) written.metadata["numerics"] = result.summary.numerics;
    if (!result.summary.arithmetic.empty()) written.metadata["arithmetic"] = result.summary.arithmetic;
    support::write_trace(options.output, written);
  }
  options.json ? print_json(call, result) : print_text(call, result);
  return kDone;
}

}  // namespace

void add_run(CLI::App& app, Action& action) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* sub =
      app.add_subcommand("run", "Run the call of a trace; show times, the selection, and what it keeps of attention");
  sub->add_option("trace", options->trace, "A .safetensors trace")->required();
  sub->add_option("--backend", options->backend, "Backend that must run it (default: the best one that can)");
  sub->add_option("--topk", options->topk, "Positions a row instead of the trace's")
      ->check(CLI::Range(int64_t{1}, int64_t{INT32_MAX}));
  sub->add_option("--threads", options->threads, "CPU threads (default: all)")->check(CLI::Range(0, 65536));
  sub->add_option("-o,--output", options->output, "Write the trace with its results here");
  CLI::Option* ranks = sub->add_option("--ranks", options->ranks.ranks,
                                       "Answer it on so many ranks too (threads), and compare; under mpirun: 0, or as "
                                       "many as it has started")
                           ->check(CLI::Range(0, 1024));
  sub->add_option("--shard", options->ranks.cut, "What the ranks share out: keys (context), rows, or both (prefill)")
      ->check(CLI::IsMember({"context", "rows", "prefill"}))
      ->needs(ranks);
  sub->add_option("--interleave", options->ranks.interleave, "Neighbouring keys of one rank")
      ->check(CLI::Range(1, 1 << 20))
      ->needs(ranks);
  sub->add_flag("--json", options->json, "Numbers for a script instead of text");
  sub->callback([options, ranks, &action] {
    options->on_ranks = ranks->count() > 0;
    action = [options] { return run(*options); };
  });
}

}  // namespace topkey::cli
