// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// topkey bench: medians of whole calls, each beside the machine's ceiling measured in the same run. Tests never time
// anything; this is where speed is shown. --json writes the rows of bench/results/<device>.json.
#include <CLI/CLI.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "bench_cases.h"
#include "bench_gpu.h"
#include "bench_producers.h"
#include "ceilings.h"
#include "command.h"

namespace topkey::cli {
namespace {

using Json = nlohmann::ordered_json;
using support::Array;
using support::Problem;

struct BenchOptions {
  std::string suite = "cpu", backend, only, json, commit, device, rows, against;
  int threads = 0;
  bool quick = false;
  std::vector<int> sgemm;
};

struct Times {
  double median = 0, least = 0;  ///< seconds
};

double median(std::vector<double>& values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Medians over at least 7 calls and about `least` seconds, of each of several calls made in turn, and the median of `ceiling`
/// taken between them: what the machine and its neighbours do meanwhile meets all of them alike.
std::vector<Times> time_calls(const std::vector<std::function<void()>>& calls, const std::function<double()>& ceiling,
                              double least, double* rate) {
  std::vector<std::vector<double>> seconds(calls.size());
  std::vector<double> rates;
  for (double spent = 0; spent < least || seconds[0].size() < 7;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // OpenMP's threads spin a while after a call
    rates.push_back(ceiling());
    for (const auto& call : calls) call();  // the first after a pause is slow
    for (const double begin = now(); now() - begin < least / 10; spent += seconds.back().back()) {
      for (size_t i = 0; i < calls.size(); ++i) {
        const double start = now();
        calls[i]();
        seconds[i].push_back(now() - start);
        if (i > 0) spent += seconds[i - 1].back();
      }
    }
  }
  *rate = median(rates);
  std::vector<Times> times;
  for (std::vector<double>& s : seconds) times.push_back({median(s), s.front()});
  return times;
}

/// A case with its data, ready to be called.
struct Prepared {
  BenchCase what;
  Problem problem;
  Array indices, blocks, candidates;
  PagedMqaTopk args{};
  std::string backend;
  Exec exec{};
  std::shared_ptr<uint8_t> workspace;
};

/// Every n-th block of the row, as many as make `admitted` keys.
Array spread_candidates(const BenchCase& c) {
  const int64_t count = c.admitted / c.block_size, all = c.spec.keys / c.block_size;
  const Array ids(DType::i32, {1, count});
  for (int64_t i = 0; i < count; ++i) ids.as<int32_t>()[i] = static_cast<int32_t>(i * all / count);
  return ids;
}

std::shared_ptr<Prepared> prepare(const BenchCase& c, const std::string& backend, int threads) {
  auto p = std::make_shared<Prepared>();
  p->what = c;
  p->problem = support::make_problem(c.spec);
  p->backend = backend;
  Selection out{};
  p->indices = Array(DType::i32, {p->problem.count(), int64_t{c.topk}});
  out.indices = p->indices.view();
  if (c.blocks > 0) {
    p->blocks = Array(DType::i32, {p->problem.count(), c.blocks});
    out.blocks = p->blocks.view();
    out.block_size = c.block_size;
  }
  p->args = p->problem.paged_search(c.topk, out);
  if (c.admitted > 0) {
    p->candidates = spread_candidates(c);
    p->args.admit.candidates = p->candidates.view();
    p->args.admit.candidate_block_size = c.block_size;
  }
  p->exec.backend = p->backend.c_str();
  p->exec.threads = c.threads > 0 ? c.threads : threads;
  p->exec.workspace_bytes = paged_mqa_topk_workspace_bytes(p->args, p->exec);
  p->workspace = support::aligned_bytes(p->exec.workspace_bytes);
  p->exec.workspace = p->workspace.get();
  return p;
}

/// (row, key) pairs that a call scores.
double pairs_of(const Prepared& p) {
  if (p.what.admitted > 0) return static_cast<double>(p.what.admitted);
  double pairs = 0;
  for (int64_t r = 0; r < p.problem.count(); ++r)
    pairs += static_cast<double>(support::int_at(p.problem.end.view(), r));
  return pairs;
}

class Bench {
 public:
  explicit Bench(const BenchOptions& options) : options_(options) {
    threads_ =
        options.threads > 0 ? options.threads : static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
    for (const BackendInfo& info : backends()) {
      if (info.name == backend()) isa_ = info.detail;
    }
  }

  Exit run() {
    std::vector<BenchCase> cases;
    if (options_.suite != "producers") cases = suite_cases(options_.suite, threads_, options_.quick);
    const std::vector<ProducerCase> producers = producer_cases(options_.quick);
    std::vector<std::string> names;
    for (const BenchCase& c : cases) names.push_back(c.name);
    for (const ProducerCase& c : producers) names.push_back(c.name);
    const bool exact = std::find(names.begin(), names.end(), options_.only) != names.end();
    const auto wanted = [&](const auto& c) {
      return exact ? c.name == options_.only : c.name.find(options_.only) != std::string::npos;
    };
    const bool searches = std::any_of(cases.begin(), cases.end(), wanted),
               moves = std::any_of(producers.begin(), producers.end(), wanted);
    if (!searches && !moves)
      throw Failure(fmt::format("bench: --only must be (part of) a case's name, got {}", options_.only));
    CopyLoop copy(threads_, size_t{options_.quick ? 16U : 256U} << 20);
    measure_ceilings(copy, searches);
    if (searches) {
      fmt::print("{:<34} {:>8} {:>12} {:>12} {:>9} {:>9} {:>7} {:>8} {:>8}\n", "case", "threads", "median", "GFLOP/s",
                 "of peak", "of sgemm", "must", "times", "at most");
      for (const BenchCase& c : cases) {
        if (wanted(c)) run_case(c, cases);
      }
    }
    if (moves) {
      fmt::print("{}{:<42} {:>8} {:>12} {:>12} {:>9} {:>12}\n", searches ? "\n" : "", "case", "threads", "median",
                 "GB/s", "of copy", "a row");
      for (const ProducerCase& c : producers) {
        if (wanted(c)) run_producer(c, copy);
      }
    }
    if (!options_.json.empty()) write();
    return kDone;
  }

 private:
  std::string backend() const { return options_.backend.empty() ? "cpu" : options_.backend; }

  /// Those of arithmetic only where something is searched.
  void measure_ceilings(CopyLoop& loop, bool searches) {
    double copy = 0;
    for (int round = 0; round < 5; ++round) copy = std::max(copy, loop.rate());
    fmt::print("backend {} on {}, {} threads\n", backend(), isa_.empty() ? "plain C++" : isa_, threads_);
    Json& found = json_["ceilings"] = {{"isa", isa_},
                                       {"fma_gflops_1", nullptr},
                                       {"fma_gflops", nullptr},
                                       {"copy_gbytes", nullptr},
                                       {"sgemm_gflops", nullptr},
                                       {"sgemm_core", nullptr}};
    found["copy_gbytes"] = copy / 1e9;
    if (searches) {
      const double peak = fma_peak(isa_, 1), peak_all = fma_peak(isa_, threads_);
      sgemm_ = sgemm_rate(16384, 512, 128, threads_);
      fmt::print("FMA loop {:.1f} GFLOP/s on 1 thread, {:.1f} on {}; ", peak / 1e9, peak_all / 1e9, threads_);
      fmt::print("{}; ", sgemm_.found
                             ? fmt::format("OpenBLAS sgemm {:.1f} GFLOP/s, core {}", sgemm_.flops / 1e9, sgemm_.core)
                             : "no OpenBLAS here");
      found["fma_gflops_1"] = peak / 1e9, found["fma_gflops"] = peak_all / 1e9;
      if (sgemm_.found) found["sgemm_gflops"] = sgemm_.flops / 1e9, found["sgemm_core"] = sgemm_.core;
    }
    fmt::print("copy {:.1f} GB/s, read and written\n\n", copy / 1e9);
  }

  void run_case(const BenchCase& c, const std::vector<BenchCase>& cases) {
    std::vector<std::shared_ptr<Prepared>> calls{prepare(c, backend(), threads_)};
    for (const BenchCase& other : cases) {
      if (!c.against.empty() && other.name == c.against) calls.push_back(prepare(other, backend(), threads_));
    }
    std::vector<std::function<void()>> functions;
    for (const auto& p : calls) functions.emplace_back([p] { paged_mqa_topk(p->args, p->exec); });
    double peak = 0;
    const int threads = calls[0]->exec.threads;
    const std::vector<Times> times = time_calls(
        functions, [&] { return fma_peak(isa_, threads, 2); }, seconds(), &peak);  // the first round wakes the cores
    report(*calls[0], times, peak);
  }
  /// About as long as each case is timed.
  double seconds() const { return options_.quick ? 0.02 : 1.0; }

  void run_producer(const ProducerCase& c, CopyLoop& copy) {
    const std::shared_ptr<ProducerCall> call = prepare_producer(c, backend(), threads_);
    double rate = 0;
    const Times times = time_calls(
        {[call] { call->run(); }}, [&] { return copy.rate(); }, seconds(), &rate)[0];
    const double floor = call->bytes / rate;
    fmt::print("{:<42} {:>8} {:>12} {:>12.1f} {:>7.1f} % {:>12}\n", c.name, call->exec.threads, duration(times.median),
               call->bytes / times.median / 1e9, 100 * floor / times.median,
               fmt::format("{:.1f} ns", times.median / static_cast<double>(call->units) * 1e9));
    std::fflush(stdout);
    const std::string& op = c.sample.op;
    const bool queries = op == "quantize_q", expands = op == "expand_pools";
    Json row = {{"op", op}, {"case", c.name}, {"backend", backend()}, {"arithmetic", nullptr}, {"numerics", nullptr}};
    row["format"] = expands ? Json(nullptr) : Json(format_name(c.sample.spec.format));
    row["heads"] = queries ? Json(c.sample.spec.heads) : Json(nullptr);
    row["head_dim"] = expands ? Json(nullptr) : Json(c.sample.spec.head_dim);
    row.update({{"rows", call->units}, {"keys", nullptr}, {"next_n", nullptr}});
    row["topk"] = expands ? Json(c.sample.topk) : Json(nullptr);
    row.update({{"pattern", "normal"}, {"threads", call->exec.threads}, {"heat", nullptr}, {"graph", nullptr}});
    row.update({{"median_us", times.median * 1e6}, {"min_us", times.least * 1e6}, {"floor_us", floor * 1e6}});
    row.update({{"fraction", floor / times.median}, {"bytes", call->bytes}, {"copy_gbytes", rate / 1e9}});
    row.update({{"peer", nullptr}, {"peer_us", nullptr}, {"must_us", nullptr}, {"target_us", nullptr}});
    row.update({{"workspace_bytes", call->exec.workspace_bytes}, {"rescans", nullptr}, {"util", nullptr}});
    json_["rows"].push_back(std::move(row));
  }

  /// times: of the case and, where it has one, of the case it is held against.
  void report(const Prepared& p, const std::vector<Times>& times, double peak) {
    const BenchCase& c = p.what;
    const bool trivial = (c.admitted > 0 ? c.admitted : c.spec.keys) <= c.topk;
    const double flop = trivial ? 0 : 2.0 * c.spec.heads * c.spec.head_dim * pairs_of(p);
    const double rate = flop / times[0].median, ratio = times.size() > 1 ? times[0].median / times[1].median : 0;
    const bool whole = sgemm_.found && p.exec.threads == threads_ && !trivial && ratio == 0;
    fmt::print("{:<34} {:>8} {:>12} {:>12} {:>9} {:>9} {:>7} {:>8} {:>8}\n", c.name, p.exec.threads,
               duration(times[0].median), trivial ? "" : fmt::format("{:.1f}", rate / 1e9),
               trivial ? "" : fmt::format("{:.1f} %", 100 * rate / peak),
               whole ? fmt::format("{:.2f}", rate / sgemm_.flops) : "",
               c.must > 0 ? fmt::format("{:.0f} %", 100 * c.must) : "", ratio > 0 ? fmt::format("{:.3f}", ratio) : "",
               c.at_most > 0 ? fmt::format("{:.2f}", c.at_most) : "");
    std::fflush(stdout);
    add_row(p, times, trivial ? 0 : flop / peak, whole ? flop / sgemm_.flops : 0);
  }

  /// floor, sgemm: seconds, 0 = none.
  void add_row(const Prepared& p, const std::vector<Times>& times, double floor, double sgemm) {
    const auto micro = [](double seconds) { return seconds > 0 ? Json(seconds * 1e6) : Json(nullptr); };
    const BenchCase& c = p.what;
    const bool paired = times.size() > 1;
    const double must = c.must > 0 ? floor / c.must : paired ? times[1].median * c.at_most : 0;
    json_["rows"].push_back({{"op", "paged_mqa_topk"},
                             {"case", c.name},
                             {"backend", backend()},
                             {"arithmetic", arithmetic(p.exec.backend, c.spec.format, support::query_dtype(c.spec))},
                             {"numerics", numerics_version(p.exec.backend, c.spec.format)},
                             {"format", format_name(c.spec.format)},
                             {"heads", c.spec.heads},
                             {"head_dim", c.spec.head_dim},
                             {"rows", p.problem.count()},
                             {"keys", c.spec.keys},
                             {"next_n", c.spec.next_n},
                             {"topk", c.topk},
                             {"page_size", c.spec.page_size},
                             {"pattern", support::pattern_name(c.spec.pattern)},
                             {"threads", p.exec.threads},
                             {"heat", nullptr},
                             {"graph", nullptr},
                             {"median_us", micro(times[0].median)},
                             {"min_us", micro(times[0].least)},
                             {"floor_us", micro(floor)},
                             {"fraction", floor > 0 ? Json(floor / times[0].median) : Json(nullptr)},
                             {"peer", paired      ? Json(c.against)
                                      : sgemm > 0 ? Json("openblas sgemm " + sgemm_.core)
                                                  : Json(nullptr)},
                             {"peer_us", micro(paired ? times[1].median : sgemm)},
                             {"must_us", micro(must)},
                             {"target_us", nullptr},
                             {"workspace_bytes", p.exec.workspace_bytes},
                             {"rescans", nullptr},
                             {"util", nullptr}});
  }

  void write() {
    char date[32] = {};
    const std::time_t seconds = std::time(nullptr);
    std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&seconds));
    Json all = {{"device", options_.device}, {"commit", options_.commit}, {"date", date}};
    all.update(json_);
    std::ofstream file(options_.json);
    file << all.dump(1) << "\n";
    if (!file) throw Failure(fmt::format("bench: {} cannot be written", options_.json));
  }

