// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// How much workspace an operation needs; room.h says for what.
#pragma once
#include <cstddef>

#include "backend_table.h"

namespace topkey::cuda {

size_t room_bytes(Op op, const Shape& shape);
/// Of a search by decode_sm90.h, if the shape may come there; else 0.
size_t decode_bytes(const Shape& shape);
/// Of one by decode_blocks.h, likewise.
size_t decode_blocks_bytes(const Shape& shape);
/// Of one by prefill_sm90.h, likewise.
size_t prefill_bytes(const Shape& shape);

/// Of store_k, and of pool_k and compress_k.
size_t store_bytes(int64_t rows);
size_t pool_bytes(int64_t rows);

}  // namespace topkey::cuda
