// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Dispatch, once and visible: the closed list of operations, what a backend is (one row of function pointers), and
// the table of backends in order of preference. c_api.cpp walks it; nothing registers itself.
#pragma once
#include <cstddef>
#include <cstdint>

#include "memory.h"
#include "topkey/topkey.h"

namespace topkey {

/// name, argument struct. The order is that of the pipeline; what came later stands at the end.
#define TOPKEY_OPERATIONS(X)          \
  X(expand_rows, ExpandRows)          \
  X(to_slots, ToSlots)                \
  X(quantize_q, QuantizeQ)            \
  X(quantize_k, QuantizeK)            \
  X(store_k, StoreK)                  \
  X(gather_k, GatherK)                \
  X(mqa_logits, MqaLogits)            \
  X(paged_mqa_logits, PagedMqaLogits) \
  X(topk, Topk)                       \
  X(select_blocks, SelectBlocks)      \
  X(mqa_topk, MqaTopk)                \
  X(paged_mqa_topk, PagedMqaTopk)     \
  X(merge_topk, MergeTopk)            \
  X(pool_k, PoolK)                    \
  X(compress_k, CompressK)            \
  X(expand_pools, ExpandPools)

enum class Op : int32_t {
#define X(name, Args) name,
  TOPKEY_OPERATIONS(X)
#undef X
};
const char* op_name(Op op) noexcept;

/// Flag of exec that only the layer sets: a strict call checks device values, raises or returns, and writes nothing.
constexpr uint32_t kCheckOnly = uint32_t{1} << 31;

/// What validation learnt of a call from shapes, dtypes and host integers: all that choosing a backend and sizing a
/// workspace may depend on. Fields that an operation does not have are 0.
struct Shape {
  KeyFormat format;
  bool scored;  ///< the operation computes scores: format, q_dtype, heads, head_dim decide the arithmetic
  DType q_dtype;
  int64_t rows;  ///< query rows, or key rows of a producer
  int64_t keys;  ///< upper bound of visible keys a row
  int64_t heads, head_dim;
  int64_t topk, blocks;
  int64_t candidates;  ///< ids a row; -1 = none given
  bool tiled;          ///< the cache's pages lie in tiles
  bool whole;          ///< one rank's part (or their merge) with what speaks of the whole: start, blocks, forced keys
};

/// One backend. A null operation pointer means that it does not have it; why_not then says so.
struct Backend {
  const char* name;
  Device device;
  bool one_thread;                                ///< under a caller's team, rank 0 does the work and the others wait
  const char* (*unusable)();                      ///< on this machine; null = usable
  const char* (*detail)();                        ///< what it found there, "" = nothing to say
  const char* (*why_not)(Op, const Shape&);       ///< null = runs
  const char* (*arithmetic)(KeyFormat, DType q);  ///< null = cannot score these
  const char* const* strategies;                  ///< selection strategies it knows, ended by null
  int32_t (*numerics)(KeyFormat);                 ///< number of the score bits, from 1; 0 = no such keys
  size_t (*workspace_bytes)(Op, const Shape&);
  void (*prepare)(int32_t device_id);  ///< loads all kernels; null = nothing to load
  const Memory* memory;                ///< of its device; null = the host's
#define X(name, Args) void (*name)(const Args&, const Exec&);
  TOPKEY_OPERATIONS(X)
#undef X
};

/// Backends of this build, best first; count in kNumBackends.
extern const Backend* const kBackends[];
extern const int kNumBackends;

/// The backend that runs `op` of this shape under `exec`: the forced one, else the first that can. Throws
/// `unsupported` with the reason.
const Backend& choose_backend(Op op, const Shape& shape, const Exec& exec);
/// Why choose_backend would throw, or null.
const char* why_unsupported(Op op, const Shape& shape, const Exec& exec);
const Backend* find_backend(const char* name) noexcept;

namespace cpu {
extern const Backend kBackend;
}
namespace cuda {
extern const Backend kHopper, kPortable;
}
namespace ref {
extern const Backend kBackend;
}

}  // namespace topkey
