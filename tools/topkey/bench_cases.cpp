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

void add_patterns(std::vector<BenchCase>& cases, int64_t keys) {
  for (const Pattern pattern : {Pattern::ascending, Pattern::descending, Pattern::all_equal, Pattern::relu_plateau,
                                Pattern::bit_reversed, Pattern::decoy}) {
    BenchCase c = decode(fmt::format("decode 1, {}", support::pattern_name(pattern)), 1, keys, 0);
    c.spec.pattern = pattern;
    cases.push_back(c);
  }
}

std::vector<BenchCase> cpu_cases(int threads, bool quick) {
  const int64_t keys = quick ? 8192 : 65536, prefill_keys = quick ? 4096 : 16384, prefill_rows = quick ? 32 : 256;
  std::vector<BenchCase> cases;
  cases.push_back(decode("decode 1", 1, keys, 0.75));
  cases.push_back(decode("decode 8", 8, keys, 0.85));
  BenchCase prefill = decode("prefill", prefill_rows, prefill_keys, 0.88);
  prefill.spec.windows = Windows::causal;
  cases.push_back(prefill);
  for (const int64_t rows : {1, 8}) {
    BenchCase mxfp4 = decode(fmt::format("decode {}, mxfp4 keys", rows), rows, keys, 0);
    mxfp4.spec.format = KeyFormat::mxfp4;
    cases.push_back(mxfp4);
  }
  BenchCase mxfp4 = prefill;
  mxfp4.name = "prefill, mxfp4 keys", mxfp4.must = 0, mxfp4.spec.format = KeyFormat::mxfp4;
  cases.push_back(mxfp4);
  BenchCase f16 = decode("decode 1, f16 keys", 1, keys, 0);
  f16.spec.format = KeyFormat::f16;
  cases.push_back(f16);
  BenchCase cells = decode("decode 1, page size 1", 1, keys, 0);
  cells.spec.page_size = 1;
  cases.push_back(cells);
  BenchCase heads = decode("decode 1, H = 32", 1, keys, 0);
  heads.spec.heads = 32;
  cases.push_back(heads);
  add_patterns(cases, keys);
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
  throw Failure(fmt::format("bench: --suite must be cpu, got {}", suite));
}

}  // namespace topkey::cli
