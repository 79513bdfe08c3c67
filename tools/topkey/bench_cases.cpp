// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See bench_cases.h.
#include "bench_cases.h"

#include <fmt/format.h>

#include <algorithm>

#include "command.h"

namespace topkey::cli {
namespace {

using support::Pattern;
using support::ProblemSpec;
using support::Windows;

/// The production geometry: fp8, 64 heads of 128, pages of 64, all rows of one request.
ProblemSpec production(int64_t rows, int64_t keys) {
  ProblemSpec spec;
  spec.heads = 64, spec.head_dim = 128;
  spec.rows = rows, spec.keys = keys;
  spec.paged = true, spec.page_size = 64;
  return spec;
}

BenchCase decode(const std::string& name, int64_t rows, int64_t keys, double must) {
  BenchCase c;
  c.name = name;
  c.spec = production(rows, keys);
  c.must = must;
  return c;
}

/// A variant of `base` that must take at most `at_most` times as long.
BenchCase variant(const BenchCase& base, const std::string& name, double at_most) {
  BenchCase c = base;
  c.name = base.name + ", " + name;
  c.must = 0;
  c.against = base.name;
  c.at_most = at_most;
  return c;
}

void add_variants(std::vector<BenchCase>& cases, const BenchCase& one) {
  BenchCase c = variant(one, "f16 keys", 0);
  c.spec.format = KeyFormat::f16;
  cases.push_back(c);
  c = variant(one, "page size 1", 1.25);
  c.spec.page_size = 1;
  cases.push_back(c);
  c = variant(one, "H = 32", 0);
  c.spec.heads = 32;
  cases.push_back(c);
  for (const Pattern pattern : {Pattern::ascending, Pattern::descending, Pattern::all_equal, Pattern::relu_plateau,
                                Pattern::bit_reversed, Pattern::decoy}) {
    c = variant(one, support::pattern_name(pattern), 1.15);
    c.spec.pattern = pattern;
    cases.push_back(c);
  }
  c = variant(one, "next_n 4", 4.0);
  c.spec.addressing = support::Addressing::next_n;
  c.spec.next_n = 4;
  cases.push_back(c);
  c = variant(one, "2048 blocks of 8", 1.05);
  c.blocks = 2048;
  cases.push_back(c);
}

std::vector<BenchCase> cpu_cases(int threads, bool quick) {
  const int64_t keys = quick ? 8192 : 65536, prefill_keys = quick ? 4096 : 16384, prefill_rows = quick ? 32 : 256;
  std::vector<BenchCase> cases;
  const BenchCase one = decode("decode 1", 1, keys, 0.75);
  cases.push_back(one);
  cases.push_back(decode("decode 8", 8, keys, 0.85));
  BenchCase prefill = decode("prefill", prefill_rows, prefill_keys, 0.88);
  prefill.spec.windows = Windows::causal;
  cases.push_back(prefill);
  for (size_t i = 0; i < 3; ++i) {  // nine tenths of the rate, or better
    BenchCase mxfp4 = variant(cases[i], "mxfp4 keys", 1 / 0.9);
    mxfp4.spec.format = KeyFormat::mxfp4;
    cases.push_back(mxfp4);
  }
  add_variants(cases, one);
  const BenchCase large = decode("decode 1, long", 1, 4 * keys, 0);
  cases.push_back(large);
  BenchCase admitted = variant(large, "a sixteenth admitted", 0.1);
  admitted.admitted = keys / 4;
  cases.push_back(admitted);
  for (int n = 1; n <= std::min(threads, 64) && threads > 1; n *= 2) {
    BenchCase sweep = decode(fmt::format("decode 1, {} threads", n), 1, keys, 0);
    sweep.threads = n;
    cases.push_back(sweep);
  }
  cases.push_back(decode("decode 1, live <= topk", 1, 2048, 0));
  return cases;
}

}  // namespace

std::vector<BenchCase> suite_cases(const std::string& suite, int threads, bool quick) {
  if (suite == "cpu") return cpu_cases(threads, quick);
  throw Failure(fmt::format(
      "bench: --suite must be cpu, performance, decode, prefill, select, producers or worst, got {}", suite));
}

}  // namespace topkey::cli
