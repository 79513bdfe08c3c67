// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// How much workspace an operation needs; room.h says for what.
#pragma once
#include <cstddef>

#include "backend_table.h"

namespace topkey::cuda {

size_t room_bytes(Op op, const Shape& shape);

}  // namespace topkey::cuda
