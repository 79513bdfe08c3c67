// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// topkey bench: medians of whole calls, each beside the machine's ceiling measured in the same run. Tests never time
// anything; this is where speed is shown. --json writes the rows of bench/results/<device>.json.
#include <CLI/CLI.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "bench_cases.h"
#include "ceilings.h"
#include "command.h"

namespace topkey::cli {
namespace {

using Json = nlohmann::ordered_json;
using support::Array;
using support::Problem;

struct Options {
  std::string suite = "cpu", backend, only, json, commit, device;
  int threads = 0;
  bool quick = false;
  std::vector<int> sgemm;
};

struct Times {
  double median = 0, least = 0;
};

/// Medians over at least 7 calls and about a second.
template <class Call>
Times time_calls(const Call& call) {
  for (int i = 0; i < 2; ++i) call();
  std::vector<double> seconds;
  const double begin = now();
  while (seconds.size() < 7 || (now() - begin < 1.0 && seconds.size() < 20000)) {
    const double start = now();
    call();
    seconds.push_back(now() - start);
  }
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], seconds.front()};
}

/// (row, key) pairs that a call scores.
double pairs_of(const Problem& p) {
  double pairs = 0;
  for (int64_t r = 0; r < p.count(); ++r) pairs += static_cast<double>(support::int_at(p.end.view(), r));
  return pairs;
}

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {
    threads_ =
        options.threads > 0 ? options.threads : static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
    for (const BackendInfo& info : backends()) {
      if (info.name == backend()) isa_ = info.detail;
    }
  }

  Exit run() {
    measure_ceilings();
    fmt::print("{:<26} {:>8} {:>12} {:>12} {:>9} {:>9} {:>7}\n", "case", "threads", "median", "GFLOP/s", "of peak",
               "of sgemm", "must");
    for (const BenchCase& c : suite_cases(options_.suite, threads_, options_.quick)) {
      if (c.name.find(options_.only) != std::string::npos) run_case(c);
    }
    if (!options_.json.empty()) write();
    return kDone;
  }

 private:
  std::string backend() const { return options_.backend.empty() ? "cpu" : options_.backend; }

  void measure_ceilings() {
    peak_ = fma_peak(isa_, 1);
    peak_all_ = fma_peak(isa_, threads_);
    const double copy = copy_bandwidth(threads_);
    sgemm_ = sgemm_rate(16384, 512, 128, threads_);
    fmt::print("backend {} on {}, {} threads\n", backend(), isa_.empty() ? "plain C++" : isa_, threads_);
    fmt::print("FMA loop {:.1f} GFLOP/s on 1 thread, {:.1f} on {}; copy {:.1f} GB/s; ", peak_ / 1e9, peak_all_ / 1e9,
               threads_, copy / 1e9);
    fmt::print("{}\n\n", sgemm_.found
                             ? fmt::format("OpenBLAS sgemm {:.1f} GFLOP/s, core {}", sgemm_.flops / 1e9, sgemm_.core)
                             : "no OpenBLAS here");
    json_["ceilings"] = {
        {"isa", isa_}, {"fma_gflops_1", peak_ / 1e9}, {"fma_gflops", peak_all_ / 1e9}, {"copy_gbytes", copy / 1e9}};
    json_["ceilings"]["sgemm_gflops"] = sgemm_.found ? Json(sgemm_.flops / 1e9) : Json(nullptr);
    json_["ceilings"]["sgemm_core"] = sgemm_.found ? Json(sgemm_.core) : Json(nullptr);
  }

  void run_case(const BenchCase& c) {
    const Problem p = support::make_problem(c.spec);
    const auto k = static_cast<int64_t>(c.topk);
    const Array indices(DType::i32, {p.count(), k});
    Selection out{};
    out.indices = indices.view();
    const PagedMqaTopk args = p.paged_search(c.topk, out);
    Exec exec{};
    const std::string name = backend();
    exec.backend = name.c_str();
    exec.threads = c.threads > 0 ? c.threads : threads_;
    const size_t bytes = paged_mqa_topk_workspace_bytes(args, exec);
    const std::shared_ptr<uint8_t> workspace = support::aligned_bytes(bytes);
    exec.workspace = workspace.get();
    exec.workspace_bytes = bytes;
    const Times times = time_calls([&] { paged_mqa_topk(args, exec); });
    report(c, p, exec, times, bytes);
  }

  void report(const BenchCase& c, const Problem& p, const Exec& exec, const Times& times, size_t bytes) {
    const bool trivial = c.spec.keys <= c.topk;
    const double flop = trivial ? 0 : 2.0 * c.spec.heads * c.spec.head_dim * pairs_of(p);
    const double peak = exec.threads == threads_ ? peak_all_ : peak_ * exec.threads, rate = flop / times.median;
    const bool whole = sgemm_.found && exec.threads == threads_ && !trivial;
    fmt::print("{:<26} {:>8} {:>12} {:>12} {:>9} {:>9} {:>7}\n", c.name, exec.threads, duration(times.median),
               trivial ? "" : fmt::format("{:.1f}", rate / 1e9),
               trivial ? "" : fmt::format("{:.1f} %", 100 * rate / peak),
               whole ? fmt::format("{:.2f}", rate / sgemm_.flops) : "",
               c.must > 0 ? fmt::format("{:.0f} %", 100 * c.must) : "");
    std::fflush(stdout);
    const auto micro = [](double seconds) { return Json(seconds * 1e6); };
    const double floor = flop / peak;
    json_["rows"].push_back({{"op", "paged_mqa_topk"},
                             {"case", c.name},
                             {"backend", backend()},
                             {"arithmetic", arithmetic(exec.backend, c.spec.format, support::query_dtype(c.spec))},
                             {"numerics", numerics_version(exec.backend, c.spec.format)},
                             {"format", format_name(c.spec.format)},
                             {"heads", c.spec.heads},
                             {"head_dim", c.spec.head_dim},
                             {"rows", p.count()},
                             {"keys", c.spec.keys},
                             {"next_n", 1},
                             {"topk", c.topk},
                             {"page_size", c.spec.page_size},
                             {"pattern", support::pattern_name(c.spec.pattern)},
                             {"threads", exec.threads},
                             {"heat", nullptr},
                             {"graph", nullptr},
                             {"median_us", micro(times.median)},
                             {"min_us", micro(times.least)},
                             {"floor_us", trivial ? Json(nullptr) : micro(floor)},
                             {"fraction", trivial ? Json(nullptr) : Json(floor / times.median)},
                             {"peer", whole ? Json("openblas sgemm " + sgemm_.core) : Json(nullptr)},
                             {"peer_us", whole ? micro(flop / sgemm_.flops) : Json(nullptr)},
                             {"must_us", c.must > 0 ? micro(floor / c.must) : Json(nullptr)},
                             {"target_us", nullptr},
                             {"workspace_bytes", bytes},
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

  const Options& options_;
  int threads_ = 1;
  std::string isa_;
  double peak_ = 0, peak_all_ = 0;
  Sgemm sgemm_;
  Json json_;
};

}  // namespace

void add_bench(CLI::App& app, Action& action) {
  auto options = std::make_shared<Options>();
  CLI::App* bench = app.add_subcommand("bench", "Time whole calls beside the machine's ceilings");
  bench->add_option("--suite", options->suite, "cpu: the CPU backend's table (default)");
  bench->add_option("--backend", options->backend, "time this backend instead of cpu");
  bench->add_option("--threads", options->threads, "threads (default: all)")->check(CLI::Range(1, 4096));
  bench->add_option("--only", options->only, "only cases whose name contains this");
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
      return Bench(*options).run();
    };
  });
}

}  // namespace topkey::cli
