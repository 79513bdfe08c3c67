// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What the kernels of plain decode calls are told (plain_decode.h), in few words: such a call takes microseconds, and each
// parameter that is read, each instruction in a row of dependent ones, can be seen in them.
#pragma once
#include <cstdint>

namespace topkey::cuda {

struct PlainDecode {
  const uint8_t* q;       ///< e4m3 [rows, heads, 128]
  const float* weights;   ///< [rows, heads]
  const int32_t* ends;    ///< [rows]
  const int32_t* table;   ///< page ids
  const uint8_t* scales;  ///< of page 0
  int32_t* out;           ///< [rows, columns]
  int64_t q_row, q_head, w_row, table_row, page_stride, out_row;
  int32_t rows, heads, topk, columns, max_len, num_pages, page_shift, fill;
  uint32_t blocks;  ///< that share a row (decode_short_sm90.cu)
};

}  // namespace topkey::cuda
