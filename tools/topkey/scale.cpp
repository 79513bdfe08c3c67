// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// topkey scale: what sharding would cost, from shapes and the speeds of a machine: bytes and time of a rank for 1, 2,
// 4, ... ranks. A model (support/scaling.h), not a measurement; bytes are exact.
#include <CLI/CLI.hpp>

#include <fmt/core.h>

#include <cmath>
#include <memory>

#include "command.h"
#include "support/scaling.h"

namespace topkey::cli {
namespace {

struct ScaleOptions {
  support::Scale scale;
  std::string cut = "context";
  int64_t most = 8;
  double tflops = 1450, read = 4300, link = 248, latency = 23, small_link = 109, small_latency = 8;
};

Exit run(const ScaleOptions& o) {
  for (const double speed : {o.tflops, o.read, o.link, o.latency, o.small_link, o.small_latency}) {
    // a range lets a NaN through
    if (std::isnan(speed)) throw Failure("scale: --tflops, --read, links and latencies must be numbers, got nan");
  }
  support::Scale s = o.scale;
  s.cut = o.cut == "rows"      ? support::Cut::rows
          : o.cut == "tokens"  ? support::Cut::tokens
          : o.cut == "prefill" ? support::Cut::gathered
                               : support::Cut::context;
  s.flops = o.tflops * 1e12, s.read = o.read * 1e9;
  s.link = {o.link * 1e9, o.latency * 1e-6}, s.small_link = {o.small_link * 1e9, o.small_latency * 1e-6};
  fmt::print("model, not measured: {} rows of {} requests, {} keys a row, H {}, D {}, topk {}, cut by {}\n", s.rows,
             s.requests, s.context, s.heads, s.head_dim, s.topk, o.cut);
  fmt::print("{:>7}  {:>16}  {:>10}  {:>10}  {:>10}  {:>10}  {:>7}\n", "ranks", "bytes received", "local", "exchange",
             "merge", "in all", "of one");
  double one = 0;
  for (s.ranks = 1; s.ranks <= o.most; s.ranks *= 2) {
    const support::Cost c = support::cost_of(s);
    if (s.ranks == 1) one = c.seconds();
    fmt::print("{:>7}  {:>16}  {:>10}  {:>10}  {:>10}  {:>10}  {:>7.3f}\n", s.ranks, c.received_bytes,
               duration(c.local), duration(c.exchange), duration(c.merge), duration(c.seconds()),
               one > 0 ? c.seconds() / one : 0.0);
  }
  return kDone;
}

}  // namespace

void add_scale(CLI::App& app, Action& action) {
  auto o = std::make_shared<ScaleOptions>();
  CLI::App* sub =
      app.add_subcommand("scale", "What sharding would cost: bytes and time of a rank, from shapes (a model)");
  // Far past any model, and such that no product of them leaves 63 bits.
  const CLI::Range counts(int64_t{1}, int64_t{1} << 20), narrow(int64_t{1}, int64_t{1} << 16),
      runs(int64_t{1}, int64_t{1} << 10), speeds(1e-6, 1e12);
  sub->add_option(
         "--shard", o->cut,
         "What the ranks share out: keys (context), rows, rows and new tokens (tokens), or all of it (prefill)")
      ->check(CLI::IsMember({"context", "rows", "tokens", "prefill"}));
  sub->add_option("--ranks", o->most, "Up to so many ranks")->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  sub->add_option("--rows", o->scale.rows, "Query rows of a step")->check(counts);
  sub->add_option("--requests", o->scale.requests, "Requests of a step")->check(counts);
  sub->add_option("--context", o->scale.context, "Key rows that a query row sees")
      ->check(CLI::Range(int64_t{1}, int64_t{INT32_MAX}))
      ->required();
  sub->add_option("--heads", o->scale.heads, "Index heads")->check(narrow);
  sub->add_option("--head-dim", o->scale.head_dim, "Dimensions of a head")->check(narrow);
  sub->add_option("--topk", o->scale.topk, "Positions a row")->check(narrow);
  sub->add_option("--interleave", o->scale.interleave, "Neighbouring keys of one rank")->check(runs);
  sub->add_option("--blocks", o->scale.blocks, "Published candidate blocks a row")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 16));
  sub->add_option("--key-bytes", o->scale.key_bytes, "Bytes of a key row")
      ->check(CLI::Range(int64_t{1}, int64_t{2048}));
  sub->add_option("--token-bytes", o->scale.token_bytes, "Bytes of a new token that prefill ranks gather")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20));
  sub->add_option("--tflops", o->tflops, "Scoring rate of a rank")->check(speeds);
  sub->add_option("--read", o->read, "GB/s that a rank reads")->check(speeds);
  const CLI::Range waits(0.0, 1e12);
  sub->add_option("--link", o->link, "GB/s into a rank")->check(speeds);
  sub->add_option("--latency", o->latency, "Microseconds of a collective")->check(waits);
  sub->add_option("--small-link", o->small_link, "GB/s where that is sooner done: of small messages")->check(speeds);
  sub->add_option("--small-latency", o->small_latency, "Microseconds of a collective then")->check(waits);
  sub->callback([o, &action] { action = [o] { return run(*o); }; });
}

}  // namespace topkey::cli
