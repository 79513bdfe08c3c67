// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// topkey info: what this build is, what it can use on this machine, and a support matrix in which every cell was run
// just now: a tiny call of the operation in the format, on the backend. "ok", or the reason that the backend gave.
#include <CLI/CLI.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "command.h"
#include "sample.h"

namespace topkey::cli {
namespace {

using Json = nlohmann::ordered_json;
constexpr KeyFormat kFormats[] = {KeyFormat::fp8, KeyFormat::mxfp4, KeyFormat::bf16,    KeyFormat::f16,
                                  KeyFormat::f32, KeyFormat::q8_0,  KeyFormat::fp8_fnuz};

struct Cell {
  std::string op, format;
  std::string reason;  ///< empty: it ran
};

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown processor";
}

std::string compiler() {
#if defined(__clang__)
  return "clang " + std::to_string(__clang_major__) + "." + std::to_string(__clang_minor__);
#elif defined(__GNUC__)
  return "g++ " + std::to_string(__GNUC__) + "." + std::to_string(__GNUC_MINOR__);
#else
  return "an unknown compiler";
#endif
}

bool has_format(const std::string& op) {
  return op.find("mqa") != std::string::npos || op.find("quantize") == 0 || op == "store_k" || op == "gather_k" ||
         op == "pool_k" || op == "compress_k";
}

std::shared_ptr<const support::Trace> tiny_trace(const std::string& op, KeyFormat format) {
  Sample sample;
  sample.op = op;
  sample.topk = 3;
  sample.spec.format = format;
  sample.spec.heads = 2, sample.spec.head_dim = 32, sample.spec.rows = 2, sample.spec.keys = 6,
  sample.spec.page_size = 4;
  sample.spec.exact = true;  // codes from the start: no producer is needed to try a search
  return std::make_shared<support::Trace>(make_sample(sample));
}

/// Empty, or why the backend did not run it.
std::string try_cell(const std::shared_ptr<const support::Trace>& trace, const std::string& backend) {
  const Exec exec = exec_on(backend);
  try {
    const support::Call call(trace);
    if (const char* reason = support::args_unsupported(call.args(), exec)) return without_op(call.op(), reason);
    call.run(exec);
    return "";
  } catch (const std::exception& error) {
    return without_op(trace->text("op", ""), error.what());
  }
}

/// In the order of the pipeline. Operations that know no format have one cell.
std::vector<Cell> matrix(const std::string& backend) {
  std::vector<Cell> cells;
  for (const std::string& op : support::operation_names()) {
    for (const KeyFormat format : kFormats) {
      const bool every = !has_format(op);
      cells.push_back({op, every ? "any" : format_name(format), try_cell(tiny_trace(op, format), backend)});
      if (every) break;
    }
  }
  return cells;
}

void print_matrix(const std::string& backend, const std::vector<Cell>& cells) {
  fmt::print("\n{}: each cell was run just now\n  {:<18}", backend, "operation");
  for (const KeyFormat format : kFormats) fmt::print("{:<9}", format_name(format));
  std::vector<std::string> reasons;
  std::string op;
  for (const Cell& cell : cells) {
    if (cell.op != op) fmt::print("\n  {:<18}", op = cell.op);
    std::string word = "ok";
    if (!cell.reason.empty()) {
      const auto place = std::find(reasons.begin(), reasons.end(), cell.reason);
      word = fmt::format("({})", place - reasons.begin() + 1);
      if (place == reasons.end()) reasons.push_back(cell.reason);
    }
    fmt::print("{:<9}", cell.format == "any" ? word + ", knows no format" : word);
  }
  fmt::print("\n");
  for (size_t i = 0; i < reasons.size(); ++i) fmt::print("  ({}) {}\n", i + 1, reasons[i]);
}

constexpr const char* kTransports[] = {"local", "mpi", "nccl"};

Exit info_text() {
  fmt::print("TopKey {} (ABI {}), built with {}\n", version(), abi_version(), compiler());
  fmt::print("machine: {}, {} threads\n\nbackends, in the order in which they are chosen\n", cpu_name(),
             std::thread::hardware_concurrency());
  for (const BackendInfo& backend : backends()) {
    fmt::print("  {:<16} {:<5} {}\n", backend.name, backend.device == Device::cpu ? "cpu" : "cuda",
               backend.unusable.empty() ? "usable" : "not usable: " + backend.unusable);
  }
  for (const BackendInfo& backend : backends()) {
    if (backend.unusable.empty()) print_matrix(backend.name, matrix(backend.name));
  }
  fmt::print("\nbetween ranks\n");
  for (const char* transport : kTransports) {
    const char* why = topkey_transport_unusable(transport);
    fmt::print("  {:<16} {}\n", transport, why == nullptr ? "usable" : std::string("not usable: ") + why);
  }
  fmt::print(
      "\nEvery stride and alignment gives the same bits; page bases and page strides must be multiples of 4 bytes.\n"
      "Fast loaders want q rows contiguous and 16-byte aligned, page base and page stride multiples of 16 bytes.\n");
  return kDone;
}

Exit info_json() {
  Json json = {{"version", version()},
               {"abi", abi_version()},
               {"compiler", compiler()},
               {"machine", cpu_name()},
               {"threads", std::thread::hardware_concurrency()}};
  json["backends"] = Json::array();
  for (const BackendInfo& backend : backends()) {
    Json row = {{"name", backend.name},
                {"device", backend.device == Device::cpu ? "cpu" : "cuda"},
                {"usable", backend.unusable.empty()}};
    if (!backend.unusable.empty()) row["reason"] = backend.unusable;
    for (const KeyFormat format : kFormats) {
      if (const char* number = numerics_version(backend.name.c_str(), format))
        row["numerics"][format_name(format)] = number;
    }
    if (backend.unusable.empty()) {
      for (const Cell& cell : matrix(backend.name))
        row["support"][cell.op][cell.format] = cell.reason.empty() ? "ok" : cell.reason;
    }
    json["backends"].push_back(std::move(row));
  }
  for (const char* transport : kTransports)
    json["transports"][transport] = topkey_transport_unusable(transport) == nullptr;
  fmt::print("{}\n", json.dump(1, ' ', false, Json::error_handler_t::replace));
  return kDone;
}

}  // namespace

void add_info(CLI::App& app, Action& action) {
  auto json = std::make_shared<bool>(false);
  CLI::App* sub = app.add_subcommand("info", "Version, machine, backends, and what each of them can run");
  sub->add_flag("--json", *json, "The same for a script");
  sub->callback([json, &action] { action = [json] { return *json ? info_json() : info_text(); }; });
}

}  // namespace topkey::cli
