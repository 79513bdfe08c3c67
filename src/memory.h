// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What the layers and the ranks of a sharded step do with memory themselves: clear, copy and reorder rows. A table of
// functions for each kind of memory: the host's (memory.cpp) and a device's (src/cuda/memory.cu, on the call's stream).
#pragma once
#include <cstddef>
#include <cstdint>

#include "topkey/topkey.h"

namespace topkey {

/// `rows` rows of `bytes` bytes; they do not overlap.
struct RowCopy {
  void* to;
  int64_t to_step;  ///< bytes from one row to the next
  const void* from;
  int64_t from_step;
  int64_t bytes, rows;
};

/// Lengths of requests, and how many key rows before each every rank owns.
struct OwnedKeys {
  Tensor indptr;  ///< i32 [B+1], of global key rows; negative ones count as 0
  Shard shard;    ///< its rank is of no meaning
  Tensor owned;   ///< i32 [world_size,B+1]: of each rank what indptr is of all, no more than 2147483647
};

/// Rows [first, first + rows) of what each rank owns, side by side in `parts`, to their global places.
struct KeyParts {
  OwnedKeys keys;
  const void* parts;  ///< [world_size,rows] rows of `bytes`
  int64_t first, rows, bytes;
  void* out;
  int64_t out_step;  ///< bytes from one row to the next
  int64_t total;     ///< rows of it, at most
};

/// Rows of tokens in their order, from this rank's own rows in front and rows [first, first + rows) of each rank behind.
struct TokenParts {
  Tensor order;  ///< i32 [T]: under own: a row of `front`; else own + rank * each + row of that rank
  int64_t own, each, world;
  const void* front;
  int64_t front_step;  ///< bytes
  const void* parts;   ///< [world,rows] rows of `bytes`
  int64_t first, rows, bytes;
  void* out;  ///< [T] rows of `bytes`; 0xFF in all bytes where order says no row
};

struct Memory {
  /// Whether the call's stream is being captured, so that nothing may be waited for.
  bool (*captured)(const Exec&);
  /// Between this memory and the host's, after all that is on the stream; returns when it is done.
  void (*copy)(void* to, const void* from, size_t bytes, const Exec&);
  /// All columns of i32 rows [0, rows) become -1; nothing without data.
  void (*clear_rows)(const Tensor&, int64_t rows, const Exec&);
  void (*copy_rows)(const RowCopy&, const Exec&);
  void (*count_owned)(const OwnedKeys&, const Exec&);
  void (*place_keys)(const KeyParts&, const Exec&);
  void (*place_tokens)(const TokenParts&, const Exec&);
};

extern const Memory kHostMemory;
/// Of the call's device (backend.cpp). Throws `unsupported` where no backend is usable there.
const Memory& memory_of(const char* op, const Exec& exec);

}  // namespace topkey
