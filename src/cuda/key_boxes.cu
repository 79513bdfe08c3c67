// SPDX-License-Identifier: Apache-2.0 OR MIT
#include "cuda/key_boxes.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace topkey::cuda {
namespace {

constexpr int kKeys = 64;

using EncodeTensorMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                     const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                     CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
/// The driver's function; null if it has none. Asked for once, through the run-time library: nothing links the driver.
EncodeTensorMap tensor_map_encoder() {
  static const EncodeTensorMap encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTensorMap>(found)
                                                                         : nullptr;
  }();
  return encode;
}

}  // namespace

bool make_boxes(const KeySource& keys, KeyBoxes* boxes) {
  const bool aligned = reinterpret_cast<uintptr_t>(keys.scales) % 16 == 0 && keys.scale_step == 4;
  // Pages that are not a multiple of 16 bytes apart begin at addresses that no copy of 16 bytes takes, nor a box.
  if (keys.head_dim != 128 || !aligned || keys.count == 0 ||
      (keys.paged && (keys.page_size % kKeys != 0 || keys.page_stride % 16 != 0)))
    return false;
  const cuuint64_t per_page = static_cast<cuuint64_t>(keys.paged ? keys.page_size : keys.count);
  const cuuint64_t pages = static_cast<cuuint64_t>(keys.paged ? keys.num_pages : 1);
  const cuuint64_t sizes[3] = {128, per_page, pages};
  // Of dense keys, one page, any step will do that the driver takes.
  const int64_t page_step = keys.paged ? keys.page_stride : (keys.value_step * keys.count + 15) / 16 * 16;
  const cuuint64_t steps[2] = {static_cast<cuuint64_t>(keys.value_step), static_cast<cuuint64_t>(page_step)};
  const cuuint32_t box[3] = {128, kKeys, 1}, each[3] = {1, 1, 1};
  const auto encode = tensor_map_encoder();
  if (encode == nullptr || pages == 0) return false;
  static_assert(sizeof(CUtensorMap) == sizeof(KeyBoxes));
  return encode(reinterpret_cast<CUtensorMap*>(boxes), CU_TENSOR_MAP_DATA_TYPE_UINT8, 3,
                const_cast<uint8_t*>(keys.values), sizes, steps, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace topkey::cuda
