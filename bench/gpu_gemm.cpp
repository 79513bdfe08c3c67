// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See gpu_ceilings.h. cuBLASLt is opened at run time; no_gpu_gemm.cpp is the twin without its header.
#include <cublasLt.h>
#include <dlfcn.h>

#include <memory>
#include <vector>

#include "bench/gpu_ceilings.h"
#include "support/patterns.h"
#include "topkey/number.h"

namespace topkey::bench {
namespace {

constexpr int64_t kSize = 8192;
constexpr size_t kRoom = size_t{64} << 20;

void require(cublasStatus_t status) {
  if (status != CUBLAS_STATUS_SUCCESS) throw std::runtime_error("cuBLASLt: status " + std::to_string(status));
}

/// The library's functions by their own types.
struct Library {
  void* handle = nullptr;
  Library() {
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"}) {
      if (handle == nullptr) handle = dlopen(name, RTLD_NOW);
    }
  }
  template <class F>
  F* get(const char* name) const {
    void* symbol = dlsym(handle, name);
    if (symbol == nullptr) throw std::runtime_error(std::string("cuBLASLt has no ") + name);
    return reinterpret_cast<F*>(symbol);
  }
};
#define TOPKEY_LT(name) library.get<decltype(name)>(#name)

/// Memory of random normal codes.
class Matrix {
 public:
  Matrix(bool fp8, bool filled) {
    const size_t bytes = kSize * kSize * (fp8 ? 1 : 2);
    must(cudaMalloc(&data, bytes));
    if (!filled) return;
    std::vector<uint8_t> codes(size_t{1} << 20);
    support::Random random(3);
    for (size_t i = 0; i < codes.size(); i += fp8 ? 1 : 2) {
      if (fp8) codes[i] = float_to_e4m3(random.normal());
      if (fp8) continue;
      const uint16_t h = float_to_bf16(random.normal());
      codes[i] = static_cast<uint8_t>(h & 0xFF), codes[i + 1] = static_cast<uint8_t>(h >> 8);
    }
    for (size_t at = 0; at < bytes; at += codes.size())
      must(cudaMemcpy(static_cast<uint8_t*>(data) + at, codes.data(), codes.size(), cudaMemcpyHostToDevice));
  }
  ~Matrix() { cudaFree(data); }
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;
  void* data = nullptr;
};

struct Room {
  Room() { must(cudaMalloc(&data, kRoom)); }
  ~Room() { cudaFree(data); }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  void* data = nullptr;
};

}  // namespace

double gemm_rate(Timer& timer, bool fp8, double load_seconds) {
  static const Library library;
  if (library.handle == nullptr) return 0;
  const cudaDataType_t type = fp8 ? CUDA_R_8F_E4M3 : CUDA_R_16BF;
  cublasLtHandle_t lt{};
  cublasLtMatmulDesc_t product{};
  cublasLtMatrixLayout_t in{}, out{};
  cublasLtMatmulPreference_t wish{};
  require(TOPKEY_LT(cublasLtCreate)(&lt));
  require(TOPKEY_LT(cublasLtMatmulDescCreate)(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const cublasOperation_t transposed = CUBLAS_OP_T;  // fp8 wants A transposed and B not
  require(
      TOPKEY_LT(cublasLtMatmulDescSetAttribute)(product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
  require(TOPKEY_LT(cublasLtMatrixLayoutCreate)(&in, type, kSize, kSize, kSize));
  require(TOPKEY_LT(cublasLtMatrixLayoutCreate)(&out, CUDA_R_16BF, kSize, kSize, kSize));
  require(TOPKEY_LT(cublasLtMatmulPreferenceCreate)(&wish));
  require(TOPKEY_LT(cublasLtMatmulPreferenceSetAttribute)(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kRoom,
                                                          sizeof kRoom));
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  require(TOPKEY_LT(cublasLtMatmulAlgoGetHeuristic)(lt, product, in, in, out, out, wish, 1, &found, &count));
  double rate = 0;
  if (count > 0) {
    const Matrix a(fp8, true), b(fp8, true), c(false, false);
    const Room room;
    const float one = 1, zero = 0;
    auto* matmul = TOPKEY_LT(cublasLtMatmul);
    const auto launch = [&] {
      require(matmul(lt, product, &one, a.data, in, b.data, in, &zero, c.data, out, c.data, out, &found.algo, room.data,
                     kRoom, timer.stream()));
    };
    launch();
    if (load_seconds > 0) timer.load(launch, load_seconds);
    rate = 2.0 * kSize * kSize * kSize / (timer.times(launch, 9).median_us * 1e-6);
    must(cudaDeviceSynchronize());
  }
  TOPKEY_LT(cublasLtMatmulPreferenceDestroy)(wish), TOPKEY_LT(cublasLtMatrixLayoutDestroy)(in);
  TOPKEY_LT(cublasLtMatrixLayoutDestroy)(out), TOPKEY_LT(cublasLtMatmulDescDestroy)(product);
  TOPKEY_LT(cublasLtDestroy)(lt);
  return rate;
}

}  // namespace topkey::bench
