// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See plain_decode.h.
#include "cuda/plain_decode.h"

#include <algorithm>

#include "cuda/device/tiles_sm90.cuh"
#include "cuda/key_boxes.h"

namespace topkey::cuda {
namespace {

const Tensor& ends_of(const Rows& rows) { return rows.end.data != nullptr ? rows.end : rows.length; }

bool plain_rows(const Rows& rows) {
  const Tensor& ends = ends_of(rows);
  return ends.data != nullptr && ends.dtype == DType::i32 && (ends.stride[0] == 1 || ends.shape[0] == 1) &&
         rows.start.data == nullptr && rows.request.data == nullptr && rows.q_indptr.data == nullptr;
}
/// Of a cut over ranks.
bool plain_cut(const LookParams& look) {
  const Tensor& end = look.whole_end;
  return look.shard.world_size <= 1 ||
         (look.whole_start.data == nullptr &&
          (end.data == nullptr || (end.dtype == DType::i32 && end.shape[0] == look.rows.count &&
                                   (end.stride[0] == 1 || end.shape[0] == 1) && look.rows.next_n <= 1)));
}
/// Rows of a request.
int32_t next_n_of(const Rows& rows) { return std::max(rows.next_n, 1); }
bool plain_answer(const Emission& emission) {
  const Selection& out = emission.out;
  return out.slots.data == nullptr && out.counts.data == nullptr && out.indices.data != nullptr &&
         out.index_base.data == nullptr && out.indices.stride[1] == 1 && emission.stats == nullptr &&
         (out.scores.data == nullptr || (out.scores.dtype == DType::f32 && out.scores.stride[1] == 1));
}
bool plain_keys(const KeySource& keys, int64_t rows) {
  const int64_t page = keys.page_size;
  return keys.paged && keys.head_dim == 128 && page % kTileKeys == 0 && (page & (page - 1)) == 0 &&
         keys.block_table.dtype == DType::i32 && keys.block_table.stride[1] == 1 && keys.block_table.shape[0] >= rows;
}
bool plain_query(const Query& q) {
  const int64_t heads = q.values.shape[1];
  return heads <= 64 && alignment_of(q) == 16 && q.weights.dtype == DType::f32 &&
         (q.weights.stride[1] == 1 || heads == 1);
}

}  // namespace

bool plain_decode(const LookParams& look, const Query& q, const Emission& emission, PlainDecode* plain,
                  KeyBoxes* boxes) {
  const KeySource& keys = look.keys;
  const Rows& rows = look.rows;
  const Selection& out = emission.out;
  const int32_t table_n = keys.table_per_row ? 1 : next_n_of(rows);
  if (!plain_rows(rows) || !plain_answer(emission) || look.stats != nullptr ||
      !plain_keys(keys, rows.count / table_n) || !plain_query(q) || !plain_cut(look) || !make_boxes(keys, boxes))
    return false;
  PlainDecode p{};
  p.q = static_cast<const uint8_t*>(q.values.data), p.q_row = q.values.stride[0], p.q_head = q.values.stride[1];
  p.weights = static_cast<const float*>(q.weights.data), p.w_row = q.weights.stride[0];
  p.ends = static_cast<const int32_t*>(ends_of(rows).data);
  p.table = static_cast<const int32_t*>(keys.block_table.data), p.table_row = keys.block_table.stride[0];
  p.scales = keys.scales, p.page_stride = keys.page_stride;
  p.out = static_cast<int32_t*>(out.indices.data), p.out_row = out.indices.stride[0];
  p.scores = static_cast<float*>(out.scores.data), p.scores_row = out.scores.data != nullptr ? out.scores.stride[0] : 0;
  p.shard = emission.shard;
  if (p.shard.world_size > 1) p.whole_ends = static_cast<const int32_t*>(look.whole_end.data);
  p.rows = static_cast<int32_t>(rows.count), p.heads = static_cast<int32_t>(q.values.shape[1]);
  p.topk = look.topk, p.columns = emission.topk;
  p.whole = p.scores == nullptr && p.shard.world_size <= 1 ? p.topk : 0;
  // Lengths are the rows' own, and there may be more of them than rows.
  p.ends_n = rows.end.data == nullptr || rows.end.shape[0] == rows.count ? 1 : next_n_of(rows), p.table_n = table_n;
  p.max_len = static_cast<int32_t>(rows.max_len > 0 ? std::min<int64_t>(keys.count, rows.max_len) : keys.count);
  p.num_pages = static_cast<int32_t>(std::min<int64_t>(keys.num_pages, INT32_MAX));
  p.page_shift = __builtin_ctz(static_cast<unsigned>(keys.page_size));
  p.fill = out.fill == Fill::value ? out.fill_value : -1;
  *plain = p;
  return true;
}

}  // namespace topkey::cuda
