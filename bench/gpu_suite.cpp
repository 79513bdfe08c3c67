// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See gpu_suite.h.
#include "bench/gpu_suite.h"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>

#include "bench/gpu_ceilings.h"
#include "bench/gpu_data.h"

namespace topkey::bench {
namespace {

using Json = nlohmann::ordered_json;

// What an H200 was measured to reach: bytes a second of a copy, flop a second of fp8 products under load. The floor of a
// call is made of these, not of this run's, so that files can be compared.
constexpr double kBandwidth = 4.3e12, kFp8 = 1.45e15;
/// Longer calls heat the GPU up and are judged warm.
constexpr double kWarmFrom = 2000;

enum Heat { kCold, kWarm };
/// [heat][graph]
struct Figures {
  Times times[2][2];
  uint64_t rescans = 0;
  size_t workspace = 0;
  double floor_us = 0;
  std::string wrong;
  Heat judged() const { return times[kCold][1].median_us > kWarmFrom ? kWarm : kCold; }
};

std::vector<GpuCase> chosen(const GpuOptions& options) {
  const std::vector<GpuCase> all = options.quick ? quick_gpu_cases() : gpu_cases();
  const bool every = options.suite == "all" || options.suite == "performance";
  const std::regex wanted(options.rows.empty() ? ".*" : options.rows);
  std::vector<bool> take(all.size());
  for (size_t i = all.size(); i-- > 0;) {  // bases stand before what is held against them
    take[i] = take[i] || ((every || all[i].suite == options.suite) && std::regex_search(all[i].name, wanted));
    for (size_t j = 0; take[i] && j < i; ++j) take[j] = take[j] || all[j].name == all[i].against;
  }
  std::vector<GpuCase> list;
  for (size_t i = 0; i < all.size(); ++i) {
    if (take[i]) list.push_back(all[i]);
  }
  if (list.empty()) throw std::invalid_argument("bench: no case is in that suite and has such a name");
  return list;
}

std::string first_backend() {
  for (const BackendInfo& info : backends()) {
    if (info.device == Device::cuda && info.unusable.empty()) return info.name;
  }
  std::string reasons;
  for (const BackendInfo& info : backends()) {
    if (info.device == Device::cuda) reasons += " " + info.name + ": " + info.unusable;
  }
  throw std::runtime_error("bench: no CUDA backend can be used here." + reasons);
}

class Suite {
 public:
  explicit Suite(const GpuOptions& options)
      : options_(options), backend_(options.backend.empty() ? first_backend() : options.backend) {}

  bool run();

 private:
  void ceilings();
  void run_case(const GpuCase& c);
  Figures measure(const GpuCase& c, GpuData& data, Exec& exec);
  void call_once(const GpuData& data, Exec exec, Figures& f) const;
  double must_of(const GpuCase& c, const Figures& f, int heat, int graph) const;
  void print(const GpuCase& c, const Figures& f) const;
  void add_rows(const GpuCase& c, const Figures& f, const Exec& exec);
  void write() const;

