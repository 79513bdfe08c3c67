// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// topkey make-trace: a synthetic call as a file, to try, to measure or to send. The same arguments give the same bytes.
#include <CLI/CLI.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string_view>

#include "command.h"
#include "sample.h"
#include "study.h"

namespace topkey::cli {
namespace {

struct MakeTraceOptions {
  std::string output, format = "fp8", pattern = "normal", scale = "ue8m0", windows = "causal", layout = "planar";
  Sample sample;
  int32_t pool_size = 1;
  bool expected = false;
};

template <class Enum>
Enum by_name(const std::string& word, std::initializer_list<const char*> names, const char* what) {
  const auto* place = std::find_if(names.begin(), names.end(), [&](const char* name) { return word == name; });
  if (place == names.end())
    throw Failure(
        fmt::format("make-trace: {} must be one of {}; got {}", what, fmt::join(names, ", "), support::shown(word)));
  return static_cast<Enum>(place - names.begin());
}

void check_tiles(const support::ProblemSpec& spec) {
  const int64_t tile = tile_rows(spec.layout);
  if (tile == 0) return;
  const bool suits = spec.format == KeyFormat::mxfp4 ? spec.head_dim == 128
                                                     : is_fp8(spec.format) && tile == 16 && spec.head_dim % 16 == 0;
  if (!suits || spec.page_size % tile != 0) {
    throw Failure(
        fmt::format("make-trace: layout {} is for fp8 and fp8_fnuz (tiled16, head-dim a multiple of 16) or mxfp4 "
                    "(head-dim 128), with page-size a multiple of {}",
                    layout_name(spec.layout), tile));
  }
}

/// Sizes that would take the machine down are refused: a trace is a sample, not a load.
void check(const Sample& sample) {
  constexpr double kLimit = 4e9;
  const support::ProblemSpec& spec = sample.spec;
  const double values =
      static_cast<double>(spec.keys) * spec.head_dim * spec.requests +
      static_cast<double>(spec.rows) * (static_cast<double>(spec.heads) * spec.head_dim + sample.topk);
  if (values > kLimit / 16) throw Failure("make-trace: this would be more than 4 GB of data on the way");
  if (spec.exact && (spec.heads > 128 || spec.head_dim > 128))
    throw Failure("make-trace: exact inputs have at most 128 heads and 128 dims");
  if (spec.scale == ScaleRule::f32 && !is_fp8(spec.format))
    throw Failure("make-trace: scale f32 is for fp8 and fp8_fnuz keys");
  if (spec.head_dim % dim_multiple(spec.format) != 0) {
    throw Failure(fmt::format("make-trace: head-dim must be a multiple of {} for {}, got {}", dim_multiple(spec.format),
                              format_name(spec.format), spec.head_dim));
  }
  check_tiles(spec);
}

/// Traces keep strides up to twice a page: what lies between pages is no part of a call.
void check_stride(const support::ProblemSpec& spec) {
  if (spec.page_stride == 0) return;
  const int64_t bytes = page_layout(spec.format, spec.layout, spec.page_size, spec.head_dim).page_bytes;
  if (spec.page_stride < bytes || spec.page_stride > 2 * bytes || spec.page_stride % 4 != 0)
    throw Failure(fmt::format("make-trace: page-stride must be 0, or a multiple of 4 from {} to {} bytes, got {}",
                              bytes, 2 * bytes, spec.page_stride));
}

/// The options that change what a sample of an operation holds, each with a space on both sides. --output, --op and
/// --seed are for all.
std::string_view options_of(const std::string& op) {
  if (op == "mqa_logits") return " --format --heads --head-dim --rows --keys --pattern --scale --windows --exact ";
  if (op == "mqa_topk")
    return " --format --heads --head-dim --rows --keys --topk --pattern --scale --windows --exact --expected ";
  if (op == "paged_mqa_logits")
    return " --format --heads --head-dim --rows --keys --requests --page-size --layout --page-stride --next-n "
           "--pattern --scale --windows --exact ";
  if (op == "paged_mqa_topk")
    return " --format --heads --head-dim --rows --keys --topk --requests --page-size --layout --page-stride --next-n "
           "--pattern --scale --windows --exact --expected --pool-size ";
  if (op == "topk" || op == "merge_topk") return " --rows --keys --topk --pattern --expected ";
  if (op == "select_blocks") return " --rows --keys --topk --pattern ";
  if (op == "expand_rows") return " --rows --keys --requests --page-size ";
  if (op == "to_slots") return " --rows --keys --topk --requests --page-size ";
  if (op == "expand_pools") return " --rows --keys --topk --expected ";
  if (op == "quantize_q") return " --format --heads --head-dim --rows ";
  if (op == "quantize_k") return " --format --head-dim --keys --scale ";
  if (op == "store_k") return " --format --head-dim --keys --page-size --layout --scale ";
  if (op == "gather_k")
    return " --format --head-dim --keys --requests --page-size --layout --page-stride --pattern --scale --exact ";
  if (op == "pool_k") return " --format --head-dim --keys --requests --page-size --scale ";
  if (op == "compress_k") return " --format --head-dim --keys --requests --page-size ";
  throw Failure(fmt::format("make-trace: op must be one of {}; got {}", fmt::join(support::operation_names(), ", "),
                            support::shown(op)));
}

/// An option that would do nothing is a misunderstanding, and said to be one.
void check_options(const Sample& sample, const CLI::App& sub) {
  const std::string_view used = options_of(sample.op);
  for (const CLI::Option* option : sub.get_options()) {
    const std::string name = option->get_name();
    const bool common = name == "--output" || name == "--op" || name == "--seed";
    if (option->count() > 0 && !common && used.find(" " + name + " ") == std::string_view::npos)
      throw Failure(
          fmt::format("make-trace: {} must be absent with --op {}, which has no use for it; got one", name, sample.op));
  }
  const support::ProblemSpec& spec = sample.spec;
  if (spec.next_n > 1 && sub.count("--rows") > 0 && spec.rows != int64_t{spec.requests} * spec.next_n)
    throw Failure(fmt::format("make-trace: rows must be requests * next-n, {}, or absent; got {}",
                              int64_t{spec.requests} * spec.next_n, spec.rows));
  if (sample.op == "pool_k" && (spec.head_dim & (spec.head_dim - 1)) != 0)
    throw Failure(fmt::format("make-trace: head-dim must be a power of two for pool_k, got {}", spec.head_dim));
}

/// Runs the trace on `ref` and stores the answers under expected_*.
void add_expected(support::Trace& trace) {
  const support::Call call(std::make_shared<support::Trace>(trace));
  Exec exec{};
  exec.backend = "ref";
  call.run(exec);
  for (const char* name : {"indices", "scores"}) {
    if (const support::TraceTensor* found = call.output(name)) trace.tensors[std::string("expected_") + name] = *found;
  }
}

/// Keys are pools: rows see so many, and of the open one as many tokens as the row's number says.
void make_pools(support::Trace& trace, int32_t size) {
  const support::Call call(std::make_shared<support::Trace>(trace));
  const std::vector<Window> windows = windows_of(call.args());
  const support::Array positions(DType::i64, {static_cast<int64_t>(windows.size())});
  for (size_t r = 0; r < windows.size(); ++r) {
    if (windows[r].start != 0) throw Failure("make-trace: windows must begin at 0 with --pool-size (full or causal)");
    positions.as<int64_t>()[r] = windows[r].end * size + static_cast<int64_t>(r) % size - 1;
  }
  trace.tensors["positions"] = support::copy_of(positions.view());
  trace.metadata["pool_size"] = std::to_string(size);
}

Exit make(MakeTraceOptions& options, const CLI::App& sub) {
  support::ProblemSpec& spec = options.sample.spec;
  check_options(options.sample, sub);
  spec.format = support::format_by_name(options.format);
  if (!support::pattern_of(options.pattern, &spec.pattern)) {
    std::string names;
    for (const support::Pattern pattern : support::all_patterns())
      names += std::string(names.empty() ? "" : ", ") + support::pattern_name(pattern);
    throw Failure(fmt::format("make-trace: pattern must be one of {}; got {}", names, support::shown(options.pattern)));
  }
  spec.scale = by_name<ScaleRule>(options.scale, {"ue8m0", "f32"}, "scale");
  spec.layout = by_name<Layout>(options.layout, {"planar", "interleaved", "tiled16", "tiled32", "tiled64"}, "layout");
  spec.windows = by_name<support::Windows>(options.windows, {"full", "causal", "random", "wild"}, "windows");
  spec.length_not_end = spec.windows != support::Windows::full;
  if (spec.next_n > 1) {
    spec.addressing = support::Addressing::next_n;
    spec.rows = int64_t{spec.requests} * spec.next_n;
  }
  check(options.sample);
  check_stride(spec);
  support::Trace trace = make_sample(options.sample);
  if (options.expected) add_expected(trace);
  if (options.pool_size > 1) make_pools(trace, options.pool_size);
  trace.metadata["pattern"] = options.pattern;
  trace.metadata["seed"] = std::to_string(spec.seed);
  trace.metadata["unit"] = options.pool_size > 1 ? "pool" : "token";
  trace.metadata["licence"] = "random numbers; no rights reserved (CC0-1.0)";
  support::write_trace(options.output, trace);
  uint64_t bytes = 0;
  for (const auto& [name, tensor] : trace.tensors) bytes += tensor.bytes.size();
  fmt::print("{}: {}, {} tensors, {:.2f} MB\n", options.output, options.sample.op, trace.tensors.size(),
             static_cast<double>(bytes) / 1e6);
  return kDone;
}

}  // namespace

void add_make_trace(CLI::App& app, Action& action) {
  auto options = std::make_shared<MakeTraceOptions>();
  Sample& sample = options->sample;
  support::ProblemSpec& spec = sample.spec;
  spec.heads = 64, spec.head_dim = 128, spec.rows = 8, spec.keys = 4096, spec.page_size = 64, sample.topk = 512;
  CLI::App* sub = app.add_subcommand("make-trace", "Write a synthetic call to a file");
  const auto positive = CLI::Range(1, INT32_MAX);
  sub->add_option("-o,--output", options->output, "The file")->required();
  sub->add_option("--op", sample.op, "Operation")->capture_default_str();
  sub->add_option("--format", options->format, "fp8, mxfp4, bf16, f16, f32, q8_0, fp8_fnuz")->capture_default_str();
  sub->add_option("--heads", spec.heads, "H")->check(positive)->capture_default_str();
  sub->add_option("--head-dim", spec.head_dim, "D")->check(positive)->capture_default_str();
  sub->add_option("--rows", spec.rows, "Query rows")->check(positive)->capture_default_str();
  sub->add_option("--keys", spec.keys, "Keys, of the longest request")->check(positive)->capture_default_str();
  sub->add_option("--topk", sample.topk, "Positions a row")->check(positive)->capture_default_str();
  sub->add_option("--requests", spec.requests, "Requests (paged)")->check(positive)->capture_default_str();
  sub->add_option("--page-size", spec.page_size, "Key rows a page (paged)")->check(positive)->capture_default_str();
  sub->add_option("--layout", options->layout, "Of a page (paged): planar, interleaved, tiled16, tiled32, tiled64")
      ->capture_default_str();
  sub->add_option("--page-stride", spec.page_stride, "Bytes from page to page (paged; 0: side by side)")
      ->check(CLI::Range(0, INT32_MAX))
      ->capture_default_str();
  sub->add_option("--next-n", spec.next_n, "Rows a request; more than 1: rows = requests * next-n")
      ->check(positive)
      ->capture_default_str();
  sub->add_option("--pool-size", options->pool_size, "Tokens of a key (paged_mqa_topk): for run --ranks over k-pools")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  sub->add_option("--pattern", options->pattern,
                  "What the scores look like: normal, relu_plateau, ties_at_cut, nans, ...")
      ->capture_default_str();
  sub->add_option("--scale", options->scale, "fp8 and fp8_fnuz key scale: ue8m0 or f32")->capture_default_str();
  sub->add_option("--windows", options->windows, "What rows see: full, causal, random, wild")->capture_default_str();
  sub->add_option("--seed", spec.seed, "Seed")->check(CLI::Range(int64_t{0}, kMostSeed))->capture_default_str();
  sub->add_flag("--exact", spec.exact, "Inputs on which every backend must agree bit for bit");
  sub->add_flag("--expected", options->expected, "Store the answers of backend ref too");
  sub->callback([options, sub, &action] { action = [options, sub] { return make(*options, *sub); }; });
}

}  // namespace topkey::cli
