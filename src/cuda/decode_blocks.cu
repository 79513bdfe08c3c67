// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See decode_blocks.h. A call that publishes takes two launches: the decode kernel also writes the best score of each block
// to the workspace, an eighth of a row's scores or less; then blocks are picked from these (pick_blocks_sm90.cu).
#include "cuda/decode_blocks.h"

#include <algorithm>

#include "cuda/pick_blocks_sm90.h"
#include "cuda/tuning.h"
#include "cuda/workspace.h"

namespace topkey::cuda {
namespace {

/// Maxima that the workspace has room for, whatever the size of blocks is.
int64_t most_maxima(const Shape& shape) {
  const int64_t each = std::max<int64_t>(shape.keys, 1) + 3;
  return std::min(std::max<int64_t>(shape.rows, 1) * each, kScoreEntries);
}
int shift_of(int32_t block_size) {
  for (int shift = 0; shift <= kMostMaximaShift; ++shift) {
    if (1 << shift == block_size) return shift;
  }
  return -1;
}

bool publish(const Shape& shape, const PlainDecode& plain, const KeyBoxes& boxes, const BlocksOut& out, void* workspace,
             const Launch& launch) {
  const int shift = shift_of(out.size);
  const int64_t step = (((int64_t{plain.max_len} + out.size - 1) / out.size) + 3) / 4 * 4;
  const int32_t together = std::max(plain.ends_n, plain.table_n);
  const int64_t fit = most_maxima(shape) / std::max<int64_t>(step, 1) / together * together;
  if (shift < 0 || fit == 0 || !pick_blocks_suits(plain.max_len, out, launch)) return false;
  auto* maxima = static_cast<float*>(workspace);
  void* rest = maxima + (most_maxima(shape) + 63) / 64 * 64;
  for (int32_t row = 0; row < plain.rows; row += static_cast<int32_t>(fit)) {
    const PlainDecode rows = rows_of(plain, row, static_cast<int32_t>(std::min<int64_t>(fit, plain.rows - row)));
    // Whether it takes them depends on how many there are: all others are no more than the first.
    if (!decode_quickly(rows, boxes, rest, launch, {maxima, step, shift})) return false;
    BlocksOut blocks = out;
    blocks.ids.data = static_cast<int32_t*>(out.ids.data) + row * out.ids.stride[0];
    pick_blocks(rows, {maxima, step, shift}, blocks, launch);
  }
  return true;
}

}  // namespace

size_t decode_blocks_bytes(const Shape& shape) {
  if (shape.blocks == 0 || shape.format != KeyFormat::fp8) return 0;
  return static_cast<size_t>((most_maxima(shape) + 63) / 64 * 64) * 4 + plain_decode_bytes(shape.rows);
}

bool decode_blocks(const Shape& shape, const LookParams& look, const Query& q, const Emission& emission,
                   void* workspace, const Launch& launch) {
  const bool admits = shape.candidates >= 0, publishes = shape.blocks > 0;
  const Admit& admit = look.admit;
  const Selection& out = emission.out;
  const bool simple = shape.topk > 0 && admit.mask.data == nullptr && admit.force_first == 0 && admit.force_last == 0 &&
                      out.order != Order::score && out.fill != Fill::repeat && !emission.shard.active();
  PlainDecode plain;
  KeyBoxes boxes;
  if (admits == publishes || !simple || !plain_decode(look, q, emission, &plain, &boxes)) return false;
  plain.whole = 0;  // maxima want the scores of all keys; of candidates there are fewer keys than the row has
  if (publishes) return publish(shape, plain, boxes, {out.blocks, out.block_size}, workspace, launch);
  const Tensor& ids = admit.candidates;
  if (ids.dtype != DType::i32 || (ids.stride[1] != 1 && ids.shape[1] > 1)) return false;
  return decode_admitted(plain,
                         {static_cast<const int32_t*>(ids.data), ids.stride[0], static_cast<int32_t>(ids.shape[1]),
                          admit.candidate_block_size},
                         look.keys.values, launch);
}

}  // namespace topkey::cuda