  const GpuOptions& options_;
  std::string backend_;
  std::optional<Timer> timer_;
  std::map<std::string, Figures> done_;
  Json ceilings_, rows_ = Json::array();
  int failed_ = 0, missed_ = 0, judged_ = 0;
};

void Suite::ceilings() {
  const double load = options_.quick ? 0.1 : 0.3;
  const auto tera = [](double x) { return x > 0 ? Json(x / 1e12) : Json(nullptr); };
  ceilings_ = {{"floor_copy_tbytes", kBandwidth / 1e12}, {"floor_fp8_tflops", kFp8 / 1e12}};
  ceilings_["copy_tbytes"] = tera(copy_rate(*timer_));
  for (const bool fp8 : {false, true}) {
    const std::string name = fp8 ? "fp8" : "bf16";
    for (const bool warm : {false, true}) {
      timer_->idle(warm ? 0 : load);
      ceilings_[name + (warm ? "_tflops_warm" : "_tflops_cold")] = tera(gemm_rate(*timer_, fp8, warm ? load : 0));
    }
  }
  std::printf("backend %s; ceilings of this run: %s\n\n", backend_.c_str(), ceilings_.dump().c_str());
}

/// Untimed: loads the kernels, shows faults, counts rescans.
void Suite::call_once(const GpuData& data, Exec exec, Figures& f) const {
  uint64_t counts[kNumStats] = {};
  must(cudaMalloc(reinterpret_cast<void**>(&exec.stats), sizeof counts));
  must(cudaMemset(exec.stats, 0, sizeof counts));
  data.call(exec);
  must(cudaDeviceSynchronize());
  must(cudaMemcpy(counts, exec.stats, sizeof counts, cudaMemcpyDeviceToHost));
  must(cudaFree(exec.stats));
  f.rescans = counts[kRescans];
}

Figures Suite::measure(const GpuCase& c, GpuData& data, Exec& exec) {
  Figures f;
  f.workspace = exec.workspace_bytes;
  f.floor_us = std::max(data.bytes() / kBandwidth, data.flop() / kFp8) * 1e6;
  call_once(data, exec, f);
  f.wrong = data.wrong();
  const Graph graph(timer_->stream(), [&] { data.call(exec); });
  const std::function<void()> replay = [&] { graph.launch(); }, call = [&] { data.call(exec); };
  const bool table = c.must_us > 0 && c.suite != "select";
  const double share = options_.quick ? 0.05 : table ? 1 : 0.25;
  const int most = options_.quick ? 7 : 20;
  for (const Heat heat : {kCold, kWarm}) {
    if (heat == kCold) timer_->idle(share * options_.idle);
    if (heat == kWarm) timer_->load(replay, share * options_.load);
    for (const int captured : {1, 0}) {
      if (heat == kCold) data.poison();
      f.times[heat][captured] = timer_->times(captured == 1 ? replay : call, most);
      if (f.wrong.empty()) f.wrong = data.wrong();
    }
  }
  return f;
}

/// 0: none is set, or what it is held against was not run.
double Suite::must_of(const GpuCase& c, const Figures& f, int heat, int graph) const {
  if (c.must_us > 0) return c.must_us;
  if (c.must_fraction > 0) return f.floor_us / c.must_fraction;
  const auto base = done_.find(c.against);
  if (c.against.empty() || base == done_.end()) return 0;
  const double us = base->second.times[heat][c.eager_base ? 0 : graph].median_us;
  return std::max(us * c.times, c.plus_us > 0 ? us + c.plus_us : 0);
}

void Suite::print(const GpuCase& c, const Figures& f) const {
  const Heat judged = f.judged();
  const double ours = f.times[judged][1].median_us, must_us = must_of(c, f, judged, 1);
  const auto number = [](double x) {
    char text[16] = "";
    if (x > 0) std::snprintf(text, sizeof text, "%.1f", x);
    return std::string(text);
  };
  const double peer = judged == kWarm && c.peer_warm_us > 0 ? c.peer_warm_us : c.peer_cold_us;
  std::printf("%-48s %9s %9s %9s %9s %9s %6s %9s %9s %9s  %s\n", c.name.c_str(),
              number(f.times[kCold][1].median_us).c_str(), number(f.times[kWarm][1].median_us).c_str(),
              number(f.times[kCold][0].median_us).c_str(), number(f.times[kWarm][0].median_us).c_str(),
              number(f.floor_us).c_str(), f.floor_us > 0 ? number(100 * f.floor_us / ours).c_str() : "",
              number(must_us).c_str(), number(c.target_us).c_str(), number(peer).c_str(),
              !f.wrong.empty()                         ? ("WRONG: " + f.wrong).c_str()
              : must_us <= 0                           ? ""
              : c.target_us > 0 && ours <= c.target_us ? "target"
              : ours <= must_us                        ? "must"
                                                       : "missed");
  std::fflush(stdout);
}

void Suite::add_rows(const GpuCase& c, const Figures& f, const Exec& exec) {
  const auto or_null = [](double x) { return x > 0 ? Json(x) : Json(nullptr); };
  const bool scored = c.op == "mqa_topk" || c.op == "paged_mqa_topk";
  for (const Heat heat : {kCold, kWarm}) {
    for (const int graph : {1, 0}) {
      const Times& t = f.times[heat][graph];
      Json row = {{"op", c.op}, {"case", c.name}, {"backend", backend_}};
      row["arithmetic"] = scored ? Json(arithmetic(exec.backend, KeyFormat::fp8, DType::f8_e4m3fn)) : Json(nullptr);
      row["numerics"] = scored ? Json(numerics_version(exec.backend, KeyFormat::fp8)) : Json(nullptr);
      row.update({{"format", "fp8"}, {"heads", c.heads}, {"head_dim", 128}, {"rows", c.rows}, {"keys", c.keys}});
      row.update({{"next_n", c.next_n}, {"topk", c.topk}, {"pattern", support::pattern_name(c.pattern)}});
      row.update({{"threads", nullptr}, {"heat", heat == kCold ? "cold" : "warm"}, {"graph", graph == 1}});
      row.update({{"judged", graph == 1 && heat == f.judged()}, {"median_us", t.median_us}, {"min_us", t.min_us}});
      row["floor_us"] = or_null(f.floor_us), row["fraction"] = or_null(f.floor_us / t.median_us);
      row["read_us"] = or_null(c.read_us);
      row["peer"] = c.peer == nullptr ? Json(nullptr) : Json(c.peer);
      row["peer_us"] = or_null(heat == kWarm && c.peer_warm_us > 0 ? c.peer_warm_us : c.peer_cold_us);
      row["must_us"] = or_null(must_of(c, f, heat, graph)), row["target_us"] = or_null(c.target_us);
      row.update({{"workspace_bytes", f.workspace}, {"rescans", f.rescans}, {"util", nullptr}});
      row["against"] = c.against.empty() ? Json(nullptr) : Json(c.against);
      if (!f.wrong.empty()) row["wrong"] = f.wrong;
      rows_.push_back(row);
    }
  }
}

void Suite::run_case(const GpuCase& c) {
  GpuData data(c);
  Exec exec{};
  exec.device = Device::cuda, exec.backend = backend_.c_str(), exec.stream = timer_->stream();
  if (const char* reason = data.unsupported(exec); reason != nullptr) {
    std::printf("%-48s refused: %s\n", c.name.c_str(), reason);
    return;
  }
  exec.workspace_bytes = data.workspace_bytes(exec);
  must(cudaMalloc(&exec.workspace, exec.workspace_bytes + 256));
  const Figures f = measure(c, data, exec);
  must(cudaFree(exec.workspace));
  print(c, f);
  add_rows(c, f, exec);
  const double must_us = must_of(c, f, f.judged(), 1);
  judged_ += must_us > 0, missed_ += must_us > 0 && f.times[f.judged()][1].median_us > must_us;
  failed_ += !f.wrong.empty();
  done_[c.name] = f;
}

void Suite::write() const {
  cudaDeviceProp device{};
  must(cudaGetDeviceProperties(&device, 0));
  char date[32] = {};
  const std::time_t seconds = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&seconds));
  const Json all = {
      {"device", device.name}, {"commit", options_.commit}, {"date", date}, {"ceilings", ceilings_}, {"rows", rows_}};
  std::ofstream file(options_.json);
  file << all.dump(1) << "\n";
  if (!file) throw std::runtime_error("bench: " + options_.json + " cannot be written");
}