  const BenchOptions& options_;
  int threads_ = 1;
  std::string isa_;
  Sgemm sgemm_;
  Json json_;
};

bool on_host(const std::string& backend) {
  const std::vector<BackendInfo> all = backends();
  return std::any_of(all.begin(), all.end(),
                     [&](const BackendInfo& info) { return info.name == backend && info.device == Device::cpu; });
}

}  // namespace

void add_bench(CLI::App& app, Action& action) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* bench = app.add_subcommand("bench", "Time whole calls beside the machine's ceilings");
  bench->add_option(
      "--suite", options->suite,
      "cpu: the CPU backend's table (default), its part producers with --backend cpu; on a GPU: performance, "
      "or a part of it: decode, prefill, select, producers, worst");
  bench->add_option("--rows", options->rows, "of a GPU's suite: only cases whose name has this regular expression");
  bench->add_option("--against", options->against,
                    "of deep_gemm,flashinfer,vllm,sgl_kernel: time what is installed of these beside TopKey, on a GPU");
  bench->add_option("--backend", options->backend, "time this backend instead of cpu");
  bench->add_option("--threads", options->threads, "threads (default: all)")->check(CLI::Range(1, 4096));
  bench->add_option("--only", options->only, "only the case of this name; else those whose name contains it");
  bench->add_flag("--quick", options->quick, "smaller shapes: see that all runs");
  bench->add_option("--json", options->json, "also write the rows to this file");
  bench->add_option("--device", options->device, "name of this machine in the file");
  bench->add_option("--commit", options->commit, "commit in the file");
  bench->add_option("--sgemm", options->sgemm)->expected(4)->group("");  // what a child process of the bench runs
  bench->callback([options, &action] {
    action = [options] {
      if (!options->sgemm.empty()) {
        return static_cast<Exit>(
            print_sgemm(options->sgemm[0], options->sgemm[1], options->sgemm[2], options->sgemm[3]));
      }
      bench::GpuOptions gpu;
      gpu.suite = options->suite, gpu.rows = options->rows, gpu.backend = options->backend;
      gpu.json = options->json, gpu.commit = options->commit, gpu.quick = options->quick;
      if (!options->against.empty()) return bench_against(options->against, gpu);
      const bool host = options->suite == "producers" && on_host(options->backend);
      if (is_gpu_suite(options->suite) && !host) return bench_gpu(gpu);
      return Bench(*options).run();
    };
  });
}

}  // namespace topkey::cli
