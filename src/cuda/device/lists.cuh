// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What is carried from one chunk of a row's keys to the next: its winners so far, ascending by position.
#pragma once
#include <cstdint>

namespace topkey::cuda {

/// [rows, length] of scores (entries) or keys of the order (blocks), and positions or block ids.
struct WinnerList {
  uint32_t* values;
  int32_t* positions;
  int64_t length;
};

struct RowState {
  uint32_t entries, blocks;  ///< in the lists
  uint32_t dropped;          ///< key of the order of the best winner's equal that was left out so far; 0 = none
  int32_t open_block;        ///< block that the last chunk ended in, -1 = none
  uint32_t open_key;         ///< its best key so far
};

/// What a part of a long row left: winners in its list, and dropped as above.
struct PartState {
  uint32_t entries, dropped;
};

}  // namespace topkey::cuda
