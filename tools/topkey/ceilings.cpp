// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See ceilings.h. OpenBLAS is opened at run time, so that nothing of it is needed to build or to run without it.
#include "ceilings.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <thread>

#include "command.h"

namespace topkey::cli {
namespace {

constexpr int64_t kSteps = 4'000'000;

/// Keeps the compiler from merging, hoisting or spilling what is being timed.
#define TOPKEY_IN_REGISTER(v) asm volatile("" : "+x"(v))

#if defined(__x86_64__)
#define TOPKEY_ACCUMULATORS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

__attribute__((target("avx2,fma"))) double flops_avx2() {
  __m256 b = _mm256_set1_ps(0.999F), c = _mm256_set1_ps(1e-3F);
#define X(i) __m256 a##i = _mm256_set1_ps(1.0F + i);
  TOPKEY_ACCUMULATORS(X)
#undef X
  const double start = now();
  for (int64_t step = 0; step < kSteps; ++step) {
#define X(i) a##i = _mm256_fmadd_ps(a##i, b, c);
    TOPKEY_ACCUMULATORS(X)
#undef X
#define X(i) TOPKEY_IN_REGISTER(a##i);
    TOPKEY_ACCUMULATORS(X)
#undef X
  }
  return static_cast<double>(kSteps) * 12 * 16 / (now() - start);
}

__attribute__((target("avx512f"))) double flops_avx512() {
  __m512 b = _mm512_set1_ps(0.999F), c = _mm512_set1_ps(1e-3F);
#define X(i) __m512 a##i = _mm512_set1_ps(1.0F + i);
  TOPKEY_ACCUMULATORS(X)
#undef X
  const double start = now();
  for (int64_t step = 0; step < kSteps; ++step) {
#define X(i) a##i = _mm512_fmadd_ps(a##i, b, c);
    TOPKEY_ACCUMULATORS(X)
#undef X
#define X(i) asm volatile("" : "+v"(a##i));
    TOPKEY_ACCUMULATORS(X)
#undef X
  }
  return static_cast<double>(kSteps) * 12 * 32 / (now() - start);
}
#endif

double flops_scalar() {
  volatile float sink = 0;
  float a[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  const double start = now();
  for (int64_t step = 0; step < kSteps / 16; ++step) {
    for (float& x : a) x = std::fma(x, 0.999F, 1e-3F);
  }
  const double elapsed = now() - start;
  sink = a[0] + a[7];
  (void)sink;
  return static_cast<double>(kSteps) / 16 * 8 * 2 / elapsed;
}

/// Sum over threads that all run `measure` at the same time; the best of `rounds`.
template <class Measure>
double together(int threads, int rounds, const Measure& measure) {
  double best = 0;
  for (int round = 0; round < rounds; ++round) {
    std::vector<double> rates(static_cast<size_t>(threads));
    std::vector<std::thread> workers;
    for (int t = 0; t < threads; ++t) workers.emplace_back([&, t] { rates[static_cast<size_t>(t)] = measure(); });
    for (std::thread& worker : workers) worker.join();
    double sum = 0;
    for (const double rate : rates) sum += rate;
    best = std::max(best, sum);
  }
  return best;
}

using SgemmFunction = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*,
                               int);

}  // namespace

double fma_peak(const std::string& isa, int threads, int rounds) {
  return together(threads, rounds, [&] {
#if defined(__x86_64__)
    if (isa.rfind("AVX3", 0) == 0) return flops_avx512();
    if (isa == "AVX2") return flops_avx2();
#endif
    return flops_scalar();
  });
}

CopyLoop::CopyLoop(int threads, size_t bytes) {
  for (int t = 0; t < threads; ++t) from_.emplace_back(bytes, 1), to_.emplace_back(bytes, 2);
}

double CopyLoop::rate() {
  std::atomic<size_t> next{0};
  return together(static_cast<int>(from_.size()), 1, [&] {
    const size_t mine = next++;
    const double start = now();
    std::memcpy(to_[mine].data(), from_[mine].data(), from_[mine].size());
    return 2.0 * static_cast<double>(from_[mine].size()) / (now() - start);
  });
}

int print_sgemm(int m, int n, int k, int threads) {
  void* library = nullptr;
  for (const char* name : {"libopenblas.so.0", "libopenblas.so"}) {
    if (library == nullptr) library = dlopen(name, RTLD_NOW);
  }
  if (library == nullptr) return kDone;
  const auto sgemm = reinterpret_cast<SgemmFunction>(dlsym(library, "cblas_sgemm"));
  const auto core = reinterpret_cast<const char* (*)()>(dlsym(library, "openblas_get_corename"));
  const auto set_threads = reinterpret_cast<void (*)(int)>(dlsym(library, "openblas_set_num_threads"));
  if (sgemm == nullptr || core == nullptr || set_threads == nullptr) return kDone;
  set_threads(threads);
  const auto elements = [](int rows, int columns) { return static_cast<size_t>(rows) * static_cast<size_t>(columns); };
  std::vector<float> a(elements(m, k), 0.5F), b(elements(n, k), 0.25F), c(elements(m, n));
  double best = 1e30;
  const double begin = now();
  for (int run = 0; run < 50 && (run < 5 || now() - begin < 1.5); ++run) {
    constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;
    const double start = now();
    sgemm(kRowMajor, kPlain, kTransposed, m, n, k, 1.0F, a.data(), k, b.data(), k, 0.0F, c.data(), n);
    best = std::min(best, now() - start);
  }
  fmt::print("{} {}\n", core(), 2.0 * m * n * static_cast<double>(k) / best);
  return kDone;
}

Sgemm sgemm_rate(int m, int n, int k, int threads) {
  Sgemm result;
  const std::string command = fmt::format("/proc/self/exe bench --sgemm {} {} {} {} 2>/dev/null", m, n, k, threads);
  // /proc/self would be the shell's own in the child, so the path is resolved here.
  char path[4096] = {};
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
  if (length <= 0) return result;
  const std::string resolved = fmt::format("'{}'{}", path, command.substr(std::strlen("/proc/self/exe")));
  FILE* pipe = popen(resolved.c_str(), "r");
  if (pipe == nullptr) return result;
  char core[64] = {};
  result.found = std::fscanf(pipe, "%63s %lf", core, &result.flops) == 2;
  result.core = core;
  pclose(pipe);
  return result;
}

}  // namespace topkey::cli
