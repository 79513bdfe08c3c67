// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Tensor (a borrowed view) and Exec (where and how a call runs): the two things every operation takes. Four rules
// hold everywhere:
//  1. Zero is the default of every field: write `MqaTopk a{};`, set what you need. A tensor whose data is null is absent.
//  2. Tensors are borrowed and live on exec.device. Strides count elements; "unit" = last dimension contiguous, every other
//     stride is free. Packed bytes (fp4 pairs, q8_0 blocks, pages) are u8. Host code never reads tensor contents of a GPU.
//  3. A call is asynchronous on exec.stream, allocates nothing, synchronises nothing, uses no other stream, and may be captured
//     and replayed with other contents. Host integers named max_* are upper bounds; they alone are frozen by a capture.
//     (Backend `ref` is the specification, not a product: it allocates and is synchronous.)
//  4. A wrong argument throws Error before any launch: outputs, stream, current device and an open capture are untouched.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "topkey/error.h"
#include "topkey/topkey_c.h"

namespace topkey {

enum class DType : int32_t { none, f32, f16, bf16, f8_e4m3fn, e8m0, u8, b8, i32, i64 };

/// Up to 4 extents and strides, in elements. Inputs are never written through `data`.
struct Tensor {
  void* data;
  int64_t shape[4], stride[4];
  int32_t ndim;
  DType dtype;
};

/// In a call a tensor is there when it has data; an empty one may well have no address: it is there too, with nothing
/// in it.
inline bool present(const Tensor& t) noexcept {
  if (t.data != nullptr) return true;
  bool empty = false;
  for (int32_t i = 0; i < t.ndim && i < 4; ++i) empty = empty || t.shape[i] == 0;
  return t.dtype != DType::none && empty;
}

/// A tensor over `data`; row-major strides unless given. More than 4 extents, or as many strides as extents missing:
/// throws.
inline Tensor tensor(const void* data, DType dtype, std::initializer_list<int64_t> shape,
                     std::initializer_list<int64_t> stride = {}) {
  if (shape.size() > 4 || (stride.size() != 0 && stride.size() != shape.size())) {
    throw Error(Status::invalid_argument, "tensor: shape must have at most 4 extents and one stride each");
  }
  Tensor t{};
  t.data = const_cast<void*>(data);
  t.ndim = static_cast<int32_t>(shape.size());
  t.dtype = dtype;
  int32_t i = 0;
  for (int64_t extent : shape) t.shape[i++] = extent;
  int64_t step = 1;
  for (i = t.ndim - 1; i >= 0; --i) {
    t.stride[i] = step;
    step *= t.shape[i];
  }
  i = 0;
  for (int64_t given : stride) t.stride[i++] = given;
  return t;
}

enum class Device : int32_t { cpu, cuda };

/// One of `size` caller threads that all make the same call (ggml's ith of nth). barrier(ctx) returns when all have
/// entered it. Wrong arguments throw on every member; a failure inside a backend that runs on one thread (`ref`)
/// throws on rank 0 alone.
struct Team {
  int32_t rank, size;
  void (*barrier)(void* ctx);
  void* ctx;
};

/// Words of exec.stats (u64[kNumStats] on exec.device; a call adds to them, once it has succeeded).
enum Stat : int32_t {
  kRows,        ///< query rows answered, padding included; key rows of producers and gather_k; capacity of expand_rows
  kScoredKeys,  ///< (row, key) pairs whose score was computed or read
  kRescans,     ///< rows for which a bounded buffer overflowed and the exact way out was taken
  /// admitted (row, key) pairs that a wild value made not live (page id outside the cache, position beyond the table,
  /// max_len or the key matrix), rows with a wild request id, gather_k rows, rope positions and pool ids likewise
  kSkippedPages,
  kSkippedSlots,  ///< slots that were not written: outside the cache (store_k, pool_k, compress_k), or of a pool or
                  ///< window that is not whole; positions without a slot (slots output, to_slots, expand_rows)
  kNanScores,     ///< (row, key) pairs whose score is NaN, of those scored
  kTiedCuts,      ///< rows whose topk-th and next key have equal scores: another tie rule would answer differently
  kReserved,
  kNumStats
};
enum Flag : uint32_t { kOverlapPrevious = 1 };  ///< programmatic dependent launch behind the kernel before it

struct Exec {
  uint32_t struct_size;  ///< set by the wrappers below; leave it 0
  Device device;
  int32_t device_id;
  void* stream;     ///< cudaStream_t; the call makes device_id current and restores it
  void* workspace;  ///< 256-byte aligned, any contents, not shared by calls that may overlap
  size_t workspace_bytes;
  /// null = best that can run; else "cuda.sm90", "cpu", ...: fails loudly. TOPKEY_BACKEND sets the default
  const char* backend;
  int32_t max_sms, threads;  ///< 0 = all; no bit of a result depends on either
  const Team* team;          ///< CPU: the caller's own threads; null = the library's
  uint64_t* stats;
  uint32_t flags;
  /// null = the backend's own (docs/numerics.md); else its name: fails where the backend has another
  const char* arithmetic;
  const char* strategy;  ///< selection strategy, for tests and tuning; null = the backend's choice
  /// ref, cpu: wild device values (page ids, slots, request ids, lengths) raise before anything is written
  bool strict;
};

namespace border {
/// A C twin of `value` with its struct_size set: what the inline wrappers hand to the C symbols.
template <class C, class Cpp>
C to_c(const Cpp& value) noexcept {
  static_assert(sizeof(C) == sizeof(Cpp) && alignof(C) == alignof(Cpp), "C and C++ twins must have one layout");
  static_assert(std::is_trivially_copyable<Cpp>::value && std::is_standard_layout<Cpp>::value, "must cross a C border");
  C twin;
  std::memcpy(&twin, &value, sizeof twin);
  twin.struct_size = sizeof twin;
  return twin;
}
}  // namespace border

/// Declares the three functions of an operation, inline over its C symbols. name(args, exec) runs it;
/// name_workspace_bytes and name_unsupported read shapes, dtypes and host integers only, so data pointers may be null
/// there: a tensor then counts as present when its dtype is set. name_workspace_bytes never shrinks when rows, keys,
/// topk or max_len grow; it throws on wrong arguments. name_unsupported returns null where the operation can run,
/// else the reason (valid until this thread's next call).
#define TOPKEY_OP(name, Args)                                                 \
  inline void name(const Args& args, const Exec& exec) {                      \
    const auto c_args = border::to_c<::topkey_##name##_args>(args);           \
    const auto c_exec = border::to_c<::topkey_exec>(exec);                    \
    border::check(::topkey_##name(&c_args, &c_exec));                         \
  }                                                                           \
  inline size_t name##_workspace_bytes(const Args& args, const Exec& exec) {  \
    const auto c_args = border::to_c<::topkey_##name##_args>(args);           \
    const auto c_exec = border::to_c<::topkey_exec>(exec);                    \
    const size_t bytes = ::topkey_##name##_workspace_bytes(&c_args, &c_exec); \
    if (bytes == SIZE_MAX) border::check(topkey_last_status());               \
    return bytes;                                                             \
  }                                                                           \
  inline const char* name##_unsupported(const Args& args, const Exec& exec) { \
    const auto c_args = border::to_c<::topkey_##name##_args>(args);           \
    const auto c_exec = border::to_c<::topkey_exec>(exec);                    \
    return ::topkey_##name##_unsupported(&c_args, &c_exec);                   \
  }

}  // namespace topkey