bool Suite::run() {
  const std::vector<GpuCase> cases = chosen(options_);
  if (options_.list) {
    for (const GpuCase& c : cases) std::printf("%-10s %s\n", c.suite.c_str(), c.name.c_str());
    return true;
  }
  prepare(Device::cuda);
  timer_.emplace();
  ceilings();
  std::printf("%-48s %9s %9s %9s %9s %9s %6s %9s %9s %9s\n", "us: graphs cold, warm; eager cold, warm", "graph", "warm",
              "eager", "warm", "floor", "% of", "must", "target", "peer");
  for (const GpuCase& c : cases) {
    try {
      run_case(c);
    } catch (const Error& error) {  // of the call; a device's error ends the run, since nothing works after it
      if (error.status() == Status::device_error) throw;
      std::printf("%-48s FAILED: %s\n", c.name.c_str(), error.what());
      ++failed_;
    }
  }
  std::printf("\n%d cases with a must, %d missed; %d wrong or failed\n", judged_, missed_, failed_);
  if (!options_.json.empty()) write();
  return failed_ == 0;
}

}  // namespace

double copy_rate(Timer& timer) {
  constexpr size_t kBytes = size_t{1} << 30;
  void *from = nullptr, *to = nullptr;
  must(cudaMalloc(&from, kBytes)), must(cudaMalloc(&to, kBytes));
  must(cudaMemset(from, 1, kBytes));
  const Times t =
      timer.times([&] { must(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDeviceToDevice, timer.stream())); }, 20);
  must(cudaFree(from)), must(cudaFree(to));
  return 2.0 * kBytes / (t.median_us * 1e-6);
}

bool run_gpu_suite(const GpuOptions& options) { return Suite(options).run(); }

}  // namespace topkey::bench
